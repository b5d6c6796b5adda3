"""Random valid Programs of random graphs, and random changes of one thing in them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from lading.ir.action import ActionKind
from lading.ir.graph import PERSISTENT, OpKind, Role, StepGraph
from lading.ir.program import Program
from tests.programs import (
    DEVICE,
    TIERS,
    GraphBuilder,
    ProgramBuilder,
    drop_action,
    drop_wait,
    edit,
    reorder,
    repeat_action,
    swap,
)

_SIZES = (4, 64, 100, 4096, 5000, 8192)


def random_graph(rng: Random) -> StepGraph:
    """A few ops with several outputs, in-place writes, random ops and optimizer steps."""
    build = GraphBuilder()
    persistent = [
        build.storage(f"p{i}", rng.choice(_SIZES), rng.choice(sorted(PERSISTENT))) for i in range(rng.randint(1, 4))
    ]
    inputs = [build.storage(f"x{i}", rng.choice(_SIZES), Role.INPUT) for i in range(rng.randint(1, 2))]
    known = [*persistent, *inputs]
    for i in range(rng.randint(2, 9)):
        reads = rng.sample(known, rng.randint(1, min(3, len(known))))
        if rng.random() < 0.25:
            kind = rng.choice((OpKind.STEP, OpKind.ELEMENTWISE))
            build.op(reads[1:], mutates=reads[:1], kind=kind)
            continue
        outputs = [build.storage(f"a{i}.{j}", rng.choice(_SIZES), Role.ACTIVATION) for j in range(rng.randint(1, 2))]
        build.op(reads, outputs, random=rng.random() < 0.15)
        known += outputs
    loss = build.storage("loss", 4, Role.ACTIVATION)
    build.op([known[-1]], [loss])
    build.losses.append(loss)
    build.op(known[-1:], mutates=persistent[:1], kind=OpKind.STEP)
    return build.graph()


class RandomLowering:
    """A valid Program of a graph with random homes, evictions, drops, recomputes, addresses and streams."""

    def __init__(self, graph: StepGraph, rng: Random) -> None:
        self.graph, self.rng = graph, rng
        persistent = [i for i, s in enumerate(graph.storages) if s.role in PERSISTENT]
        self.homes = {s: rng.choice((DEVICE, *TIERS)) for s in persistent}
        slots: dict[str, list[int]] = {tier: [] for tier in TIERS}
        for storage in range(len(graph.storages)):
            home = self.homes.get(storage, DEVICE)
            tier = rng.choice((*TIERS, "")) if home == DEVICE else home
            if tier:
                slots[tier].append(storage)
        for ids in slots.values():
            rng.shuffle(ids)
        self.tier_of = {s: tier for tier, ids in slots.items() for s in ids}
        self.build = ProgramBuilder(graph, self.homes, slots, reuse=rng.random() < 0.8)
        self.creator = {s: i for i, op in enumerate(graph.ops) for s in op.outputs}
        self.ran_reads: dict[int, dict[int, int]] = {}
        self.last = {s: i for i, op in enumerate(graph.ops) for s in (*graph.reads(op), *graph.writes(op))}
        self.started: set[int] = set(self.homes) | {i for i, s in enumerate(graph.storages) if s.role is Role.INPUT}
        self.position = 0

    def program(self) -> Program:
        for index, op in enumerate(self.graph.ops):
            self.position = index
            self._keep_recomputable(set(op.mutates))
            for storage in self.graph.reads(op):
                self._bring(storage)
            self.ran_reads[index] = {s: self.build.version[s] for s in self.graph.reads(op)}
            self.build.run(index)
            self.started.update(op.outputs)
            for storage in self.rng.sample(sorted(self.build.live), len(self.build.live)):
                self._maybe_drop(storage)
        self.position = len(self.graph.ops)
        self._finish()
        return self.build.program(overhead_bytes=self.rng.choice((0, 1000)), workspace_bytes=self.rng.choice((0, 77)))

    def _needed(self, storage: int) -> bool:
        loss = {self.graph.storage_of(t) for t in self.graph.losses}
        return storage in self.homes or storage in loss or self.last.get(storage, -1) > self.position

    def _copied(self, storage: int) -> bool:
        tier = self.tier_of.get(storage)
        return tier is not None and self.build.copy_version.get((tier, storage)) == self.build.version[storage]

    def _obtainable(self, storage: int, without: frozenset[int]) -> bool:
        """Whether ``storage``'s current value can be had when what is in ``without`` is not on the device."""
        if storage in self.build.live and storage not in without:
            return True
        if self._copied(storage):
            return True
        if self.graph.storages[storage].role is Role.INPUT:
            return self.build.version[storage] == 0
        op_index = self.creator.get(storage)
        if op_index not in self.ran_reads or self.build.version[storage] != 1:
            return False
        op, reads = self.graph.ops[op_index], self.ran_reads[op_index]
        return not op.random and not op.mutates and all(
            self.build.version[s] == version and self._obtainable(s, without) for s, version in reads.items()
        )  # fmt: skip

    def _keep_recomputable(self, mutated: set[int]) -> None:
        """Bring back what an in-place write would put out of reach."""
        if mutated:
            for storage in sorted(self.started - self.build.live.keys()):
                if self._needed(storage) and not self._copied(storage):
                    self._bring(storage)

    def _bring(self, storage: int) -> None:
        if storage in self.build.live:
            return
        if self._copied(storage):
            self.build.load(storage, self.tier_of[storage])
        elif self.graph.storages[storage].role is Role.INPUT:
            self.build.batch(storage)
        else:
            op_index = self.creator[storage]
            for needed in self.graph.reads(self.graph.ops[op_index]):
                self._bring(needed)
            self.build.recompute(op_index)

    def _maybe_drop(self, storage: int) -> None:
        if self._needed(storage) and self.rng.random() < 0.5:
            return
        tier = self.tier_of.get(storage)
        if self._needed(storage) and tier is not None and not self._copied(storage) and self.rng.random() < 0.7:
            self.build.store(storage, tier)
        gone = frozenset({storage})
        waiting = [s for s in self.started if self._needed(s) and (s == storage or s not in self.build.live)]
        if all(self._obtainable(s, gone) for s in waiting):
            self.build.free(storage, self._stream())

    def _stream(self) -> str:
        return self.rng.choice(("compute", "compute", "host_read", "host_write", "disk_read", "disk_write"))

    def _finish(self) -> None:
        """Losses out, then every persistent storage home; what lies elsewhere than it must is stored and loaded."""
        for storage in sorted({self.graph.storage_of(t) for t in self.graph.losses}):
            self._bring(storage)
            self.build.result(storage)
        resident = dict(self.build.resident)
        for storage in sorted(self.build.live):
            if storage not in self.homes:
                self.build.free(storage, self._stream())
        for storage in sorted(self.build.live):
            if resident.get(storage) != self.build.live[storage]:
                if not self._copied(storage):
                    self.build.store(storage, self.tier_of[storage])
                self.build.free(storage, self._stream())
        for storage, offset in resident.items():
            if storage not in self.build.live:
                self.build.load(storage, self.tier_of[storage], offset)


def random_program(rng: Random) -> Program:
    """A valid Program, mostly with several streams."""
    return RandomLowering(random_graph(rng), rng).program()


def shift_slot(program: Program, rng: Random) -> Program:
    """With a slot of a lower tier a page or a line away from where it was, in a budget with room for that."""
    tier = rng.choice([tier for tier, rows in program.slots.items() if rows])
    rows = list(program.slots[tier])
    which, by = rng.randrange(len(rows)), rng.choice((-4096, -64, 64, 4096))
    rows[which] = rows[which][0], rows[which][1] + by
    budgets = {**program.budgets, tier: program.budgets[tier] + 4096}
    return replace(program, slots={**program.slots, tier: tuple(rows)}, budgets=budgets)


def random_mutation(program: Program, rng: Random) -> tuple[str, Program]:
    """Its name, and a program with one random change of the kind the name says."""
    actions = program.actions
    waiting = [a for a in actions if a.waits]
    placing = [a for a in actions if a.places]
    frees = [a.id for a in actions if a.kind is ActionKind.FREE]
    slots = ["shift slot"] if any(program.slots.values()) else []
    kinds = [
        "drop action",
        "swap",
        *slots,
        *(["drop wait"] * 4 if waiting else []),
        "shift address",
        "other free stream",
    ]
    kind = rng.choice([*kinds, *(["drop free", "repeat free", "late free"] if frees else [])])
    index = rng.choice(frees) if frees else 0
    if kind == "shift slot":
        return kind, shift_slot(program, rng)
    if kind == "drop wait":
        action = rng.choice(waiting)
        return kind, drop_wait(program, action.id, rng.choice(action.waits))
    if kind == "shift address":
        action = rng.choice(placing)
        which, offsets = rng.randrange(len(action.places)), [o for a in placing for _, o in a.places]
        offset = rng.choice([rng.choice(offsets), action.places[which][1] + rng.choice((-4096, -64, 64, 4096))])
        places = [(s, offset if i == which else o) for i, (s, o) in enumerate(action.places)]
        return kind, edit(program, action.id, places=tuple(places))
    if kind == "drop action":
        return kind, drop_action(program, rng.randrange(len(actions)))
    if kind == "swap":
        return kind, swap(program, rng.randrange(len(actions) - 1))
    if kind == "other free stream" and frees:
        return kind, edit(program, index, stream=rng.choice(program.streams))
    if kind == "drop free":
        return kind, drop_action(program, index)
    if kind == "late free":
        ids = [i for i in range(len(actions)) if i != index]
        ids.insert(rng.randint(index, len(ids)), index)
        return kind, reorder(program, ids)
    return "repeat free" if frees else "repeat action", repeat_action(program, index)
