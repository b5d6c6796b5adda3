"""Fitted rates of kernels by architecture, as data: catalog/kernels/<architecture>.toml, one source for each table.

The numbers are written by the scripts of ``benchmarks/calibrate/``; each has a physical meaning, said here.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Any, cast

from lading.errors import ConfigError

_FOLDER = Path(__file__).parent / "kernels"


@dataclass(frozen=True, kw_only=True)
class ProductRates:
    """Rates of matrix products on one architecture ([Note: product]).

    Attributes:
        tiles: Rows and columns of the output that a multiprocessor (or a pair) makes at once.
        reach: Share of the peak that a very large tile reaches at full clock.
        operand_columns: Rows plus columns of a tile cost as much again as this many of either (loads of operands).
        wave_share: How much of a last wave that is not full is lost: 1 all, 0 none (work is split along k).
        prologue_k: Filling the pipeline of a tile takes as long as so much k.
        epilogue_share: Share of writing the output that is not under computing.
        memory_share: Share of the memory bandwidth that a product reaches.
        fixed_s: Least time of a product.
        group_s: Host's time for each group, where the groups of a grouped product are launched one by one.
        group_reach: Rate of a grouped product's tiles over that of one product's.
        float32_reach: Share of the peak of fp32 without tensor cores that large products reach.
        unaligned: How many times longer computing takes where rows of operands or output start at multiples of 2, 4, 8
            and 16 bytes only; () where that was not measured.
        flops_per_joule: FLOP of products with a joule at the power limit, by dtype of the operands; none where power
            was never seen to be the limit.
    """

    tiles: tuple[tuple[int, int], ...]
    reach: float
    operand_columns: float
    wave_share: float
    prologue_k: float
    epilogue_share: float
    memory_share: float
    fixed_s: float
    group_s: float
    group_reach: float
    flops_per_joule: dict[str, float]
    unaligned: tuple[float, ...] = ()
    float32_reach: float = 1.0

    def unaligned_at(self, row_bytes: int) -> float:
        """Factor for rows of so many bytes: that of the largest power of two that divides them."""
        place = (row_bytes & -row_bytes).bit_length() - 2
        return self.unaligned[place] if 0 <= place < len(self.unaligned) else 1.0


@dataclass(frozen=True, kw_only=True)
class PassRates:
    """Rates of one pass (forward or backward) of an attention kernel ([Note: attention]).

    Attributes:
        head_sizes: Ascending; between them ``reach`` is interpolated in the logarithm, beyond them it is constant.
        reach: Share of the 16-bit peak that its products reach at each head size, exponentials included.
        prologue_keys: Starting and ending a block takes as long as so many keys.
        block: Queries of a block (keys of one in backward).
        tail: Share of the longest block for which multiprocessors wait at the end.
        power_share: How much of the slowdown of products at the power limit this kernel has.
        exponentials: How many times as fast it is where exponentials take half as long (``Gpu.exponentials``).
        skips: Blocks outside of a window are left out.
    """

    head_sizes: tuple[float, ...]
    reach: tuple[float, ...]
    prologue_keys: float
    block: int
    tail: float
    power_share: float
    exponentials: float = 1.0
    skips: bool = True

    def reach_at(self, head_size: float) -> float:
        """Share of the peak at a head size, the mean of those of keys and values."""
        sizes = [log(size) for size in self.head_sizes]
        place = min(max(log(head_size), sizes[0]), sizes[-1])
        right = next(i for i, size in enumerate(sizes) if size >= place)
        if right == 0:
            return self.reach[0]
        share = (place - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return self.reach[right - 1] * (1 - share) + self.reach[right] * share


@dataclass(frozen=True, kw_only=True)
class MemoryRates:
    """Rates of operations that only move bytes.

    Attributes:
        share: Share of the memory bandwidth a large one reaches.
        fixed_s: Least time on the device.
        cache_speed: How many times the memory's bandwidth the last level of cache has.
        cache_share: Share of that cache that still holds what the operation before wrote.
        classes: Time by cost class (or "norm_backward", ...) over that of a plain copy of as many bytes.
    """

    share: float
    fixed_s: float
    cache_speed: float
    cache_share: float
    classes: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class KernelRates:
    """Fitted rates of an architecture's kernels.

    Attributes:
        attention: Rates by kernel ("flash2") and pass ("forward", "backward").
    """

    architecture: str
    product: ProductRates
    attention: dict[str, dict[str, PassRates]]
    memory: MemoryRates
    sources: dict[str, str]


@cache
def kernel_rates(architecture: str) -> KernelRates:
    """Read the fitted rates of an architecture's kernels.

    Raises:
        ConfigError: there are none, or its file lacks a number.
    """
    path = _FOLDER / f"{architecture}.toml"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in _FOLDER.glob("*.toml")))
        raise ConfigError(f"expected an architecture with fitted kernels ({names}), got {architecture!r}")
    data: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        product = dict(data["product"])
        product["tiles"] = tuple((int(m), int(n)) for m, n in product["tiles"])
        product["unaligned"] = tuple(product.get("unaligned", ()))
        attention = {
            kernel: {name: PassRates(**_tuples(values)) for name, values in passes.items()}
            for kernel, passes in data["attention"].items()
        }
        return KernelRates(
            architecture=architecture,
            product=ProductRates(**product),
            attention=attention,
            memory=MemoryRates(**data["memory"]),
            sources=data["sources"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: expected tables product, attention, memory and sources, whole: {error}") from error


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(cast("list[Any]", value)) if isinstance(value, list) else value for key, value in values.items()}
