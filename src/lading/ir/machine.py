"""Machine: what a host can do, as data with units in the keys and a source for every number.

Read from and written to TOML. A catalog entry and the output of ``lading probe`` are the same type.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log

from lading.errors import ConfigError
from lading.units import format_capacity

#: Columns of a product beyond which BLAS packs no more of it at once. Measured: MKL of torch 2.13, 512 deep.
PACKED_COLUMNS = 6400
#: Numbers that the update of ``optimizer_elements_per_s`` reads and writes for an element: a value and two moments both
#: ways, and a gradient.
UPDATE_NUMBERS = 7.0
#: Rate at which a product waits for its operands that are not in cache, among ``Device.cold_rates``.
COLD_PRODUCT = "product"
#: Rates of float32 products whose rows of results begin at whole vectors of so many numbers, and of others, in FLOP/s
#: against their columns, among ``Device.rates``.
EVEN_COLUMNS, ODD_COLUMNS, VECTOR = "matmul.even", "matmul.odd", 8
#: Rate of float32 products on a GPU by their FLOP, among ``Device.rates``, where it is another share of its peak than
#: that of 16-bit products.
WIDE_PRODUCTS = "product.float32"
#: Form of attention without a causal mask, in keys of ``Device.rates``: kernels do part of what a mask spares others.
WHOLE = "whole"
#: Key of a source that machine files written before this number was measured lack.
KERNEL_BYTES = "device.kernel_bytes"
DEVICE_KINDS = ("cpu", "cuda", "mps")
LINK_KINDS = ("nvswitch", "mesh", "pcie", "infiniband", "ethernet", "omnipath")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Measured rate against size, interpolated in log-log and constant beyond its ends.

    Attributes:
        size: Ascending sizes (bytes, or FLOP for products).
        rate: The rate at each size (bytes/s or FLOP/s).
    """

    size: tuple[float, ...]
    rate: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.size or len(self.size) != len(self.rate):
            raise ConfigError(f"a curve needs as many rates as sizes, got {len(self.size)} and {len(self.rate)}")
        if list(self.size) != sorted(set(self.size)) or min(self.size) <= 0 or min(self.rate) <= 0:
            raise ConfigError(f"a curve needs ascending positive sizes and positive rates, got {self.size} {self.rate}")

    def at(self, size: float) -> float:
        """Interpolate the rate at ``size``."""
        right = bisect_left(self.size, size)
        if right == 0:
            return self.rate[0]
        if right == len(self.size):
            return self.rate[-1]
        low, high = self.size[right - 1], self.size[right]
        share = log(size / low) / log(high / low)
        return exp(log(self.rate[right - 1]) * (1 - share) + log(self.rate[right]) * share)

    def slower(self, factor: float) -> Curve:
        """Curve of rates divided by ``factor``."""
        return Curve(size=self.size, rate=tuple(rate / factor for rate in self.rate))


#: Generations of GPUs whose kernels have fitted rates (``lading.catalog.kernel_rates``).
ARCHITECTURES = ("ampere", "hopper", "blackwell")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Properties of a GPU that costs of kernels by their shape need.

    Attributes:
        architecture: Architecture whose kernels run on it.
        num_sms: Streaming multiprocessors.
        l2_bytes: Last level of cache.
        power_w: Watts that the board may draw.
        speed: How fast products and attention run beside the part their rates were fitted on, each against its own
            peak: 1 for that part, less for one with less power.
        exponentials: Rate of exponentials beside that part's: 2 for Blackwell Ultra.
    """

    architecture: str
    num_sms: int
    l2_bytes: int
    power_w: float
    speed: float = 1.0
    exponentials: float = 1.0

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(f"gpu architecture must be one of {', '.join(ARCHITECTURES)}, got {self.architecture!r}")
        for key in ("num_sms", "l2_bytes", "power_w", "speed", "exponentials"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"device.gpu.{key} must be positive, got {getattr(self, key)}")


@dataclass(frozen=True, kw_only=True)
class Device:
    """Processor or accelerator that computes, with its rates.

    Attributes:
        kind: PyTorch's name for the device whose kernels run ("cuda" for AMD's too); or "module:function", which
            makes the driver (``lading.runtime.device.DeviceDriver``) of another, where operations run as captured.
        num_threads: Threads the rates were measured with; 0 where it has no meaning.
        peak_flops_per_s: Dense peak for each dtype (for a probed CPU: the best product measured).
        memory_bandwidth_bytes_per_s: Read plus write.
        op_overhead_s: Least time of one operation, launch included.
        overhead_bytes: Memory a running process needs on top of its tensors (thread stacks, kernel scratch, code).
        packing_bytes: Memory that BLAS keeps once it has packed a product of ``PACKED_COLUMNS`` columns.
        kernel_bytes: Memory that a CPU's library keeps for each distinct product of 16-bit numbers: the code it
            compiled.
        product_efficiency: Share of the peak a product reaches against its FLOP; measured or assumed.
        skinny_dim: Dimension of a product at which half of that share is lost (m / (m + skinny_dim)).
        rates: For each cost class, bytes/s (FLOP/s for attention) against size.
        optimizer_elements_per_s: AdamW elements per second.
        cache_bytes: Bytes that the last level of cache keeps of what was touched last; 0 where ``cold_rates`` are not
            known, and all operands cost what ``rates`` say.
        cold_rates: As ``rates``, with operands that come from memory; "product" is bytes/s of such operands, which a
            product waits for besides its FLOP.
        gpu: What costs of kernels by shape need; None where no such costs are known.
    """

    name: str
    kind: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    op_overhead_s: float
    peak_flops_per_s: dict[str, float]
    optimizer_elements_per_s: float
    num_threads: int = 0
    overhead_bytes: int = 0
    packing_bytes: int = 0
    kernel_bytes: int = 0
    skinny_dim: float = 0.0
    product_efficiency: Curve | None = None
    rates: dict[str, Curve] = field(default_factory=lambda: {})
    cache_bytes: int = 0
    cold_rates: dict[str, Curve] = field(default_factory=lambda: {})
    gpu: Gpu | None = None

    @property
    def architecture(self) -> str:
        """Name by which factors of software are given for its kernels: a GPU's architecture, "cpu"; "" for others."""
        return self.gpu.architecture if self.gpu else "cpu" if self.kind == "cpu" else ""

    def __post_init__(self) -> None:
        if self.kind not in DEVICE_KINDS and not all(self.kind.partition(":")):
            raise ConfigError(
                f"device kind must be one of {', '.join(DEVICE_KINDS)}, or 'module:function', got {self.kind!r}"
            )
        for key in ("memory_bytes", "memory_bandwidth_bytes_per_s", "optimizer_elements_per_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"device.{key} must be positive, got {getattr(self, key)}")
        if self.cache_bytes < 0 or bool(self.cache_bytes) != bool(self.cold_rates):
            raise ConfigError(
                f"expected both of device.cache_bytes > 0 and device.cold_rates or neither, got {self.cache_bytes} and "
                f"{len(self.cold_rates)} rates"
            )


@dataclass(frozen=True, kw_only=True)
class HostDevice:
    """Processors beside a device that has memory of its own; they can run an optimizer step where the states are.

    Attributes:
        num_threads: Threads the rates are for.
        memory_bandwidth_bytes_per_s: Read plus write, of the host's memory.
        optimizer_elements_per_s: AdamW elements per second, all fp32 and in the host's memory.
        row_flops_per_s: FLOP per second of float32 products of rows, with weights that come from that memory, against
            the number of rows; of as many in each layout as an expert has. None where it was not measured.
    """

    name: str
    num_threads: int
    memory_bandwidth_bytes_per_s: float
    optimizer_elements_per_s: float
    row_flops_per_s: Curve | None = None

    def __post_init__(self) -> None:
        for key in ("num_threads", "memory_bandwidth_bytes_per_s", "optimizer_elements_per_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"host_device.{key} must be positive, got {getattr(self, key)}")


#: Kinds of tiers that Lading serves itself.
MEMORY, FILE = "memory", "file"
#: Where storages lie in a tier at least: whole pages, which O_DIRECT and DMA move.
TIER_ALIGNMENT_BYTES = 4096
_TIER_NAME = re.compile(r"[A-Za-z]\w*\Z", re.ASCII)
_NO_TIERS = ("device", "caller", "keep", "recompute")


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Memory behind the device, by its properties; its name means nothing.

    Attributes:
        name: What plans, budgets, reports and messages call it: letters, digits and underscores.
        kind: What serves it at run time: "memory" of the host, a swap "file", or "module:function", which is called
            with the bytes and the location and returns a ``lading.runtime.tiers.TierBytes``.
        capacity_bytes: Bytes that a plan may use where it has no budget.
        read_bytes_per_s, write_bytes_per_s: Bytes a second from and to the device, each while the other direction is
            idle.
        mixed_read_bytes_per_s, mixed_write_bytes_per_s: Bytes a second of each while the other direction runs too, both
            with moves of at least ``turn_bytes``.
        turn_bytes: Bytes that a direction moves at most before the other one has its turn, on a tier that serves one
            request after another: a move of fewer bytes has as much less of the tier's time (``rates_together``). 0
            where directions do not wait for each other, and the mixed rates hold for moves of all sizes.
        latency_s: Seconds of a move beside those of its bytes.
        read_slowdown, write_slowdown: Share by which an operation of the device takes longer while this tier reads, or
            writes, alone (0.1: 10%); at a lower rate it is so much less, for each byte takes its time.
        read_slowdown_of_passes, write_slowdown_of_passes: The same of operations other than products, which wait for
            memory that the tier's bytes go through, too; 0 where that was not measured apart.
        latency_slowdown: Share by which it takes longer during a move's latency, in which a processor that computes
            prepares the move: small moves take more from computing than their bytes do.
        location: Folder of a file, address of anything else; "" for the folder of the run.
        host_computes: Whether the host's processors can work on what lies there.
        persistent: Whether what lies there outlives the process, so that checkpoints take room of it too.
        alignment_bytes: Multiple at which each storage begins there: whole pages of 4096 bytes.
        wire: Name of a wire that several tiers share, as a GPU's link carries the bytes of the host's memory and those
            of a disk behind it. Each way it carries what the fastest of them moves, alone or in both directions; those
            that move the same way at once have equal parts, and what slower ones leave of theirs (``fair_share``). ""
            for a wire of its own.
    """

    name: str
    kind: str
    capacity_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_read_bytes_per_s: float
    mixed_write_bytes_per_s: float
    latency_s: float
    read_slowdown: float = 0.0
    write_slowdown: float = 0.0
    location: str = ""
    host_computes: bool = False
    persistent: bool = False
    alignment_bytes: int = TIER_ALIGNMENT_BYTES
    wire: str = ""
    turn_bytes: int = 0
    latency_slowdown: float = 0.0
    read_slowdown_of_passes: float = 0.0
    write_slowdown_of_passes: float = 0.0

    def __post_init__(self) -> None:
        if not _TIER_NAME.match(self.name) or self.name in _NO_TIERS:
            raise ConfigError(
                f"expected a tier's name of letters, digits and underscores, none of {', '.join(_NO_TIERS)}, got "
                f"{self.name!r}"
            )
        if self.kind not in (MEMORY, FILE) and not all(self.kind.partition(":")):
            raise ConfigError(
                f"tier {self.name}: expected the kind {MEMORY!r}, {FILE!r} or 'module:function', got {self.kind!r}"
            )
        if self.kind == FILE and self.host_computes:
            raise ConfigError(f"tier {self.name}: the host's processors cannot work on a file; drop host_computes")
        for key in (*_TIER_SLOWDOWNS, "latency_s", "turn_bytes"):
            if getattr(self, key) < 0:
                raise ConfigError(f"tier {self.name}: {key} must be >= 0, got {getattr(self, key)}")
        for key in ("capacity_bytes", *_TIER_RATES):
            if getattr(self, key) <= 0:
                raise ConfigError(f"tier {self.name}: {key} must be positive, got {getattr(self, key)}")
        if self.alignment_bytes <= 0 or self.alignment_bytes % TIER_ALIGNMENT_BYTES:
            raise ConfigError(
                f"tier {self.name}: expected alignment_bytes in whole pages of {TIER_ALIGNMENT_BYTES}, got "
                f"{self.alignment_bytes}"
            )

    def slowdown(self, *, read: bool, product: bool) -> float:
        """Share by which a product, or another operation, takes longer while this tier reads, or writes, alone."""
        of_all = self.read_slowdown if read else self.write_slowdown
        of_passes = self.read_slowdown_of_passes if read else self.write_slowdown_of_passes
        return of_all if product or not of_passes else of_passes

    def alone_bytes_per_s(self, *, read: bool) -> float:
        """Bytes/s that the tier reads, or writes, while nothing else moves."""
        return self.read_bytes_per_s if read else self.write_bytes_per_s

    def rates_together(self, read_bytes: int, write_bytes: int) -> tuple[float, float]:
        """Bytes/s read and written while a move of so many bytes comes from the tier and another one goes to it.

        Where directions take turns, each turn moves up to ``turn_bytes`` of a move, so the tier's time is shared in
        proportion to what both turns take alone. The rates of that share lie between the mixed ones, which are those of
        full turns, and the rate of one direction alone, so no faster than what ``lading.planner.linear.facets`` allows.
        """
        read, write = self.read_bytes_per_s, self.write_bytes_per_s
        both_read, both_write = min(self.mixed_read_bytes_per_s, read), min(self.mixed_write_bytes_per_s, write)
        if not self.turn_bytes:
            return both_read, both_write
        turns = [max(1, min(size_bytes, self.turn_bytes)) for size_bytes in (read_bytes, write_bytes)]
        reading_s, writing_s = turns[0] / read, turns[1] / write
        share, full = reading_s / (reading_s + writing_s), write / (read + write)
        if share <= full:
            part = share / full
            return part * both_read, write + part * (both_write - write)
        part = (1.0 - share) / (1.0 - full)
        return read + part * (both_read - read), part * both_write


_TIER_RATES = ("read_bytes_per_s", "write_bytes_per_s", "mixed_read_bytes_per_s", "mixed_write_bytes_per_s")
_TIER_SLOWDOWNS = ("read_slowdown", "write_slowdown", "latency_slowdown", "read_slowdown_of_passes",
                   "write_slowdown_of_passes")  # fmt: skip
#: Attributes of a tier that say how fast it is, and what its moves take from computing.
TIER_SPEEDS = (*_TIER_RATES, "latency_s", *_TIER_SLOWDOWNS)


def host_tier(tiers: Iterable[Tier]) -> str:
    """Name of the first tier on which the host's processors can work; "" where there is none."""
    return next((tier.name for tier in tiers if tier.host_computes), "")


def wires(tiers: Iterable[Tier]) -> tuple[tuple[Tier, ...], ...]:
    """Group tiers by the wire that several of them share."""
    by_wire: dict[str, list[Tier]] = {}
    for tier in tiers:
        by_wire.setdefault(tier.wire, []).append(tier)
    return tuple(tuple(shared) for wire, shared in by_wire.items() if wire and len(shared) > 1)


def wire_of(tiers: Sequence[Tier]) -> Tier:
    """Wire of some tiers, as a tier with the rates of the fastest of them: alone, and while it carries both ways."""
    return dataclasses.replace(
        tiers[0], **{key: max(getattr(tier, key) for tier in tiers) for key in _TIER_RATES}, turn_bytes=0
    )


def outdoes(near: Tier, far: Tier) -> bool:
    """Whether a tier moves every byte over the same wire as another one at least as fast, and takes no more for it."""
    costs = ("latency_s", *_TIER_SLOWDOWNS)
    return (
        bool(near.wire)
        and near.wire == far.wire
        and all(getattr(near, key) >= getattr(far, key) for key in _TIER_RATES)
        and all(getattr(near, key) <= getattr(far, key) for key in costs)
    )


def fair_share(rate: float, others: Iterable[float], total: float) -> float:
    """Rate that one of several has of a wire (max-min fairness).

    Args:
        rate: Its rate alone.
        others: Rates alone of the others that move the same way now.
        total: Rate of the wire.
    """
    rivals = sorted(others)
    for number, other in enumerate(rivals):
        part = total / (len(rivals) + 1 - number)
        if other >= part:
            return min(rate, part)
        total -= other
    return min(rate, total)


@dataclass(frozen=True, kw_only=True)
class Link:
    """Link that joins devices: those of one domain (NVLink, PCIe), or all domains (a network).

    Attributes:
        name: "nvlink", "pcie", "network", ...
        kind: "nvswitch": any pair at full rate; "mesh": a rank has ports to each other rank of the domain, so that a
            part of them has a part of the rate; "pcie"; the others are networks.
        ranks: Devices of one domain; 0: all there are.
        bandwidth_bytes_per_s: Each direction, by the data sheet: of one device, or of one NIC where ``nics`` > 0.
        efficiency: Share of it that a long ring of all ranks reaches (bus bandwidth of nccl-tests).
        fewer: Efficiency for 2, 3, ... ranks of a domain, as far as known; else ``efficiency``, in a mesh by ports.
        latency_s: Seconds of a hop of a few bytes.
        nics: NICs that ``nic_ranks`` devices of one node share; 0: not a network.
        nic_ranks: Devices of one node.
        reduces: Share of the bandwidth at which the switch itself adds what ranks send (NVLink SHARP): bytes of an
            all-reduce per second over the bandwidth, for very many ranks; 0: it does not.
    """

    name: str
    kind: str
    ranks: int
    bandwidth_bytes_per_s: float
    efficiency: float
    latency_s: float
    nics: int = 0
    nic_ranks: int = 0
    reduces: float = 0.0
    fewer: tuple[float, ...] = ()

    def reached(self, ranks: int) -> float:
        """Bytes/s in each direction that a rank of a long ring of ``ranks`` of a domain reaches."""
        share = self.efficiency
        if 2 <= ranks < len(self.fewer) + 2:
            share = self.fewer[ranks - 2]
        elif self.kind == "mesh" and 1 < ranks < self.ranks:
            share *= (ranks - 1) / (self.ranks - 1)
        return self.bandwidth_bytes_per_s * share

    def __post_init__(self) -> None:
        if self.kind not in LINK_KINDS:
            raise ConfigError(f"link {self.name}: kind must be one of {', '.join(LINK_KINDS)}, got {self.kind!r}")
        if self.bandwidth_bytes_per_s <= 0 or not 0 < self.efficiency <= 1 or self.latency_s < 0:
            raise ConfigError(
                f"link {self.name}: expected a positive bandwidth, an efficiency in (0, 1] and a latency >= 0, got "
                f"{self.bandwidth_bytes_per_s}, {self.efficiency} and {self.latency_s}"
            )
        if any(not 0 < share <= 1 for share in self.fewer):
            raise ConfigError(f"link {self.name}: expected each share of fewer in (0, 1], got {self.fewer}")
        if self.ranks < 0 or self.nics < 0 or bool(self.nics) != bool(self.nic_ranks) or self.nic_ranks < 0:
            raise ConfigError(
                f"link {self.name}: expected ranks >= 0 and both of nics and nic_ranks or neither, got {self.ranks}, "
                f"{self.nics} and {self.nic_ranks}"
            )


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Slowdowns of processes of one host that train together, as ``lading probe --ranks`` measures it.

    Attributes:
        slowdown: How many times longer kernels take while 1, 2, 3, ... processes compute at once, each with the threads
            of ``device``, by cause ("products", "memory-bound"): processors in turns, caches, bandwidth.
        busy: Processors that a collective keeps busy, by operation and number of ranks ("all_reduce.4").
        tiers: What each of 1, 2, 3, ... processes has of a tier while all of them compute, read and write, by its name
            and the attribute of ``Tier`` ("disk.read_bytes_per_s"); threads that move bytes wait for processors then.
        overhead_s: Seconds that the host spends on things that are no kernel of the model: "operation" (launching one
            in eager, forward or backward), "tensor-parallel" (a linear layer of DTensors forward and back, beyond a
            plain one), "unit" (FSDP2's hooks of a unit, forward and back).
        cores: Processors of the host.
        skew: Seconds by which the last of 1, 2, ... processes comes to a collective later than they do in the mean, a
            second of computing after the one before; it grows as the square root of that time, as what holds up one of
            them does not hold up the others. () where it was not measured.
        device: The host's processors as one such process has them, alone, with its share of the threads; None where the
            machine's device was measured with as many.
        computing: Number of processes, all computing, of which the machine's device is one (``Machine.shared_by``).
    """

    cores: int
    slowdown: dict[str, tuple[float, ...]]
    busy: dict[str, float] = field(default_factory=lambda: {})
    tiers: dict[str, tuple[float, ...]] = field(default_factory=lambda: {})
    overhead_s: dict[str, float] = field(default_factory=lambda: {})
    skew: tuple[float, ...] = ()
    device: Device | None = None
    computing: int = 1

    def __post_init__(self) -> None:
        if any(not 0 <= delay < float("inf") for delay in self.skew):
            raise ConfigError(f"processes.skew: expected seconds >= 0 from one process on, got {self.skew}")
        if self.cores < 1 or not self.slowdown:
            raise ConfigError(f"processes: expected cores >= 1 and a slowdown, got {self.cores} and {self.slowdown}")
        if self.computing < 1:
            raise ConfigError(f"processes: expected computing >= 1, got {self.computing}")
        for cause, times in self.slowdown.items():
            if not times or min(times) <= 0:
                raise ConfigError(f"processes.slowdown.{cause}: expected positive factors from one process on")
        if "memory-bound" not in self.slowdown:
            raise ConfigError(f"processes.slowdown: expected memory-bound, got {', '.join(sorted(self.slowdown))}")
        for name, slowdowns in self.tiers.items():
            if name.rpartition(".")[2] not in TIER_SPEEDS:
                raise ConfigError(f"processes.tiers: expected TIER. and one of {', '.join(TIER_SPEEDS)}, got {name!r}")
            if not slowdowns or min(slowdowns) < 0:
                raise ConfigError(f"processes.tiers.{name}: expected numbers >= 0 from one process on, got {slowdowns}")

    def slower(self, cause: str, processes: int) -> float:
        """Factor by which kernels of a cause take longer while so many processes compute; others as "memory-bound".

        Beyond what was measured processes take turns once all processors are busy.
        """
        times = self.slowdown.get(cause) or self.slowdown["memory-bound"]
        return times[min(processes, len(times)) - 1] * max(1.0, processes / max(len(times), self.cores))

    def tier(self, tier: Tier, processes: int) -> Tier:
        """Make the tier that each of so many processes has, which all compute and move.

        Rates that were not measured are divided among them, as are those of more processes than were measured.
        """
        speeds = {key: getattr(tier, key) / processes for key in _TIER_RATES} if tier.kind == FILE else {}
        for key in TIER_SPEEDS:
            if times := self.tiers.get(f"{tier.name}.{key}"):
                more = max(1.0, processes / len(times)) if key in _TIER_RATES else 1.0
                speeds[key] = times[min(processes, len(times)) - 1] / more
        return dataclasses.replace(tier, **speeds, capacity_bytes=max(1, tier.capacity_bytes // processes))

    def skew_s(self, between_s: float) -> float:
        """Seconds that those that compute wait in the mean for the last of them, so long after they met before."""
        return self.skew[min(self.computing, len(self.skew)) - 1] * between_s**0.5 if self.skew else 0.0

    def launch_s(self, processes: int) -> float:
        """Seconds to launch an operation while so many processes compute."""
        return self.overhead_s.get("operation", 0.0) * self.slower("products", processes)


@dataclass(frozen=True, kw_only=True)
class HostSpeed:
    """Factors on the seconds of a machine file: 1.0 is as it says, 2.0 is twice as long.

    Attributes:
        products: Factor of products and attention.
        others: Factor of all other operations, which caches and memory bound.
        tiers: Factors of moves, by the tier's name and direction ("disk.read"); a missing one is 1.0.
    """

    products: float = 1.0
    others: float = 1.0
    tiers: dict[str, float] = field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        for name, factor in (("products", self.products), ("others", self.others), *self.tiers.items()):
            if not 0 < factor < float("inf"):
                raise ConfigError(f"expected a positive factor of {name}, got {factor}")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host: one device and the tiers behind it, nearest first.

    Attributes:
        links: Links that join this device to others of its kind, nearest first; () where nothing is known.
        collectives: Measured among processes of this host: bytes/s against size, by operation and number of ranks
            ("all_reduce.4"); they come before what ``links`` would give.
        processes: Slowdowns of processes that share this host, measured; None where nothing is known of it.
        host_device: Device that the host computes with; None where the device is the host's CPU, or nothing is known of
            it.
        node_devices: Devices of a node between which its memory, processors and disks are divided here: ``tiers`` and
            ``host_device`` are what one of so many has (``Machine.with_job``). 1 where they are the whole host's.
        host_id: Name of the host a probe ran on (CPU model, cores, memory); "" for a catalog entry.
        sources: Where each number comes from, by key.
    """

    name: str
    date: str
    source: str
    device: Device
    tiers: tuple[Tier, ...] = ()
    links: tuple[Link, ...] = ()
    collectives: dict[str, Curve] = field(default_factory=lambda: {})
    processes: Processes | None = None
    host_device: HostDevice | None = None
    node_devices: int = 1
    host_id: str = ""
    sources: dict[str, str] = field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        if self.node_devices < 1:
            raise ConfigError(f"node_devices must be >= 1, got {self.node_devices}")
        names = Counter(tier.name for tier in self.tiers)
        if twice := [name for name, count in names.items() if count > 1]:
            raise ConfigError(f"expected tiers of different names, got {twice[0]!r} more than once")
        if shared_names := names.keys() & {tier.wire for tier in self.tiers}:
            raise ConfigError(f"expected a wire that is no tier, got {min(shared_names)!r}; name it otherwise")
        files = Counter(tier.location for tier in self.tiers if tier.kind == FILE)
        if twice := [location for location, count in files.items() if count > 1]:
            raise ConfigError(
                f"expected swap files in different folders, got more than one tier of kind {FILE!r} at "
                f"{twice[0] or 'the folder of the run'}; give each a location"
            )

    def __repr__(self) -> str:
        tiers = "".join(f", {tier.name} {format_capacity(tier.capacity_bytes)}" for tier in self.tiers)
        device = f"{self.device.kind} {self.device.name!r} with {format_capacity(self.device.memory_bytes)}"
        return f"Machine({self.name!r}: {device}{tiers})"

    def tier(self, name: str) -> Tier | None:
        """Look up the tier called ``name``; None if this machine has none."""
        return next((tier for tier in self.tiers if tier.name == name), None)

    @property
    def host_tier(self) -> str:
        """Name of the nearest tier on which the host's processors can work; "" where there is none."""
        return host_tier(self.tiers)

    def offload_tier(self, name: str) -> Tier:
        """Look up the tier that a layout's ``offload_to`` names; "" names ``host_tier``.

        Raises:
            ConfigError: there is none.
        """
        tier = self.tier(name or self.host_tier)
        if tier is None:
            tier_names = ", ".join(candidate.name for candidate in self.tiers) or "none"
            expected = f"a tier {name!r}" if name else "a tier on which the host's processors work"
            raise ConfigError(
                f"offload: expected {expected} of {self.name}, its tiers are: {tier_names}; name one of them with "
                "offload_to=, add [[tiers]] to the machine file or leave offload away"
            )
        return tier

    @property
    def swap_tier(self) -> str:
        """Name of the nearest tier that is a file; "" where there is none."""
        return next((tier.name for tier in self.tiers if tier.kind == FILE), "")

    @property
    def persistent_tier(self) -> str:
        """Name of the nearest tier that outlives the process, where checkpoints lie too; "" where there is none."""
        return next((tier.name for tier in self.tiers if tier.persistent), "")

    def with_threads(self, threads: int = 0) -> Machine:
        """Make the machine of a process with so many threads, where a CPU was measured with several numbers.

        Where none was measured with as many, the nearest stands in for it, which plans say.

        Args:
            threads: Threads of the process; 0 for a rank's share, as ``lading probe --ranks`` measured it.
        """
        process_device = None if self.processes is None else self.processes.device
        threads = threads or (process_device or self.device).num_threads
        if self.device.kind != "cpu" or (process_device is None and self.device.num_threads in (0, threads)):
            return self
        measured = (self.device,) if process_device is None else (self.device, process_device)
        device = min(measured, key=lambda device_at: abs(device_at.num_threads - threads))
        sources = dict(self.sources)
        if device.num_threads != threads:
            sources["threads"] = (
                f"assumption: kernels are as fast with {threads} threads as they were measured with "
                f"{device.num_threads}; measure again with OMP_NUM_THREADS={threads}: lading probe"
            )
        processes = None if self.processes is None else dataclasses.replace(self.processes, device=None)
        return dataclasses.replace(self, device=device, processes=processes, sources=sources)

    def shared_by(self, ranks: int) -> Machine:
        """Make the machine that each of several ranks has, all of which compute, read and write at once.

        Its files have a rank's share of their rates and room; a CPU, and the host's memory, a share of their bytes. The
        kernels of a CPU are slower as measured among so many processes, where that was measured.
        """
        if ranks == 1:
            return self
        if self.processes is not None and self.processes.computing > 1:
            raise ConfigError(
                f"{self.name}: expected a whole host, found what one of {self.processes.computing} ranks of one has"
            )
        share = f"assumption: {ranks} on this host compute and move at once, each at its share of the rates"
        shared = self.processes or Processes(cores=1, slowdown={"memory-bound": (1.0,)})
        tiers = tuple(shared.tier(tier, ranks) for tier in self.tiers)
        device = self.device
        if device.kind == "cpu":
            device = dataclasses.replace(device, memory_bytes=device.memory_bytes // ranks)
            if self.processes is not None:
                products, passes = (self.processes.slower(cause, ranks) for cause in ("products", "memory-bound"))
                device = _slower(device, products, passes, launch=products)
        processes = None if self.processes is None else dataclasses.replace(self.processes, computing=ranks)
        sources = {**self.sources, "ranks": share}
        return dataclasses.replace(self, device=device, tiers=tiers, processes=processes, sources=sources)

    def with_job(self, ranks: int) -> Machine:
        """Make the machine that each of a job's ranks has of its node: what the host has is divided by these alone.

        Processors, memory and files of a host belong to the node. A job of one rank on a node of eight devices has all
        of them; eight on a desktop whose file is one device's have an eighth each. Copies to and from the host's memory
        are no faster than the device's bus, nor than its part of the memory.

        Args:
            ranks: Ranks of the job on one node, >= 1.
        """
        if ranks == self.node_devices or self.device.kind == "cpu":
            return self
        share = self.node_devices / ranks
        host = self.host_device
        if host is not None:
            host = dataclasses.replace(
                host,
                num_threads=max(1, int(host.num_threads * share)),
                memory_bandwidth_bytes_per_s=host.memory_bandwidth_bytes_per_s * share,
                optimizer_elements_per_s=host.optimizer_elements_per_s * share,
                row_flops_per_s=host.row_flops_per_s and host.row_flops_per_s.slower(1 / share),
            )
        memory = host.memory_bandwidth_bytes_per_s if host else float("inf")
        bus = self.tier(self.host_tier)
        tiers = tuple(_of_job(tier, share, memory, bus) for tier in self.tiers)
        note = f"assumption: of a node's memory, processors and disks each of the job's {ranks} ranks there has a part"
        sources = {**self.sources, "ranks": note}
        return dataclasses.replace(self, host_device=host, tiers=tiers, node_devices=ranks, sources=sources)

    def at_speed(self, speed: HostSpeed) -> Machine:
        """Make the machine as it is now, where it takes other times than were measured for it."""
        devices = [self.device, *([self.processes.device] if self.processes and self.processes.device else [])]
        device, *process_device = (
            _slower(measured_device, speed.products, speed.others, launch=speed.others) for measured_device in devices
        )
        processes = self.processes
        if processes is not None:
            processes = dataclasses.replace(
                processes,
                device=process_device[0] if process_device else None,
                tiers={
                    name: _slowed_speeds(name, slowdowns, speed.tiers) for name, slowdowns in processes.tiers.items()
                },
            )
        tiers = tuple(
            dataclasses.replace(
                tier,
                **{
                    key: _slowed_speeds(f"{tier.name}.{key}", (getattr(tier, key),), speed.tiers)[0]
                    for key in _TIER_RATES
                },
            )
            for tier in self.tiers
        )
        return dataclasses.replace(self, device=device, processes=processes, tiers=tiers)

    @property
    def fingerprint(self) -> str:
        """Hash of every number of the machine."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


#: Beginnings of the cost classes whose rates are those of products.
_PRODUCTS = ("attention", "bmm", "matmul")


def _of_job(tier: Tier, share: float, memory_bytes_per_s: float, bus: Tier | None) -> Tier:
    """Tier of which a rank has ``share`` times the room, and a file's rates as far as its bus carries them."""
    capacity = max(1, int(tier.capacity_bytes * share))
    if tier.kind == FILE:
        limits = {key: getattr(bus, key) if bus else float("inf") for key in _TIER_RATES}
        rates = {key: min(getattr(tier, key) * share, max(limits[key], getattr(tier, key))) for key in _TIER_RATES}
    elif tier.host_computes and share < 1:
        rates = {key: min(getattr(tier, key), memory_bytes_per_s) for key in _TIER_RATES}
    else:
        rates = {}
    return dataclasses.replace(tier, **rates, capacity_bytes=capacity)


def _slowed_speeds(speed: str, measured: tuple[float, ...], factors: Mapping[str, float]) -> tuple[float, ...]:
    """Speeds of a tier, named as in ``Processes.tiers``, where its moves take ``factors`` times longer."""
    tier, _, key = speed.rpartition(".")
    factor = factors.get(f"{tier}.{'read' if 'read' in key else 'write'}", 1.0) if key in _TIER_RATES else 1.0
    return tuple(slowdown / factor for slowdown in measured)


def _slower(device: Device, products: float, passes: float, *, launch: float) -> Device:
    """Device whose products, passes over memory and launches take so many times longer."""
    return dataclasses.replace(
        device,
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s / passes,
        op_overhead_s=device.op_overhead_s * launch,
        peak_flops_per_s={dtype: peak / products for dtype, peak in device.peak_flops_per_s.items()},
        optimizer_elements_per_s=device.optimizer_elements_per_s / passes,
        rates={
            name: curve.slower(products if name.startswith(_PRODUCTS) else passes)
            for name, curve in device.rates.items()
        },
        cold_rates={name: curve.slower(passes) for name, curve in device.cold_rates.items()},
    )
