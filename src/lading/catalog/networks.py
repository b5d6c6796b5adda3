"""Networks and links in words: what joins nodes, and what joins the devices of a node.

[Note: networks] A network may be said in words: "8x HDR InfiniBand 200 Gb/s per node", "1600 Gb/s RoCE node-to-node",
"4x 50 GB/s". Its numbers are NICs of a node, bits or bytes a second of each, and the kind of fabric; what the words
leave out is assumed, and said. Words in brackets are remarks: they may add a number, and are passed over where they do
not.

[Note: near links] Links inside a node are said in words, too: "NVLink3 600 GB/s", "PCIe 4.0 x16". Data sheets add up
both directions of NVLink (600 GB/s of an A100 are 300 each way) and give PCIe for one; a rate that is what the machine
of the catalog has each way is taken for that.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from lading.catalog.rates import NamedRate, both_ways, find_rates
from lading.errors import ConfigError
from lading.ir.machine import Link, Machine

#: Rate in Gb/s of a port of four lanes, by generation, the longer names first (InfiniBand roadmap; data sheets of
#: NICs; Omni-Path CN100 and CN5000).
_GENERATIONS = (
    *((r"hdr-?100", 100), (r"ndr-?200", 200), (r"hdr(?:-?200)?", 200), (r"ndr(?:-?400)?", 400)),
    *((r"xdr(?:-?800)?", 800), (r"edr(?:-?100)?", 100), (r"fdr", 56), (r"qdr", 32)),
    *((r"(?:connectx|cx)[- ]?5", 100), (r"(?:connectx|cx)[- ]?6", 200), (r"(?:connectx|cx)[- ]?7", 400)),
    *((r"(?:connectx|cx)[- ]?8", 800), (r"slingshot[- ]?11", 200), (r"slingshot[- ]?10", 100)),
)
_EFA = r"\befa(?:v\d)?\b|elastic fabric"
_KINDS = (
    ("omnipath", r"omni-?path|\bopa\b"),
    ("ethernet", _EFA + r"|roce|ethernet|gbe\b|tcpx|slingshot|\beth\b|\brnic\b|\d\s?g(?:ig)?e\b"),
    ("infiniband", r"infiniband|\bib\b|\b[fehnxq]dr|rdma|cx[- ]?[5678]|connectx"),
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
#: A word that says that a rate was measured stands up to three words from it; no number and no denial is between.
_MEASURED = r"\b(?:measured|achieved|reached)\b"
_FEW_WORDS = r"(?:(?!(?:not|never|no|than)\b|\S*n't\b)[^\s\d;,()]+\s+){0,3}?"
_MEASURED_BEHIND = re.compile(rf"\s*(?P<bracket>\(\s*)?{_FEW_WORDS}{_MEASURED}(?P<rest>[^;,()]*)")
_MEASURED_AHEAD = re.compile(rf"(?<!not )(?<!never )(?<!no ){_MEASURED}:?\s+{_FEW_WORDS}~?$")
_NONE = re.compile(
    r"^\s*(n/?a\b.*|none\b.*|not (?:stated|told|given|known)\b.*|unknown.*|unspecified.*|single[- ]node.*|"
    r"(?:a )?single (?:gpu|device|host|machine).*|-)?\s*$",
    re.IGNORECASE,
)
#: Clauses of these speak of what is inside a node.
_NEAR = re.compile(r"nvlink|nvswitch|\bnvl\d*\b|pci-?e\b|pcie|xgmi|infinity fabric", re.IGNORECASE)
#: Gb/s of the fastest NIC; a faster rate can only be a node's.
_LARGEST_NIC = 800
#: What is counted of a node's network: "4 Omni-Path links", "8 NICs"; so are ports by their generation, "8 HDR".
_COUNTED = r"nics?|hcas?|ports?|rails?|links?|adapters?"
_COUNTS = {"single": 1, "one": 1, "dual": 2, "two": 2, "double": 2, "four": 4, "quad": 4, "eight": 8}
#: Words that say nothing of rate, number or kind that is not read by other rules.
_EMPTY = re.compile(
    r"\b(?:a|an|and|the|of|on|in|via|with|at|to|by|over|from|between|each|every|for|per|using|node|nodes|gpu|gpus|"
    r"device|devices|rank|ranks|server|servers|host|hosts|machine|instance|nic|nics|hca|hcas|port|ports|rail|rails|"
    r"adapter|adapters|card|cards|link|links|network|fabric|interconnect|inter|inter-node|internode|node-to-node|"
    r"cluster|dgx|superpod|total|aggregate|bandwidth|speed|rate|full|bisection|fat-tree|rail-optimized|optimized|non-blocking|"
    r"nonblocking|nvidia|mellanox|quantum|quantum-2|aws|efa|efav2|efav3|elastic|v1|v2|v3|p4d|p4de|p5|p5e|p5en|azure|gcp|"
    r"rdma|rnic|gdr|gpudirect|gpudirect-rdma|gpudirect-tcpx|gpudirect-tcpxo|tcpx|tcpxo|tcp|ip|ipoib|ethernet|eth|infiniband|ib|roce|rocev2|"
    r"roce-v2|omni-path|omnipath|opa|slingshot|cornelis|intel|bluefield|bluefield-3|spectrum|spectrum-x|connectx|cx|"
    r"around|about|approximately|roughly|measured|achieved|reached|bidirectional|unidirectional|duplex|direction|directions|both|way|ways|x|is|are|not|stated|restated)\b"
)


@dataclass(frozen=True)
class NamedNetwork:
    """Network that words name.

    Attributes:
        link: Link that it is; None where the words name none.
        said: Words and assumptions that it was read by, for a report.
        unread: Words, and numbers of more than one meaning, that were not understood.
    """

    link: Link | None
    said: str
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Nics:
    """NICs of a node, the Gb/s of each, and what was taken for granted to say so."""

    count: int
    gigabits: float
    assumed: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


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
    written, bare = _with_unit((words or "").replace("\u00d7", "x"))
    if _NONE.match(written):
        return NamedNetwork(None, "network not stated: the machine's own")
    between = _between_nodes(written)
    text = between.lower()
    kind = next((name for name, pattern in _KINDS if re.search(pattern, text)), "")
    parsed = _nics(between, node_ranks)
    unread_words = (*_unread(between), *_other_rates(between))
    if parsed is None:
        return NamedNetwork(None, f"network {words!r} has no rate: the machine's own", unread_words)
    efficiency, latency, reached = _REACHED["efa" if re.search(_EFA, text) else kind or "infiniband"]
    if _is_measured(between):
        efficiency, reached = 1.0, "a rate that was measured is what is reached"
    link = Link(
        name="network",
        kind=kind or "infiniband",
        ranks=0,
        bandwidth_bytes_per_s=parsed.gigabits * 1e9 / 8,
        efficiency=efficiency,
        latency_s=latency,
        nics=parsed.count,
        nic_ranks=node_ranks,
    )
    guess = "" if kind else "; assumption: InfiniBand"
    assumptions = "".join(f"; assumption: {text}" for text in (*bare, *parsed.assumed, *parsed.doubts))
    reading = (
        f"{parsed.count} x {parsed.gigabits:g} Gb/s for {node_ranks} devices of a node{guess}{assumptions}; {reached}"
    )
    return NamedNetwork(link, reading, (*parsed.doubts, *unread_words))


def _is_measured(text: str) -> bool:
    """Whether words right at the first rate say that it was measured; a number behind them is what was measured."""
    rate = next(iter(find_rates(text, bits=True)), None)
    if rate is None:
        return False
    lowered = text.lower()
    if behind := _MEASURED_BEHIND.match(lowered, rate.end):
        number = re.match(r"\W*(?:(?:at|as|around|about)\b)?\W*\d", behind["rest"])
        return not number and not (behind["bracket"] and find_rates(behind["rest"], bits=True))
    return _MEASURED_AHEAD.search(lowered[: rate.start]) is not None


#: NICs and their rate without a unit: "8x400".
_BARE = re.compile(r"(?<![\w.])(\d{1,2}) ?[x*] ?(25|40|50|56|100|200|400|800)(?![\w.])(?! ?[gGtT])")


def _with_unit(words: str) -> tuple[str, tuple[str, ...]]:
    """Words whose counted rates have a unit, and what was taken for granted to give them one."""
    bare = _BARE.search(words)
    if bare is None or find_rates(words, bits=True):
        return words, ()
    return _BARE.sub(r"\1x \2 Gb/s", words), (f"{bare[0]!r} is NICs and Gb/s",)


def _between_nodes(words: str) -> str:
    """Select the clauses that speak of what joins nodes, as far as they are apart from those of a node's inside."""
    clauses = re.split(r"[;,]|\s\+\s|\band\b", words)
    inner_clauses = [clause for clause in clauses if _NEAR.search(clause)]
    if not inner_clauses or len(inner_clauses) == len(clauses):
        return words
    return ", ".join(clause.strip() for clause in clauses if clause not in inner_clauses)


def _unread(text: str) -> tuple[str, ...]:
    """Words outside of brackets that no rule reads."""
    plain = re.sub(r"\([^)]*\)", " ", text)
    for rate in reversed(find_rates(plain, bits=True)):
        plain = f"{plain[: rate.start]} {plain[rate.end :]}"
    plain = plain.lower()
    for pattern, _ in _GENERATIONS:
        plain = re.sub(rf"\b{pattern}\b", " ", plain)
    plain = re.sub(rf"\b(?:{'|'.join(_COUNTS)})\b", " ", plain)
    plain = re.sub(r"(?<![\w.])\d{1,3}\s*x?\b|\bx\s*\d{1,2}\b|/gpu|/node|node-to-node|fat-tree", " ", plain)
    plain = _EMPTY.sub(" ", plain)
    unread_words = [word for word in re.findall(r"[\w.'-]+", plain) if re.search(r"\w", word)]
    return (f"network: {' '.join(unread_words)!r} in {text.strip()!r}",) if unread_words else ()


#: Of two rates that say the same of ports, NICs and nodes, one is this many times the other at most; how exactly.
_TIMES, _EXACT = 16, 0.05


def _other_rates(text: str) -> tuple[str, ...]:
    """Rates outside of brackets that are no whole multiple of the first, nor it of them: which counts is not said."""
    first, *others = find_rates(re.sub(r"\([^)]*\)", " ", text), bits=True) or (None,)
    if first is None:
        return ()
    times = [max(rate.bytes_per_s / first.bytes_per_s, first.bytes_per_s / rate.bytes_per_s) for rate in others]
    odd = [
        rate.words
        for rate, share in zip(others, times, strict=True)
        if round(share) > _TIMES or abs(share - round(share)) > _EXACT * share
    ]
    return (f"network: {odd[0]!r} beside {first.words!r}",) if odd else ()


def _nics(text: str, node_ranks: int) -> _Nics | None:
    """Parse the NICs of a node and the Gb/s of each; None where the words name none."""
    rates = find_rates(text, bits=True)
    assumed = tuple(rate.assumed for rate in rates if rate.assumed)
    lowered = text.lower()
    generation = next((value for name, value in _GENERATIONS if re.search(rf"\b{name}\b", lowered)), 0)
    speed, halved = _speed(rates, text)
    if halved:
        assumed = (*assumed, halved)
    if not speed and not generation:
        return None
    if share := re.search(r"(?:per|every|each|by) (two|four|2|4) (?:gpus|devices|ranks)", lowered):
        ranks = _COUNTS.get(share[1]) or int(share[1])
        return _Nics(max(1, node_ranks // ranks), speed or generation, assumed)
    if re.search(r"per[- ]gpu|per[- ]device|/\s?gpu|per[- ]rank|each gpu", lowered):
        return _Nics(node_ranks, speed or generation, assumed)
    count = _count(text)
    if count:
        return _counted(count, rates, lowered, speed, generation, assumed)
    if re.search(r"per[- ](?:nic|port|hca|link|rail)", lowered):
        return _Nics(node_ranks, speed or generation, (*assumed, "a NIC for each device: how many is not said"))
    if not speed:
        return _Nics(node_ranks, generation, (*assumed, "a NIC for each device: how many is not said"))
    if generation and abs(speed - generation) < 1e-9 and "node" not in lowered:
        return _Nics(node_ranks, speed, (*assumed, "a NIC for each device: how many is not said"))
    nics = next((n for n in (node_ranks, 4, 2, 1) if speed / n >= 100), 1)
    is_of_node = re.search(r"node|total|aggregate|server|instance|host", lowered)
    doubt = (
        ()
        if is_of_node or nics == 1 or speed > _LARGEST_NIC
        else (f"{text.strip()!r} is the rate of a whole node, not of each NIC",)
    )
    return _Nics(nics, speed / nics, assumed, doubt)


def _speed(rates: tuple[NamedRate, ...], text: str) -> tuple[float, str]:
    """Gb/s each way of the first rate, and what was done to get it."""
    if not rates:
        return 0.0, ""
    speed = rates[0].bytes_per_s * 8 / 1e9
    if both_ways(text):
        return speed / 2, f"half of {rates[0].words} each way, as both are added up"
    return speed, ""


def _count(text: str) -> int:
    """Number of NICs of a node that words give; 0 where they give none.

    Numbers of nodes and devices, of rates and of generations ("ConnectX 7") are not NICs.
    """
    plain = text
    for rate in reversed(find_rates(text, bits=True)):
        plain = f"{plain[: rate.start]} rate {plain[rate.end :]}"
    plain = re.sub(r"\b(?:connectx|cx|slingshot)[- ]?\d+\b", " ", plain.lower())
    plain = re.sub(r"\d+\s*(?:x\s*\d+\s*)?(?:nodes?|servers?|machines?|hosts?|gpus?|devices?)\b", " ", plain)
    plain = re.sub(r"x\s*\d+\s*(?:gpus?|devices?)\b", " ", plain)
    match = re.search(
        r"(?<![\d.-])(\d{1,2})\s*[x*](?![a-z])|\bx\s*(\d{1,2})\b|"
        rf"(?<![\w.-])(\d{{1,2}})\s+(?:\S+\s+){{0,3}}(?:{_COUNTED})\b|(?<![\w.-])(\d{{1,2}})\s+[efhnxq]dr(?:-?\d+)?\b",
        plain,
    )
    if match:
        return int(next(filter(None, match.groups())))
    word = re.search(rf"\b({'|'.join(_COUNTS)})\b", plain)
    return _COUNTS[word[1]] if word else 0


def _counted(
    count: int, rates: tuple[NamedRate, ...], lowered: str, speed: float, generation: int, assumed: tuple[str, ...]
) -> _Nics:
    """NICs that are counted: a rate is each one's, unless the words or a second rate say that it is all of them's."""
    if len(rates) > 1:
        first, second = (rate.bytes_per_s for rate in rates[:2])
        if abs(first - count * second) < 0.01 * first:
            return _Nics(count, speed / count, assumed)
        if abs(second - count * first) < 0.01 * second:
            return _Nics(count, speed, assumed)
    if speed and (re.search(r"node\s*\(\s*\d+\s*x", lowered) or re.search(r"total|aggregate", lowered)):
        return _Nics(count, speed / count, assumed)
    return _Nics(count, speed or generation, assumed)


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
    nodes = node_ranks or node_size(machine)
    link, description = network, "given as a link"
    if not isinstance(link, Link):
        parsed = parse_network(link, nodes)
        link, description = parsed.link, f"{network!r}: {parsed.said}"
    if link is None:
        return machine
    if not link.nics:
        raise ConfigError(f"with_network: expected a link with nics and nic_ranks, got {link.name} without")
    inner_links = tuple(old_link for old_link in machine.links if not old_link.nics)
    sources = {key: text for key, text in machine.sources.items() if not key.startswith("links.network")}
    return dataclasses.replace(
        machine, links=(*inner_links, link), sources={**sources, f"links.{link.name}": description}
    )


#: Bytes a second each way of sixteen lanes of PCIe, by generation (PCI-SIG).
_PCIE = {3: 1.575e10, 4: 3.15e10, 5: 6.3e10, 6: 1.21e11}
#: What a ring of devices behind a host's PCIe reaches: as of the catalog's cards on PCIe.
_PCIE_REACHED = 0.4, (0.66, 0.66, 0.66)


@dataclass(frozen=True)
class NamedNode:
    """Links inside a node that words name.

    Attributes:
        links: Links of the machine, the nearest as the words say.
        said: Words and assumptions that they were read by; "" where nothing was said or changed.
        unread: Words that were not understood.
    """

    links: tuple[Link, ...]
    said: str = ""
    unread: tuple[str, ...] = ()


def with_node(machine: Machine, words: str, node_ranks: int = 0) -> Machine:
    """Give a machine's nodes other links inside, or another number of devices ([Note: near links]).

    Args:
        words: Words such as "NVLink3 600 GB/s" or "PCIe 4.0 x16"; "" for the machine's own.
        node_ranks: Devices of a node; 0 for as many as the machine's own have.
    """
    named = parse_node(machine, words, node_ranks)
    if named.links == machine.links:
        return machine
    changed = {old_link.name for old_link in machine.links} - {
        old_link.name for old_link in named.links if old_link in machine.links
    }
    sources = {key: text for key, text in machine.sources.items() if key.removeprefix("links.") not in changed}
    new = {f"links.{new_link.name}": named.said for new_link in named.links if new_link not in machine.links}
    larger = max(1.0, node_ranks / node_size(machine))  # a host with more slots has as much more memory and processors
    devices = max(1, round(machine.node_devices * larger))
    return dataclasses.replace(machine, links=named.links, node_devices=devices, sources={**sources, **new})


def parse_node(machine: Machine, words: str, node_ranks: int = 0) -> NamedNode:
    """Read what words say of the links inside a machine's nodes, and lay it over what the catalog has of them."""
    links, readings, unread = machine.links, list[str](), list[str]()
    text = words.lower()
    if not _NONE.match(words) and links and not links[0].nics:
        near_link, reading, unread_words = _near_link(links[0], machine, text, words)
        links, readings, unread = (near_link, *links[1:]), [reading] if reading else [], list(unread_words)
    catalog_size = node_size(machine)
    if node_ranks and node_ranks != catalog_size and links:
        links = tuple(_resized(link, catalog_size, node_ranks) for link in links)
        readings.append(f"nodes of {node_ranks} devices, where the catalog's have {catalog_size}")
    return NamedNode(links, "; ".join(readings), tuple(unread))


def _resized(link: Link, own: int, ranks: int) -> Link:
    """Link of nodes of another size: what ends at the node ends there, NICs stay in proportion."""
    if link.nics:
        return dataclasses.replace(link, nics=max(1, round(link.nics * ranks / link.nic_ranks)), nic_ranks=ranks)
    if link.ranks != own or ranks >= own:
        return dataclasses.replace(link, ranks=ranks) if link.ranks == own else link
    measured = 2 <= ranks < len(link.fewer) + 2
    share = link.fewer[ranks - 2] if measured else link.reached(ranks) / link.bandwidth_bytes_per_s
    return dataclasses.replace(link, ranks=ranks, efficiency=share, fewer=link.fewer[: max(0, ranks - 2)])


def _near_link(own: Link, machine: Machine, text: str, words: str) -> tuple[Link, str, tuple[str, ...]]:
    """Nearest link as words name it, how it was read, and what was not."""
    on_bus = own.kind == "pcie"
    text = re.sub(r"\b(?:no|without|w/o) (?:nvlink|nvswitch|xgmi)", " ", text)
    if re.search(r"pci-?e\b|pcie|pci express", text) and not re.search(r"nvlink|nvswitch|xgmi", text):
        return _pcie(own, machine, text, words)
    if not re.search(r"nvlink|nvswitch|\bnvl\d*\b|xgmi|infinity fabric", text):
        return own, "", (f"links of a node: {words!r}",)
    if on_bus:
        return own, "", (f"links of a node: {words!r}, but the catalog's {machine.name} has {own.name} only",)
    domain = re.search(r"\bnvl(\d+)\b|(\d+)-gpu", text)
    ranks = int(next(filter(None, domain.groups()))) if domain else own.ranks
    rates = find_rates(words, bits=False)
    if not rates:
        return dataclasses.replace(own, ranks=ranks), "", ()
    counted = re.search(r"(?<![\w.])(\d{1,2}) ?(?:x|links? (?:of|at|x)) ?$", words[: rates[0].start].lower())
    rate, own_rate = rates[0].bytes_per_s * (int(counted[1]) if counted else 1), own.bandwidth_bytes_per_s
    added = both_ways(words)
    if added is None:
        added = abs(rate / own_rate - 1) > 0.02
    one_way = rate / 2 if added else rate
    if abs(one_way / own_rate - 1) <= 0.02:
        one_way = own_rate
    direction = "both ways added up" if added else "each way"
    near_link = dataclasses.replace(own, ranks=ranks, bandwidth_bytes_per_s=one_way)
    return (
        near_link,
        f"{words!r}: {counted[0] if counted else ''}{rates[0].words} read as {direction}, "
        f"{one_way / 1e9:g} GB/s each way",
        (),
    )


def _pcie(own: Link, machine: Machine, text: str, words: str) -> tuple[Link, str, tuple[str, ...]]:
    """PCIe that joins the devices of a node, by generation and lanes, or by its rate."""
    generation = re.search(r"(?:gen ?|pci-?e ?(?:gen)? ?|v)([3456])(?:\.0)?\b", text)
    lanes = re.search(r"\bx ?(4|8|16)\b", text)
    rates = find_rates(words, bits=False)
    if generation:
        one_way = _PCIE[int(generation[1])] * (int(lanes[1]) if lanes else 16) / 16
        reading = f"{one_way / 1e9:g} GB/s each way"
    elif rates:
        added = both_ways(words) or False
        one_way = rates[0].bytes_per_s / (2 if added else 1)
        reading = f"{rates[0].words} {'both ways' if added else 'each way'}"
    else:
        host = machine.tier(machine.host_tier)
        copies = host.read_bytes_per_s if host else _PCIE[4] * 0.8
        one_way = min(_PCIE.values(), key=lambda rate: abs(rate * 0.8 - copies))
        reading = f"assumption: {one_way / 1e9:g} GB/s each way, as the catalog's bus of this machine"
    if own.kind == "pcie":
        is_same = abs(one_way / own.bandwidth_bytes_per_s - 1) < 0.02
        return (
            (own if is_same else dataclasses.replace(own, bandwidth_bytes_per_s=one_way)),
            f"{words!r}: {reading}",
            (),
        )
    reached, fewer = _PCIE_REACHED
    link = Link(
        name="pcie",
        kind="pcie",
        ranks=node_size(machine),
        bandwidth_bytes_per_s=one_way,
        efficiency=reached,
        fewer=fewer,
        latency_s=1e-6,
    )
    return link, f"{words!r}: {reading}, in the place of {own.name}", ()


def node_size(machine: Machine) -> int:
    """Devices of one of a machine's nodes."""
    nodes = next((link.nic_ranks for link in machine.links if link.nics), 0)
    return nodes or next((link.ranks for link in machine.links if link.ranks), 8)


def checked_network(words: str, node_ranks: int = 8) -> str:
    """Return a user's words for a network, all of which must be understood.

    Raises:
        ConfigError: no rate in them, or a word that no rule reads.
    """
    parsed = parse_network(words, node_ranks)
    unread_words = tuple(text for text in parsed.unread if text.startswith("network"))
    if parsed.link is None or unread_words:
        fault = f"{unread_words[0].removeprefix('network: ')} is not understood" if unread_words else "it has no rate"
        raise ConfigError(
            f"network: expected NICs, rate and fabric such as '4x 200 Gb/s HDR InfiniBand' or '1600 Gb/s RoCE', got "
            f"{words!r}: {fault}; leave it out for the machine's own network"
        )
    return words
