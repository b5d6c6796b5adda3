"""Machine: what a host can do, as data with units in the keys and a source for every number.

Read from and written to TOML. A catalog entry and the output of ``lading probe`` are the same type.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from bisect import bisect_left
from dataclasses import dataclass, field
from math import exp, log

from lading.errors import ConfigError
from lading.units import format_capacity

#: Columns of a product beyond which BLAS packs no more of it at once. Measured: MKL of torch 2.13, 512 deep.
PACKED_COLUMNS = 6400
#: Numbers that the update of ``optimizer_elements_per_s`` reads and writes for an element: a value and two moments both
#: ways, and a gradient.
UPDATE_NUMBERS = 7.0
#: Key of a source that machine files written before this number was measured lack.
KERNEL_BYTES = "device.kernel_bytes"
TIERS = ("device", "host", "disk")
DEVICE_KINDS = ("cpu", "cuda", "mps")
LINK_KINDS = ("nvswitch", "mesh", "pcie", "infiniband", "ethernet", "omnipath")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A measured rate against size, interpolated in log-log and constant beyond its ends.

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
        """Rate at ``size``."""
        right = bisect_left(self.size, size)
        if right == 0:
            return self.rate[0]
        if right == len(self.size):
            return self.rate[-1]
        low, high = self.size[right - 1], self.size[right]
        share = log(size / low) / log(high / low)
        return exp(log(self.rate[right - 1]) * (1 - share) + log(self.rate[right]) * share)


#: Generations of GPUs whose kernels have fitted rates (``lading.catalog.kernels``).
ARCHITECTURES = ("ampere", "hopper", "blackwell")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """What only a GPU has, for costs of kernels by their shape.

    Attributes:
        architecture: Whose kernels run on it.
        num_sms: Streaming multiprocessors.
        l2_bytes: Last level of cache.
        power_w: What the board may draw.
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
    """What computes.

    Attributes:
        kind: PyTorch's name for the kind of device whose kernels run ("cuda" for AMD's too).
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
    gpu: Gpu | None = None

    def __post_init__(self) -> None:
        if self.kind not in DEVICE_KINDS:
            raise ConfigError(f"device kind must be one of {', '.join(DEVICE_KINDS)}, got {self.kind!r}")
        for key in ("memory_bytes", "memory_bandwidth_bytes_per_s", "optimizer_elements_per_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"device.{key} must be positive, got {getattr(self, key)}")


@dataclass(frozen=True, kw_only=True)
class HostDevice:
    """The processors beside a device that has memory of its own: they can run an optimizer step where the states are.

    Attributes:
        num_threads: Threads the rates are for.
        memory_bandwidth_bytes_per_s: Read plus write, of the host's memory.
        optimizer_elements_per_s: AdamW elements per second, all fp32 and in the host's memory.
    """

    name: str
    num_threads: int
    memory_bandwidth_bytes_per_s: float
    optimizer_elements_per_s: float

    def __post_init__(self) -> None:
        for key in ("num_threads", "memory_bandwidth_bytes_per_s", "optimizer_elements_per_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"host_device.{key} must be positive, got {getattr(self, key)}")


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Memory behind the device: "host" (only when the device has its own memory) or "disk".

    Rates are what one direction reaches alone; ``mixed_*`` what each reaches while the other runs.
    ``read_slowdown`` and ``write_slowdown``: by how much longer an operation of the device takes while this tier reads,
    or writes, alone (0.1: 10%); at a lower rate it is so much less, for each byte takes its time.
    """

    name: str
    capacity_bytes: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    mixed_read_bytes_per_s: float
    mixed_write_bytes_per_s: float
    latency_s: float
    read_slowdown: float = 0.0
    write_slowdown: float = 0.0

    def __post_init__(self) -> None:
        for key in ("read_slowdown", "write_slowdown"):
            if getattr(self, key) < 0:
                raise ConfigError(f"tier {self.name}: {key} must be >= 0, got {getattr(self, key)}")
        if self.name not in TIERS[1:]:
            raise ConfigError(f"a tier is one of {TIERS[1:]}, got {self.name!r}")
        for key in dataclasses.fields(self)[1:6]:
            if getattr(self, key.name) <= 0:
                raise ConfigError(f"tier {self.name}: {key.name} must be positive, got {getattr(self, key.name)}")


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins devices: those of one domain (NVLink, PCIe), or all domains (a network).

    Attributes:
        name: "nvlink", "pcie", "network", ...
        kind: "nvswitch": any pair at full rate; "mesh": a rank has ports to each other rank of the domain, so that a
            part of them has a part of the rate; "pcie"; the others are networks.
        ranks: Devices of one domain; 0: all there are.
        bandwidth_bytes_per_s: Each direction, by the data sheet: of one device, or of one NIC where ``nics`` > 0.
        efficiency: Share of it that a long ring of all ranks reaches (bus bandwidth of nccl-tests).
        fewer: The same for 2, 3, ... ranks of a domain, as far as known; else ``efficiency``, in a mesh by ports.
        latency_s: Of a hop of a few bytes.
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
        """Bytes/s each direction that a rank of a long ring of ``ranks`` of a domain reaches."""
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
    """What processes of one host that train together share, as ``lading probe --ranks`` measures it.

    Attributes:
        slowdown: How many times longer kernels take while 1, 2, 3, ... processes of one thread compute at once, by
            cause ("products", "memory-bound"): processors that are shared in turns, caches, bandwidth.
        busy: Processors that a collective keeps busy, by operation and number of ranks ("all_reduce.4").
        overhead_s: Seconds that the host spends on things that are no kernel of the model: "operation" (launching one
            in eager, forward or backward), "tensor-parallel" (a linear layer of DTensors forward and back, beyond a
            plain one), "unit" (FSDP2's hooks of a unit, forward and back).
        cores: Processors of the host.
    """

    cores: int
    slowdown: dict[str, tuple[float, ...]]
    busy: dict[str, float] = field(default_factory=lambda: {})
    overhead_s: dict[str, float] = field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        if self.cores < 1 or not self.slowdown:
            raise ConfigError(f"processes: expected cores >= 1 and a slowdown, got {self.cores} and {self.slowdown}")
        for cause, times in self.slowdown.items():
            if not times or min(times) <= 0:
                raise ConfigError(f"processes.slowdown.{cause}: expected positive factors from one process on")
        if "memory-bound" not in self.slowdown:
            raise ConfigError(f"processes.slowdown: expected memory-bound, got {', '.join(sorted(self.slowdown))}")

    def slower(self, cause: str, processes: int) -> float:
        """How many times longer kernels of a cause take while so many processes compute; others as "memory-bound".

        Beyond what was measured processes take turns once all processors are busy.
        """
        times = self.slowdown.get(cause) or self.slowdown["memory-bound"]
        return times[min(processes, len(times)) - 1] * max(1.0, processes / max(len(times), self.cores))

    def launch_s(self, processes: int) -> float:
        """Seconds to launch an operation while so many processes compute."""
        return self.overhead_s.get("operation", 0.0) * self.slower("products", processes)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host: one device and the tiers behind it, nearest first.

    Attributes:
        links: What joins this device to others of its kind, nearest first; () where nothing is known.
        collectives: Measured among processes of this host: bytes/s against size, by operation and number of ranks
            ("all_reduce.4"); they come before what ``links`` would give.
        processes: What processes of this host share, measured; None where nothing is known of it.
        host_device: What the host computes with; None where the device is the host's CPU, or nothing is known of it.
        host_id: What identifies the host a probe ran on (CPU model, cores, memory); "" for a catalog entry.
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
    host_id: str = ""
    sources: dict[str, str] = field(default_factory=lambda: {})

    def __repr__(self) -> str:
        tiers = "".join(f", {tier.name} {format_capacity(tier.capacity_bytes)}" for tier in self.tiers)
        device = f"{self.device.kind} {self.device.name!r} with {format_capacity(self.device.memory_bytes)}"
        return f"Machine({self.name!r}: {device}{tiers})"

    def tier(self, name: str) -> Tier | None:
        """The tier called ``name``, or None if this machine has none."""
        return next((tier for tier in self.tiers if tier.name == name), None)

    @property
    def fingerprint(self) -> str:
        """Hash of every number."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
