"""Experts at run time: what routers chose in the step under way, what is left out for it, and what is made up for.

A router's own action tells which experts got tokens, before anything that depends on them runs. An expert that missed
steps and is chosen now is brought up to date there, where its values lie between steps.

[Note: who decides] The thread that drives a lane decides, before it issues anything. On a device that runs behind the
host, the thread of the compute lane therefore waits after each router until the numbers that it chose are in host
memory, and only then is its action announced: whatever waits for it finds them.

[Note: counted late] A Program that leaves nothing out only counts, and nobody waits: a lane of its own copies what a
router chose behind the router's action, and the numbers are read at the end of the step. What gives the chosen numbers'
memory back, or writes there, waits on the device for that copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from lading.errors import ConfigError, ProgramError, StorageError
from lading.ir.experts import Expert
from lading.ir.graph import DTYPE_BYTES, Op, StepGraph, refs
from lading.ir.program import Program, whole_pages
from lading.ir.update_ops import rule_of
from lading.memory.guards import (
    REPLAY_ELEMENTS,
    Guards,
    ReplayedParameter,
    find_guards,
    find_routers_alone,
    layer_names,
    replay_bytes,
)
from lading.memory.hosted_experts import HostedExperts, check_hosted, find_hosted, limits_by_expert
from lading.optim.rule import ParameterRule
from lading.runtime.device import Call, DeviceDriver, Lane, Mark
from lading.runtime.expert_computing import HostRows
from lading.runtime.host_arena import Arena
from lading.runtime.interrupts import HeldInterrupts
from lading.runtime.tiers import TierBytes
from lading.runtime.update_kernels import Rate, parameter_kernel

if TYPE_CHECKING:
    from lading.runtime.values import Values  # which imports what binds actions, and that imports this file

#: Steps that are remembered for experts that missed them, however long nobody chooses these.
MOST_MISSED = 256


@dataclass(frozen=True, slots=True)
class MissedStep:
    """Numbers of a step that some experts missed; ``spoilt`` where clipping would have made every gradient NaN."""

    rate: Rate
    spoilt: bool


@dataclass
class ExpertCounts:
    """Counts of what routers chose in training steps.

    Attributes:
        steps: Steps counted.
        tokens: For each router of a micro-batch, by its module, the tokens that each expert got.
        chosen: Likewise the steps in which each expert got any.
        moved_bytes, spared_bytes: Bytes that were moved between tiers under a guard, and left where they were, by
            stream.
        replayed: Updates that were made up for.
        replayed_bytes: Bytes that were read, and as many written, from lower tiers to make up for updates.
        hosted: Like ``chosen``, the steps in which the host computed each expert.
        hosted_bytes: Bytes of rows that were copied for it, by direction.
    """

    steps: int = 0
    tokens: dict[str, list[int]] = field(default_factory=lambda: {})
    chosen: dict[str, list[int]] = field(default_factory=lambda: {})
    moved_bytes: dict[str, int] = field(default_factory=lambda: {})
    spared_bytes: dict[str, int] = field(default_factory=lambda: {})
    replayed: int = 0
    replayed_bytes: int = 0
    hosted: dict[str, list[int]] = field(default_factory=lambda: {})
    hosted_bytes: dict[str, int] = field(default_factory=lambda: {})

    def since(self, before: ExpertCounts) -> ExpertCounts:
        """Make the counts of steps, tokens and choices alone that came after ``before``, counts of the same plan."""
        return ExpertCounts(
            self.steps - before.steps, _more(self.tokens, before.tokens), _more(self.chosen, before.chosen)
        )

    def shares(self) -> dict[str, list[float]]:
        """Share of the steps in which each expert got tokens, for ``lading.plan(experts=)``."""
        return {name: [count / max(1, self.steps) for count in row] for name, row in self.chosen.items()}

    def loads(self) -> dict[str, list[tuple[float, float]]]:
        """Shares with the mean tokens of each expert in the steps that choose it, for ``lading.plan(experts=)``.

        A plan for these may compute experts on the host.
        """
        tokens = {
            name: [number / max(1, steps) for number, steps in zip(row, self.chosen[name], strict=True)]
            for name, row in self.tokens.items()
        }
        return {name: [*zip(row, tokens[name], strict=True)] for name, row in self.shares().items()}


def _more(now: Mapping[str, list[int]], before: Mapping[str, list[int]]) -> dict[str, list[int]]:
    return {
        name: [count - then for count, then in zip(row, before.get(name, [0] * len(row)), strict=True)]
        for name, row in now.items()
    }


class Experts:
    """Experts of one Program.

    Args:
        guards: From ``lading.memory.guards.find_guards``.
        values: Values where they lie between steps.
        optimizer: Rule of the run.
        device: Device that the Program runs on, in whose memory updates are made up for.
        hosted: Experts that the host computes where they get few tokens.
        tiers: Lower tiers by name.

    Attributes:
        counts: What was chosen so far.
        now, before: Choices that got tokens in the step under way, and in the last whole one; of the step under way
            without those that the host computes.
        hosting: Computes experts on the host; None where no step does.
    """

    def __init__(
        self,
        program: Program,
        guards: Guards,
        values: Values,
        optimizer: ParameterRule,
        device: DeviceDriver,
        *,
        hosted: HostedExperts,
        tiers: Mapping[str, TierBytes],
    ) -> None:
        self.guards, self.counts = guards, ExpertCounts()
        self.now: set[Expert] = set()
        self.before: set[Expert] = set()
        self._graph, self._values, self._optimizer = program.graph, values, optimizer
        self._device, self._settled = device, _Settled(device)
        self._late = None if guards.actions else _LateCopies(device)
        self._room = device.arena(replay_bytes(program, guards))
        self._chosen: dict[int, list[int]] = {}
        self._history: list[MissedStep] = []
        self._since: dict[int, int] = {}  # parameter -> first step of the history that it missed
        self._by_expert: dict[Expert, list[ReplayedParameter]] = {}
        for parameter in guards.replayed:
            for expert in parameter.experts:
                self._by_expert.setdefault(expert, []).append(parameter)
        self._names = layer_names(guards.routers)
        self.hosting: HostRows | None = None
        if hosted.rows:
            self.hosting = HostRows(program, hosted, tiers, values, optimizer, device, self._settled)

    def close(self) -> None:
        """Give back the memory in which updates are made up for."""
        self._room.close()
        self._settled.close()
        if self.hosting is not None:
            self.hosting.close()
        if self._late is not None:
            self._late.close()

    # while a step runs

    def begin(self) -> None:
        """Begin a run of the Program: nothing is chosen yet."""
        self.now, self._chosen = set(), {}
        if self.hosting is not None:
            self.hosting.begin()

    def noting(self, run: Call, router: int, chosen: torch.Tensor, lane: Lane) -> Call:
        """Make the call of a router's action that then takes note of what it chose. See [Note: who decides].

        Args:
            chosen: Numbers of the chosen experts, where they lie when the action runs.
            lane: The action's.
        """
        if self._late is not None:
            return self._late.noting(run, router, chosen, lane)
        numbers = self._settled.on_host(run, chosen, lane)

        def noted() -> None:
            numbers_now = numbers()
            used = self._note(router, numbers_now)
            on_host = frozenset[Expert]() if self.hosting is None else self.hosting.choose(router, numbers_now, used)
            for parameter in (p for expert in used for p in self._by_expert.get(expert, ())):
                self._replay(parameter)
            if on_host:  # whose values were made up for by the device
                self._settled.wait()
            self.now.update(used.keys() - on_host)

        return noted

    def _note(self, router: int, numbers: torch.Tensor) -> dict[Expert, int]:
        """Take note of the experts that a router chose; returns those that got tokens, and how many."""
        tokens = torch.bincount(numbers.reshape(-1), minlength=self.guards.routers[router].experts).tolist()
        self._chosen[router] = tokens
        return {(router, expert): number for expert, number in enumerate(tokens) if number}

    def ending(self, run: Call | None, storages: Iterable[int], lane: Lane) -> Call | None:
        """Make the call of an action that ends or changes storages. See [Note: counted late].

        Args:
            run: What the action does; None for nothing.
            lane: The action's.
        Returns:
            A call that issues to the lane itself; None where the action waits for no copy.
        """
        if self._late is None:
            return None
        ends = frozenset(storages)
        routers = enumerate(self.guards.routers)
        marks = self._late.marks([n for n, router in routers if self._graph.storage_of(router.chosen) in ends])
        if not marks:
            return None
        issue = None if run is None else lane.bound(run)

        def ended() -> None:
            lane.wait(marks)
            if issue is not None:
                issue()

        return ended

    def guarded(
        self,
        run: Call,
        action: int,
        zeros: Sequence[torch.Tensor],
        lane: Lane,
        moved: tuple[str, int],
        on_host: Call | None = None,
    ) -> Call:
        """Make the call of an action that is left out where its experts got no token.

        Args:
            zeros: Tensors that are then set to zero.
            lane: The action's.
            moved: Stream and bytes of a move; 0 bytes of others.
            on_host: Runs the operation on the host, in steps in which its expert is computed there.
        """
        is_idle = self.guards.actions[action].is_idle
        fetches = frozenset[Expert]() if self.hosting is None else self.hosting.hosted.fetches.get(action, frozenset())
        issue = lane.bound(run)
        clear = lane.bound(partial(_clear, zeros)) if zeros else None
        stream, size_bytes = moved

        def chosen() -> None:
            idle = is_idle(self.now, self.before)
            if fetches and self.hosting is not None:
                idle = idle and fetches.isdisjoint(self.hosting.now)
            if size_bytes:
                counted = self.counts.spared_bytes if idle else self.counts.moved_bytes
                counted[stream] = counted.get(stream, 0) + size_bytes
            if not idle:
                issue()
                return
            if clear is not None:
                clear()
            if on_host is not None:
                on_host()

        return chosen

    def left_out(self) -> frozenset[int]:
        """Actions that did nothing so far in the run under way, or would not."""
        left_out = self.guards.left_out(self.now, self.before)
        return left_out if self.hosting is None else left_out - self.hosting.hosted.fetched(self.hosting.now)

    def end_step(
        self, rate: Rate, norm: float | None, norms: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] | None
    ) -> None:
        """Count a whole step, and remember its numbers for the experts that missed it.

        Args:
            rate: Its learning rates.
            norm: Norm of all gradients, where they are clipped.
            norms: Norms of gradients by parameter, where they were asked for; those of zeros are put in.
        """
        hosted = frozenset[Expert]() if self.hosting is None else self.hosting.now
        missed = [p for p in self.guards.replayed if p.experts.isdisjoint(self.now | hosted)]
        for parameter in missed:
            self._since.setdefault(parameter.storage, len(self._history))
            if norms is not None:
                norms.setdefault(parameter.storage, []).append((torch.zeros(()), torch.zeros(())))
        if not self._since:
            self._history.clear()
        else:
            kept = Rate(rate.value, rate.matrices, dict(rate.rules))
            self._history.append(MissedStep(kept, norm is not None and math.isnan(norm)))
        self.before = self.now
        if self._late is not None:
            for router, numbers in self._late.numbers.items():
                self._note(router, numbers)
        self._count()

    def _count(self) -> None:
        counts = self.counts
        counts.steps += 1
        used: dict[str, set[int]] = {}
        for number, router in enumerate(self.guards.routers):
            name, tokens = self._names[router.layer], self._chosen.get(number, [0] * router.experts)
            row = counts.tokens.setdefault(name, [0] * router.experts)
            for expert, more in enumerate(tokens):
                row[expert] += more
            used.setdefault(name, set()).update(expert for expert, more in enumerate(tokens) if more)
        if self.hosting is not None:
            self._count_hosted(self.hosting)
        for name, experts in used.items():
            row = counts.chosen.setdefault(name, [0] * len(counts.tokens[name]))
            for expert in experts:
                row[expert] += 1

    def _count_hosted(self, hosting: HostRows) -> None:
        self.counts.hosted_bytes = dict(hosting.moved_bytes)
        for router, expert in hosting.now:
            name = self._names[self.guards.routers[router].layer]
            self.counts.hosted.setdefault(name, [0] * self.guards.routers[router].experts)[expert] += 1

    # what was missed

    @property
    def is_behind(self) -> bool:
        """Whether some expert's values lack updates that it missed."""
        return bool(self._since)

    @property
    def is_far_behind(self) -> bool:
        """Whether as many steps are remembered as may be: every expert is then to be brought up to date."""
        return len(self._history) >= MOST_MISSED

    def replay_all(self) -> None:
        """Bring every expert up to date, between steps.

        Raises:
            StorageError: a tier failed; the parameter then counts as lost.
        """
        with self._settled.lane.entered():
            for parameter in self.guards.replayed:
                self._replay(parameter)
        self._settled.wait()
        self._history.clear()

    def _replay(self, parameter: ReplayedParameter) -> None:
        """Make up for the updates that a parameter missed. See [Note: replayed updates] in ``lading.ir.experts``."""
        since = self._since.get(parameter.storage)
        if since is None:
            return
        values = frozenset(s for op in parameter.updates for s in self._graph.op_writes[op])
        if values & self._values.lost:  # written anew before anything reads it
            del self._since[parameter.storage]
            return
        missed = self._history[since:]
        with HeldInterrupts():
            try:
                for number in parameter.updates:
                    self._replay_part(self._graph.ops[number], missed, parameter.storage)
            except StorageError:
                self._values.lose(values)
                raise
            finally:
                del self._since[parameter.storage]
                if isinstance(self._room, Arena):  # whose pages are given back after use
                    self._room.discard()
        self.counts.replayed += len(missed)

    def _replay_part(self, op: Op, missed: Sequence[MissedStep], parameter: int) -> None:
        """Run the update of one part again and again with zeros, as many elements at a time as fit a cache."""
        part = _Part(self._graph, op)
        step = None if part.step is None else self._number(part.step)
        began = None if step is None else (step.clone() if part.counts else step - len(missed))
        for start in range(0, part.elements, REPLAY_ELEMENTS):
            count = min(REPLAY_ELEMENTS, part.elements - start)
            zeros_bytes = count * DTYPE_BYTES[self._graph.tensors[part.gradient].dtype]
            gradient = self._room.bytes_at(0, zeros_bytes).view(self._dtype(part.gradient)).zero_()
            places = self._fetched(part.moved, start, count, whole_pages(zeros_bytes))
            views = {t: room.view(self._dtype(t))[:count] for t, (room, _) in places.items()}
            number = None if began is None else began.clone()
            self._run(part, views, gradient, number, missed, parameter)
            for tensor, (room, is_copy) in places.items():
                if is_copy:
                    self._values.write_pages(self._graph.storage_of(tensor), self._byte(tensor, start), room)
                    self.counts.replayed_bytes += room.numel()
        if step is not None and part.counts:
            step.add_(len(missed))

    def _run(
        self,
        part: _Part,
        views: Mapping[int, torch.Tensor],
        gradient: torch.Tensor,
        number: torch.Tensor | None,
        missed: Sequence[MissedStep],
        parameter: int,
    ) -> None:
        """Run one update for every missed step."""
        rate = Rate()
        args = [views[part.param], gradient, *(views[t] for t in part.states), *([] if number is None else [number])]
        named = {} if part.master is None else {"master": views[part.master]}
        run, _ = parameter_kernel(
            part.op, args, named, self._device.kind, optimizer=self._optimizer, rate=rate, parameter=parameter
        )
        with torch.inference_mode():
            for each in missed:
                rate.take(each.rate)
                if each.spoilt:
                    gradient.fill_(math.nan)
                run()
                if each.spoilt:
                    gradient.zero_()

    def _dtype(self, tensor: int) -> torch.dtype:
        return getattr(torch, self._graph.tensors[tensor].dtype)

    def _number(self, tensor: int) -> torch.Tensor:
        """View of the number of updates, which is small and so always on the device."""
        memory = self._values.at_home(self._graph.storage_of(tensor), 0, 4)
        assert memory is not None, "small values are not moved"
        return memory.view(torch.float32).view(())

    def _byte(self, tensor: int, element: int) -> int:
        view = self._graph.tensors[tensor]
        return (view.offset + element) * DTYPE_BYTES[view.dtype]

    def _fetched(self, tensors: Sequence[int], start: int, count: int, at: int) -> dict[int, tuple[torch.Tensor, bool]]:
        """Bytes of elements of values, where they lie or as copies of whole pages; and whether they are copies.

        Args:
            at: Bytes of the room that are taken already.
        """
        places = dict[int, tuple[torch.Tensor, bool]]()
        for tensor in tensors:
            view = self._graph.tensors[tensor]
            begin, size = self._byte(tensor, start), count * DTYPE_BYTES[view.dtype]
            memory = self._values.at_home(view.storage, begin, begin + size)
            room = memory
            if room is None:
                whole = whole_pages(size)
                room = self._room.bytes_at(at, whole)
                self._values.read_pages(view.storage, begin, room)
                at += whole
            places[tensor] = room, memory is None
        return places


class _Part:
    """Tensors of the update of one part of a parameter.

    Attributes:
        moved: Tensors with as many elements as the part that it changes.
        counts: Whether it adds one to ``step``.
    """

    def __init__(self, graph: StepGraph, op: Op) -> None:
        rule = rule_of(op)
        assert isinstance(rule, ParameterRule)
        self.op = op
        self.param, self.gradient, *others = (next(refs(arg)) for arg in op.args)
        shape = graph.tensors[self.param].shape
        names = len(rule.state_specs(shape))
        self.states, self.step = others[:names], others[names] if rule.counts else None
        named = dict(op.kwargs)
        self.master = next(refs(named["master"])) if "master" in named else None
        self.counts = bool(named.get("first", True))
        self.moved = [self.param, *self.states, *([] if self.master is None else [self.master])]
        self.elements = math.prod(shape)


def _clear(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.zero_()


class _Settled:
    """Waits for a lane of a device, which may run behind the host, and brings small tensors to host memory.

    Attributes:
        lane: Lane on which updates are made up for; that of computing, once a router's action is bound.
    """

    def __init__(self, device: DeviceDriver) -> None:
        self._device, self._memory = device, ExitStack()
        self._host = device.lane("experts", blocking=True)  # whose thread waits for marks
        self.lane: Lane = self._host
        self._mark: Mark | None = None

    def on_host(self, run: Call, tensor: torch.Tensor, lane: Lane) -> Callable[[], torch.Tensor]:
        """Make the call that issues ``run`` to a lane, waits for it, and gives a tensor that it made in host memory."""
        self.lane, self._mark = lane, self._mark or lane.mark()
        issue = lane.bound(run)
        if self._mark is None:

            def ran() -> torch.Tensor:
                issue()
                return tensor

            return ran
        size = tensor.numel() * tensor.element_size()
        memory = self._device.host(size)
        self._memory.callback(memory.close)
        there = memory.bytes_at(0, size).view(tensor.dtype).view(tensor.shape)
        copy = lane.bound(partial(there.copy_, tensor, non_blocking=True))

        def brought() -> torch.Tensor:
            issue()
            copy()
            self.wait()
            return there

        return brought

    def wait(self) -> None:
        """Return once all that the lane was given has ended."""
        if self._mark is not None:
            self._mark.record()
            self._host.wait((self._mark,))

    def close(self) -> None:
        """Give the host memory back."""
        self._memory.close()


class _LateCopies:
    """Copies what routers chose to host memory, while the host goes on. See [Note: counted late].

    Attributes:
        numbers: Host memory for what each router chose, by its number.
    """

    def __init__(self, device: DeviceDriver) -> None:
        self._device, self._memory = device, ExitStack()
        self._lane = device.lane("routing", blocking=False)
        self.numbers: dict[int, torch.Tensor] = {}
        self._copied: dict[int, Mark] = {}

    def noting(self, run: Call, router: int, chosen: torch.Tensor, lane: Lane) -> Call:
        """Make the call that issues ``run`` to a lane, and the copy behind it to another."""
        size = chosen.numel() * chosen.element_size()
        memory = self._device.host(size)
        self._memory.callback(memory.close)
        there = self.numbers[router] = memory.bytes_at(0, size).view(chosen.dtype).view(chosen.shape)
        issue, copy = lane.bound(run), self._lane.bound(partial(there.copy_, chosen, non_blocking=True))
        ran, copied = lane.mark(), self._lane.mark()
        if ran is None or copied is None:  # has ended once it is issued
            return _both(issue, copy)
        self._copied[router] = copied

        def noted() -> None:
            issue()
            ran.record()
            self._lane.wait((ran,))
            copy()
            copied.record()

        return noted

    def marks(self, routers: Iterable[int]) -> list[Mark]:
        """Marks behind the copies of these routers' choices, as far as they were bound and do not end at once."""
        return [self._copied[router] for router in routers if router in self._copied]

    def close(self) -> None:
        """Give the host memory back."""
        self._memory.close()


def _both(first: Call, then: Call) -> Call:
    def run() -> None:
        first()
        then()

    return run


def check_place(*, is_fused: bool, is_spread: bool) -> None:
    """Refuse experts where they cannot be left out: with regions that are one call, on ranks.

    Raises:
        ConfigError: says where.
    """
    if is_fused or is_spread:
        found = "compiled regions" if is_fused else "several ranks"
        raise ConfigError(f"experts: expected one device without compiled regions, got {found}; plan without experts")


def experts_of(
    programs: Sequence[Program],
    values: Values,
    optimizer: ParameterRule,
    device: DeviceDriver,
    asked: bool | Literal["count"] | Mapping[str, Mapping[int, int]],
    tiers: Mapping[str, TierBytes],
) -> Experts:
    """Find the experts of the first of some Programs that take turns over values, which lie where ``values`` says.

    Args:
        asked: "count": leave nothing out, and count what routers choose. A mapping: most tokens for which the host
            computes an expert, by the router's name and the expert.
        tiers: Lower tiers by name.

    Raises:
        ConfigError: it has none.
        ProgramError: an expert cannot be computed on the host by this Program.
    """
    program, *others = programs
    counts_alone = asked == "count"
    guards = find_routers_alone(program) if counts_alone else find_guards(program)
    if not (guards.routers if counts_alone else guards.actions):
        raise ConfigError("experts: expected outputs weighed by a router's weights, found none; plan without experts")
    limits = limits_by_expert(guards, asked) if isinstance(asked, Mapping) else {}
    hosted = find_hosted(program, guards, limits)
    for (router, expert), why in hosted.refused.items():
        name = layer_names(guards.routers)[guards.routers[router].layer]
        raise ProgramError(f"expected expert {expert} of {name} to be computed on the host, but {why}; plan again")
    check_hosted(program, guards, hosted, others)
    return Experts(program, guards, values, optimizer, device, hosted=hosted, tiers=tiers)
