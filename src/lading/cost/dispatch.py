"""Seconds of bringing tokens to the ranks of their experts, and of bringing results back.

[Note: what is sent]
NCCL's all-to-all sends a copy of a token for each of its experts. DeepEP sends one for each rank that has some of them,
and one over the network for each node, which hands it on over NVLink; both ways run at once, so the slower counts. An
all-gather brings every token to every rank. Experts are taken to be spread evenly: of ``n`` places a token with ``k``
experts meets ``n (1 - (1 - 1/n)^k)``.
"""

from __future__ import annotations

from lading.cost.collective import collective_s, nic_share
from lading.cost.topology import Group
from lading.errors import ConfigError
from lading.ir.machine import Link, Machine

DISPATCHERS = ("alltoall", "allgather", "deepep")
#: Of what a ring reaches inside a domain, and of a NIC's reach: deepseek-ai/DeepEP README.md @ebfe47e on H800, 153 GB/s
#: over NVLink of 200 for 8 ranks; 46 GB/s of 50 for 64 ranks on 8 nodes, an eighth of which stays on the node.
_NEAR, _FAR = 0.94, 0.85
#: Assumption: kernels that count tokens, and the host's wait for the counts.
_COUNT_S = 30e-6
#: Streaming multiprocessors of DeepEP's kernels: its default, and the best of its own tuning (issue 493).
DEEPEP_SMS = 24


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
        size_bytes: Of a rank's tokens, once for each expert of each: what its all-to-all sends, own part included.
        group: Ranks of the axis "ep".
        dispatcher: "alltoall" (NCCL), "allgather" or "deepep" ([Note: what is sent]).
        active: Experts of a token.
        combine: For "allgather": a reduce-scatter instead; the others take as long both ways.
        most_nodes: Nodes that the experts of a token lie on at most; 0: any (DeepSeek-V3: 4).

    Raises:
        ConfigError: an unknown dispatcher, or ``active`` < 1.
    """
    if dispatcher not in DISPATCHERS or active < 1:
        known = ", ".join(DISPATCHERS)
        raise ConfigError(f"dispatch: expected one of {known} and active >= 1, got {dispatcher!r} and {active}")
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
    near: Link = machine.links[0]
    net = next((link for link in machine.links if link.nics), None)
    seconds = token_bytes * _places(group.ranks, active) / (near.reached(group.domain_ranks) * _NEAR)
    if group.domains > 1:
        if net is None:
            raise ConfigError(f"a group of {group.domains} domains needs a network, machine {machine.name} has none")
        domains = _places(group.domains, active)
        domains = min(domains, most_nodes) if most_nodes else domains
        away = domains * (group.domains - 1) / group.domains
        seconds = max(seconds, token_bytes * away / (nic_share(net, group.busy) * net.efficiency * _FAR))
    return _COUNT_S + seconds


def _places(places: int, active: int) -> float:
    """Different places, of so many, that the experts of a token lie at."""
    return places * (1 - (1 - 1 / places) ** active)
