"""Reading parsed JSON strictly: a file Lading wrote comes back as what it was, or an error says where it differs."""

from __future__ import annotations

import dataclasses
import math
from enum import EnumType, StrEnum
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from lading.errors import ConfigError

#: Integers are sizes, counts and ids: all below this.
_TOO_LARGE = 1 << 63


def read_as(hint: Any, value: Any, where: str, advice: str = "plan again") -> Any:
    """Read a value from JSON as the type ``hint``: a dataclass, tuple, dict, enum, X | None or plain type.

    Args:
        where: Names the value in errors.

    Raises:
        ConfigError: it is of another type, or a field is missing or unknown.
    """
    kind: Any = get_origin(hint) or hint
    inner = get_args(hint)
    if kind is UnionType:  # X | None
        return None if value is None else read_as(inner[0], value, where, advice)
    if kind is tuple and isinstance(value, list):
        items = cast("list[Any]", value)
        kinds = [inner[0]] * len(items) if inner[-1] is Ellipsis else list(inner)
        if len(kinds) == len(items):
            return tuple(read_as(k, items[i], f"{where}[{i}]", advice) for i, k in enumerate(kinds))
    if kind is dict and isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return {key: read_as(inner[1], item, f"{where}.{key[:40]}", advice) for key, item in table.items()}
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _read_fields(kind, cast("dict[str, Any]", value), where, advice)
    if isinstance(kind, EnumType):
        if value in [option.value for option in cast("type[StrEnum]", kind)]:
            return kind(value)
    elif isinstance(kind, type) and issubclass(kind, str) and isinstance(value, str):
        return kind(value)
    if kind is Any or _is_plain(kind, value):
        return cast(Any, value)
    raise ConfigError(f"{where}: expected {kind.__name__}, found {_short(cast(object, value))}; {advice}")


def _is_plain(kind: Any, value: Any) -> bool:
    if type(value) is int:
        return kind in (int, float) and -_TOO_LARGE < value < _TOO_LARGE
    return type(value) is kind and (kind is not float or math.isfinite(value))


def _short(value: object) -> str:
    if type(value) is int and abs(value) >= _TOO_LARGE:
        return "an integer of more than 63 bits"
    return repr(value)[:60]


def _read_fields(kind: Any, value: dict[str, Any], where: str, advice: str) -> Any:
    hints = get_type_hints(kind)
    if hints.keys() != value.keys():
        missing, unknown = sorted(hints.keys() - value.keys()), sorted(k[:40] for k in value.keys() - hints.keys())
        raise ConfigError(f"{where}: missing {missing}, unknown {unknown}; {advice}")
    return kind(**{name: read_as(hints[name], item, f"{where}.{name}", advice) for name, item in value.items()})
