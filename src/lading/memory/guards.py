"""Guards: which actions of a Program are left out where experts got no token, and what is made up for later.

Operations follow ``lading.ir.experts``. A move follows the operations of the stay on the device that it begins or ends:
a read is left out where every operation of its stay is, a write where what it would write was not made or not changed.
A move is guarded only where the routers have surely chosen before it starts, in every timing; else it runs as ever.

[Note: what can be replayed] An update may be left out, and made up for later, if nothing else can tell the difference:
its parameter and its states are touched by the expert's own operations alone, every read of them is guarded, and they
are at home, in a file or in memory, when a router chooses. Then a router that chooses the expert finds them where they
lie between steps, brings them up to date there, and what follows reads them as if they had always been.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from itertools import count
from math import prod

from lading.ir.action import CALLER, DEVICE, Action, ActionKind
from lading.ir.experts import Expert, Routed, Router, find_experts, find_routers, owned_values
from lading.ir.graph import DTYPE_BYTES, Op, StepGraph, Tensor
from lading.ir.machine import FILE, MEMORY
from lading.ir.program import COMPUTE_STREAM, PAGE_BYTES, ActionList, Program
from lading.ir.update_ops import PREFIX, matrix_rule_of, rule_of
from lading.memory.tier_layout import home_tiers
from lading.memory.verify import START, Order
from lading.optim.rule import ParameterRule

#: Elements that are brought up to date at once, all steps of them: as many as stay in a cache.
REPLAY_ELEMENTS = 1 << 16
_NONE: frozenset[Expert] = frozenset()


@dataclass(frozen=True, slots=True)
class Guard:
    """Experts of which one must have got a token for an action to run.

    Attributes:
        now: Choices of this step's routers.
        before: Choices of the last step's, for what was deferred from it.
        zeros: Tensors that are set to zero where the action is left out.
    """

    now: frozenset[Expert]
    before: frozenset[Expert]
    zeros: tuple[int, ...] = ()

    def is_idle(self, now: Set[Expert], before: Set[Expert]) -> bool:
        """Whether the action is left out where these experts got tokens."""
        return self.now.isdisjoint(now) and self.before.isdisjoint(before)


@dataclass(frozen=True, slots=True)
class ReplayedParameter:
    """Parameter whose updates are made up for. See [Note: what can be replayed].

    Attributes:
        storage: Its storage.
        updates: Operations that move it, one for each part.
        experts: Choices without which its gradient is zero.
        size_bytes: Bytes of the parameter and its states.
    """

    storage: int
    updates: tuple[int, ...]
    experts: frozenset[Expert]
    size_bytes: int


@dataclass(frozen=True)
class Guards:
    """Guards of a Program's actions.

    Attributes:
        routers: Routers of the step.
        chosen_at: Action that runs each router first.
        actions: Guard by action.
        replayed: Parameters of experts whose updates are made up for.
        routed: Operations that they follow; None where nothing is left out.
    """

    routers: tuple[Router, ...]
    chosen_at: tuple[int, ...]
    actions: Mapping[int, Guard]
    replayed: tuple[ReplayedParameter, ...]
    routed: Routed | None = None

    def left_out(self, now: Set[Expert], before: Set[Expert] | None = None) -> frozenset[int]:
        """Actions left out of a step in which these experts get tokens; those of the last step are alike if not said.

        Args:
            now, before: Pairs (number of a router, expert).
        """
        last = now if before is None else before
        return frozenset(action for action, guard in self.actions.items() if guard.is_idle(now, last))

    def all_experts(self) -> frozenset[Expert]:
        """Every expert of every router."""
        return frozenset((number, e) for number, router in enumerate(self.routers) for e in range(router.experts))


@dataclass(slots=True)
class Stay:
    """Stay of a storage on the device.

    Attributes:
        start: Action that began it; START for what is there between steps.
        is_read: Whether that was a move from a lower tier.
        ops: Actions of operations on it.
        writes: Actions that move it to a lower tier.
        ends: Action that freed it; -1 without one.
    """

    storage: int
    start: int
    is_read: bool = False
    ops: list[int] = field(default_factory=lambda: [])
    writes: list[int] = field(default_factory=lambda: [])
    ends: int = -1


def stays_of(program: Program) -> list[Stay]:
    """List the stays of all storages on the device, in order of their beginning."""
    graph = program.graph
    now = {storage: Stay(storage, START) for storage, _ in program.resident}
    stays = [*now.values()]

    def begin(stay: Stay) -> None:
        now[stay.storage] = stay
        stays.append(stay)

    for action in program.actions:
        if action.op is not None:
            for storage, _ in action.places:
                begin(Stay(storage, action.id))
            for storage in dict.fromkeys((*graph.op_reads[action.op], *graph.op_writes[action.op])):
                if action.op not in graph.on_host and storage in now:
                    now[storage].ops.append(action.id)
        elif action.kind is ActionKind.MOVE and action.storage is not None:
            if action.target == DEVICE:
                begin(Stay(action.storage, action.id, is_read=action.source != CALLER))
            elif action.source == DEVICE and action.target != CALLER:
                now[action.storage].writes.append(action.id)
        elif action.kind is ActionKind.FREE and action.source == DEVICE and action.storage is not None:
            now.pop(action.storage).ends = action.id
    return stays


def find_guards(program: Program) -> Guards:
    """Find what of a Program is left out where experts got no token; nothing where it has no experts."""
    always: frozenset[int] = frozenset()
    walk = _GuardWalk(program)
    while True:
        routed = find_experts(program.graph, always)
        guards = walk.guards(routed)
        replayed = {op for parameter in guards.replayed for op in parameter.updates}
        if routed.updates <= replayed:
            return guards
        always |= routed.updates - replayed  # and what makes its gradient then writes zeros


def find_routers_alone(program: Program) -> Guards:
    """Guards of a Program that runs whole: none, only the actions whose choice is to be counted."""
    walk = _GuardWalk(program)
    routers = find_routers(program.graph)
    return Guards(routers, tuple(walk.first[router.op] for router in routers), {}, ())


class _GuardWalk:
    """A Program's order and stays, which do not depend on what is guarded."""

    def __init__(self, program: Program) -> None:
        self.program, self.graph = program, program.graph
        self.order = Order(program.streams)
        for action in program.actions:
            self.order.append(action)
        self.stays = stays_of(program)
        self.homes = home_tiers(program)
        self.late = frozenset(program.graph.deferred)
        self.first: dict[int, int] = {}
        for action in program.actions:
            if action.op is not None:
                self.first.setdefault(action.op, action.id)

    def guards(self, routed: Routed) -> Guards:
        """Guards of the actions as far as their operations are needless."""
        chosen_at = tuple(self.first[router.op] for router in routed.routers)
        actions: dict[int, Guard] = {}
        for action in self.program.actions:
            needs = None if action.op is None else routed.needs.get(action.op)
            if needs is not None and action.op is not None and action.stream == COMPUTE_STREAM:
                now, before = (_NONE, needs) if action.op in self.late else (needs, _NONE)
                actions[action.id] = Guard(now, before, routed.zeros.get(action.op, ()))
        for stay in self.stays:
            actions.update(self._moves(stay, routed, actions, chosen_at))
        return Guards(routed.routers, chosen_at, actions, self._replayed(routed, actions, chosen_at), routed)

    def _moves(
        self, stay: Stay, routed: Routed, actions: Mapping[int, Guard], chosen_at: tuple[int, ...]
    ) -> dict[int, Guard]:
        """Guards of the moves that begin a stay and write in it."""
        if stay.is_read:
            if stay.ends < 0:  # the next step finds it there
                return {}
            guard = _union(actions.get(op) for op in stay.ops)
            if guard is None or not all(self.order.before(chosen_at[router], stay.start) for router, _ in guard.now):
                return {}
            return dict.fromkeys((stay.start, *stay.writes), guard)
        maker = actions.get(stay.start)
        if maker is None or any(self.graph.storage_of(t) == stay.storage for t in maker.zeros):
            return {}
        return dict.fromkeys(stay.writes, dataclasses.replace(maker, zeros=()))

    def _replayed(
        self, routed: Routed, actions: Mapping[int, Guard], chosen_at: tuple[int, ...]
    ) -> tuple[ReplayedParameter, ...]:
        by_parameter: dict[int, list[int]] = {}
        for index, op in enumerate(self.graph.ops):
            if op.name.startswith(PREFIX) and op.mutates:
                parameter = self.graph.first_piece(self.graph.storage_of(op.inputs[0]))
                by_parameter.setdefault(parameter, []).append(index)
        stays: dict[int, list[Stay]] = {}
        for stay in self.stays:
            stays.setdefault(stay.storage, []).append(stay)
        owners = owned_values(self.graph, routed)
        rows: list[ReplayedParameter] = []
        for storage, updates in by_parameter.items():
            experts, ops = routed.needs.get(updates[0]), [self.graph.ops[op] for op in updates]
            alike = (
                all(routed.needs.get(op) == experts for op in updates) and len({o in self.late for o in updates}) == 1
            )
            if experts is None or not alike or not all(can_replay(self.graph, op) for op in ops):
                continue
            values = {s for op in updates for s in self.graph.op_writes[op]}
            if all(self._is_at_home(s, stays.get(s, []), experts, owners, routed, actions, chosen_at) for s in values):
                size = sum(self.graph.storages[s].size_bytes for s in values)
                rows.append(ReplayedParameter(storage, tuple(updates), experts, size))
        return tuple(rows)

    def _is_at_home(
        self,
        storage: int,
        stays: Iterable[Stay],
        experts: frozenset[Expert],
        owners: Mapping[int, frozenset[Expert]],
        routed: Routed,
        actions: Mapping[int, Guard],
        chosen_at: tuple[int, ...],
    ) -> bool:
        """Whether a value lies where it does between steps whenever a router may choose its expert."""
        layers = frozenset((routed.routers[router].layer, expert) for router, expert in experts)
        if owners.get(storage) != layers:
            return False
        tier = next((t for t in self.program.tiers if t.name == self.homes.get(storage)), None)
        is_small = self.graph.storages[storage].size_bytes < PAGE_BYTES
        if self.homes.get(storage) != DEVICE and (is_small or tier is None or tier.kind not in (FILE, MEMORY)):
            return False
        for stay in stays:
            if stay.is_read and stay.start not in actions:
                return False
            moved = [*stay.writes, *([stay.ends] if stay.ends >= 0 else [])] if stay.start == START else []
            if not all(self.order.before(chosen_at[router], move) for router, _ in experts for move in moved):
                return False
        return True


def _union(guards: Iterable[Guard | None]) -> Guard | None:
    """Guard of what all of several guarded actions need; None where one of them always runs, or there are none."""
    now, before, number = set[Expert](), set[Expert](), 0
    for guard in guards:
        if guard is None:
            return None
        now |= guard.now
        before |= guard.before
        number += 1
    return Guard(frozenset(now), frozenset(before)) if number else None


def can_replay(graph: StepGraph, op: Op) -> bool:
    """Whether the update of a part may be run again piece by piece: it treats elements alone, states included."""
    rule = rule_of(op)
    if matrix_rule_of(op) is not None or not isinstance(rule, ParameterRule) or rule.whole or op.on_host:
        return False
    shape = graph.tensors[op.inputs[0]].shape
    if any(spec.shape != shape or spec.block != 1 for spec in rule.state_specs(shape).values()):
        return False
    tensors = (graph.tensors[t] for t in op.inputs if graph.tensors[t].shape)
    return all(t.shape == shape and t.is_row_major and not _start_bytes(t) % PAGE_BYTES for t in tensors)


def _start_bytes(tensor: Tensor) -> int:
    return tensor.offset * DTYPE_BYTES[tensor.dtype]


def layer_names(routers: Iterable[Router]) -> dict[int, str]:
    """Name of each router of a micro-batch: its module, with a number where that has several."""
    names: dict[int, str] = {}
    for router in routers:
        if router.layer not in names:
            taken = sum(router.module == name.partition("#")[0] for name in names.values())
            names[router.layer] = f"{router.module}#{taken}" if taken else router.module
    return names


def replay_bytes(program: Program, guards: Guards) -> int:
    """Most bytes that making up for an update takes beside the arena."""
    graph, most = program.graph, 0
    for op in (graph.ops[op] for parameter in guards.replayed for op in parameter.updates):
        tensors = [graph.tensors[t] for t in op.inputs if graph.tensors[t].shape]
        most = max(most, sum(DTYPE_BYTES[t.dtype] * min(REPLAY_ELEMENTS, prod(t.shape)) + PAGE_BYTES for t in tensors))
    return most


def with_late_reads(program: Program, is_late: Callable[[Router, int], bool]) -> Program:
    """Program in which values of some experts are read behind the router that may choose them, so that it can say no.

    A read stays where it is if what it must come before does not allow it; one that is there already waits for it.

    Args:
        is_late: Whether an expert of a router is one of them.
    """
    walk = _GuardWalk(program)
    routed = find_experts(program.graph)
    chosen_at = [walk.first[router.op] for router in routed.routers]
    behind: dict[int, list[int]] = {}
    joins: dict[int, int] = {}  # first operation on what is read -> the read
    waited = {wait: action.id for action in reversed(program.actions) for wait in action.waits}
    for stay in walk.stays:
        if not stay.is_read or not stay.ops:
            continue
        needs = [routed.needs.get(program.ranks[0].op[action], _NONE) for action in stay.ops]
        if not all(needs):
            continue
        pairs = zip(stay.ops, needs, strict=True)
        now = {e for action, need in pairs if program.ranks[0].op[action] not in walk.late for e in need}
        if not now or not all(is_late(routed.routers[router], expert) for router, expert in now):
            continue
        router = max(chosen_at[number] for number, _ in now)
        if stay.start < router < min(stay.ops) and waited.get(stay.start, router) >= router:
            behind.setdefault(router, []).append(stay.start)
            joins[min(stay.ops)] = stay.start
        elif router < stay.start and not walk.order.before(router, stay.start):
            joins[stay.start] = router
    return _moved_behind(program, behind, joins) if behind or joins else program


def _moved_behind(program: Program, behind: Mapping[int, list[int]], joins: Mapping[int, int]) -> Program:
    """Copy of a Program with actions moved behind later ones, which they then wait for.

    Args:
        behind: Actions that move, by the one that they are to follow.
        joins: One more action that an action is to wait for.
    """
    moved = {read: router for router, reads in behind.items() for read in reads}
    order = [n for a in program.actions if a.id not in moved for n in (a.id, *behind.get(a.id, ()))]
    number = dict(zip(order, count(), strict=False))
    actions: list[Action] = []
    for old in order:
        action = program.actions[old]
        waits = {*action.waits, *([moved[old]] if old in moved else []), *([joins[old]] if old in joins else [])}
        actions.append(dataclasses.replace(action, id=number[old], waits=tuple(sorted(number[wait] for wait in waits))))
    return dataclasses.replace(program, ranks=(ActionList(streams=[*program.ranks[0].streams]).extend(actions),))
