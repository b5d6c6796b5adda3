"""Contention of computing with a collective: both are slower, as they share processors and memory.

[Note: what is shared]
NCCL runs a block on one streaming multiprocessor per channel as long as the collective lasts, so a matrix product has
that many fewer. Each byte on the wire is stored and read again, two to three times its size in memory traffic
(NVIDIA/nccl issue 1428, a maintainer). What remains of computing's rate is ``1 - channels / processors - share * memory
traffic / memory bandwidth``, where ``share`` is largest for kernels that are themselves bound by memory.
Measured: on A100 beside an all-gather products take 1.76, attention 1.83 and elementwise kernels 2.5 times as long
(issue 1428); on H100 products 1.3 to 1.4 times (pytorch/pytorch #179937). Copy engines take no processors.
"""

from __future__ import annotations

from dataclasses import dataclass

from lading.cost.collective import NCCL, bus_rate
from lading.cost.topology import Group
from lading.errors import ConfigError
from lading.ir.machine import Link, Machine

#: Memory traffic of a byte on the wire: NVIDIA/nccl issue 1428, "at least 2x ... it can be 3x".
_TRAFFIC = 2.5
#: How much kernels mind memory traffic: fitted to the three figures of the note (benchmarks/calibrate/collectives.py).
_PRODUCTS, _MEMORY_BOUND = 0.5, 1.3
#: Assumption: by how much of its share of the memory's bandwidth a collective is slower beside computing.
_OWN = 0.5
#: Least rate that is left to either.
_LEAST = 0.2
MOST_LOST = 1 - _LEAST

#: Channels inside a domain behind NVSwitch, of NVLink SHARP, and of sends: NCCL's own log on A100 and H100 ("24 coll
#: channels, 16 nvls channels, 32 p2p channels"; NVIDIA/nccl-tests issue 100).
_INSIDE, _NVLS, _SENDS = 24, 16, 32
#: Channels for each NIC (NCCL's log on 8 H100 with 8 NICs: "16 coll channels"; NVIDIA/nccl issue 1453), and over PCIe
#: (issue 1706: 4).
_PER_NIC, _PCIE = 2, 4


@dataclass(frozen=True, slots=True)
class Contention:
    """Shares that remain of the rates of computing and of a collective while both run.

    Attributes:
        compute: Share of computing, in (0, 1].
        collective: Share of the collective, in (0, 1].
    """

    compute: float
    collective: float

    @property
    def slowdown(self) -> float:
        """Share by which computing takes longer (0.1: 10%)."""
        return 1 / self.compute - 1

    @property
    def lost(self) -> float:
        """Seconds that computing loses for each second that the collective takes alone, as that takes longer too."""
        return min(MOST_LOST, (1 - self.compute) / self.collective)


def channels(op: str, group: Group, machine: Machine, *, nvls: bool = True) -> int:
    """Number of streaming multiprocessors that a collective takes.

    Raises:
        ConfigError: the group has more than one rank and the machine no links.
    """
    if group.ranks == 1:
        return 0
    if not machine.links:
        raise ConfigError(f"machine {machine.name} has no links: add [[links]] to its file")
    near_link: Link = machine.links[0]
    pairwise = op in ("all_to_all", "send")
    net = next((link for link in machine.links if link.nics), None)
    if group.domains > 1 and net is not None:
        used = net.nics * min(1.0, group.domain_ranks / net.nic_ranks)
        across = max(_PER_NIC, round(_PER_NIC * used))
        return min(_SENDS, max(across, _PCIE) if pairwise and group.domain_ranks > 1 else across)
    if near_link.kind == "pcie":
        return _PCIE
    if pairwise:
        return _SENDS
    added = nvls and near_link.reduces and op == "all_reduce" and group.domain_ranks >= NCCL.nvls_ranks
    return _NVLS if added else _INSIDE


def contention(
    op: str,
    group: Group,
    machine: Machine,
    num_sms: int,
    *,
    memory_bound: float = 0.0,
    copy_engine: bool = False,
    nvls: bool = True,
) -> Contention:
    """Rates of computing and of a collective while both run on a device ([Note: what is shared]).

    Args:
        op, group: As for ``collective_s``.
        num_sms: Streaming multiprocessors of the device.
        memory_bound: Share of the seconds of computing limited by memory (norms, elementwise), not in products
            or attention: 0 to 1.
        copy_engine: Whether copy engines move the bytes (all-gather from symmetric memory): no processors are taken.
        nvls: As for ``collective_s``.

    Raises:
        ConfigError: ``num_sms`` < 1, or ``memory_bound`` is no share.

    Example:
        ``contention("all_gather", group_of(parse_layout("dp8,zero3"), "dp", m), m, 108).slowdown`` with ``m =
        load_machine("a100")`` gives 0.58: products take 1.58 times as long.
    """
    if num_sms < 1:
        raise ConfigError(f"contention: expected num_sms >= 1, got {num_sms}")
    if not 0 <= memory_bound <= 1:
        raise ConfigError(f"contention: expected a share of memory-bound computing from 0 to 1, got {memory_bound}")
    if group.ranks == 1:
        return Contention(1.0, 1.0)
    num_taken_sms = 0 if copy_engine else channels(op, group, machine, nvls=nvls)
    memory = _TRAFFIC * bus_rate(group, machine) / machine.device.memory_bandwidth_bytes_per_s
    products, other_ops = (
        max(_LEAST, 1 - num_taken_sms / num_sms - minds * memory) for minds in (_PRODUCTS, _MEMORY_BOUND)
    )
    compute = 1 / ((1 - memory_bound) / products + memory_bound / other_ops)
    return Contention(min(1.0, compute), max(_LEAST, 1 / (1 + _OWN * memory)))
