"""Experts computed on the host: those of a Program that the host's processors can run where their values lie.

Where a router gives an expert few tokens, all that is guarded by it is left out, as for an expert without tokens
(``lading.memory.guards``), and each of its operations is run on the host in its action's place, on the rows of those
tokens alone (``lading.ir.expert_rows``). So the Program that the verifier has proven says all about time and place: an
action that reads a tensor of the device finds it there, and rows are written where an action makes a tensor, into the
zeros that stand there for an expert left out.

[Note: what a hosted expert needs] Its values lie in the host's memory whenever its router has chosen, and nothing else
touches them in that step: that is what makes up for updates needs, too (``lading.memory.guards``, [Note: what can be
replayed]), and every move of them is left out. What its operations read from the device has to be there: a move that
brings it for them alone would be left out with the expert, and is made all the same (``HostedExperts.fetches``). Rows
pass through memory for as many tokens as the expert may be given there: indices and one row of the widest tensor for
each, on the device and, page-locked, on the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from lading.errors import ProgramError
from lading.ir.action import DEVICE
from lading.ir.expert_rows import ExpertRows, find_expert_rows
from lading.ir.experts import Expert
from lading.ir.graph import StepGraph
from lading.ir.guess import guess_of
from lading.ir.program import PAGE_BYTES, Program, whole_pages
from lading.ir.update_ops import PREFIX
from lading.memory.guards import Guards, layer_names, stays_of
from lading.memory.tier_layout import home_tiers

#: Bytes of the number of a row.
INDEX_BYTES = 8
_NUMBER_BYTES = 8


@dataclass(frozen=True)
class HostedExperts:
    """Experts of a Program that the host computes where they get few tokens.

    Attributes:
        rows: Operations of each, on rows.
        limits: Most tokens for which it is computed there.
        by_action: Expert that an action computes.
        fetches: For each guarded move of what is on the device for them, the experts for which it is made all the same.
        refused: Why an expert that was to be is not, in words.
        left_off: Which others the budget of the host's memory has no room for, in words; "" for none.
    """

    rows: Mapping[Expert, ExpertRows]
    limits: Mapping[Expert, int]
    by_action: Mapping[int, Expert]
    refused: Mapping[Expert, str]
    fetches: Mapping[int, frozenset[Expert]] = field(default_factory=dict[int, frozenset[Expert]])
    left_off: str = ""

    def chosen(self, tokens: Mapping[Expert, int]) -> frozenset[Expert]:
        """Experts among those with tokens that are computed on the host."""
        return frozenset(e for e, count in tokens.items() if 0 < count <= self.limits.get(e, 0))

    def part(self, experts: Iterable[Expert]) -> HostedExperts:
        """Copy with these of its experts alone."""
        kept = frozenset(experts)
        return HostedExperts(
            {e: rows for e, rows in self.rows.items() if e in kept},
            {e: limit for e, limit in self.limits.items() if e in kept},
            {action: e for action, e in self.by_action.items() if e in kept},
            self.refused,
            {action: experts & kept for action, experts in self.fetches.items()},
        )

    def fetched(self, experts: Set[Expert]) -> frozenset[int]:
        """Guarded moves that are made for experts which the host computes."""
        return frozenset(action for action, needed in self.fetches.items() if not needed.isdisjoint(experts))


def row_bytes(graph: StepGraph, rows: ExpertRows, storage: int) -> int:
    """Bytes per token of a storage that has rows."""
    return graph.storages[storage].size_bytes // rows.count


def find_hosted(program: Program, guards: Guards, limits: Mapping[Expert, int]) -> HostedExperts:
    """Find which of the experts that may be given up to so many tokens on the host can be computed there, and why not.

    Args:
        guards: Guards of its actions.
        limits: Most tokens by expert; 0 asks for none.
    """
    allowed = {expert: limit for expert, limit in limits.items() if limit > 0}
    if not allowed or guards.routed is None:
        return HostedExperts({}, {}, {}, {})
    rows_by_expert = find_expert_rows(program.graph, guards.routed)
    rows: dict[Expert, ExpertRows] = {}
    refused: dict[Expert, str] = {}
    check = _HostedCheck(program, guards)
    for expert in allowed:
        candidate = rows_by_expert.get(expert, "nothing of it can be left out")
        reason = candidate if isinstance(candidate, str) else check.refusal(expert, candidate)
        if reason or isinstance(candidate, str):
            refused[expert] = reason
        else:
            rows[expert] = candidate
    expert_by_op = {op: expert for expert, expert_rows in rows.items() for op in expert_rows.ops}
    by_action = {a.id: expert_by_op[a.op] for a in program.actions if a.op is not None and a.op in expert_by_op}
    limits = {e: min(allowed[e], rows[e].count) for e in rows}
    return HostedExperts(rows, limits, by_action, refused, _fetches(program, guards, rows, by_action))


def _fetches(
    program: Program, guards: Guards, rows: Mapping[Expert, ExpertRows], by_action: Mapping[int, Expert]
) -> dict[int, frozenset[Expert]]:
    """Experts for which a guarded move to the device, and those back in the same stay, are made all the same."""
    fetches: dict[int, frozenset[Expert]] = {}
    for stay in stays_of(program):
        if not stay.is_read or stay.start not in guards.actions:
            continue
        needed = {
            by_action[action]
            for action in stay.ops
            if action in by_action and stay.storage in _passed(rows[by_action[action]], program.actions[action].op)
        }
        if needed:
            fetches.update(dict.fromkeys((stay.start, *stay.writes), frozenset(needed)))
    return fetches


def _passed(rows: ExpertRows, op: int | None) -> tuple[int, ...]:
    """Storages of which an operation has rows brought from the device, or put there."""
    return () if op is None else (*rows.inputs.get(op, ()), *rows.results.get(op, ()))


class _HostedCheck:
    """Reasons for which an expert of a Program cannot be computed on the host."""

    def __init__(self, program: Program, guards: Guards) -> None:
        self._program, self._graph, self._guards = program, program.graph, guards
        self._homes = home_tiers(program)
        self._guesses = guess_of(program.graph) is not None

    def refusal(self, expert: Expert, rows: ExpertRows) -> str:
        """Say what keeps the host from computing an expert; "" for nothing. See [Note: what a hosted expert needs]."""
        if not self._program.host_tier:
            return "no tier of the plan is memory in which the host's processors compute"
        if self._guesses:
            return "updates run on a guess of the norm of all gradients, expected a plan in which they wait for it"
        replayed = (parameter for parameter in self._guards.replayed if expert in parameter.experts)
        moved = {s for parameter in replayed for op in parameter.updates for s in self._graph.op_writes[op]}
        for storage in sorted(rows.weights):
            if why := self._of_value(storage, moved):
                return f"{self._graph.storages[storage].name} {why}"
        views = (t for op in rows.ops for t in (*self._graph.ops[op].inputs, *self._graph.ops[op].outputs))
        if any(len(self._graph.storages_of(tensor)) > 1 for tensor in views):
            return "its parameters lie in pieces, expected each in one"
        return ""

    def _of_value(self, storage: int, moved: set[int]) -> str:
        home = self._homes.get(storage, "")
        if home == DEVICE and self._graph.storages[storage].size_bytes <= _NUMBER_BYTES:
            return ""  # the number of updates
        if home != self._program.host_tier:
            return f"lies on {home or 'no tier'} between steps, expected {self._program.host_tier}"
        return "" if storage in moved else "is used beside its expert, or its updates cannot be left to a later step"


def room_bytes(graph: StepGraph, hosted: HostedExperts) -> int:
    """Bytes of the device through which rows pass, and as many page-locked ones of the host."""
    return max(
        (whole_pages(hosted.limits[e] * INDEX_BYTES) + whole_pages(_widest(graph, hosted, e)) for e in hosted.rows),
        default=0,
    )


def _widest(graph: StepGraph, hosted: HostedExperts, expert: Expert) -> int:
    rows = hosted.rows[expert]
    passed = (s for each in (rows.inputs, rows.results) for storages in each.values() for s in storages)
    widths = (row_bytes(graph, rows, s) for s in passed if s in rows.widths)
    return hosted.limits[expert] * max(widths, default=0)


def last_uses(program: Program, hosted: HostedExperts) -> dict[int, tuple[int, ...]]:
    """Storages whose values on the host an action of an expert is the last to need, by action."""
    last: dict[tuple[Expert, int], int] = {}
    for action, op, expert in _steps(program, hosted):
        for storage in _on_host(program.graph, op):
            last[expert, storage] = action
    ends: dict[int, list[int]] = {}
    for (_, storage), action in last.items():
        ends.setdefault(action, []).append(storage)
    return {action: tuple(storages) for action, storages in ends.items()}


def host_bytes(program: Program, hosted: HostedExperts) -> int:
    """Most bytes of the host's memory that computing experts there takes beside tiers, of a step that does so for all.

    These are rows, from when they are gathered or made until their last use, and once more while they are put in order;
    gradients of weights, whose memory is kept for the next of their size (``is_kept``); and page-locked bytes through
    which rows pass.
    """
    graph, ends = program.graph, last_uses(program, hosted)
    live: set[tuple[Expert, int]] = set()
    now = most = 0
    kept, most_kept = Counter[int](), Counter[int]()
    for action, op, expert in _steps(program, hosted):
        sizes = {storage: _host_size(graph, hosted, expert, storage) for storage in _on_host(graph, op)}
        begins = [storage for storage in sizes if (expert, storage) not in live]
        live.update((expert, storage) for storage in begins)
        made = {graph.storage_of(tensor) for tensor in graph.ops[op].outputs}
        rows = hosted.rows[expert]
        now += sum(sizes[storage] for storage in begins if not is_kept(graph, rows, storage))
        kept.update(sizes[storage] for storage in begins if is_kept(graph, rows, storage))
        most = max(most, now + sum(sizes[s] for s in made & sizes.keys() if not is_kept(graph, rows, s)))
        most_kept |= kept
        for storage in ends.get(action, ()):
            live.remove((expert, storage))
            if is_kept(graph, rows, storage):
                kept[sizes[storage]] -= 1
            else:
                now -= sizes[storage]
    return most + sum(size * count for size, count in most_kept.items()) + room_bytes(graph, hosted)


def is_kept(graph: StepGraph, rows: ExpertRows, storage: int) -> bool:
    """Whether memory of a storage on the host serves the next one of its size: it is whole, and a page or more."""
    return storage not in rows.widths and graph.storages[storage].size_bytes >= PAGE_BYTES


def host_limit(program: Program, others: Sequence[Program] = ()) -> int:
    """Bytes that a Program's budget of the host's memory leaves to experts computed there, beside its tier.

    Args:
        others: Programs that run on the same values, as evaluation does: the tier is as large as the largest needs.
    """
    tier = program.host_tier
    return program.budgets.get(tier, 0) - max(each.tier_bytes(tier) for each in (program, *others))


def _steps(program: Program, hosted: HostedExperts) -> Iterator[tuple[int, int, Expert]]:
    """Yield the actions that compute experts, each with its operation and its expert, in order."""
    for action, expert in sorted(hosted.by_action.items()):
        op = program.actions[action].op
        if op is not None:
            yield action, op, expert


def _on_host(graph: StepGraph, op: int) -> Iterator[int]:
    """Yield the storages of which an operation has rows, or the whole, on the host: none that outlast the step."""
    yield from dict.fromkeys(s for s in (*graph.op_reads[op], *graph.op_writes[op]) if s not in graph.persistent)


def _host_size(graph: StepGraph, hosted: HostedExperts, expert: Expert, storage: int) -> int:
    rows = hosted.rows[expert]
    whole = graph.storages[storage].size_bytes
    return hosted.limits[expert] * row_bytes(graph, rows, storage) if storage in rows.widths else whole


def check_hosted(program: Program, guards: Guards, hosted: HostedExperts, others: Sequence[Program] = ()) -> None:
    """Prove that rows have room, and that each action that computes an expert on the host is one that is left out.

    Args:
        others: Programs that run on the same values.

    Raises:
        ProgramError: says where.
    """
    needed, left = host_bytes(program, hosted) if hosted.rows else 0, host_limit(program, others)
    if needed > max(0, left):
        raise ProgramError(
            f"expected {needed} bytes of the host's memory for experts that it computes, found {max(0, left)} in the "
            f"budget of {program.host_tier} beside what lies there; raise it by {needed - max(0, left)}, or plan again"
        )
    asked = room_bytes(program.graph, hosted)
    if asked > program.workspace_bytes:
        raise ProgramError(
            f"expected room of {asked} bytes on the device for rows of experts that the host computes, found "
            f"{program.workspace_bytes} beside the arena; plan again"
        )
    for action, expert in hosted.by_action.items():
        guard = guards.actions.get(action)
        if guard is None or guard.now != frozenset((expert,)) or guard.before:
            raise ProgramError(
                f"expected action {action} to be left out where expert {expert} got no token, found that it runs; "
                "plan again",
                action_id=action,
            )
    for expert, rows in hosted.rows.items():
        if not 0 < hosted.limits[expert] <= rows.count:
            raise ProgramError(
                f"expected 1 to {rows.count} tokens for which the host computes expert {expert}, found "
                f"{hosted.limits[expert]}; plan again"
            )


def limits_by_expert(guards: Guards, by_layer: Mapping[str, Mapping[int, int]]) -> dict[Expert, int]:
    """Most tokens by (router, expert), of those by the router's name (``layer_names``) and expert.

    Raises:
        ProgramError: the step has no such router.
    """
    names = layer_names(guards.routers)
    if unknown := by_layer.keys() - set(names.values()):
        raise ProgramError(f"expected routers among {', '.join(names.values())}, found {min(unknown)!r}; plan again")
    return {
        (number, expert): limit
        for number, router in enumerate(guards.routers)
        for expert, limit in by_layer.get(names[router.layer], {}).items()
    }


def updates_of(graph: StepGraph, rows: ExpertRows) -> Iterator[int]:
    """Yield the updates among an expert's operations."""
    yield from (op for op in rows.ops if graph.ops[op].name.startswith(PREFIX))
