"""Seconds of a collective: what NCCL's algorithms take on a machine's links, the fastest of those it would consider.

[Note: time of a collective]
An algorithm takes ``latency + size * rate + fill(size)``.

- Latency: a launch, and one wait per hop of the longest path.
- Rate: seconds per byte of the tensor on the narrowest link. A ring of n ranks sends every byte 2 (n-1) / n times over
  each link between neighbours for an all-reduce, half of that for a gather or a scatter. A tree sends it twice over
  each link. A switch that adds takes it once.
- Fill: chunks go through a pipeline. With the best chunk size, filling it takes 2 sqrt(size * rate * depth), with the
  rate inside a domain, and at most the time of the largest chunk.

Protocols trade the latency of hops for bandwidth: LL sends a flag with every four bytes (half the rate, short hops),
LL128 with every 120, Simple none (long hops).
Structure, hops and launches are those of NCCL's own tuning model (NVIDIA/nccl src/graph/tuning.cc @5067397c); what it
does not know (fill, what NVSwitch reaches, all-to-all) is fitted in benchmarks/calibrate/collectives.py.

[Note: levels]
The nearest link joins the ranks of a domain, the network joins domains. A ring that leaves a domain is as fast as the
slower of the link and of all NICs its ranks have there ([Note: who shares a NIC]).

[Note: what is sent]
NCCL's all-to-all sends a copy of a token for each of its experts. DeepEP sends one for each rank that has some of them,
and one over the network for each node, which hands it on over NVLink; both ways run at once, so the slower counts. An
all-gather brings every token to every rank. Experts are taken to be spread evenly: of ``n`` places a token with ``k``
experts meets ``n (1 - (1 - 1/n)^k)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2, sqrt

import numpy as np
import numpy.typing as npt

from lading.cost.topology import Group, group_of
from lading.errors import ConfigError
from lading.ir.layout import Layout
from lading.ir.machine import Link, Machine
from lading.ir.stack import DISPATCHERS

#: Of what a ring reaches inside a domain, and of a NIC's reach: deepseek-ai/DeepEP README.md @ebfe47e on H800, 153 GB/s
#: over NVLink of 200 for 8 ranks; 46 GB/s of 50 for 64 ranks on 8 nodes, an eighth of which stays on the node.
_NEAR, _FAR = 0.94, 0.85
#: Assumption: kernels that count tokens, and the host's wait for the counts.
_COUNT_S = 30e-6
_ASSUMED = re.compile(r"assumption: ([^;]+)")

Floats = npt.NDArray[np.float64]
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True)
class Tuning:
    """Constants of a communication library; seconds and shares.

    Attributes:
        launch_ring, launch_tree: Base latency by protocol (LL, LL128, Simple).
        ring_hop, tree_hop, pcie_hop, ring_net_hop, tree_net_hop: Seconds of a hop by protocol, inside a domain (of
            NVLink, of PCIe) and between domains.
        link_hop_s, pcie_hop_s, network_hop_s: Latency of a link for which those hold; a slower one adds the difference.
        share, tree_share: Share of the bandwidth that each protocol has.
        ll_cap: Highest rate of LL, as a share of the nearest link's bandwidth, within a domain and across.
        nvls_s, nvls_tree_s: Latency of an all-reduce in the switch; of each hop of the tree between such.
        nvls_ranks: Ranks from which the switch is used.
        nvls_loss: Bandwidth of the switch, in ranks, that is lost to the ranks' own sends.
        nvls_tree_share: Share of the switch's rate that is left where a tree joins domains.
        net_overhead_s: Least time of a hop inside a node when the ring leaves it (a proxy posts every send).
        ring_plateau: Factor on a ring's latency across nodes with the Simple protocol.
        depth_s: Hops in flight times the cost of a chunk, by algorithm (ring, tree, switch, tree of switches) ([Note:
            time of a collective]).
        fill_bytes: Bytes in flight beyond which filling the pipeline takes no longer.
        fills: Share of ``fill_bytes`` by protocol: LL and LL128 send small chunks.
        p2p_s: Seconds to launch sends and receives.
        peer_s: Seconds for each further peer of an all-to-all, by medium.
        all_to_all_share: Share of a ring's bandwidth that pairwise sends reach, inside a domain; of the NICs'
            across domains of several ranks (between 0.53, two nodes of B200 with NCCL's defaults, and 0.9, six nodes of
            H100 of NVIDIA/nccl-tests issue 267), and of one each.
        send_share: Share of those bandwidths that one send reaches, inside and across (between 0.46, defaults, and
            0.84, tuned, on two nodes of B200).
        send_channel: Bytes/s of one channel inside a domain, and the bytes up to which a send has one channel.
        congestion: Share of a network's rate lost each time the domains double beyond two.
    """

    launch_ring: tuple[float, float, float] = (6.6e-6, 14e-6, 8.4e-6)
    launch_tree: tuple[float, float, float] = (6.8e-6, 14e-6, 8.4e-6)
    ring_hop: tuple[float, float, float] = (0.6e-6, 1.9e-6, 3.4e-6)
    tree_hop: tuple[float, float, float] = (0.6e-6, 1.25e-6, 4.0e-6)
    ring_net_hop: tuple[float, float, float] = (6.0e-6, 8.5e-6, 14e-6)
    tree_net_hop: tuple[float, float, float] = (5.0e-6, 8.5e-6, 14e-6)
    pcie_hop: tuple[float, float, float] = (1.0e-6, 2.5e-6, 5.7e-6)
    link_hop_s: float = 0.6e-6
    pcie_hop_s: float = 1.0e-6
    network_hop_s: float = 2.7e-6
    share: tuple[float, float, float] = (0.5, 0.92, 1.0)
    tree_share: tuple[float, float, float] = (0.26, 0.78, 0.92)
    ll_cap: tuple[float, float] = (0.165, 0.07)
    nvls_s: float = 20.4e-6
    nvls_tree_s: float = 20.9e-6
    nvls_ranks: int = 5
    nvls_loss: float = 0.55
    nvls_tree_share: float = 0.87
    net_overhead_s: float = 1.0e-6
    ring_plateau: float = 1.4
    depth_s: tuple[float, float, float, float] = (4.75e-6, 12.6e-6, 11.5e-6, 20.8e-6)
    fill_bytes: float = 49e6
    fills: tuple[float, float, float] = (0.0, 0.56, 1.0)
    p2p_s: float = 5e-6
    peer_s: tuple[float, float] = (0.3e-6, 1.2e-6)
    all_to_all_share: tuple[float, float, float] = (0.9, 0.75, 0.95)
    send_share: tuple[float, float] = (0.95, 0.75)
    send_channel: tuple[float, float] = (85e9, 64e6)
    congestion: float = 0.005


NCCL = Tuning()


@dataclass(frozen=True, slots=True)
class Line:
    """One algorithm's time against size ([Note: time of a collective])."""

    algorithm: str
    latency_s: float
    rate_s: float
    fill_rate_s: float = 0.0
    depth_s: float = 0.0
    fill_bytes: float = 0.0
    slower_s: float = 0.0
    slower_bytes: float = 0.0

    def at(self, size_bytes: float) -> float:
        """Seconds of a collective of so many bytes."""
        seconds = self.latency_s + size_bytes * self.rate_s
        if self.slower_s:
            first = min(size_bytes, self.slower_bytes)
            later_s = max(0.0, size_bytes - first) * self.rate_s
            seconds += max(0.0, first * self.slower_s - later_s)
        if self.depth_s and size_bytes:
            best = 2 * sqrt(size_bytes * self.fill_rate_s * self.depth_s)
            seconds += 1 / (1 / best + 1 / (self.fill_bytes * self.fill_rate_s))
        return seconds

    def many(self, sizes: Floats) -> Floats:
        """Seconds of many sizes at once, each as of ``at``."""
        seconds = self.latency_s + sizes * self.rate_s
        if self.slower_s:
            first = np.minimum(sizes, self.slower_bytes)
            later_s = np.maximum(0.0, sizes - first) * self.rate_s
            seconds += np.maximum(0.0, first * self.slower_s - later_s)
        if self.depth_s:
            best = 2 * np.sqrt(np.maximum(sizes, 1e-300) * self.fill_rate_s * self.depth_s)
            seconds += np.where(sizes > 0, 1 / (1 / best + 1 / (self.fill_bytes * self.fill_rate_s)), 0.0)
        return seconds


def collectives_s(op: str, sizes: Floats, group: Group, machine: Machine, *, nvls: bool = True) -> Floats:
    """Seconds of a collective of many sizes at once; arguments and errors as of ``collective_s``."""
    if np.any(sizes < 0):
        raise ConfigError(f"collective {op}: expected sizes >= 0, got {float(np.min(sizes))}")
    if group.ranks == 1:
        return np.zeros(sizes.shape)
    if f"{op}.{group.ranks}" in machine.collectives:
        return np.array([collective_s(op, size, group, machine, nvls=nvls) for size in sizes.tolist()])
    return np.minimum.reduce([line.many(sizes) for line in lines(op, group, machine.links, nvls)])


def collective_s(op: str, size_bytes: float, group: Group, machine: Machine, *, nvls: bool = True) -> float:
    """Seconds of a collective with nothing else on the links but the groups beside it.

    Args:
        op: One of ``OPS``.
        size_bytes: Bytes of the whole tensor, as ``lading.ir.work.Collective.size_bytes``; for an all-to-all the bytes
            that one rank sends in all, its own part included; for a send the bytes sent.
        group: Ranks that take part, from ``lading.cost.topology.group_of``.
        machine: Machine whose ``collectives`` were measured among processes, else whose ``links`` count.
        nvls: Whether NVSwitch may add for an all-reduce (NCCL since 2.17; not before Hopper).

    Returns:
        Seconds; 0.0 for one rank.

    Raises:
        ConfigError: unknown ``op``, a negative size, or the machine lacks a link that the group needs.

    Example:
        ``collective_s("all_reduce", 1 << 30, group_of(parse_layout("tp8"), "tp", m), m)`` with ``m =
        load_machine("h100")`` gives 0.0041.
    """
    if size_bytes < 0:
        raise ConfigError(f"collective {op}: expected a size >= 0, got {size_bytes}")
    if group.ranks == 1:
        return 0.0
    curve = machine.collectives.get(f"{op}.{group.ranks}")
    if curve is not None:
        return max(size_bytes, curve.size[0]) / curve.at(size_bytes)
    return min(line.at(size_bytes) for line in lines(op, group, machine.links, nvls))


def algorithm(op: str, size_bytes: float, group: Group, machine: Machine, *, nvls: bool = True) -> str:
    """Name of the algorithm that ``collective_s`` takes, such as "ring LL128"."""
    if group.ranks == 1:
        return "none"
    if f"{op}.{group.ranks}" in machine.collectives:
        return "measured"
    return min(lines(op, group, machine.links, nvls), key=lambda line: line.at(size_bytes)).algorithm


def bus_rate(group: Group, machine: Machine) -> float:
    """Achieved bytes/s in each direction of a rank in a long ring; ``inf`` for one rank."""
    return float("inf") if group.ranks == 1 else _Paths.of(group, machine.links, NCCL).bus_rate


@lru_cache(maxsize=4096)
def lines(op: str, group: Group, links: tuple[Link, ...], nvls: bool = True, tuning: Tuning = NCCL) -> tuple[Line, ...]:
    """Lines (seconds against size) of all algorithms that ``op`` may use; the fastest counts."""
    if op not in OPS:
        raise ConfigError(f"collective: expected one of {', '.join(OPS)}, got {op!r}")
    if not links:
        raise ConfigError("collective: the machine has no links; add [[links]] to its file")
    paths = _Paths.of(group, links, tuning)
    if op == "all_to_all":
        return (_all_to_all(paths),)
    if op == "send":
        return (_send(paths),)
    lines_by_algorithm = [_ring(op, paths, protocol) for protocol in range(3)]
    if op == "all_reduce":
        lines_by_algorithm += [_tree(paths, protocol) for protocol in range(3)]
        if nvls and links[0].reduces and group.domain_ranks >= tuning.nvls_ranks:
            lines_by_algorithm.append(_nvls(paths))
    return tuple(lines_by_algorithm)


@dataclass(frozen=True)
class _Paths:
    """Bandwidth of a group on the links that it uses.

    Attributes:
        link_rate: Achieved bytes/s in each direction of one rank inside its domain.
        net_rate: Achieved bytes/s in each direction of all the group's ranks of a domain to other domains.
    """

    group: Group
    link: Link
    tuning: Tuning
    link_rate: float
    net_rate: float
    link_extra_s: float
    net_extra_s: float

    @staticmethod
    def of(group: Group, links: tuple[Link, ...], tuning: Tuning) -> _Paths:
        near_link = links[0]
        inside, net_rate, extra = group.domain_ranks, 0.0, 0.0
        if group.domains > 1:
            net = next((link for link in links[1:] if link.nics), None)
            if net is None:
                names = ", ".join(link.name for link in links)
                raise ConfigError(
                    f"a group of {group.ranks} ranks spans {group.domains} domains of {near_link.name}, and the "
                    f"machine has no network (links: {names}): add one with lading.catalog.networks.with_network"
                )
            lost = (1 - tuning.congestion) ** max(0.0, log2(group.domains) - 1)
            net_rate = inside * nic_share(net, group.busy) * net.efficiency * lost
            extra = net.latency_s - tuning.network_hop_s
        hop_s = tuning.pcie_hop_s if near_link.kind == "pcie" else tuning.link_hop_s
        rate = near_link.reached(inside)
        return _Paths(group, near_link, tuning, rate, net_rate, near_link.latency_s - hop_s, extra)

    @property
    def bus_rate(self) -> float:
        """Bytes/s of a ring over all ranks."""
        if self.group.domains == 1:
            return self.link_rate
        return self.net_rate if self.group.domain_ranks == 1 else min(self.link_rate, self.net_rate)

    def capped(self, rate: float, protocol: int) -> float:
        """Rate of a protocol; that of LL is limited by how fast a GPU can poll."""
        cap = self.tuning.ll_cap[self.group.domains > 1] * self.link.bandwidth_bytes_per_s
        return min(rate, cap) if protocol == 0 else rate

    def hop(self, protocol: int, *, tree: bool) -> float:
        """Seconds of a hop inside a domain."""
        hops = self.tuning.tree_hop if tree else self.tuning.ring_hop
        hop_s = (self.tuning.pcie_hop if self.link.kind == "pcie" else hops)[protocol]
        return hop_s if protocol == 2 else hop_s + self.link_extra_s

    def depth(self, algorithm: int, protocol: int, rate: float) -> float:
        """Depth of the pipeline (``Line.depth_s``); links slower than a GPU's copy kernels hide the filling."""
        if self.link.kind != "nvswitch":
            return 0.0
        slower = min(1.0, rate / self.link_rate)
        return self.tuning.depth_s[algorithm] * self.tuning.fills[protocol] * slower

    def net_hop(self, protocol: int, *, tree: bool) -> float:
        """Seconds of a hop between domains; a rank that is alone in its domain waits for all of it."""
        full = tree or self.group.domain_ranks == 1
        hops = self.tuning.tree_net_hop if full else self.tuning.ring_net_hop
        return hops[protocol] + self.net_extra_s


def nic_share(network: Link, busy: int) -> float:
    """Bytes/s in each direction of one rank on its node's NICs while ``busy`` ranks of the node send (0: all)."""
    users = busy or network.nic_ranks
    num_nics = ceil(network.nics / network.nic_ranks)
    return network.bandwidth_bytes_per_s * min(num_nics, network.nics / users)


_NAMES = ("LL", "LL128", "Simple")


def _ring(op: str, paths: _Paths, protocol: int) -> Line:
    group, tuning = paths.group, paths.tuning
    passes = 2 if op == "all_reduce" else 1
    steps, outside = passes * (group.ranks - 1), 0
    inner = paths.hop(protocol, tree=False)
    if group.domains > 1:
        outside = min(steps, passes * group.domains)
        inner = max(inner, tuning.net_overhead_s * (3 if protocol == 2 else 1))
    latency = (steps - outside) * inner + outside * paths.net_hop(protocol, tree=False)
    if group.domains > 1 and protocol == 2 and op == "all_reduce":
        latency *= tuning.ring_plateau
    rate = paths.capped(paths.bus_rate * tuning.share[protocol], protocol)
    travels = 1.0 if op == "broadcast" else steps / group.ranks
    return Line(
        f"ring {_NAMES[protocol]}",
        tuning.launch_ring[protocol] + latency,
        travels / rate,
        travels / paths.link_rate,
        paths.depth(0, protocol, paths.bus_rate),
        tuning.fill_bytes,
    )


#: Twice the tensor over the bytes that the busiest domain of two binary trees sends, where that is less than twice.
_TREE_BYTES = {2: 2.0, 3: 4 / 3}
#: What a plain tree makes of it: two nodes of p4d take 1.9 times less than four (NVIDIA/nccl issue 527), while
#: tensor-parallel groups over two nodes of vTrain's cluster take as long as a ring; three nodes reach 96 of 100 GB/s
#: (NVIDIA/nccl-tests issue 119).
_TREE_GAIN = {2: 1.4, 3: 1.15}


def _tree(paths: _Paths, protocol: int) -> Line:
    """Tree: a chain in each domain, and two binary trees between domains, each for half of the bytes."""
    group, tuning = paths.group, paths.tuning
    latency = 2 * (group.domain_ranks - 1) * paths.hop(protocol, tree=True)
    rate = paths.link_rate if group.domain_ranks > 1 else float("inf")
    if group.domains > 1:
        latency += 2 * log2(group.domains) * paths.net_hop(protocol, tree=True)
        rate = min(rate, paths.net_rate * _TREE_GAIN.get(group.domains, 1.0))
    depth = paths.depth(1, protocol, rate)
    rate = paths.capped(rate * tuning.tree_share[protocol], protocol)
    return Line(
        f"tree {_NAMES[protocol]}",
        tuning.launch_tree[protocol] + latency,
        2 / rate,
        2 / paths.link_rate,
        depth,
        tuning.fill_bytes,
    )


def _nvls(paths: _Paths) -> Line:
    """Addition in the switch of each domain, with a tree between domains."""
    group, tuning, link = paths.group, paths.tuning, paths.link
    latency = tuning.nvls_s
    usable_share = (group.domain_ranks - tuning.nvls_loss) / group.domain_ranks
    inner = link.reduces * link.bandwidth_bytes_per_s * usable_share
    rate, name = inner, "NVLS"
    if group.domains > 1:
        latency += 2 * log2(group.domains) * (tuning.nvls_tree_s + paths.net_extra_s)
        rate = min(inner * tuning.nvls_tree_share, paths.net_rate * _TREE_BYTES.get(group.domains, 1.0) / 2)
        name = "NVLS tree"
    wide = group.domain_ranks / 8
    depth, fill_bytes = tuning.depth_s[2] * wide, tuning.fill_bytes * wide
    if group.domains > 1:
        depth, fill_bytes = tuning.depth_s[3], fill_bytes * 2
    return Line(name, latency, 1 / rate, 1 / inner, depth, fill_bytes)


def _all_to_all(paths: _Paths) -> Line:
    """Pairwise sends, those inside a domain beside those that leave it."""
    group, tuning = paths.group, paths.tuning
    num_near, num_far = group.domain_ranks - 1, group.ranks - group.domain_ranks
    latency = tuning.p2p_s + num_near * tuning.peer_s[0] + num_far * tuning.peer_s[1]
    rate = num_near / group.ranks / (paths.link_rate * tuning.all_to_all_share[0])
    if num_far:
        latency += paths.net_hop(2, tree=True)
        share = tuning.all_to_all_share[1 if num_near else 2]
        rate = max(rate, num_far / group.ranks / (paths.net_rate / group.domain_ranks * share))
        return Line("pairwise", latency, rate)
    latency += paths.hop(2, tree=False)
    return Line("pairwise", latency, rate, rate, paths.depth(0, 2, paths.link_rate), tuning.fill_bytes)


def _send(paths: _Paths) -> Line:
    """Send over one channel up to a size; a larger send takes one channel for each piece of that size."""
    group, tuning = paths.group, paths.tuning
    if group.domains > 1:
        rate = paths.net_rate / group.domain_ranks * tuning.send_share[1]
        return Line("send", tuning.p2p_s + paths.net_hop(2, tree=True), 1 / rate)
    rate = paths.link_rate * tuning.send_share[0]
    channel, piece = tuning.send_channel
    slower = max(0.0, 1 / channel - 1 / rate)
    return Line("send", tuning.p2p_s + paths.hop(2, tree=False), 1 / rate, 0.0, 0.0, 0.0, slower, piece)


def dispatch_s(
    size_bytes: float,
    group: Group,
    machine: Machine,
    *,
    dispatcher: str = "alltoall",
    active: int = 1,
    combine: bool = False,
    most_nodes: int = 0,
) -> float:
    """Seconds to bring tokens to their experts, or (``combine``) results back.

    Args:
        size_bytes: Bytes that a rank's all-to-all sends, own part included: each token once for each of its experts.
        group: Ranks of the axis "ep".
        dispatcher: "alltoall" (NCCL), "allgather" or "deepep" ([Note: what is sent]).
        active: Number of experts of a token.
        combine: Whether results go back: "allgather" then is a reduce-scatter; the others take as long both ways.
        most_nodes: Largest number of nodes on which the experts of a token lie; 0: any (DeepSeek-V3: 4).

    Raises:
        ConfigError: an unknown dispatcher, or ``active`` < 1.
    """
    if dispatcher not in DISPATCHERS or active < 1:
        dispatchers = ", ".join(DISPATCHERS)
        raise ConfigError(f"dispatch: expected one of {dispatchers} and active >= 1, got {dispatcher!r} and {active}")
    if group.ranks == 1:
        return 0.0
    if dispatcher == "alltoall":
        return collective_s("all_to_all", size_bytes, group, machine)
    token_bytes = size_bytes / active
    if dispatcher == "allgather":
        op = "reduce_scatter" if combine else "all_gather"
        return collective_s(op, token_bytes * group.ranks, group, machine)
    return _deepep(token_bytes, active, group, machine, most_nodes)


def _deepep(token_bytes: float, active: int, group: Group, machine: Machine, most_nodes: int) -> float:
    if not machine.links:
        raise ConfigError(f"machine {machine.name} has no links: add [[links]] to its file")
    near_link: Link = machine.links[0]
    net = next((link for link in machine.links if link.nics), None)
    seconds = token_bytes * _places(group.ranks, active) / (near_link.reached(group.domain_ranks) * _NEAR)
    if group.domains > 1:
        if net is None:
            raise ConfigError(f"a group of {group.domains} domains needs a network, machine {machine.name} has none")
        domains = _places(group.domains, active)
        domains = min(domains, most_nodes) if most_nodes else domains
        away = domains * (group.domains - 1) / group.domains
        seconds = max(seconds, token_bytes * away / (nic_share(net, group.busy) * net.efficiency * _FAR))
    return _COUNT_S + seconds


def _places(places: int, active: int) -> float:
    """Expected number of different places, of ``places``, at which the experts of a token lie."""
    return places * (1 - (1 - 1 / places) ** active)


def assumed_of_links(layout: Layout, machine: Machine, tuning: Tuning = NCCL) -> tuple[str, ...]:
    """List what is assumed, not measured, of the links that a job of ``layout`` uses and of the rates over them.

    Raises:
        ConfigError: the layout has several ranks and the machine neither links nor measured collectives.

    Example:
        ``assumed_of_links(parse_layout("tp8,dp4"), load_machine("a100"))`` starts with
        ``"network: eight HDR InfiniBand NICs of 200 Gb/s a node, as DGX A100"``.
    """
    world = group_of(layout, "world", machine)
    if world.ranks == 1 or not machine.links:
        return ()
    used = machine.links if world.domains > 1 else machine.links[:1]
    sentences = [sentence for link in used for sentence in assumptions(machine, f"links.{link.name}", link.name)]
    if world.domains > 2:
        sentences.append(f"network: {tuning.congestion:.1%} of its rate lost each time the domains double beyond two")
    experts = group_of(layout, "ep", machine)
    if experts.domains > 1 and experts.domain_ranks > 1:
        share = tuning.all_to_all_share[1]
        sentences.append(f"network: all-to-alls reach {share:.0%} of it (53% to 90% on the two clusters measured)")
    if group_of(layout, "pp", machine).domains > 1:
        share = tuning.send_share[1]
        sentences.append(f"network: sends reach {share:.0%} of a NIC (46% and 84% measured, before and after tuning)")
    return tuple(sentences)


def assumptions(machine: Machine, key: str, name: str) -> Iterator[str]:
    """Yield what the machine's sources for a key, and for the keys below it, name as assumed, each behind ``name``."""
    for source_key, text in machine.sources.items():
        if source_key == key or source_key.startswith(f"{key}."):
            yield from (f"{name}: {assumption.strip()}" for assumption in _ASSUMED.findall(text))
