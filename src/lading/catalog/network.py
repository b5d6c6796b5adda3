"""Networks in words: "8x HDR InfiniBand 200 Gb/s per node", "1600 Gb/s RoCE node-to-node", "4x 100 Gb/s Omni-Path".

A network's numbers are NICs of a node, bits a second of each, and the kind of fabric; what the words leave out is
assumed, and said.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from lading.errors import ConfigError
from lading.ir.machine import Link, Machine

#: Rate of a port of four lanes in Gb/s: InfiniBand roadmap, Omni-Path CN100 and CN5000.
_GENERATIONS = {"fdr": 56, "edr": 100, "hdr": 200, "ndr": 400, "xdr": 800, "connectx-6": 200, "connectx-7": 400}
_KINDS = (
    ("omnipath", r"omni-?path|\bopa\b"),
    ("ethernet", r"roce|ethernet|\befa\b|gbe\b|tcpx|slingshot|\beth\b|\brnic\b"),
    ("infiniband", r"infiniband|\bib\b|\b[fehnx]dr|rdma|cx-?[678]|connectx"),
)
#: Of the line rate, what a long ring over all NICs of the nodes reaches, and a hop's latency.
_REACHED = {
    "infiniband": (0.95, 2.7e-6, "as InfiniBand: 96 of 100 GB/s (nccl-tests issue 119), NCCL's own hop"),
    "ethernet": (0.95, 5e-6, "assumption: as InfiniBand, with a hop of 5 us"),
    "efa": (
        0.95,
        1.7e-5,
        "381.8 of 400 GB/s on four nodes of B200; 17 us a hop, as two p6-b200 take 54 us (dstack #3961)",
    ),
    "omnipath": (
        0.34,
        5e-6,
        "135 of 400 Gb/s a node on Jean Zay in 2022, and a year later (stas00/ml-engineering network/README.md "
        "@744d01e1); assumption: a hop of 5 us, as the host's processors move its packets",
    ),
}
_NONE = re.compile(r"^\s*(n/?a\b.*|none|not stated|unknown|single node.*|-)?\s*$", re.IGNORECASE)


@dataclass(frozen=True)
class NamedNetwork:
    """Network that words name.

    Attributes:
        link: Link that it is; None where the words name none.
        said: Words and assumptions that it was read by, for a report.
    """

    link: Link | None
    said: str


def parse_network(words: str | None, node_ranks: int = 8) -> NamedNetwork:
    """Parse the words of a network, for nodes of ``node_ranks`` devices.

    A rate counts for each NIC where NICs are counted ("8x 400 Gb/s") or the words say "per GPU"; else for the whole
    node ("800 Gb/s"; "1600 Gb/s RoCE node-to-node"), which then has a NIC for each 400 Gb/s, as many as divide it.
    Words without a rate ("RoCE RDMA (4 nodes)") name no network: the machine keeps its own.

    Raises:
        ConfigError: ``node_ranks`` < 1.
    """
    if node_ranks < 1:
        raise ConfigError(f"network: expected node_ranks >= 1, got {node_ranks}")
    text = (words or "").lower().replace("\u00d7", "x")
    if _NONE.match(text):
        return NamedNetwork(None, "network not stated: the machine's own")
    kind = next((name for name, pattern in _KINDS if re.search(pattern, text)), "")
    parsed = _nics(text, node_ranks)
    if parsed is None:
        return NamedNetwork(None, f"network {words!r} has no rate: the machine's own")
    nics, gigabits = parsed
    efficiency, latency, reached = _REACHED["efa" if "efa" in text else kind or "infiniband"]
    link = Link(
        name="network",
        kind=kind or "infiniband",
        ranks=0,
        bandwidth_bytes_per_s=gigabits * 1e9 / 8,
        efficiency=efficiency,
        latency_s=latency,
        nics=nics,
        nic_ranks=node_ranks,
    )
    guess = "" if kind else "; assumption: InfiniBand"
    return NamedNetwork(link, f"{nics} x {gigabits:g} Gb/s for {node_ranks} devices of a node{guess}; {reached}")


def with_network(machine: Machine, network: str | Link | None, node_ranks: int = 0) -> Machine:
    """Put a machine on another network.

    Args:
        network: Words for ``parse_network``, or a link with ``nics``; None leaves it as it is.
        node_ranks: Devices of a node; 0 means as the machine's own network, else its nearest link, has.

    Raises:
        ConfigError: a link that is no network.

    Example:
        ``with_network(load_machine("a100"), "4x Omni-Path 100 Gb/s per node")``
    """
    nodes = node_ranks or next((link.nic_ranks for link in machine.links if link.nics), 0)
    nodes = nodes or next((link.ranks for link in machine.links if link.ranks), 8)
    link, said = network, "given as a link"
    if not isinstance(link, Link):
        parsed = parse_network(link, nodes)
        link, said = parsed.link, f"{network!r}: {parsed.said}"
    if link is None:
        return machine
    if not link.nics:
        raise ConfigError(f"with_network: expected a link with nics and nic_ranks, got {link.name} without")
    near = tuple(own for own in machine.links if not own.nics)
    sources = {key: text for key, text in machine.sources.items() if not key.startswith("links.network")}
    return dataclasses.replace(machine, links=(*near, link), sources={**sources, f"links.{link.name}": said})


def _nics(text: str, node_ranks: int) -> tuple[int, float] | None:
    """Parse the NICs of a node and the Gb/s of each; None where the words name none."""
    rate = re.search(r"(\d+(?:\.\d+)?)\s*(t|g)(?:b/s|bps|bit/s|b\b|bit\b|be\b)", text)
    speed = float(rate[1]) * (1000 if rate[2] == "t" else 1) if rate else 0.0
    generation = next((value for name, value in _GENERATIONS.items() if re.search(rf"\b{name}", text)), 0)
    count = re.search(
        r"(?<![\d.-])(\d{1,2})\s*x(?![a-z])|\bx\s*(\d{1,2})\b|(?<![\d.-])(\d{1,2})\s+(?:\S+\s+){0,3}nics?\b", text
    )
    nics = int(next(filter(None, count.groups()))) if count else 0
    if not speed and not generation:
        return None
    if re.search(r"per gpu|per device|/gpu|per rank", text):
        return node_ranks, speed or generation
    if nics and re.search(r"node\s*\(\s*\d+\s*x|total", text) and speed:
        return nics, speed / nics
    if nics:
        return nics, speed or generation
    if not speed:
        return node_ranks, generation
    if generation and speed == generation and "node" not in text:
        return node_ranks, speed
    nics = next((n for n in (node_ranks, 4, 2, 1) if speed / n >= 100), 1)
    return nics, speed / nics
