"""Hand-made StepGraphs and Programs for tests: a small builder that finds addresses and waits, and small edits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest

from lading.errors import ProgramError
from lading.ir.action import CALLER, Action, ActionKind
from lading.ir.graph import Op, OpKind, Phase, Role, StepGraph, Storage, Tensor
from lading.ir.machine import Device, Machine, Tier
from lading.ir.program import PAGE_BYTES, ActionList, Program, slot_bytes
from lading.memory.verify import verify

DEVICE = "device"
PAGE = PAGE_BYTES
TIERS = ("host", "disk")


class GraphBuilder:
    """A StepGraph with one uint8 tensor per storage, so tensor and storage ids are equal."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.ops: list[Op] = []
        self.losses: list[int] = []

    def storage(self, name: str, size_bytes: int, role: Role) -> int:
        self.storages.append(Storage(name, size_bytes, role))
        return len(self.storages) - 1

    def op(
        self,
        inputs: Iterable[int] = (),
        outputs: Iterable[int] = (),
        mutates: Iterable[int] = (),
        *,
        kind: OpKind = OpKind.ELEMENTWISE,
        random: bool = False,
        name: str = "f",
    ) -> int:
        ins, outs, muts = tuple(inputs), tuple(outputs), tuple(mutates)
        phase = Phase.OPTIMIZER if kind is OpKind.STEP else Phase.FORWARD
        self.ops.append(Op(name, phase, (), (), ins, outs, outs, muts, f"layer{len(self.ops)}", kind, random=random))
        return len(self.ops) - 1

    def graph(self) -> StepGraph:
        tensors = tuple(Tensor(i, "uint8", (s.size_bytes,), (1,)) for i, s in enumerate(self.storages))
        graph = StepGraph(tuple(self.storages), tensors, tuple(self.ops), (), (), (), tuple(self.losses))
        graph.validate()
        return graph


@dataclass
class Chain:
    """The graph of ``depth`` layers, forward, loss, backward and optimizer, and the ids of what is in it."""

    graph: StepGraph
    batch: int
    weights: list[int]
    states: list[int]
    activations: list[int]
    loss: int
    forward: list[int]
    backward: list[int]
    steps: list[int]


def chain(depth: int, size_bytes: int = PAGE_BYTES) -> Chain:
    """a_i = f(a_i-1, w_i); loss = g(a_n); then backward and one optimizer step per weight, interleaved."""
    build = GraphBuilder()
    batch = build.storage("x", size_bytes, Role.INPUT)
    weights = [build.storage(f"w{i}", size_bytes, Role.PARAMETER) for i in range(depth)]
    states = [build.storage(f"m{i}", size_bytes, Role.OPTIMIZER_STATE) for i in range(depth)]
    activations = [build.storage(f"a{i}", size_bytes, Role.ACTIVATION) for i in range(depth)]
    loss = build.storage("loss", 4, Role.ACTIVATION)
    build.losses.append(loss)
    before = [batch, *activations]
    forward = [build.op([before[i], weights[i]], [activations[i]], kind=OpKind.MATMUL) for i in range(depth)]
    gradient = build.storage(f"ga{depth - 1}", size_bytes, Role.GRADIENT)
    forward.append(build.op([before[-1]], [loss, gradient], name="loss"))
    backward: list[int] = []
    steps: list[int] = []
    for i in reversed(range(depth)):
        of_weight = build.storage(f"gw{i}", size_bytes, Role.GRADIENT)
        outputs, inputs = [of_weight], [gradient, before[i], weights[i]]
        if i:
            gradient = build.storage(f"ga{i - 1}", size_bytes, Role.GRADIENT)
            outputs.append(gradient)
        backward.append(build.op(inputs, outputs, kind=OpKind.MATMUL, name="backward"))
        steps.append(build.op([of_weight], mutates=[weights[i], states[i]], kind=OpKind.STEP, name="adamw"))
    return Chain(build.graph(), batch, weights, states, activations, loss, forward, backward, steps)


@dataclass
class _Uses:
    written: int = -1
    reads: dict[str, int] = field(default_factory=dict)

    def all(self) -> list[int]:
        return [self.written, *self.reads.values()]


class ProgramBuilder:
    """Appends actions with the waits that hazards ask for; addresses are the given ones or the first that fit.

    ``reuse`` lets addresses be used again after a FREE; otherwise every residency has its own.
    """

    def __init__(self, graph: StepGraph, homes: dict[int, str], slots: dict[str, list[int]], *, reuse: bool = True):
        self.graph, self.reuse = graph, reuse
        self.actions: list[Action] = []
        self.live: dict[int, int] = {}
        self.uses: dict[int, _Uses] = {}
        self.freed: list[tuple[int, int, int]] = []
        self.freed_storage: dict[int, int] = {}
        self.copies: dict[tuple[str, int], _Uses] = {}
        self.copy_version: dict[tuple[str, int], int] = {}
        self.version = [0] * len(graph.storages)
        self.end = 0
        self.slots = {tier: tuple(self._offsets(ids)) for tier, ids in slots.items()}
        for storage, home in homes.items():
            if home == DEVICE:
                self.live[storage] = self._fit(storage)
                self.end = max(self.end, self._range(storage, self.live[storage])[1])
                self.uses[storage] = _Uses()
            else:
                self.copy_version[home, storage] = 0
        self.resident = tuple(self.live.items())

    def _offsets(self, ids: list[int]) -> Iterable[tuple[int, int]]:
        offset = 0
        for storage in ids:
            yield storage, offset
            offset += -(-slot_bytes(self.graph.storages[storage].size_bytes) // PAGE_BYTES) * PAGE_BYTES

    def _range(self, storage: int, offset: int) -> tuple[int, int]:
        return offset, offset + slot_bytes(self.graph.storages[storage].size_bytes)

    def _fit(self, storage: int) -> int:
        unit = PAGE_BYTES if self.graph.storages[storage].size_bytes >= PAGE_BYTES else 64
        taken = sorted(self._range(s, o) for s, o in self.live.items())
        offset = 0 if self.reuse else -(-self.end // unit) * unit
        for start, end in taken:
            if offset < end and start < self._range(storage, offset)[1]:
                offset = -(-end // unit) * unit
        return offset

    def _add(self, kind: ActionKind, stream: str, waits: Iterable[int], **fields: object) -> int:
        latest: dict[str, int] = {}
        for wait in waits:
            if wait >= 0 and (other := self.actions[wait].stream) != stream:
                latest[other] = max(wait, latest.get(other, -1))
        action = Action(len(self.actions), kind, stream, waits=tuple(sorted(latest.values())), **fields)  # type: ignore[arg-type]
        self.actions.append(action)
        return action.id

    def _place(
        self, storages: Iterable[int], at: dict[int, int] | None = None
    ) -> tuple[tuple[tuple[int, int], ...], list[int]]:
        """Addresses, and the FREEs to wait for; the caller adds the action that places."""
        places, waits = [], []
        for storage in storages:
            offset = (at or {}).get(storage, self._fit(storage))
            start, end = self._range(storage, offset)
            waits += [freed for a, b, freed in self.freed if a < end and start < b]
            waits.append(self.freed_storage.get(storage, -1))
            self.live[storage] = offset
            self.end = max(self.end, end)
            places.append((storage, offset))
        return tuple(places), waits

    def _read(self, storage: int, stream: str) -> int:
        """What to wait for; the read is recorded under the next id."""
        uses = self.uses[storage]
        uses.reads[stream] = len(self.actions)
        return uses.written

    def run(self, op_index: int, at: dict[int, int] | None = None) -> int:
        """COMPUTE, or STEP as the op says."""
        op = self.graph.ops[op_index]
        kind = ActionKind.STEP if op.kind is OpKind.STEP else ActionKind.COMPUTE
        waits = [w for s in op.mutates for w in self.uses[s].all()]
        waits += [self._read(s, "compute") for s in self.graph.reads(op)]
        places, more = self._place(op.outputs, at)
        action = self._add(kind, "compute", waits + more, op=op_index, places=places)
        for storage in self.graph.writes(op):
            self.version[storage] += 1
            self.uses[storage] = _Uses(action)
        return action

    def recompute(self, op_index: int, at: dict[int, int] | None = None) -> int:
        op = self.graph.ops[op_index]
        waits = [self._read(s, "compute") for s in self.graph.reads(op)]
        created = [s for s in op.outputs if s not in self.live]
        places, more = self._place(created, at)
        action = self._add(ActionKind.RECOMPUTE, "compute", waits + more, op=op_index, places=places)
        self.uses.update({s: _Uses(action) for s in created})
        return action

    def batch(self, storage: int) -> int:
        """MOVE from the caller."""
        places, waits = self._place([storage])
        action = self._add(
            ActionKind.MOVE, "compute", waits, storage=storage, source=CALLER, target=DEVICE, places=places
        )
        self.uses[storage] = _Uses(action)
        return action

    def result(self, storage: int) -> int:
        """MOVE to the caller."""
        waits = [self._read(storage, "compute")]
        return self._add(ActionKind.MOVE, "compute", waits, storage=storage, source=DEVICE, target=CALLER)

    def store(self, storage: int, tier: str) -> int:
        stream = f"{tier}_write"
        copy = self.copies.setdefault((tier, storage), _Uses())
        waits = [self._read(storage, stream), *copy.all()]
        action = self._add(ActionKind.MOVE, stream, waits, storage=storage, source=DEVICE, target=tier)
        self.copies[tier, storage] = _Uses(action)
        self.copy_version[tier, storage] = self.version[storage]
        return action

    def load(self, storage: int, tier: str, offset: int | None = None) -> int:
        stream = f"{tier}_read"
        copy = self.copies.setdefault((tier, storage), _Uses())
        places, waits = self._place([storage], None if offset is None else {storage: offset})
        copy.reads[stream] = len(self.actions)
        action = self._add(
            ActionKind.MOVE, stream, [copy.written, *waits], storage=storage, source=tier, target=DEVICE, places=places
        )
        self.uses[storage] = _Uses(action)
        return action

    def free(self, storage: int, stream: str = "compute") -> int:
        action = self._add(ActionKind.FREE, stream, self.uses[storage].all(), storage=storage, source=DEVICE)
        self.freed.append((*self._range(storage, self.live.pop(storage)), action))
        self.freed_storage[storage] = action
        return action

    def evict(self, storage: int, tier: str) -> int:
        """Store and free; returns the id of the store."""
        action = self.store(storage, tier)
        self.free(storage, f"{tier}_write")
        return action

    def free_all(self) -> None:
        """FREE what is on the device."""
        for storage in list(self.live):
            self.free(storage)

    def program(self, *, overhead_bytes: int = 0, workspace_bytes: int = 0) -> Program:
        """The program so far, with budgets that fit exactly."""
        arena = max(self.end, 0)
        program = Program(
            (ActionList().extend(self.actions),), self.graph, arena_bytes=arena, workspace_bytes=workspace_bytes,
            resident=self.resident, slots=self.slots, overhead_bytes=overhead_bytes, tiers=machine().tiers,
        )  # fmt: skip
        program.budgets[DEVICE] = program.peak_bytes
        program.budgets.update({tier: program.tier_bytes(tier) for tier in self.slots})
        return program


def keep_all(chain: Chain, *, reuse: bool = False) -> ProgramBuilder:
    """Everything stays on the device until its last use; weights and states live there."""
    graph = chain.graph
    homes = dict.fromkeys([*chain.weights, *chain.states], DEVICE)
    build = ProgramBuilder(graph, homes, {}, reuse=reuse)
    last = {s: i for i, op in enumerate(graph.ops) for s in (*graph.reads(op), *graph.writes(op))}
    build.batch(chain.batch)
    for index in range(len(graph.ops)):
        build.run(index)
        for storage in [s for s in build.live if last[s] == index and s not in homes]:
            if storage == chain.loss:
                build.result(storage)
            build.free(storage)
    return build


def offloaded(chain: Chain, tier: str = "disk", *, recompute: tuple[int, ...] = ()) -> ProgramBuilder:
    """States live in ``tier``; activations go there between forward and backward, or are recomputed (by layer)."""
    graph, depth = chain.graph, len(chain.weights)
    homes = {**dict.fromkeys(chain.weights, DEVICE), **dict.fromkeys(chain.states, tier)}
    build = ProgramBuilder(graph, homes, {tier: [*chain.states, *chain.activations]})
    build.batch(chain.batch)
    for i, op in enumerate(chain.forward[:-1]):
        build.run(op)
        if 0 < i < depth:
            before = chain.activations[i - 1]
            if i - 1 in recompute:
                build.free(before)
            else:
                build.evict(before, tier)
    build.run(chain.forward[-1])
    build.result(chain.loss)
    build.free(chain.loss)
    build.free(chain.activations[-1])
    for i, backward, step in zip(reversed(range(depth)), chain.backward, chain.steps, strict=True):
        _bring_activation(build, chain, i - 1, tier, recompute)
        build.load(chain.states[i], tier)
        build.run(backward)
        build.run(step)
        build.evict(chain.states[i], tier)
        weights = {*chain.weights, chain.batch}
        keep = {chain.graph.ops[backward].outputs[-1]} if i else set()
        for storage in [s for s in build.live if s not in weights and s not in keep]:
            build.free(storage)
    build.free(chain.batch)
    return build


def _bring_activation(build: ProgramBuilder, chain: Chain, i: int, tier: str, recompute: tuple[int, ...]) -> None:
    if i < 0 or chain.activations[i] in build.live:
        return
    if i not in recompute:
        build.load(chain.activations[i], tier)
        return
    _bring_activation(build, chain, i - 1, tier, recompute)
    build.recompute(chain.forward[i])


def machine(**changes: float) -> Machine:
    """Round numbers: disk reads 100, writes 200, mixed 50 and 80 bytes/s, 1 s of latency unless changed."""
    device = Device(
        name="toy", kind="cpu", memory_bytes=1 << 30, memory_bandwidth_bytes_per_s=1e6, op_overhead_s=0.5,
        peak_flops_per_s={"float32": 1e9, "uint8": 1e9}, optimizer_elements_per_s=1e6,
    )  # fmt: skip
    numbers: dict[str, float] = {
        "read_bytes_per_s": 100.0, "write_bytes_per_s": 200.0, "mixed_read_bytes_per_s": 50.0,
        "mixed_write_bytes_per_s": 80.0, "latency_s": 1.0, **changes,
    }  # fmt: skip
    tiers = (
        Tier(name="host", kind="memory", host_computes=True, capacity_bytes=1 << 40, **numbers),  # type: ignore[arg-type]
        Tier(name="disk", kind="file", persistent=True, capacity_bytes=1 << 40, **numbers),  # type: ignore[arg-type]
    )
    return Machine(name="toy", date="2026-11", source="made up", device=device, tiers=tiers)


def assert_rejects(program: Program, action_id: int | None, why: str) -> None:
    """Rejected for ``why``, and the action is named by its id and its line."""
    with pytest.raises(ProgramError, match=why) as caught:
        verify(program)
    assert caught.value.action_id == action_id
    if action_id is not None:
        assert f"action {action_id} [{program.actions[action_id]}]" in str(caught.value)


def find(program: Program, test: Callable[[Action], bool], nth: int = 0) -> Action:
    return [a for a in program.actions if test(a)][nth]


# Mutations: one small change each, which may or may not break a Program.


def with_actions(program: Program, actions: Iterable[Action]) -> Program:
    """The same Program with other actions."""
    return replace(program, ranks=(ActionList().extend(actions),))


def edit(program: Program, index: int, **changes: object) -> Program:
    """The same Program with fields of one action changed."""
    actions = list(program.actions)
    actions[index] = replace(actions[index], **changes)  # type: ignore[arg-type]
    return with_actions(program, actions)


def reorder(program: Program, order: Iterable[int]) -> Program:
    """The Program of the given old ids in the given order (some left out or twice), numbered anew.

    A wait on an action that was left out is dropped; on one that comes twice, it is on the first.
    """
    order = list(order)
    new_id: dict[int, int] = {}
    for position, old in enumerate(order):
        new_id.setdefault(old, position)
    return with_actions(
        program,
        (
            replace(a, id=position, waits=tuple(new_id[w] for w in a.waits if w in new_id))
            for position, a in enumerate(program.actions[old] for old in order)
        ),
    )


def drop_wait(program: Program, index: int, wait: int) -> Program:
    """Without one wait."""
    return edit(program, index, waits=tuple(w for w in program.actions[index].waits if w != wait))


def drop_action(program: Program, index: int) -> Program:
    """Without one action."""
    return reorder(program, (i for i in range(len(program.actions)) if i != index))


def repeat_action(program: Program, index: int) -> Program:
    """With one action twice in a row."""
    ids = range(len(program.actions))
    return reorder(program, (i for i in ids for _ in range(1 + (i == index))))


def swap(program: Program, index: int) -> Program:
    """With an action and the next one in the other order."""
    ids = list(range(len(program.actions)))
    ids[index], ids[index + 1] = ids[index + 1], ids[index]
    return reorder(program, ids)
