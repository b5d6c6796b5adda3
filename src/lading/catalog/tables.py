"""Model tables of families, stored as data in tables/, and the table of a model by its name or its sizes.

A file holds one family's segments with its sizes as symbols, as ``tools.families`` captured them. Tensors are
rows ``[storage, dtype, dims, role, name, repeats]``, operations ``[name, kind, phase, module, args, results, settings,
kwargs, mutates, random]``; dims are written ``"b,s,3*d*n"``, an argument that is tensor 5 of the segment ``"#5"``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from lading.catalog.models import named_model
from lading.errors import ConfigError, did_you_mean
from lading.ir.graph import Arg, Literal, Op, OpKind, Phase, Ref, Role, refs
from lading.ir.sizes import Power, Size
from lading.ir.table import ModelTable, Segment, SegmentTensor

TABLES = Path(__file__).parent / "tables"
_ROLES = {role.value[:3]: role for role in Role}
_PHASES = {phase.value[:3]: phase for phase in Phase}
#: Fields of a Segment that are tensors by number.
SEGMENT_ENDS = ("enters", "leaves", "enters_back", "leaves_back", "saved")
#: Meaning of the symbols, for messages.
SYMBOLS = {
    "b": "sequences of a micro-batch",
    "s": "tokens of a sequence",
    "h": "width",
    "f": "hidden width of the MLP",
    "n": "attention heads",
    "k": "key-value heads",
    "d": "width of a head",
    "v": "vocabulary",
    "e": "experts",
    "a": "experts of a token",
    "g": "hidden width of an expert",
    "fs": "hidden width of the shared expert",
    "qr": "rank of the queries",
    "kr": "rank of keys and values",
    "dn": "width of a head without position",
    "dr": "width of a head with position",
    "dv": "width of a head's values",
    "latent": "width that experts work in",
    "mg": "groups of a state-space layer",
    "mr": "heads of a group",
    "md": "width of a state-space head",
    "ms": "state of a head",
    "p": "numbers of a patch",
    "t": "tokens of text",
    "c": "width of the text",
}

Tied = tuple[tuple[tuple[int, str], tuple[int, str]], ...]


@dataclass(frozen=True)
class StoredTable:
    """Table of a family of models, with sizes as symbols.

    Attributes:
        counts: How often each segment stands, as Sizes in ``layers`` and the like.
        symbols: Every symbol of its sizes.
    """

    name: str
    segments: tuple[Segment, ...]
    counts: tuple[str, ...]
    tied: Tied
    symbols: tuple[str, ...]
    source: str


def table_families() -> tuple[str, ...]:
    """Names of the families, sorted."""
    return tuple(sorted(path.stem for path in TABLES.glob("*.json")))


def family_table(
    family: str,
    *,
    layers: int,
    dense_layers: int | None = None,
    tied: bool | None = None,
    name: str = "",
    **symbols: int,
) -> ModelTable:
    """Build the table of operations of a model of a family.

    Args:
        layers: Number of blocks.
        dense_layers: First blocks of them that have an MLP in the place of experts; for families that know such.
        tied: The head is the embedding; None means as the family is by nature.
        name: Name of the model.
        symbols: Sizes by their letters (see ``SYMBOLS``), but ``b`` and ``s``, which stay open. Where they are not
            given ``k`` is as ``n``, ``d`` is ``h / n`` and ``f`` is ``4 * h``.
    Raises:
        ConfigError: no such family, or a size is missing, unknown or not positive.
    """
    stored = stored_table(family)
    counts = {"layers": layers, "dense_layers": dense_layers or 0}
    if layers < max(1, counts["dense_layers"]) or counts["dense_layers"] < 0:
        raise ConfigError(f"{name or family}: expected layers of at least dense_layers and 1, got {counts}")
    if dense_layers and not any("dense_layers" in text for text in stored.counts):
        raise ConfigError(f"{name or family}: family {family!r} has one kind of block, got dense_layers={dense_layers}")
    values = family_symbols(family, stored, symbols)
    keeps = stored.tied if (family.startswith(("gpt", "mpt")) if tied is None else tied) else ()
    return ModelTable(
        name=name or family,
        segments=stored.segments,
        counts=tuple(Size.of(text).at(counts) for text in stored.counts),
        symbols=values,
        tied=keeps,
        source=stored.source,
    )


#: Symbol of each size of a catalog model.
_FIELDS = {
    "dim": "h",
    "num_heads": "n",
    "num_kv_heads": "k",
    "head_size": "d",
    "hidden_dim": "f",
    "vocab_size": "v",
    "num_experts": "e",
    "num_active": "a",
}


def model_table(name: str) -> ModelTable:
    """Build the table of a model of the catalog, such as ``"llama3-405b"``.

    Raises:
        ConfigError: no such model.
    """
    model = named_model(name)
    sizes = {key: int(size) for key, size in model.sizes.items()}
    if model.family:
        return family_table(model.family, name=name, **sizes)  # pyright: ignore[reportArgumentType]
    layers, tied = sizes.pop("num_layers"), sizes.pop("tied", None)
    if model.model == "dit":
        sizes = {**sizes, "p": sizes["channels"] * sizes["patch_size"] ** 2, "v": sizes["num_classes"] + 1}
    names = {**_FIELDS, "hidden_dim": "g"} if "num_experts" in sizes else _FIELDS
    symbols = {names.get(key, key): size for key, size in sizes.items()}
    family = "qwen3" if sizes.get("qk_norm") else model.model
    known_symbols = stored_table(family).symbols
    given_sizes = {key: size for key, size in symbols.items() if key in known_symbols}
    return family_table(family, layers=layers, tied=None if tied is None else bool(tied), name=name, **given_sizes)


def family_symbols(family: str, stored: StoredTable, given: Mapping[str, int]) -> dict[str, int]:
    """Value of every symbol of a family but ``b`` and ``s``, from those given.

    Raises:
        ConfigError: one is missing, unknown or not positive.
    """
    needed_symbols = [name for name in stored.symbols if name not in ("b", "s")]
    unknown = sorted(set(given) - set(needed_symbols))
    values = dict(given)
    if "h" in given and "n" in given and given["n"]:
        values.setdefault("k", given["n"])
        if given["h"] % given["n"] == 0:
            values.setdefault("d", given["h"] // given["n"])
        values.setdefault("f", 4 * given["h"])
    missing = [name for name in needed_symbols if name not in values]
    if unknown or missing:
        size_list = ", ".join(f"{name} ({SYMBOLS.get(name, 'size')})" for name in needed_symbols)
        wrong = [f"no {', '.join(missing)}"] if missing else []
        wrong += [f"{', '.join(unknown)} too"] if unknown else []
        raise ConfigError(f"sizes of {family!r}: expected {size_list}; got {' and '.join(wrong)}")
    for name in needed_symbols:
        if values[name] < 1:
            raise ConfigError(f"sizes of {family!r}: expected {name} of at least 1, got {values[name]!r}")
    return {name: values[name] for name in needed_symbols}


@cache
def stored_table(family: str) -> StoredTable:
    """Read a family's table as it lies in the catalog.

    Raises:
        ConfigError: there is none; the nearest name is given.
    """
    if family not in table_families():
        hint = did_you_mean(family, table_families())
        raise ConfigError(f"expected a family among {', '.join(table_families())}, got {family!r}{hint}")
    return read_table((TABLES / f"{family}.json").read_text(encoding="utf-8"))


def _read_arg(value: Any) -> Arg:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        if "size" in fields:
            size = Size.of(fields["size"])
            return Power(size, fields["exponent"]) if "exponent" in fields else size
        ((kind, text),) = fields.items()
        return Literal(kind, text)
    if isinstance(value, list):
        return tuple(map(_read_arg, cast("list[Any]", value)))
    return Ref(int(value[1:])) if isinstance(value, str) and value.startswith("#") else value


def read_table(text: str) -> StoredTable:
    """Read a family's table from its JSON."""
    data: dict[str, Any] = json.loads(text)
    tied = tuple(((a, b), (c, d)) for (a, b), (c, d) in data["tied"])
    segments = tuple(map(_read_segment, data["segments"]))
    symbols = tuple(data["symbols"].split())
    return StoredTable(data["name"], segments, tuple(data["counts"]), tied, symbols, data["source"])


def _read_segment(data: Mapping[str, Any]) -> Segment:
    ends: dict[str, Any] = {end: tuple(data[end]) for end in SEGMENT_ENDS}
    gradients = tuple((parameter, gradient) for parameter, gradient in data["gradients"])
    tensors, ops = tuple(map(_read_tensor, data["tensors"])), tuple(map(_read_op, data["ops"]))
    return Segment(name=data["name"], tensors=tensors, ops=ops, gradients=gradients, **ends)


@cache
def _dims(text: str) -> tuple[Size, ...]:
    return tuple(map(Size.of, text.split(","))) if text else ()


def _read_tensor(row: Sequence[Any]) -> SegmentTensor[Size]:
    defaults: tuple[Any, ...] = ("", [])
    storage, dtype, dims, role, name, repeats = (*row, *defaults[len(row) - 4 :])
    return SegmentTensor(storage, dtype, _dims(dims), _ROLES[role], name, tuple(repeats))


def _read_op(row: Sequence[Any]) -> Op:
    defaults: tuple[Any, ...] = ("", [], [], {}, {}, [], False)
    name, kind, phase, module, arguments, results, settings, named, mutates, random = (*row, *defaults[len(row) - 3 :])
    args, kwargs = tuple(map(_read_arg, arguments)), tuple((key, _read_arg(value)) for key, value in named.items())
    return Op(
        name=name,
        kind=OpKind(kind),
        phase=_PHASES[phase],
        module=module,
        args=args,
        kwargs=kwargs,
        inputs=tuple(dict.fromkeys((*refs(args), *refs(tuple(arg for _, arg in kwargs))))),
        outputs=tuple(dict.fromkeys(t for t in results if t is not None)),
        results=tuple(results),
        settings=tuple((key, _read_setting(value)) for key, value in settings.items()),
        mutates=tuple(mutates),
        random=random,
    )


def _read_setting(value: Any) -> object:
    if isinstance(value, dict):
        return Size.of(cast("dict[str, str]", value)["size"])
    return tuple(map(_read_setting, cast("list[Any]", value))) if isinstance(value, list) else value
