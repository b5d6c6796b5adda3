"""Group: which ranks of a layout take part in a collective, and which share of the machine's links they have.

[Note: order of ranks]
Ranks are numbered as Megatron, DeepSpeed and torchtitan number them: tensor-parallel ranks are neighbours, then come
context, data and pipeline ("tp-cp-dp-pp"); experts lie over the data-parallel ranks of one pipeline stage, nearest
first. "tp-cp-pp-dp" (Megatron's ``use_tp_pp_dp_mapping``) has the stages of a pipeline next to each other.

[Note: who shares a NIC]
All ranks of a node send at the same time, as each of them is in some group of the same axis: each has its part of the
node's NICs. A ring that has several ranks of a node uses the NICs of all of them: a tensor-parallel group of 16 on
nodes of eight goes over all eight NICs, a data-parallel group of one rank a node over one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lading.errors import ConfigError
from lading.ir.layout import Layout
from lading.ir.machine import Link, Machine

ORDERS = ("tp-cp-dp-pp", "tp-cp-pp-dp")


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate.

    Attributes:
        ranks: Number of ranks.
        domain_ranks: Ranks of them in one domain of the nearest link (the fullest one).
        busy: Ranks of a node that use its NICs at the same time, those of other groups included; 0: all of the node.
    """

    ranks: int
    domain_ranks: int
    busy: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.domain_ranks <= self.ranks or self.busy < 0:
            raise ConfigError(
                f"group: expected 1 <= domain_ranks <= ranks and busy >= 0, got {self.domain_ranks}, {self.ranks} and "
                f"{self.busy}"
            )

    @property
    def domains(self) -> int:
        """Number of domains of the nearest link that the group spans."""
        return -(-self.ranks // self.domain_ranks)


def group_of(layout: Layout, axis: str, machine: Machine, order: str = "tp-cp-dp-pp") -> Group:
    """Find the ranks of ``layout`` that take part in a collective over ``axis`` ([Note: order of ranks]).

    Args:
        axis: "tp", "cp", "tp/cp" (both), "dp" (every rank with the same dense parameters: dp * cp of them), "shard" and
            "replicate" (its parts where ``layout.shard`` is smaller), "ep", "etp", "dp/ep" (ranks with the same
            experts), "pp" (the two ends of a send, over the farthest of a pipeline's hops), or "world".

    Raises:
        ConfigError: unknown axis or order, or the machine has no links.

    Example:
        ``group_of(parse_layout("tp16,pp4,dp2"), "tp", load_machine("a100"))`` gives 16 ranks, 8 of them in a domain.
    """
    if machine.collectives and not machine.links:
        ranks, _ = _extent(layout, axis)
        return Group(ranks, ranks)
    return _group(layout, axis, machine.links, order, machine.name)


def group_of_ranks(ranks: int, machine: Machine, stride: int = 1, devices: int = 0) -> Group:
    """Make a group of ranks whose numbers are ``stride`` apart, in a job of ``devices`` ranks (at least the group's).

    Raises:
        ConfigError: ``ranks`` or ``stride`` is below 1, or the machine has no links.
    """
    if ranks < 1 or stride < 1:
        raise ConfigError(f"group: expected ranks >= 1 and a distance >= 1, got {ranks} and {stride}")
    if ranks == 1:
        return Group(1, 1, 1)
    if machine.collectives and not machine.links:
        return Group(ranks, ranks)
    devices = max(devices, ranks * stride)
    domain = _domain(devices, _links(machine.links, ranks, machine.name))
    return _even(ranks, min(ranks, -(-domain // stride)), _busy(devices, machine.links))


@lru_cache(maxsize=4096)
def _group(layout: Layout, axis: str, links: tuple[Link, ...], order: str, name: str) -> Group:
    if order not in ORDERS:
        raise ConfigError(f"order of ranks: expected one of {', '.join(ORDERS)}, got {order!r}")
    ranks, stride = _extent(layout, axis)
    if ranks == 1:
        return Group(1, 1, 1)
    devices = layout.devices
    domain = _domain(devices, _links(links, ranks, name))
    inner = layout.tp * layout.cp
    if axis == "pp":
        hop = inner * layout.dp if order == ORDERS[0] else inner
        return Group(2, 2 if hop * layout.pp <= domain else 1, _busy(devices, links))
    jump = layout.pp if order == ORDERS[1] and axis != "world" else 1
    places = range(0, min(ranks * stride, domain), stride)
    inside = sum(place % inner + place // inner * inner * jump < domain for place in places)
    return _even(ranks, inside, _busy(devices, links))


def _extent(layout: Layout, axis: str) -> tuple[int, int]:
    """Number of ranks of an axis, and the distance of neighbours in the numbering of a stage's ranks."""
    data = layout.dp * layout.cp
    expert = layout.expert_tp * layout.ep
    extents = {
        "tp": (layout.tp, 1),
        "cp": (layout.cp, layout.tp),
        "tp/cp": (layout.tp * layout.cp, 1),
        "dp": (data, layout.tp),
        "etp": (layout.expert_tp, 1),
        "ep": (layout.ep, layout.expert_tp),
        "dp/ep": (max(1, layout.tp * data // expert), expert),
        "shard": (layout.sharding_ranks, layout.tp),
        "replicate": (max(1, data // layout.sharding_ranks), layout.tp * layout.sharding_ranks),
        "pp": (min(2, layout.pp), 1),
        "world": (layout.devices, 1),
    }
    if axis not in extents:
        raise ConfigError(f"axis of a collective: expected one of {', '.join(extents)}, got {axis!r}")
    return extents[axis]


def _links(links: tuple[Link, ...], ranks: int, name: str) -> int:
    """Number of ranks in a domain of the nearest link."""
    if not links:
        raise ConfigError(
            f"machine {name} has no links, so what {ranks} ranks send to each other has no price: add [[links]] to its "
            "file, or name a network (lading.catalog.networks.with_network)"
        )
    return links[0].ranks


def _even(ranks: int, inside: int, busy: int) -> Group:
    """Spread ranks evenly over as few domains as possible."""
    domains = -(-ranks // max(1, inside))
    return Group(ranks, -(-ranks // domains), busy)


def _domain(devices: int, domain: int) -> int:
    """Number of a job's ranks in each domain if they are spread evenly (64 of a domain's 72 for 128 ranks)."""
    if not domain or devices <= domain:
        return devices
    return -(-devices // -(-devices // domain))


def _busy(devices: int, links: tuple[Link, ...]) -> int:
    node = next((link.nic_ranks for link in links if link.nics), 0)
    return min(devices, node)
