"""Inputs named in words: columns of a batch (``"float32 3 224 224"``, ``"int64 below 1000"``), known models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lading.errors import ConfigError

_DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
#: No dimension is larger.
_LARGEST = (1 << 31) - 1
#: Models known by name; ``lading.catalog.models`` reads them.
CATALOG_MODELS = Path(__file__).parent / "catalog" / "models"


def catalog_models() -> tuple[str, ...]:
    """Names of the catalog's models, sorted."""
    return tuple(sorted(path.stem for path in CATALOG_MODELS.glob("*.toml")))


@dataclass(frozen=True)
class Input:
    """One column of a batch: its dtype, the shape of a row, and what its integers are below (None: not known)."""

    dtype: str
    shape: tuple[int, ...] = ()
    below: int | None = None


def parse_input(name: str, text: str) -> Input:
    """Parse a column such as ``"float32 3 224 224"`` or ``"int64 below 1000"``.

    Raises:
        ConfigError: it says something else.
    """
    words = text.split()
    dtype, *shape = words or [""]
    below: list[str] = []
    if "below" in shape:
        at = shape.index("below")
        shape, below = shape[:at], shape[at + 1 :]
        if len(below) != 1 or not below[0].isdecimal() or not 0 < int(below[0]) <= _integer_limit(dtype):
            raise ConfigError(f"{name}: expected integers such as 'int64 below 1000', got {text!r}")
    if dtype not in _DTYPES or not all(n.isdecimal() and 0 < int(n) < _LARGEST for n in shape):
        raise ConfigError(
            f"{name}: expected a dtype ({', '.join(_DTYPES)}) and the shape of one row, such as "
            f"'float32 3 224 224', got {text!r}"
        )
    return Input(dtype, tuple(map(int, shape)), int(below[0]) if below else None)


def _integer_limit(dtype: str) -> int:
    """One more than the largest integer of a dtype; 0 if it has none."""
    sign, _, bits = dtype.partition("int")
    return 1 << int(bits) - (0 if sign == "u" else 1) if dtype in _DTYPES and bits else 0


def check_inputs(kind: str, inputs: Mapping[str, str], sequence_length: int, *, has_source: bool) -> None:
    """Refuse settings of data that do not go together; errors begin with the setting's name.

    Raises:
        ConfigError: they do not.
    """
    for name, text in inputs.items():
        parse_input(f"inputs.{name}", text)
    if kind == "text" and inputs:
        raise ConfigError("inputs: expected kind 'arrays' or 'random' with it, got 'text'")
    if kind == "text" and sequence_length == 0:
        raise ConfigError("sequence_length: expected an integer >= 1, the tokens of a sequence, got none")
    if kind == "arrays" and not has_source:
        raise ConfigError("source: expected files of arrays for kind 'arrays', got none")
    if kind == "random" and not inputs:
        raise ConfigError(
            "inputs: expected the inputs of the model for kind 'random', such as pixel_values = 'float32 3 224 224'"
        )
