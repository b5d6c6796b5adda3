"""Machine files: read them strictly, write them readably. A catalog entry and a probe's output are the same format.

[Note: what a machine file may leave to others]

    extends = "server"              start from bases/server.toml, or from another machine of the catalog

    [shares]                        of limits that data sheets give; the loader makes absolute rates of them
    optimizer = 0.85                AdamW elements/s: this share of the memory bandwidth, at 28 bytes an element
    product_best = 0.85             highest share of its dtype's peak that a product reaches
    product_fp32_best = 0.65        the same for products of float32 on a GPU, where it is not product_best
    attention_best = 0.56           the same for attention, also attention_backward_best (GPU: 16-bit peak, CPU: fp32)
    [shares.product]                size (FLOP) and rate as shares of product_best; also attention, attention_backward
    [shares.rates.copy]             size (bytes) and rate as shares of the memory bandwidth, for each cost class
    cache_bytes = 72e6              last-level cache: of a kernel's bytes a share 1 / (1 + (bytes / 0.4 cache)^2) is in
                                    it, 2.5 times as fast as memory (catalog/kernels/ampere.toml, memory)

What a file says itself wins over what it extends and over shares: tables are merged, tiers and links by their name. A
number it replaces loses the source it had, so that the file has to name its own.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from lading.errors import ConfigError, did_you_mean
from lading.files import read_toml, write_text
from lading.ir.machine import (
    FILE,
    MEMORY,
    WIDE_PRODUCTS,
    Curve,
    Device,
    Gpu,
    HostDevice,
    Link,
    Machine,
    Processes,
    Tier,
)

Table = dict[str, Any]

#: Arrays of tables whose entries are told apart by their name.
_NAMED = ("tiers", "links")
#: Bytes that AdamW reads and writes for an element, all in fp32: four read, three written.
_ADAMW_BYTES = 28
#: Part of a cache that holds what the kernel before wrote, and how much faster it is than memory.
_CACHE_SHARE, _CACHE_SPEED = 0.4, 2.5
_CURVES = ("product", "attention", "attention_backward")
_SCALARS = ("optimizer", "cache_bytes", "product_fp32_best", *(f"{name}_best" for name in _CURVES))
_DEPTH = 4


def resolve(data: Table, origin: str, base: Callable[[str], Table]) -> Table:
    """Complete the table of a machine file that may extend another and give shares.

    Args:
        origin: File named in errors.
        base: The parsed file that ``extends`` names; raises ConfigError for an unknown one.

    Raises:
        ConfigError: extends itself, or a share is no share.
    """
    chain = [data]
    while isinstance(name := chain[-1].get("extends"), str):
        if len(chain) > _DEPTH:
            raise ConfigError(
                f"{origin}: expected at most {_DEPTH} files that extend each other, got more; is it a loop?"
            )
        chain.append(base(name))
    merged: Table = {}
    for table in reversed(chain):
        merged = _merged(merged, {k: v for k, v in table.items() if k != "extends" or not isinstance(v, str)})
    shares = merged.pop("shares", None)
    return merged if shares is None else _with_rates(merged, shares, origin)


def _merged(base: Table, child: Table) -> Table:
    """Lay ``child`` over ``base``, whose sources of what the child replaces are dropped."""
    replaced = set(_keys({key: value for key, value in child.items() if key != "sources"}))
    sources = child.get("sources", {})
    inherited = {key: text for key, text in base.get("sources", {}).items() if key not in replaced}
    if not isinstance(sources, dict):
        return {**base, **child}  # the loader says what is wrong with it
    return {**_overlaid(base, child), "sources": {**inherited, **sources}}


def _overlaid(base: Table, child: Table) -> Table:
    result = dict(base)
    for key, value in child.items():
        old: Any = result.get(key)
        if key in _NAMED and _all_tables(old) and _all_tables(value):
            result[key] = _by_name(old, value)
        elif isinstance(old, dict) and isinstance(value, dict) and "size" not in value:
            result[key] = _overlaid(cast(Table, old), cast(Table, value))
        else:
            result[key] = value
    return result


def _all_tables(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in cast("list[object]", value))


def _by_name(base: list[Table], child: list[Table]) -> list[Table]:
    """Merge tables by name, in the base's order; new ones come last."""
    tables = {table.get("name"): table for table in base}
    for table in child:
        tables[table.get("name")] = {**tables.get(table.get("name"), {}), **table}
    return list(tables.values())


def _keys(table: Table, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of every value, tiers and links by their name."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield prefix + key
            yield from _keys(cast(Table, value), f"{prefix}{key}.")
        elif key in _NAMED and _all_tables(value):
            for item in cast("list[Table]", value):
                yield from (f"{key}.{item.get('name')}.{name}" for name in item)
        else:
            yield prefix + key


def _with_rates(machine: Table, shares: object, origin: str) -> Table:
    """Put absolute rates in place of shares; those that are there already stay."""
    if not isinstance(shares, dict) or not isinstance(machine.get("device"), dict):
        raise ConfigError(f"{origin}: expected the tables [shares] and [device], found another kind of value")
    table, device = cast(Table, shares), dict(cast(Table, machine["device"]))
    for key in table:
        if key not in (*_SCALARS, *_CURVES, "rates"):
            known_keys = ", ".join((*_SCALARS, *_CURVES, "rates"))
            raise ConfigError(f"{origin}: unknown key {key!r} in [shares]; known keys: {known_keys}")
    bandwidth = _positive(device.get("memory_bandwidth_bytes_per_s"), "device.memory_bandwidth_bytes_per_s", origin)
    if "optimizer" in table:
        rate = bandwidth * _positive(table["optimizer"], "shares.optimizer", origin) / _ADAMW_BYTES
        device.setdefault("optimizer_elements_per_s", rate)
    if "product" in table:
        best = _positive(table.get("product_best"), "shares.product_best", origin)
        device.setdefault("product_efficiency", _scaled(table["product"], best, "shares.product", origin))
    rates = _rates(table, origin)
    if "cache_bytes" in table:
        cache = _positive(table["cache_bytes"], "shares.cache_bytes", origin)
        rates = {name: _cached(curve, cache) for name, curve in rates.items()}
    curves = {name: (curve, bandwidth) for name, curve in rates.items()}
    for name in _CURVES[1:]:
        if name in table:
            best = _positive(table.get(f"{name}_best"), f"shares.{name}_best", origin)
            curves[name] = (table[name], best * _attention_peak(device, origin))
    if "product_fp32_best" in table:
        best = _positive(table["product_fp32_best"], "shares.product_fp32_best", origin)
        curves[WIDE_PRODUCTS] = (table.get("product"), best * _peak_of(device, ("float32",), origin))
    scaled_rates = {
        name: _scaled(curve, limit, f"shares.rates.{name}", origin) for name, (curve, limit) in curves.items()
    }
    device["rates"] = {**scaled_rates, **cast(Table, device.get("rates", {}))}
    return {**machine, "device": device}


def _rates(shares: Table, origin: str) -> Table:
    rates = shares.get("rates", {})
    if not isinstance(rates, dict):
        raise ConfigError(f"{origin}: shares.rates: expected a table, got {rates!r}")
    return cast(Table, rates)


def _cached(curve: object, cache_bytes: float) -> object:
    """Rates by size with a last-level cache; what is no table of both is left to who checks it."""
    table = cast(Table, curve if isinstance(curve, dict) else {})
    sizes, rates = table.get("size"), table.get("rate")
    if not (isinstance(sizes, list) and isinstance(rates, list)):
        return table
    plain = Curve(size=tuple(cast("list[float]", sizes)), rate=tuple(cast("list[float]", rates)))
    room = _CACHE_SHARE * cache_bytes
    grid = sorted({*plain.size, *(room * step for step in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0))})
    miss_share = [1 / (1 + (size / room) ** 2) for size in grid]
    faster = [1 / (1 - share + share / _CACHE_SPEED) for share in miss_share]
    return {**table, "size": grid, "rate": [plain.at(size) * more for size, more in zip(grid, faster, strict=True)]}


def _attention_peak(device: Table, origin: str) -> float:
    """FLOP/s that attention's share refers to: a processor's in float32, another device's in 16 bits."""
    return _peak_of(device, ("float32",) if device.get("kind") == "cpu" else ("bfloat16", "float16"), origin)


def _peak_of(device: Table, dtypes: tuple[str, ...], origin: str) -> float:
    """Peak of the first of the dtypes that has one."""
    peaks = device.get("peak_flops_per_s")
    peak_by_dtype = cast(Table, peaks) if isinstance(peaks, dict) else {}
    peak = next((peak_by_dtype[dtype] for dtype in dtypes if dtype in peak_by_dtype), None)
    return _positive(peak, f"device.peak_flops_per_s.{dtypes[0]}", origin)


def _scaled(curve: object, factor: float, where: str, origin: str) -> Table:
    table = cast(Table, curve) if isinstance(curve, dict) else {}
    rates = table.get("rate")
    if not isinstance(rates, list) or set(table) != {"size", "rate"}:
        raise ConfigError(f"{origin}: {where}: expected a table of size and rate, got {curve!r}")
    return {**table, "rate": [_positive(rate, f"{where}.rate", origin) * factor for rate in cast("list[Any]", rates)]}


def _positive(value: object, where: str, origin: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        if value is None:
            raise ConfigError(
                f"{origin}: {where}: expected a finite number > 0, found none: what the file extends leaves it to each "
                'machine; give it, or extend a machine, as "cpu", in place of a base'
            )
        raise ConfigError(f"{origin}: {where}: expected a finite number > 0, got {value!r}")
    return float(value)


_FOLDER = Path(__file__).parent / "machines"
_BASES = Path(__file__).parent / "bases"
_T = TypeVar("_T")
_TOO_LARGE = 1 << 63


@cache
def machine_names() -> tuple[str, ...]:
    """Names of the catalog's machines, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_machine(name_or_path: str | Path) -> Machine:
    """Load a catalog machine by name ("h100"), or the machine described by a TOML file.

    Raises:
        ConfigError: no such name or file, not TOML, or a key or value of the file is wrong.
    """
    text = str(name_or_path)
    path = Path(name_or_path)
    if text in machine_names():
        return _of_catalog(text)
    if not path.is_file():
        names = machine_names()
        raise ConfigError(
            f"expected a machine ({', '.join(names)}) or the path of a TOML file, got {text!r}"
            f"{did_you_mean(text, names)}; measure this host with: lading probe"
        )
    return _of_file(path)


def as_machine(machine: Machine | str | Path) -> Machine:
    """Take a machine given as such, by its name in the catalog, or by the path of its TOML file.

    Raises:
        ConfigError: none of the three, or as ``load_machine``.
    """
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, (str, Path)):  # pyright: ignore[reportUnnecessaryIsInstance]  users without a checker
        raise ConfigError(
            f"machine: expected a name of the catalog, the path of a machine file or a lading.Machine, got {machine!r}"
        )
    return load_machine(machine)


@cache
def _of_catalog(name: str) -> Machine:
    """Read a machine of the catalog once, as what is shipped does not change."""
    return _of_file(_FOLDER / f"{name}.toml")


def _of_file(path: Path) -> Machine:
    return machine_from_dict(resolve(_parsed(path), str(path), _base), str(path))


def _base(name: str) -> dict[str, Any]:
    """Read the table that ``extends = name`` stands for."""
    bases = tuple(sorted(path.stem for path in _BASES.glob("*.toml")))
    if name not in (*bases, *machine_names()):
        raise ConfigError(f"extends: expected one of {', '.join((*bases, *machine_names()))}, got {name!r}")
    return _parsed((_BASES if name in bases else _FOLDER) / f"{name}.toml")


def _parsed(path: Path) -> dict[str, Any]:
    return read_toml(path, "a machine", "measure this host with: lading probe")


def machine_from_dict(data: object, origin: str) -> Machine:
    """Build the Machine that parsed TOML or JSON describes.

    Args:
        data: Table as ``machine_to_toml`` or ``dataclasses.asdict`` gives it.
        origin: File named in errors.

    Raises:
        ConfigError: a key is unknown or missing, or a value has the wrong type or range; names key and file.
    """
    if "devices" in _table(data, "the file", origin):
        raise ConfigError(
            f"{origin}: expected one device, got a list of them; only lading place and lading plan --model take a list"
        )
    return _build(Machine, data, "", origin)


def machine_to_toml(machine: Machine) -> str:
    """Write the machine as TOML: ``machine_from_dict(tomllib.loads(...))`` gives an equal machine."""
    lines: list[str] = []
    _write_table(lines, "", dataclasses.asdict(machine))
    return "\n".join(lines).lstrip("\n") + "\n"


def save_machine(machine: Machine, path: Path | str) -> None:
    """Write the machine to ``path``; a reader sees the old file or the new one, never half of one.

    Raises:
        StorageError: the folder is missing, read-only or full.
    """
    write_text(Path(path), machine_to_toml(machine))


def _build(cls: type[_T], data: object, where: str, origin: str) -> _T:
    """Build an instance of a dataclass from a table, every value checked against its annotation."""
    table = _table(data, where or "the file", origin)
    fields = {f.name: f for f in dataclasses.fields(cast(Any, cls))}
    place = f"in [{where}]" if where else "at the top level"
    for key in table:
        if key not in fields:
            known_keys = ", ".join(fields)
            raise ConfigError(
                f"{origin}: unknown key {key!r} {place}{did_you_mean(key, fields)}; known keys: {known_keys}"
            )
    for key, field in fields.items():
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if key not in table and not optional:
            raise ConfigError(f"{origin}: missing key {key!r} {place}; expected {field.type}")
    values = {k: _READERS[str(fields[k].type)](v, f"{where}.{k}".lstrip("."), origin) for k, v in table.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{origin}: [{where or 'machine'}] {error}") from error


def _wrong(expected: str, value: object, where: str, origin: str) -> ConfigError:
    shown = "of more than 63 bits" if type(value) is int and abs(value) >= _TOO_LARGE else repr(value)[:60]
    return ConfigError(f"{origin}: {where}: expected {expected}, got {type(value).__name__} {shown}")


def _table(value: object, where: str, origin: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong("a table", value, where, origin)
    return dict(cast("Mapping[str, Any]", value))


def _list(value: object, where: str, origin: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise _wrong("an array", value, where, origin)
    return list(cast("list[Any]", value))


def _str(value: object, where: str, origin: str) -> str:
    if not isinstance(value, str):
        raise _wrong("a string", value, where, origin)
    return value


def _int(value: object, where: str, origin: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= _TOO_LARGE:
        raise _wrong("an integer", value, where, origin)
    return value


def _float(value: object, where: str, origin: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise _wrong("a finite number >= 0", value, where, origin)
    return float(value)


def _optional_curve(value: object, where: str, origin: str) -> Curve | None:
    return None if value is None else _build(Curve, value, where, origin)


def _dict_of(read: Callable[[object, str, str], _T]) -> Callable[[object, str, str], dict[str, _T]]:
    def reader(value: object, where: str, origin: str) -> dict[str, _T]:
        return {key: read(item, f"{where}.{key}", origin) for key, item in _table(value, where, origin).items()}

    return reader


def _tuple_of(read: Callable[[object, str, str], _T]) -> Callable[[object, str, str], tuple[_T, ...]]:
    def reader(value: object, where: str, origin: str) -> tuple[_T, ...]:
        return tuple(read(item, f"{where}.{i}", origin) for i, item in enumerate(_list(value, where, origin)))

    return reader


def _curve(value: object, where: str, origin: str) -> Curve:
    return _build(Curve, value, where, origin)


def _device(value: object, where: str, origin: str) -> Device:
    return _build(Device, value, where, origin)


def _optional_device(value: object, where: str, origin: str) -> Device | None:
    return None if value is None else _device(value, where, origin)


def _optional_host(value: object, where: str, origin: str) -> HostDevice | None:
    return None if value is None else _build(HostDevice, value, where, origin)


def _optional_processes(value: object, where: str, origin: str) -> Processes | None:
    return None if value is None else _build(Processes, value, where, origin)


def _optional_gpu(value: object, where: str, origin: str) -> Gpu | None:
    return None if value is None else _build(Gpu, value, where, origin)


def _bool(value: object, where: str, origin: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong("true or false", value, where, origin)
    return value


def _tier(value: object, where: str, origin: str) -> Tier:
    if "kind" not in _table(value, where, origin):
        raise ConfigError(
            f"{origin}: missing key 'kind' in [{where}], which files of earlier probes lack: expected what serves the "
            f"tier, {MEMORY!r}, {FILE!r} or 'module:function'; add it, or measure again with: lading probe"
        )
    return _build(Tier, value, where, origin)


def _link(value: object, where: str, origin: str) -> Link:
    return _build(Link, value, where, origin)


_READERS: dict[str, Callable[[object, str, str], Any]] = {
    "str": _str,
    "int": _int,
    "bool": _bool,
    "float": _float,
    "Device": _device,
    "Device | None": _optional_device,
    "Curve | None": _optional_curve,
    "HostDevice | None": _optional_host,
    "Gpu | None": _optional_gpu,
    "Processes | None": _optional_processes,
    "dict[str, str]": _dict_of(_str),
    "dict[str, float]": _dict_of(_float),
    "dict[str, Curve]": _dict_of(_curve),
    "dict[str, tuple[float, ...]]": _dict_of(_tuple_of(_float)),
    "tuple[float, ...]": _tuple_of(_float),
    "tuple[Tier, ...]": _tuple_of(_tier),
    "tuple[Link, ...]": _tuple_of(_link),
}


def _write_table(lines: list[str], name: str, table: Mapping[str, Any]) -> None:
    """Write plain values first, then sub-tables, then arrays of tables, as TOML wants them."""
    if name and (not table or any(not isinstance(v, dict) for v in table.values())):
        lines += ["", f"[{name}]"]
    for key, value in table.items():
        if value is not None and not isinstance(value, dict) and not _is_tables(value):
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in table.items():
        path = f"{name}.{_key(key)}" if name else _key(key)
        if isinstance(value, dict):
            _write_table(lines, path, cast("dict[str, Any]", value))
        elif _is_tables(value):
            for item in value:
                lines += ["", f"[[{path}]]", *(f"{_key(k)} = {_value(v)}" for k, v in item.items())]


def _is_tables(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, dict) for item in cast("tuple[Any, ...]", value))


def _key(key: str) -> str:
    return key if key and all((c.isalnum() and c.isascii()) or c in "-_" for c in key) else _quoted(key)


def _value(value: object) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:_}"
    if isinstance(value, float):
        return _number(value)
    return "[" + ", ".join(_value(item) for item in cast("tuple[object, ...]", value)) + "]"


def _quoted(text: str) -> str:
    """Quote a TOML string as JSON does, but for DEL and characters written as two surrogates."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _number(value: float) -> str:
    """Write the shortest decimal text that reads back as the same float."""
    text = next(t for t in (f"{value:.{digits}g}" for digits in range(1, 18)) if float(t) == value)
    return text if "." in text or "e" in text else f"{text}.0"
