"""Binding: turn every action of a Program into a closure over views of the arena, once, before the first step."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Protocol, cast

import torch

from lading.errors import ConfigError, ProgramError
from lading.ir.action import CALLER, DEVICE, Action, ActionKind
from lading.ir.graph import DTYPE_BYTES, Op, OpKind, Phase, StepGraph
from lading.ir.guess import coefficient_op, is_update, next_values, speculated
from lading.ir.program import (
    COMPUTE_STREAM,
    LINE_BYTES,
    NETWORK_STREAM,
    RUNS_OP,
    Program,
    read_stream,
    slot_bytes,
    transfer_of,
    write_stream,
)
from lading.ir.reduction import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_SUM,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SCATTER_SUM,
    SEND,
    SUM,
    TRANSFERS,
    joined_ranks,
)
from lading.ir.sharding import GATHERS
from lading.ir.update_ops import matrix_rule_of
from lading.optim.rule import ParameterRule
from lading.runtime.accelerator import move_past_device
from lading.runtime.device import Call, DeviceDriver, Lane, Memory
from lading.runtime.draws import Draws
from lading.runtime.fence import overwritten
from lading.runtime.fuse import Fused
from lading.runtime.host_arena import view_of
from lading.runtime.kernel_calls import BoundKernel, bind
from lading.runtime.regions import FusibleRegion, Site
from lading.runtime.replays import Experts
from lading.runtime.resident import LARGEST_KEPT_BYTES, UNSEEN_BYTES
from lading.runtime.shard_exchange import rooms_bytes
from lading.runtime.speculation import Speculation, VersionedMemory
from lading.runtime.streams import Entry, Gate, Jitter
from lading.runtime.tiers import HostBytes, TierBytes, bound_move
from lading.runtime.update_kernels import Rate

_POISON = 0xFF  # NaN in every float format, -1 in every integer
#: An operation on so many bytes takes some 100 us; to read the resident set takes 3.
_LARGE_BYTES = UNSEEN_BYTES
#: Scratch above that of the heap may be more than what its shapes say by one part of so many.
_PADDED = 8


_REDUCTIONS = frozenset((ALL_REDUCE, ALL_REDUCE_SUM, REDUCE_SCATTER, SCATTER_SUM, SUM))


@dataclass
class Rates:
    """Numbers of this step's updates, and of those deferred from the step before."""

    now: Rate = field(default_factory=Rate)
    before: Rate = field(default_factory=Rate)


@dataclass
class CallerData:
    """Batches that the caller hands in for the current step, by micro-batch, and results that it gets back.

    ``results`` are in the order of ``StepGraph.results``, in host memory, filled by the end of the step.
    """

    batches: Sequence[Mapping[str, torch.Tensor]] = ()
    results: list[torch.Tensor] = field(default_factory=lambda: [])


class Mailbox(Protocol):
    """Room for what another rank sends once a step."""

    def post(self) -> None:
        """Ask for this step's, before the step begins."""
        ...

    def take(self, values: torch.Tensor) -> None:
        """Wait for it, and copy it out."""
        ...


class Reducer(Protocol):
    """Ranks that reduce gradients with each other, and may each have a shard of the values.

    ``over`` are axes as ``lading.ir.layout.Layout.across`` joins them: those are meant that differ from this one along
    them alone, numbered from 0 in order.
    """

    def number(self, over: str) -> int:
        """Number of this rank among those over some axes."""
        ...

    def mean_(self, values: torch.Tensor, over: str) -> None:
        """Replace a tensor by its mean over ranks."""
        ...

    def sum_(self, values: torch.Tensor, over: str) -> None:
        """Replace a tensor by its sum over ranks."""
        ...

    def reduce_scatter(self, shard: torch.Tensor, values: torch.Tensor, over: str, *, mean: bool = True) -> None:
        """Fill a shard with this rank's part of the mean, or the sum, of ``values`` over ranks; overwrites ``values``.

        Both have one dim.
        """
        ...

    def send(self, values: torch.Tensor, peer: int, tag: int, over: str) -> None:
        """Send a tensor to another rank, which receives it by the same tag."""
        ...

    def mailbox(self, size_bytes: int, peer: int, tag: int, over: str) -> Mailbox:
        """Make room for what another rank sends by this tag once a step."""
        ...

    def broadcast(self, values: torch.Tensor, source: int, over: str) -> None:
        """Fill a tensor with that of one rank, on all others."""
        ...

    def all_gather(self, values: torch.Tensor, shard: torch.Tensor, over: str) -> None:
        """Fill ``values`` with the shards of ranks, one after another; both have one dim."""
        ...

    def all_to_all(self, arrived: torch.Tensor, values: torch.Tensor, over: str) -> None:
        """Send each rank its part of ``values``, and fill ``arrived`` with what they send; both have one dim."""
        ...


@dataclass(frozen=True)
class Place:
    """Surroundings of a Program: the device, its memory, the lower tiers by name, the caller's side, other replicas.

    Attributes:
        draws: Random numbers that are this rank's, where a step of several draws some.
    """

    device: DeviceDriver
    arena: Memory
    tiers: Mapping[str, TierBytes]
    caller: CallerData
    replicas: Reducer | None = None
    draws: Draws | None = None


@dataclass
class Bound:
    """A Program whose actions are closures, queued by stream.

    Attributes:
        entries: Queue of each stream, in the order of ``streams``; ``lanes`` likewise.
        actions: Ids of the actions of each queue in order, with those that have no work.
        instant: Pairs (action, the action before it in its queue): the first has no work, and ends when the second
            does.
        scratch_bytes: Bytes that an action takes beside the arena, by action id.
        regions: Regions that run as one call, by the id of their first action.
        posts: Calls before a step, each for an action: they ask other ranks for what it receives.
    """

    streams: tuple[str, ...]
    lanes: list[Lane]
    entries: list[list[Entry]]
    actions: list[list[int]]
    instant: list[tuple[int, int]]
    scratch_bytes: dict[int, int]
    regions: tuple[FusibleRegion, ...] = ()
    posts: tuple[tuple[int, Call], ...] = ()

    def without(self, actions: Set[int]) -> Bound:
        """Copy of the queues in which some actions do nothing."""
        entries = [
            [dataclasses.replace(entry, run=_nothing) if entry.action in actions else entry for entry in queue]
            for queue in self.entries
        ]
        return dataclasses.replace(self, entries=entries)

    def fenced(self, writes: Mapping[int, frozenset[int]], wait: Callable[[frozenset[int]], object]) -> Bound:
        """Copy of the queues in which actions wait for values that they write over (``lading.runtime.fence``).

        Args:
            writes: Values by the id of an action.
            wait: Returns when these values may be written over.
        """
        entries = [
            [
                dataclasses.replace(entry, run=_after(partial(wait, writes[entry.action]), entry.run))
                if entry.action in writes
                else entry
                for entry in queue
            ]
            for queue in self.entries
        ]
        return dataclasses.replace(self, entries=entries)

    def watched(self, stream: str, watch: Callable[[Entry], Call]) -> Bound:
        """Copy of the queues in which every action of a stream is run by the call that ``watch`` makes of it."""
        queues = [
            [dataclasses.replace(entry, run=watch(entry)) for entry in queue] if name == stream else queue
            for name, queue in zip(self.streams, self.entries, strict=True)
        ]
        return dataclasses.replace(self, entries=queues)


@dataclass(frozen=True)
class Ready:
    """Program that can be run at once.

    Attributes:
        plan: Number of the Program of whose actions and addresses it is; 0 is the executor's first.
        caller: Its batches and losses.
        constants: Pairs (offset in the arena, bytes) of its own constants, which no other step leaves there.
        draws: Its random numbers, where it is of several ranks and draws some.
    """

    program: Program
    bound: Bound
    gate: Gate
    plan: int
    caller: CallerData
    constants: tuple[tuple[int, bytes], ...] = ()
    draws: Draws | None = None

    @cached_property
    def writes(self) -> dict[int, frozenset[int]]:
        """Values that each action writes over (``lading.runtime.fence``)."""
        return overwritten(self.program, self.bound.regions)


class Binder:
    """Walks a Program in order, knowing where each storage lies at every action, and makes the closures.

    Args:
        poison: Overwrite what is freed, so that a use after FREE shows in the results.
        jitter: Called before each action, on its stream's thread.
        fused: Regions that run as one call, at the first of their actions.
        make_room: Called with the scratch bytes, and the bytes written, of each large operation on the device before it
            runs, and of each reduction.
        experts: Leaves actions out where experts got no token.
    """

    def __init__(  # noqa: PLR0913  all that a Program is bound to
        self,
        program: Program,
        place: Place,
        *,
        optimizer: ParameterRule,
        rates: Rates,
        poison: bool = False,
        jitter: Jitter | None = None,
        fused: Sequence[Fused] = (),
        make_room: Callable[[int, int], None] | None = None,
        experts: Experts | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.experts, self.speculation = experts, speculation
        self.next_moves = next_values(program.graph, program.actions, program.host_tier).moves
        self.on_guess = speculated(program.graph)
        self.next_on_host = set[int]()  # storages changed on a guess whose value of then the host's memory has by now
        self.coefficient = None if speculation is None else coefficient_op(program.graph)
        self.program, self.graph = program, program.graph
        self.make_room = make_room
        self.device, self.arena = place.device, place.arena
        self.tiers, self.caller, self.replicas, self.draws = place.tiers, place.caller, place.replicas, place.draws
        self.optimizer, self.rates = optimizer, rates
        self.deferred = frozenset(self.graph.deferred)
        self.poison, self.jitter = poison, jitter
        self.slots = {tier: dict(slots) for tier, slots in program.slots.items()}
        self.fused = {f.region.actions[0]: f for f in fused}
        self.inside = {a for f in fused for a in (*f.region.actions, *f.region.freed)}
        self.where: dict[int, int] = dict(program.resident)
        self.scratch: dict[int, int] = {}
        self.posts: list[tuple[int, Call]] = []
        self.lanes: Mapping[str, Lane] = {}
        self.deciding: set[int] = set()
        self._bytes: dict[tuple[int, int], torch.Tensor] = {}
        self._views: dict[Site, torch.Tensor] = {}

    def bind(self) -> Bound:
        """Make the closures of all streams, and the fewest waits between them.

        Raises:
            ProgramError: an action cannot be bound; names it.
        """
        host_tiers = [name for name, tier in self.tiers.items() if isinstance(tier, HostBytes)]
        issued = {COMPUTE_STREAM, *map(read_stream, host_tiers), *map(write_stream, host_tiers)}
        lanes = [self.device.lane(name, blocking=name not in issued) for name in self.program.streams]
        self.lanes = dict(zip(self.program.streams, lanes, strict=True))
        runs: list[Call | None] = []
        for action in self.program.actions:
            self.where.update(action.places)
            try:
                runs.append(self._speculating(action, self._guarded(action, self._run(action))))
            except (ProgramError, KeyError, ConfigError) as error:
                raise ProgramError(
                    f"action {action} ({self.program.label(action)}): {error}", action_id=action.id
                ) from error
            if action.kind is ActionKind.FREE and action.source == DEVICE:
                del self.where[action.storage or 0]
        inline_actions = taken_over(self.program, runs) if self.device.kind == "cpu" else frozenset[int]()
        bound = queues(self.program, runs, lanes, inline_actions, self.jitter, self.deciding)
        regions = tuple(f.region for f in self.fused.values())
        return dataclasses.replace(bound, scratch_bytes=self.scratch, regions=regions, posts=tuple(self.posts))

    def _guarded(self, action: Action, run: Call | None) -> Call | None:
        """Make the call of an action that experts without tokens make needless, or that chooses experts."""
        if self.experts is None:
            return run
        guards, lane = self.experts.guards, self.lanes[action.stream]
        changed = () if action.op is None else self.graph.op_writes[action.op]
        if action.kind is ActionKind.FREE and action.source == DEVICE and action.storage is not None:
            changed = (action.storage,)
        if (ending := self.experts.ending(run, changed, lane)) is not None:
            self.deciding.add(action.id)
            return ending
        if run is None:
            return run
        if action.id in guards.chosen_at:
            self.deciding.add(action.id)
            router = guards.chosen_at.index(action.id)
            chosen = self.view(guards.routers[router].chosen)
            assert chosen is not None, "the action reads it"
            return self.experts.noting(run, router, chosen, lane)
        if action.id not in guards.actions or action.kind is ActionKind.FREE:
            return run
        zeros = [view for t in guards.actions[action.id].zeros if (view := self.view(t)) is not None]
        moved_bytes = 0 if action.storage is None else slot_bytes(self.graph.storages[action.storage].size_bytes)
        self.deciding.add(action.id)
        return self.experts.guarded(run, action.id, zeros, lane, (action.stream, moved_bytes), self._on_host(action))

    def _on_host(self, action: Action) -> Call | None:
        """Make the call that computes an expert's operation on the host in the place of its action."""
        hosting = None if self.experts is None else self.experts.hosting
        if hosting is None or action.op is None or action.id not in hosting.hosted.by_action:
            return None
        places = dict(self.where)
        located = lambda storage: self._storage_bytes(storage, places[storage])  # noqa: E731
        return hosting.bound(action.id, action.op, located, self.rates.now, self.lanes[action.stream])

    def _speculating(self, action: Action, run: Call | None) -> Call | None:
        """Make the call of an action that a guess of the coefficient of clipping depends on."""
        if self.speculation is None or run is None or action.op is None:
            return run
        if action.op == self.coefficient:
            coefficient = self.view(self.graph.ops[action.op].outputs[0])
            assert coefficient is not None, "the action writes it"
            return self.speculation.noting(run, coefficient)
        return self.speculation.guarded(run) if is_update(self.graph, action.op) else run

    def view(self, tensor: int) -> torch.Tensor | None:
        """View of a graph tensor where its storage lies now; None if it has no place."""
        t = self.graph.tensors[tensor]
        offset = self.where.get(t.storage)
        return None if offset is None else self._view_at(Site(tensor, offset))

    def host_view(self, tensor: int, version: int = 0) -> torch.Tensor | None:
        """View of a graph tensor in the tier on which the host's processors work; None if it has no slot there.

        Args:
            version: Which version of values changed on a guess counts (``lading.runtime.speculation``).
        """
        t = self.graph.tensors[tensor]
        memory = self._host_bytes(t.storage, version, is_next=t.storage in self.next_on_host)
        return None if memory is None else view_of(memory, t)

    def _host_bytes(self, storage: int, version: int, *, is_next: bool) -> torch.Tensor | None:
        """Bytes of a storage for the host's processors; ``is_next`` asks for what does not count yet."""
        name = self.program.host_tier
        offset, size_bytes = self.slots.get(name, {}).get(storage), self.graph.storages[storage].size_bytes
        if offset is None:
            return None
        tier = self.tiers.get(name)
        if self.speculation is not None:
            tier = (self.speculation.next_tiers if is_next else self.speculation.tiers)[name]
        if isinstance(tier, VersionedMemory):
            return tier.bytes_at(offset, size_bytes, version)
        if isinstance(tier, HostBytes):
            return tier.bytes_at(offset, size_bytes)
        raise ProgramError(
            f"expected the tier {name!r} to give its bytes to the host's processors (bytes_at), as its host_computes "
            f"says, found {type(tier).__name__}"
        )

    def _run_on_host(self, op: int, bound: Callable[..., BoundKernel]) -> Call:
        """Make the call of an operation on the host: what it changes on a guess it copies first, and changes the copy.

        So the value from before stays where it counts.
        """
        if self.speculation is None:
            return bound(self.host_view, kind="cpu").run
        changed = self.on_guess.intersection(self.graph.op_writes[op])
        copied = sorted(changed - self.next_on_host)
        self.next_on_host |= changed

        def made(version: int) -> Call:
            run = bound(partial(self.host_view, version=version), kind="cpu").run
            places = [[self._host_bytes(s, version, is_next=is_next) for is_next in (True, False)] for s in copied]

            def changes_copies() -> None:
                for copy, before in places:
                    assert copy is not None
                    assert before is not None, "the operation has its operands there"
                    copy.copy_(before)
                run()

            return changes_copies

        return self.speculation.by_version(made)

    def _view_at(self, place: Site) -> torch.Tensor:
        if place not in self._views:
            t = self.graph.tensors[place.tensor]
            pieces = self.graph.storages_of(place.tensor)
            if len(pieces) == 1:
                memory = self._storage_bytes(t.storage, place.offset)
            else:  # pieces of a parameter, one after another (lading.ir.weight_pieces)
                memory = self.arena.bytes_at(place.offset, sum(self.graph.storages[s].size_bytes for s in pieces))
            self._views[place] = view_of(memory, t)
        return self._views[place]

    def _storage_bytes(self, storage: int, offset: int) -> torch.Tensor:
        key = (storage, offset)
        if key not in self._bytes:
            self._bytes[key] = self.arena.bytes_at(offset, self.graph.storages[storage].size_bytes)
        return self._bytes[key]

    def _run(self, action: Action) -> Call | None:
        """Make the call that does an action; None for an action without work."""
        if action.id in self.fused:
            fused = self.fused[action.id]
            self.scratch[action.id] = fused.compiled.scratch_bytes
            return fused.bind(self._view_at)
        if action.id in self.inside:
            return None
        if action.kind in RUNS_OP:
            if action.op is None:
                raise ProgramError(f"a {action.kind.value} needs an operation")
            rate = self.rates.before if action.op in self.deferred else self.rates.now
            op = self.graph.ops[action.op]
            if op.kind is OpKind.COLLECTIVE:
                run = self._collective(op, action.id)
                if self.make_room is None or op.name not in _REDUCTIONS or op.bytes_read < _LARGE_BYTES:
                    return run
                return _after(partial(self.make_room, rooms_bytes(op.bytes_read, joined_ranks(op)), 0), run)
            parameter = self.graph.first_piece(self.graph.storage_of(op.inputs[0])) if op.inputs else -1
            over = dict(op.kwargs).get("over")
            rank = self.replicas.number(over) if isinstance(over, str) and self.replicas is not None else 0
            bound = partial(bind, op, optimizer=self.optimizer, rate=rate, parameter=parameter, rank=rank)
            if action.op in self.graph.on_host:  # the CPU's kernel, whose scratch is not the device's
                return self._run_on_host(action.op, bound)
            kernel = bound(self.view, kind=self.device.kind)
            self.scratch[action.id] = kernel.scratch_bytes
            run = kernel.run if op.draw is None or self.draws is None else self.draws.bound(op.draw, kernel.run)
            if self.make_room is None or not self._is_large(action.op, kernel):
                return run
            return _after(partial(self.make_room, self._room_bytes(action.op, kernel), op.bytes_written), run)
        if action.storage is None or action.kind not in (ActionKind.MOVE, ActionKind.FREE):
            raise ProgramError(
                f"expected COMPUTE, RECOMPUTE, STEP, or MOVE or FREE of a storage, found {action.kind.value}"
            )
        if action.kind is ActionKind.FREE:
            if not self.poison:
                return None
            if action.source != DEVICE:
                return self._spoil_on_host(action.storage, action.source)
            return partial(self._storage_bytes(action.storage, self.where[action.storage]).fill_, _POISON)
        return self._move(action, action.storage)

    def _collective(self, op: Op, action: int) -> Call:
        """Make the call that all ranks take part in."""
        if op.name in TRANSFERS:
            return self._transfer(op, action)
        source, target = self.view(op.inputs[0]), self.view((*op.outputs, *op.mutates)[0])
        over = cast("str", dict(op.kwargs)["over"])
        if self.replicas is None or source is None or target is None:
            raise ProgramError("expected other ranks to reduce with, found a Program for several that runs on one")
        if op.name in GATHERS or op.name == ALL_GATHER:
            return partial(self.replicas.all_gather, target, source, over)
        if op.name == ALL_TO_ALL:
            return partial(self.replicas.all_to_all, target, source, over)
        if op.name == SUM:
            return _after(partial(target.copy_, source), partial(self.replicas.sum_, target, over))
        if op.name == SCATTER_SUM:
            return partial(self.replicas.reduce_scatter, target, source, over, mean=False)
        if op.name == REDUCE_SCATTER:
            count = dict(op.kwargs).get("mean_of")
            reduced = partial(self.replicas.reduce_scatter, target, source, over, mean=count is None)
            return reduced if count is None else _after(reduced, partial(target.div_, cast("int", count)))
        count = dict(op.kwargs).get("mean_of")
        if op.name == ALL_REDUCE and count is None:
            return partial(self.replicas.mean_, source, over)
        summed = partial(self.replicas.sum_, source, over)
        return summed if count in (None, 1) else _after(summed, partial(source.div_, cast("int", count)))

    def _transfer(self, op: Op, action: int) -> Call:
        """Make the call that sends a storage to another rank, or receives it."""
        facts, tensor = dict(op.kwargs), self.view((*op.inputs, *op.outputs, *op.mutates)[0])
        peer, tag, over = cast("int", facts["peer"]), cast("int", facts["tag"]), cast("str", facts["over"])
        if self.replicas is None or tensor is None:
            raise ProgramError("expected other ranks to send to, found a Program for several that runs on one")
        if op.name == SEND:
            return partial(self.replicas.send, tensor, peer, tag, over)
        mailbox = self.replicas.mailbox(tensor.nbytes, peer, tag, over)
        self.posts.append((action, mailbox.post))
        return partial(mailbox.take, tensor)

    def _is_large(self, op: int, kernel: BoundKernel) -> bool:
        """Whether an operation takes so long that looking at the process before it costs nothing beside it."""
        touched = self.graph.ops[op].bytes_read + self.graph.ops[op].bytes_written
        return max(touched, kernel.scratch_bytes) >= _LARGE_BYTES

    def _room_bytes(self, op: int, kernel: BoundKernel) -> int:
        """Bytes that an operation may take while it runs: no more than the largest of the step, which was measured.

        What an update of matrices takes inside its products is known from that measure alone. Large scratch is worked
        out from shapes, and libraries pad it: 16.9 MiB measured of 16.0, a 16-bit product of oneDNN 3.
        """
        largest, scratch = self.program.workspace_bytes, kernel.scratch_bytes
        if scratch > LARGEST_KEPT_BYTES:
            scratch += scratch // _PADDED
        is_matrix_update = matrix_rule_of(self.graph.ops[op]) is not None
        return largest if is_matrix_update else min(scratch, largest)

    def _spoil_on_host(self, storage: int, name: str) -> Call | None:
        tier, size_bytes = self.tiers[name], self.graph.storages[storage].size_bytes
        assert isinstance(tier, HostBytes), "what is freed there was worked on there"
        return partial(tier.bytes_at(self.slots[name][storage], size_bytes).fill_, _POISON)

    def _move(self, action: Action, storage: int) -> Call:
        source, target = action.source, action.target
        if source == CALLER:
            return self._feed(storage)
        if target == CALLER:
            return self._report(storage)
        if DEVICE not in (source, target):
            far, reads = transfer_of((source, target), self.program.host_tier)
            memory = self._host_bytes(storage, 0, is_next=False)
            assert memory is not None, "it has its place there"
            return move_past_device(self.tiers[far], self.slots[far][storage], memory, reads=reads)
        place = self.where[storage]
        memory = self.arena.bytes_at(place, slot_bytes(self.graph.storages[storage].size_bytes))
        name = source if target == DEVICE else target
        tier, slot = self.tiers[name], self.slots[name][storage]
        if self.speculation is not None and action.id in self.next_moves:  # of a value that may not come to count
            tier = self.speculation.next_tiers[name]
            self.next_on_host |= {storage} if target == self.program.host_tier else set[int]()
        return bound_move(tier, slot, memory, reads=target == DEVICE)

    def _feed(self, storage: int) -> Call:
        """Make the call that copies the leaves of a batch that lie on a storage into it."""
        leaves = [
            (micro, name, view)
            for micro, inputs in enumerate(self.graph.inputs)
            for name, tensor in inputs
            if self.graph.storage_of(tensor) == storage and (view := self.view(tensor)) is not None
        ]
        if not leaves:
            raise ProgramError(f"storage {storage} ({self.graph.storages[storage].name}) is no input of the step")
        caller = self.caller

        def run() -> None:
            for micro, name, view in leaves:
                view.copy_(caller.batches[micro][name], non_blocking=True)

        return run

    def _report(self, storage: int) -> Call:
        """Make the call that hands the results that lie on a storage to the caller."""
        views = [
            (index, view)
            for index, tensor in enumerate(self.graph.results)
            if self.graph.storage_of(tensor) == storage and (view := self.view(tensor)) is not None
        ]
        if not views:
            raise ProgramError(f"storage {storage} ({self.graph.storages[storage].name}) is no loss of the step")
        places = self.caller.results

        def run() -> None:
            for index, view in views:
                places[index].copy_(view, non_blocking=True)

        return run


def _nothing() -> None:
    return None


def taken_over(program: Program, runs: Sequence[Call | None]) -> frozenset[int]:
    """Find the network's actions that the compute stream's thread does itself, as it could only wait meanwhile.

    Such an action waits for the last work before it on the compute stream, and the next work there waits for it. Where
    an action has ended when its call returns, one thread may do both, and neither has to wake the other, twice for each
    collective. What waits for what stays as it is.
    """
    need, number, num_sent = 0, dict[int, int](), 0
    #: Action of each work of the compute stream, and how many sent transfers it needs.
    computing_needs: list[tuple[int, int]] = []
    for action in program.actions:
        if action.stream == NETWORK_STREAM:
            num_sent += 1
            number[action.id] = num_sent
        elif action.stream == COMPUTE_STREAM:
            need = max([need, *(number.get(wait, 0) for wait in action.waits)])
            if runs[action.id] is not None:
                computing_needs.append((action.id, need))
    computing, inline, last = [action for action, _ in computing_needs], set[int](), -1
    for action in (candidate for candidate in program.actions if candidate.stream == NETWORK_STREAM):
        streams = {wait: program.actions[wait].stream for wait in action.waits}
        work = max((wait for wait, stream in streams.items() if stream == COMPUTE_STREAM), default=-1)
        after = bisect_right(computing, work)
        follows = after < len(computing) and number[action.id] <= computing_needs[after][1]
        if runs[action.id] is None:  # ends with what is before it
            follows = last in inline and set(streams.values()) <= {COMPUTE_STREAM, NETWORK_STREAM}
        if follows:
            inline.add(action.id)
        last = action.id
    return frozenset(inline)


def queues(
    program: Program,
    runs: list[Call | None],
    lanes: list[Lane],
    taken: Set[int],
    jitter: Jitter | None,
    deciding: Set[int] = frozenset(),
) -> Bound:
    """Split the actions over their streams. An action without work and waits joins the one before it.

    Args:
        taken: Actions of the network that the compute stream's queue has (``taken_over``).
        deciding: Actions whose calls are made on the host, and issue to the lane themselves.
    """
    streams = program.streams
    index = {name: i for i, name in enumerate(streams)}
    after = _other_queues(program, taken)
    awaited = {wait for action in program.actions for wait in action.waits} | set(after.values())
    bound = Bound(streams, lanes, [[] for _ in streams], [[] for _ in streams], [], {})
    position: list[tuple[int, int]] = []
    known_counts = [[0] * len(streams) for _ in streams]
    for action, run in zip(program.actions, runs, strict=True):
        stream = index[COMPUTE_STREAM if action.id in taken else action.stream]
        bound.actions[stream].append(action.id)
        position.append((stream, count := len(bound.actions[stream])))
        before = (*action.waits, after[action.id]) if action.id in after else action.waits
        waits = _minimal_waits([position[w] for w in before], known_counts[stream], stream)
        queue = bound.entries[stream]
        if run is None and not waits and queue and jitter is None:
            queue[-1].count = count
            queue[-1].announce |= action.id in awaited
            bound.instant.append((action.id, queue[-1].action))
            continue
        call = run or _nothing
        if jitter is not None:
            call = _after(partial(jitter, action), call)
        if (run is not None or jitter is not None) and action.id not in deciding:
            call = lanes[stream].bound(call)
        queue.append(Entry(call, waits, count, action.id in awaited, action.id))
    _mark(bound)
    return bound


def _other_queues(program: Program, taken: Set[int]) -> dict[int, int]:
    """Action of the network before each one that another queue has, so that their order stays."""
    network = [action.id for action in program.actions if action.stream == NETWORK_STREAM]
    return {b: a for a, b in pairwise(network) if (a in taken) != (b in taken)}


def _mark(bound: Bound) -> None:
    """Give every announced action its lane's mark, and every wait the mark of what it waits for."""
    for lane, queue in zip(bound.lanes, bound.entries, strict=True):
        for entry in queue:
            entry.mark = lane.mark() if entry.announce else None
    for queue in bound.entries:
        for entry in queue:
            others = (bound.entries[stream][_position(bound.entries[stream], count)] for stream, count in entry.waits)
            entry.marks = tuple(waited_for.mark for waited_for in others if waited_for.mark is not None)


def _position(queue: Sequence[Entry], count: int) -> int:
    """Index of the entry at whose end ``count`` actions of its stream have ended."""
    return bisect_left(queue, count, key=lambda entry: entry.count)


def _after(first: Call, then: Call) -> Call:
    def run() -> None:
        first()
        then()

    return run


def _minimal_waits(waits: list[tuple[int, int]], known: list[int], stream: int) -> tuple[tuple[int, int], ...]:
    """Reduce waits to the farthest count for each other stream, without what this stream has already waited for.

    Updates ``known``, the counts that this stream has waited for, by stream.
    """
    needed_counts: dict[int, int] = {}
    for other_stream, count in waits:
        if other_stream != stream and count > max(known[other_stream], needed_counts.get(other_stream, 0)):
            needed_counts[other_stream] = count
    for other_stream, count in needed_counts.items():
        known[other_stream] = count
    return tuple(needed_counts.items())


def actions_of(program: Program, *, updates: bool) -> frozenset[int]:
    """Ids of the actions of deferred updates (``updates``), or else of the model and the caller; none of moves."""
    deferred = frozenset(program.graph.deferred)
    return frozenset(
        a.id
        for a in program.actions
        if (a.op is not None and (a.op in deferred) == updates) or (not updates and CALLER in (a.source, a.target))
    )


def actions_beside_forward(program: Program) -> frozenset[int]:
    """Ids of the actions of operations that forward, loss and what was deferred from the step before do not need."""
    ops, deferred = program.graph.ops, frozenset(program.graph.deferred)
    forward = [
        a.id
        for a in program.actions
        if a.kind is ActionKind.COMPUTE and a.op is not None and ops[a.op].phase in (Phase.FORWARD, Phase.LOSS)
    ]
    last = max(forward, default=-1)
    return frozenset(
        a.id
        for a in program.actions
        if a.op is not None
        and a.op not in deferred
        and (ops[a.op].phase not in (Phase.FORWARD, Phase.LOSS) or (a.kind is ActionKind.RECOMPUTE and a.id > last))
    )


def checked_batches(
    program: Program, batches: Sequence[Mapping[str, torch.Tensor]]
) -> Sequence[Mapping[str, torch.Tensor]]:
    """Return the batches if they are what the step was captured for.

    Raises:
        ConfigError: another number of micro-batches, another name, shape or dtype.
    """
    graph = program.graph
    if len(batches) != len(graph.inputs):
        raise ConfigError(
            f"expected {len(graph.inputs)} micro-batches, got {len(batches)}; the accumulation is part of the plan"
        )
    for micro, (batch, inputs) in enumerate(zip(batches, graph.inputs, strict=True)):
        names = {name for name, _ in inputs}
        if names != batch.keys():
            raise ConfigError(f"micro-batch {micro}: expected the inputs {sorted(names)}, got {sorted(batch)}")
        for name, tensor in inputs:
            t, leaf = graph.tensors[tensor], batch[name]
            actual = (str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape))
            if actual != (t.dtype, t.shape):
                unlike = len({tuple(micro_batch[name].shape) for micro_batch in batches if name in micro_batch}) > 1
                alone = "pad or cut the batch, or give the Trainer a capture of this shape in shapes="
                raise ConfigError(
                    f"micro-batch {micro}: expected {name!r} of {t.dtype} {t.shape}, got {actual[0]} {actual[1]}; "
                    f"{'pad or cut it: the micro-batches of one step are of one shape' if unlike else alone}"
                )
            if leaf.layout is not torch.strided or leaf.is_meta:
                kind = "a tensor without values (meta)" if leaf.is_meta else str(leaf.layout)
                raise ConfigError(f"micro-batch {micro}: expected {name!r} dense, with values, got {kind}")
    return batches


def places_of_results(graph: StepGraph, scalars: Memory) -> list[torch.Tensor]:
    """Places in host memory of a step's results: scalars, which the device fills without the host waiting.

    Those of outputs are empty until a step runs.
    """
    places: list[torch.Tensor] = []
    for index, tensor in enumerate(graph.results):
        shape, dtype = graph.tensors[tensor].shape, graph.tensors[tensor].dtype
        place = scalars.bytes_at(LINE_BYTES * index, 0 if shape else DTYPE_BYTES[dtype])
        places.append(place.view(getattr(torch, dtype)).view(() if not shape else (0,)))
    return places
