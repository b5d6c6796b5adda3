"""Inheritance of machine files: a base it extends, and shares of what its device can do at most.

    extends = "server"              start from bases/server.toml, or from another machine of the catalog

    [shares]                        of limits that data sheets give; the loader makes absolute rates of them
    optimizer = 0.85                AdamW elements/s: this share of the memory bandwidth, at 28 bytes an element
    product_best = 0.85             highest share of its dtype's peak that a product reaches
    attention_best = 0.56           the same for attention, also attention_backward_best (GPU: 16-bit peak, CPU: fp32)
    [shares.product]                size (FLOP) and rate as shares of product_best; also attention, attention_backward
    [shares.rates.copy]             size (bytes) and rate as shares of the memory bandwidth, for each cost class

What a file says itself wins over what it extends and over shares: tables are merged, tiers and links by their name. A
number it replaces loses the source it had, so that the file has to name its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from lading.errors import ConfigError

Table = dict[str, Any]

#: Arrays of tables whose entries are told apart by their name.
_NAMED = ("tiers", "links")
#: Bytes that AdamW reads and writes for an element, all in fp32: four read, three written.
_ADAMW_BYTES = 28
_CURVES = ("product", "attention", "attention_backward")
_SCALARS = ("optimizer", *(f"{name}_best" for name in _CURVES))
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
            known = ", ".join((*_SCALARS, *_CURVES, "rates"))
            raise ConfigError(f"{origin}: unknown key {key!r} in [shares]; known keys: {known}")
    bandwidth = _positive(device.get("memory_bandwidth_bytes_per_s"), "device.memory_bandwidth_bytes_per_s", origin)
    if "optimizer" in table:
        rate = bandwidth * _positive(table["optimizer"], "shares.optimizer", origin) / _ADAMW_BYTES
        device.setdefault("optimizer_elements_per_s", rate)
    if "product" in table:
        best = _positive(table.get("product_best"), "shares.product_best", origin)
        device.setdefault("product_efficiency", _scaled(table["product"], best, "shares.product", origin))
    curves = {name: (curve, bandwidth) for name, curve in _rates(table, origin).items()}
    for name in _CURVES[1:]:
        if name in table:
            best = _positive(table.get(f"{name}_best"), f"shares.{name}_best", origin)
            curves[name] = (table[name], best * _attention_peak(device, origin))
    made = {name: _scaled(curve, limit, f"shares.rates.{name}", origin) for name, (curve, limit) in curves.items()}
    device["rates"] = {**made, **cast(Table, device.get("rates", {}))}
    return {**machine, "device": device}


def _rates(shares: Table, origin: str) -> Table:
    rates = shares.get("rates", {})
    if not isinstance(rates, dict):
        raise ConfigError(f"{origin}: shares.rates: expected a table, got {rates!r}")
    return cast(Table, rates)


def _attention_peak(device: Table, origin: str) -> float:
    """FLOP/s that attention's share refers to: a processor's in float32, another device's in 16 bits."""
    peaks = device.get("peak_flops_per_s")
    known = cast(Table, peaks) if isinstance(peaks, dict) else {}
    dtypes = ("float32",) if device.get("kind") == "cpu" else ("bfloat16", "float16")
    peak = next((known[dtype] for dtype in dtypes if dtype in known), None)
    return _positive(peak, f"device.peak_flops_per_s.{dtypes[0]}", origin)


def _scaled(curve: object, factor: float, where: str, origin: str) -> Table:
    table = cast(Table, curve) if isinstance(curve, dict) else {}
    rates = table.get("rate")
    if not isinstance(rates, list) or set(table) != {"size", "rate"}:
        raise ConfigError(f"{origin}: {where}: expected a table of size and rate, got {curve!r}")
    return {**table, "rate": [_positive(rate, f"{where}.rate", origin) * factor for rate in cast("list[Any]", rates)]}


def _positive(value: object, where: str, origin: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ConfigError(f"{origin}: {where}: expected a finite number > 0, got {value!r}")
    return float(value)
