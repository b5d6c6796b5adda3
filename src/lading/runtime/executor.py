"""The executor: runs a Program step after step, with real tensors, on a device of this machine.

Everything that can be decided before a step is: addresses, views, arguments, kernels, waits. A step then walks lists of
closures: the compute stream on the calling thread, every other stream on a thread of its own, started once. What
differs between devices is behind ``lading.runtime.device``.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from enum import Enum, auto
from functools import partial
from math import hypot
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Literal, Self

import torch

from lading.errors import ConfigError, ProgramError
from lading.ir.graph import Role
from lading.ir.guess import guess_of
from lading.ir.program import COMPUTE_STREAM, LINE_BYTES, Program
from lading.ir.timeline import Timeline
from lading.optim.rule import ParameterRule
from lading.runtime.binding import (
    Binder,
    CallerData,
    Place,
    Rates,
    Ready,
    Reducer,
    actions_beside_forward,
    actions_of,
    checked_batches,
    places_of_results,
)
from lading.runtime.device import CpuDevice, DeviceDriver, Lane, set_threads
from lading.runtime.draws import Draws
from lading.runtime.fence import Fence
from lading.runtime.fuse import Fused
from lading.runtime.fuse import fuse as fuse_regions
from lading.runtime.interrupts import HeldInterrupts
from lading.runtime.kernel_memory import largest_product
from lading.runtime.measuring import OperationPeaks, measured_timeline, spread
from lading.runtime.replays import Experts, check_place, experts_of
from lading.runtime.resident import Ceiling, give_back, reuse_pages, take_gaps, trim
from lading.runtime.salvage import bring_home, ended_actions, salvage
from lading.runtime.speculation import Speculation
from lading.runtime.streams import Clocking, Gate, Jitter, Stopped, Workers, named_error, run_stream
from lading.runtime.tiers import TierBytes
from lading.runtime.update_kernels import Rate
from lading.runtime.values import Values


class _ExecutorState(Enum):
    """Life cycle of an executor, by what its memory holds.

    IDLE: every value where it is between steps. RUNNING: values anywhere. CLOSED: nothing.
    """

    IDLE = auto()
    RUNNING = auto()
    CLOSED = auto()


class Executor:
    """Runs one Program, or several over the same values, step after step. A context manager.

    Every storage holds zeros until it is written; constants hold their values. A step that stops half-way leaves every
    value where it is between steps, as far as that value still exists: ``changed`` and ``lost`` say which values are
    not those of the last whole step.

    Args:
        program: A Program that ``lading.memory.verify`` has proven.
        optimizer: Settings of what moves parameters, its learning rate aside; rules for matrices have theirs in the
            Program.
        folder: Folder for the file of a tier that names no location.
        threads: Compute threads; None leaves torch's setting. Results can depend on it.
        device: Device to run on, for this executor alone, which closes it; None is the CPU.
        jitter, poison: For tests: called with each action before it runs, on its thread; NaN fills what is freed.
        fuse: Compile regions (``lading.runtime.fuse``): faster, close to eager's numbers, not equal to the bit.
        replicas: Other ranks, where the Program reduces gradients over them.
        others: Further Programs, which find the values where the first has them between steps (``lading.ir.together``).
        draws: For each Program its random numbers, where it is of several ranks and draws some.
        experts: Leave out of the first Program what experts without tokens make needless, as ``experts_of`` is asked.

    Attributes:
        completed: Number of steps that came to their end.
        ran_step: Whether what ran last, or was to, is a whole step.

    Raises:
        StorageError: no room in ``folder``, or another run is using it.
        ProgramError: an action cannot be executed with this torch.
        ConfigError: ``experts`` of a step without any, or where they cannot be left out.
    """

    completed = 0
    ran_step = _has_run = _device_failed = False
    experts: Experts | None = None  # of the first Program, where it leaves some out or counts them
    speculation: Speculation | None = None  # of Programs whose updates do not wait for the norm of all gradients
    _state = _ExecutorState.IDLE
    _highest = _last_peak = _caller_bytes = 0
    _norms: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] | None = None
    _timeline: Timeline | None = None
    _began_s = 0.0  # where that timeline begins
    _moments: tuple[list[float], list[float]] | None = None  # of the last step, where its clocks run again
    _peaks: OperationPeaks | None = None  # of a step that looks at its operations
    _left_bytes: int | None = None  # in use at the end of the last step, until anything is done between
    _fence: Fence | None = None  # of values that are copied while steps go on
    _lane: Lane | None = None  # on which they are

    def __init__(  # noqa: PLR0913  all that a run is made of
        self,
        program: Program,
        *,
        optimizer: ParameterRule,
        folder: Path,
        threads: int | None = None,
        device: DeviceDriver | None = None,
        jitter: Jitter | None = None,
        poison: bool = False,
        fuse: bool = False,
        replicas: Reducer | None = None,
        others: Sequence[Program] = (),
        draws: Sequence[Draws | None] = (),
        experts: bool | Literal["count"] | Mapping[str, Mapping[int, int]] = False,
    ) -> None:
        self.program = program
        self._programs = (program, *others)
        self._device = device or CpuDevice()
        self._rates = Rates()
        #: Deferred operations that neither the next step nor flush will run: they have been run, or never were due.
        self._caught_up = frozenset(program.graph.deferred)
        with ExitStack() as stack:
            stack.callback(self._device.close)
            set_threads(stack, threads)
            fused = [fuse_regions(shaped, self._device.kind) if fuse else () for shaped in self._programs]
            trim()  # what the compiler took belongs to the start of the process
            reuse_pages()
            stack.callback(take_gaps())
            self._open_memory(stack, folder)
            stack.callback(self._drain)
            if poison:
                self._values.poison()
            if experts:
                check_place(is_fused=fuse, is_spread=replicas is not None)
                step_experts = experts_of(self._programs, self._values, optimizer, self._device, experts, self.tiers)
                self.experts = stack.enter_context(closing(step_experts))
            self._place = Place(self._device, self._arena, self.tiers, CallerData(), replicas)
            self._binder = partial(
                Binder, optimizer=optimizer, rates=self._rates, poison=poison, jitter=jitter,
                make_room=self._ceiling and self._ceiling.make_room,
            )  # fmt: skip
            self._bind_programs(stack, fused, draws or [None] * len(fused))
            if self._ceiling is not None and not (poison or jitter):
                self._pack_largest()
            self._values.write_constants(self.homes)
            self._cleanup = stack.pop_all()

    def _bind_programs(self, stack: ExitStack, fused: Sequence[Sequence[Fused]], draws: Sequence[Draws | None]) -> None:
        """Bind every Program to the memory that all share, and start a thread for each stream beside computing."""
        rows = enumerate(zip(self._programs, fused, draws, strict=True))
        self._shapes = [self._ready(shape, number, drawn, regions) for number, (shape, regions, drawn) in rows]
        self._take_up(self._shapes[0])
        count = max(len(program.actions) for program in self._programs)
        self._times = Clocking([0.0] * count, [0.0] * count, sample=self._meter.sample)
        beside = dict.fromkeys(s for shape in self._shapes for s in shape.bound.streams if s != COMPUTE_STREAM)
        self._workers = Workers([*beside], self._run_stream)
        stack.callback(self._workers.close)

    def _open_memory(self, stack: ExitStack, folder: Path) -> None:
        self._meter = self._device.meter()
        stack.callback(self._meter.close)
        self._baseline = self._meter.now_bytes()
        arena_bytes = max(program.arena_bytes for program in self._programs)
        planned = arena_bytes + max(program.overhead_bytes + program.workspace_bytes for program in self._programs)
        is_predicted = self._device.kind == "cpu" and self.program.overhead_bytes > 0
        ceiling = Ceiling(self._meter.now_bytes, self._baseline + planned, lambda: not self.completed)
        self._ceiling = ceiling if is_predicted else None
        self._arena = self._device.arena(arena_bytes)
        stack.callback(self._arena.close)
        self._scalars = self._device.host(LINE_BYTES * max(len(program.graph.results) for program in self._programs))
        stack.callback(self._scalars.close)
        self.tiers: dict[str, TierBytes] = {}
        for tier in self.program.tiers:
            if size := max(program.tier_bytes(tier.name) for program in self._programs):
                self.tiers[tier.name] = self._device.tier(tier, size, folder)
                stack.callback(self.tiers[tier.name].close)
        if guess_of(self.program.graph) is not None:
            self.speculation = Speculation(self.program, self._arena, self.tiers, self._device.kind)
            self.tiers = {**self.speculation.tiers}
        self._values = Values(self.program, self._arena, self.tiers)
        stack.callback(self._values.close)
        if not self._meter.exact:
            warnings.warn(
                "the kernel does not let its memory mark be reset: peaks are sampled every 2 ms", stacklevel=4
            )

    def _pack_largest(self) -> None:
        """Run the product with the largest operand on zeros, so that BLAS has buffers that fit all others."""
        product, compute = largest_product(self.program.graph), self._bound.streams.index(COMPUTE_STREAM)
        action = next((a.id for a in self.program.actions if product is not None and a.op == product), None)
        with torch.inference_mode():
            for entry in self._bound.entries[compute]:
                if entry.action == action:
                    entry.run()
        self._device.end()  # before values come to lie where it wrote

    def _ready(self, program: Program, plan: int, draws: Draws | None, fused: Sequence[Fused] = ()) -> Ready:
        """Bind a Program to the memory that all share."""
        caller = CallerData(results=places_of_results(program.graph, self._scalars))
        place = dataclasses.replace(self._place, caller=caller, draws=draws)
        experts = self.experts if program is self._programs[0] else None
        bound = self._binder(program, place, fused=fused, experts=experts, speculation=self.speculation).bind()
        constants = self._constants(program) if plan else ()
        return Ready(program, bound, Gate(len(bound.streams)), plan, caller, constants, draws)

    def _make_room_for_outputs(self) -> None:
        """Make a tensor for each output of the step that runs next, which the caller may keep."""
        graph, places = self.program.graph, self._caller.results
        for index, tensor in enumerate(graph.losses):
            if shape := graph.tensors[tensor].shape:
                places[index] = torch.empty(shape, dtype=places[index].dtype)

    def _constants(self, program: Program) -> tuple[tuple[int, bytes], ...]:
        """Constants that a Program has beside those of the first."""
        storages = program.graph.storages
        return tuple((at, data) for s, at in program.resident if s not in self.homes and (data := storages[s].data))

    def _take_up(self, ready: Ready) -> None:
        """Switch to a Program: it is the one that runs next."""
        self._now, self.program, self._bound, self._gate = ready, ready.program, ready.bound, ready.gate
        self._running, self._caller = ready.bound, ready.caller

    def _change_to(self, ready: Ready) -> None:
        """Go on with another Program; where its plan is another, updates that wait are made and its constants come."""
        if ready.plan != self._now.plan:
            self.flush()
            self._caught_up = frozenset(ready.program.graph.deferred)
            for offset, data in ready.constants:
                self._arena.bytes_at(offset, len(data)).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._take_up(ready)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads and give all memory and disk space back. May be called twice."""
        self._state = _ExecutorState.CLOSED
        if self._fence is not None:
            self._fence.wait()
        for ready in self._shapes:
            ready.bound.entries.clear()
        self._running = self._bound
        self._cleanup.close()

    def add_shape(self, program: Program, of: int = 0, draws: Draws | None = None) -> int:
        """Bind the Program of another shape of a step to the same memory; returns its number, for ``step``.

        Args:
            program: From ``lading.memory.restore.program_of_shape``, so of the same actions and addresses.
            of: Number of the Program that has these; 0 for the first, 1 for the first of the others.
            draws: Its random numbers, as those of the others.
        """
        self._shapes.append(self._ready(program, of, draws))
        return len(self._shapes) - 1

    def step(
        self,
        batches: Sequence[Mapping[str, torch.Tensor]],
        *,
        lr: float,
        matrix_lr: float = 0.0,
        rules: Mapping[int, ParameterRule] = MappingProxyType({}),
        shape: int = 0,
        norms: bool = False,
    ) -> list[float]:
        """Run one training step. Updates that the Program defers wait for the next step, or for ``flush``.

        Args:
            batches: One mapping per micro-batch, from the graph's input names to tensors.
            lr, matrix_lr: Learning rates of this step's updates, by the optimizer and by a rule for matrices.
            rules: Rule of this step by the parameter's storage, its learning rate included; others have ``lr``.
            shape: Number of the Program: 0 for the first, then the others, then those of ``add_shape``.
            norms: Take norms of the gradients, for ``gradient_norms``.
        Returns:
            The scalars of each micro-batch in turn, in the order of ``graph.losses``; see ``take_outputs``, too.
        Raises:
            ConfigError: a batch is not what the step was captured for, or an earlier step left no values to go on from;
                nothing has run.
            StorageError: a tier failed. ProgramError: an operation failed. Both name the action. Where the step had
                changed no parameter and no state by then, it has not happened: the next one may be run.
        """
        self._prepare(batches, shape)
        self._norms = {} if norms else None
        self._rates.now.take(Rate(lr, matrix_lr, rules, self._norms))
        run = partial(self._run, self._skipped(), self._end_step)
        return run() if self.speculation is None else self.speculation.run(run, self._values, self._norms)

    def gradient_norms(self) -> dict[int, tuple[float, float]]:
        """Norms (L1, L2) of the gradients that the last step moved parameters by, by the parameter's storage.

        Empty where that step did not take them.
        """
        self.flush()
        return {
            storage: (sum(float(l1) for l1, _ in parts), hypot(*(float(l2) for _, l2 in parts)))
            for storage, parts in (self._norms or {}).items()
        }

    def forward(self, batches: Sequence[Mapping[str, torch.Tensor]], *, shape: int = 0) -> list[float]:
        """Run the step's forward and loss alone; arguments, losses and errors are those of ``step``.

        What lies in lower tiers moves as in a step. Updates that wait for the next step are made.
        """
        self._prepare(batches, shape)
        return self._run(self._skipped() | actions_beside_forward(self.program), self._end_flush)

    def _prepare(self, batches: Sequence[Mapping[str, torch.Tensor]], shape: int) -> None:
        self._check_idle()
        if not self.is_whole:
            raise ConfigError(
                "a step failed after it had begun to change values; write them again, or load a checkpoint"
            )
        ready = self._shapes[shape]
        batches = self._device.handed(checked_batches(ready.program, batches))
        if self.experts is not None and (ready is not self._now or self.experts.is_far_behind):
            self.flush()  # other Programs run whole, on values that are up to date
        if ready is not self._now:
            self._change_to(ready)
        if self.experts is not None:
            self.experts.begin()
        self._caller.batches = batches

    def _run(self, skipped: frozenset[int], end: Callable[[], None]) -> list[float]:
        """Run the streams but for some actions; returns the scalars of ``graph.losses``."""
        self._times.samples.clear()
        self._timeline, self._moments, self._has_run, self.ran_step = None, None, False, end == self._end_step
        self._values.discard()
        if not self.completed:
            give_back()  # what setting the values has freed
        self._leave_to_caller()
        self._make_room_for_outputs()
        self._meter.reset()
        if self._now.draws is not None:
            self._now.draws.begin()
        self._run_streams(skipped, end)
        if self._now.draws is not None:
            self._now.draws.end()
        self._last_peak = self.observe_peak()
        self._left_bytes = self._meter.now_bytes()
        self._has_run = self._times.enabled
        return [float(result) for result in self._caller.results[: len(self.program.graph.losses)] if not result.dim()]

    def take_outputs(self) -> list[torch.Tensor]:
        """Outputs of each micro-batch of the last step in turn, which are the caller's from now on."""
        places, outputs = self._caller.results, list[torch.Tensor]()
        for index, place in enumerate(places):
            if place.dim():
                outputs.append(place)
                places[index] = place.new_empty(0)
        if self._left_bytes is not None and self._device.kind == "cpu":
            self._left_bytes -= sum(output.nbytes for output in outputs)  # what of them stays is the caller's
        return outputs

    @property
    def gradient_norm(self) -> float | None:
        """Norm of all gradients of the last step together, before they were clipped; None where they are not."""
        return None if self.program.graph.gradient_norm is None else float(self._caller.results[-1])

    def _leave_to_caller(self) -> None:
        """Move the zero of the memory count by what the caller took, or freed again, since the last step ended.

        Does nothing where something of the executor's own ran in between.
        """
        if self._left_bytes is None:
            return
        change = max(self._meter.now_bytes() - self._left_bytes, -self._caller_bytes)
        self._caller_bytes += change
        self._left_bytes = None
        self.given_back(-change)

    def _end_step(self) -> None:
        """Count a whole step: no value is half changed, and deferred updates wait, with the rates of this step."""
        if self.speculation is not None and not self.speculation.settle(self._values):
            return
        self.completed += 1
        if self._routing is not None:
            self._routing.end_step(self._rates.now, self.gradient_norm, self._norms)
        self._rates.before.take(self._rates.now)
        self._caught_up = frozenset()
        self._values.changed = {}
        self._caller.batches = ()

    def flush(self) -> None:
        """Run the updates that the last step left to the next one; without any, do nothing.

        Everything that reads or writes values between steps calls this first. It takes the time of the step's moves
        between tiers, not of its computation.

        Raises:
            StorageError, ProgramError: as ``step``; updates that have not run still wait.
        """
        self._check_idle()
        if self._pending:
            self._run_pending()
        if self.experts is not None and self.experts.is_behind:
            self._left_bytes = None
            self.experts.replay_all()

    def _run_pending(self) -> None:
        if self.experts is not None:
            self.experts.begin()
        if self._has_run and self._moments is None:
            self._moments = self._moments_s()  # of the step; what follows uses the same clocks
        self._left_bytes = None
        enabled, self._times.enabled = self._times.enabled, False
        try:
            self._run_streams(self._skipped() | actions_of(self.program, updates=False), self._end_flush)
        finally:
            self._times.enabled = enabled

    def _end_flush(self) -> None:
        self._caught_up = frozenset(self.program.graph.deferred)

    @property
    def _routing(self) -> Experts | None:
        """Experts that the Program that runs now leaves out; None where it runs whole."""
        return self.experts if self.program is self._programs[0] else None

    @property
    def _pending(self) -> bool:
        """Whether updates of the last step are left to the next one, or to flush."""
        return len(self._caught_up) < len(self.program.graph.deferred)

    def _skipped(self) -> frozenset[int]:
        """Actions of deferred updates that are not to be run."""
        return (
            frozenset(a.id for a in self.program.actions if a.op in self._caught_up) if self._caught_up else frozenset()
        )

    @property
    def is_running(self) -> bool:
        """Whether a step, or a flush, is under way."""
        return self._state is _ExecutorState.RUNNING

    @property
    def is_closed(self) -> bool:
        """Whether the executor was closed, and all memory and disk space given back."""
        return self._state is _ExecutorState.CLOSED

    @property
    def homes(self) -> Mapping[int, str]:
        """Tier in which each persistent storage lies between steps."""
        return self._values.homes

    @property
    def changed(self) -> Mapping[int, tuple[int, int]]:
        """Count changes after a step that stopped: by storage, (those that its value has, those of a whole step)."""
        return self._values.changed

    @property
    def lost(self) -> frozenset[int]:
        """Storages whose value went with a step that stopped; writing one brings it back."""
        return self._values.lost

    @property
    def is_whole(self) -> bool:
        """Whether parameters and states are those of the last step that came to its end.

        Buffers may then hold changes of a step that stopped, as in plain PyTorch after a forward that raises.
        """
        storages = self.program.graph.storages
        return not self.lost and all(storages[s].role is Role.BUFFER for s in self.changed)

    def stop(self, error: BaseException) -> None:
        """Make the running step raise ``error`` at its next actions. For handlers of signals."""
        if self._state is _ExecutorState.RUNNING:
            self._gate.fail(error)

    def write_storage(self, storage: int, tensor: torch.Tensor) -> None:
        """Set a persistent storage between steps, wherever it lives.

        Args:
            tensor: The parameter, buffer or state in its own shape and dtype, or the raw bytes (uint8, one dim).
        Raises:
            ConfigError: not persistent, or of another shape or dtype.
        """
        self._before_writing()
        if self._ceiling is not None:
            self._ceiling.make_room(self.program.graph.storages[storage].size_bytes)
        self._values.write(storage, tensor)

    def write_part(self, storage: int, start: int, part: torch.Tensor, *, anew: bool = False) -> None:
        """Set the bytes of a persistent storage from byte ``start`` on between steps: ``part`` (uint8, one dim).

        Args:
            anew: Whether all other bytes are set, too, so that the value may have been lost.
        Raises:
            ConfigError: not persistent. StorageError: lost, or a tier failed.
        """
        self._before_writing()
        if self._ceiling is not None:
            self._ceiling.make_room(part.numel())
        self._values.write_part(storage, start, part, anew=anew)

    def takes_chunks(self, storage: int) -> bool:
        """Whether a storage's bytes lie in the order of its tensor's elements, so that ``write_chunks`` can set it."""
        return self._values.takes_chunks(storage)

    def write_chunks(self, storages: Sequence[int], chunks: Iterable[memoryview]) -> None:
        """Set persistent storages between steps from bytes in the order of their elements, 1 MiB at a time.

        Args:
            storages: Storages to fill, one after the other; ``takes_chunks`` is true of each.
            chunks: Bytes of all of them, in any cuts.
        Raises:
            ConfigError: not persistent, or not as many bytes; some may have been written.
        """
        self._before_writing()
        self._values.write_chunks(storages, chunks)

    def _before_writing(self) -> None:
        """Come to the state between steps in which values may be set."""
        self.flush()
        self._left_bytes = None
        if self._fence is not None:
            self._fence.wait()
        if self.speculation is not None:
            self.speculation.written()

    def can_stage(self, storage: int) -> bool:
        """Whether ``stage`` copies a storage: its bytes are its tensor's elements in order, in memory."""
        return self.takes_chunks(storage) and self._values.is_in_memory(storage)

    def stage(self, rooms: Mapping[int, Sequence[torch.Tensor]], fresh_bytes: int = 0) -> Fence:
        """Let values be copied into host memory while steps go on; whoever calls this runs the fence it returns.

        Args:
            rooms: Places for each storage's bytes, as uint8; ``can_stage`` is true of each storage.
            fresh_bytes: Bytes of this process's memory that are used for the first time.
        Raises:
            ConfigError, StorageError: as ``flush``; or a value was lost.
        """
        self._before_writing()
        if self._ceiling is not None:
            self._ceiling.limit_bytes += fresh_bytes
        self._lane = self._lane or self._device.lane("staging", blocking=True)
        soon = dict.fromkeys(storage for written in self._now.writes.values() for storage in sorted(written))
        order = dict.fromkeys([*(storage for storage in soon if storage in rooms), *rooms])
        copies = {storage: partial(self._values.copy_out, storage, rooms[storage]) for storage in order}
        self._fence = Fence(copies, self._lane)
        return self._fence

    def read_storage(self, storage: int) -> torch.Tensor:
        """Copy a persistent storage between steps: in the shape of its parameter, buffer or state, else its bytes.

        Raises:
            ConfigError: not persistent. StorageError: lost, or a tier failed.
        """
        self.flush()
        return self._values.read(storage)

    def read_part(self, storage: int, start: int, room: torch.Tensor) -> None:
        """Fill ``room`` (uint8, one dim) with the bytes of a storage from ``start`` on; errors as ``read_storage``."""
        self.flush()
        self._values.read_part(storage, start, room)

    def chunks(self, storage: int) -> Iterator[memoryview]:
        """Read the bytes of a persistent tensor between steps, in the order of its elements, a few MiB at a time.

        A chunk is valid until the next. ConfigError: not persistent. StorageError: lost, or a tier failed.
        """
        self.flush()
        yield from self._values.chunks(storage)

    def timeline(self) -> Timeline:
        """Measured Timeline of the last step: when each action ran, and memory over time.

        Raises:
            ConfigError: no step has completed.
        """
        if self._timeline is None:
            if not self._has_run or self._state is not _ExecutorState.IDLE:
                raise ConfigError("expected a completed step, found none; call step() first, with timing on")
            starts, ends = self._moments or self._moments_s()
            for action, before in self._bound.instant:
                starts[action] = ends[action] = ends[before]
            for region in self._bound.regions:
                spread(region, starts, ends)
            self._began_s = min((starts[action.id] for action in self.program.actions), default=0.0)
            self._timeline = measured_timeline(
                self.program,
                starts,
                ends,
                began_s=self._began_s,
                scratch_bytes=self._bound.scratch_bytes,
                resident=tuple((t, max(0, size - self._baseline)) for t, size in self._times.samples),
                peak_bytes=self._last_peak,
            )
        return self._timeline

    def _moments_s(self) -> tuple[list[float], list[float]]:
        """Start and end of each action of the last step, in seconds by action id."""
        return self._device.seconds(self._times.starts), self._device.seconds(self._times.ends)

    @property
    def began_s(self) -> float:
        """Moment at which the timeline of the last step begins, in seconds of the host's clock; as ``timeline``."""
        self.timeline()
        return self._began_s

    def computing_s(self) -> float:
        """Seconds in which the compute stream ran actions in the last step; 0.0 where they were not timed."""
        if not self._has_run or COMPUTE_STREAM not in self._running.streams:
            return 0.0
        starts, ends = self._moments or self._moments_s()
        actions = self.program.actions
        queue = self._running.entries[self._running.streams.index(COMPUTE_STREAM)]
        computing = (item.action for item in queue if actions[item.action].stream == COMPUTE_STREAM)
        return sum(ends[action] - starts[action] for action in computing)

    @property
    def timing(self) -> bool:
        """Whether steps take the time of each action, which ``timeline`` needs; may be set between steps."""
        return self._times.enabled

    @timing.setter
    def timing(self, enabled: bool) -> None:
        self._times.enabled = enabled

    def observe_peak(self) -> int:
        """Highest memory in bytes since the last step began, above what was in use before this executor.

        On a CPU this is the resident set; on a device with memory of its own, what tensors take there. A step calls it
        at its end; call it again after work between steps that should count.
        """
        highest = max(self._meter.peak_bytes(), self._peaks.peak_bytes if self._peaks is not None else 0)
        peak = max(0, highest - self._baseline)
        self._highest = max(self._highest, peak)
        return peak

    @property
    def step_peak_bytes(self) -> int:
        """Highest memory in bytes while the last step ran, counted as by ``observe_peak``."""
        return self._last_peak

    def reset_peak(self) -> None:
        """Forget the highest memory since the last step began: part of it was the caller's."""
        self._meter.reset()

    def now_bytes(self) -> int:
        """Memory of the device in use now, in bytes."""
        return self._meter.now_bytes()

    def excess_cause(self) -> str:
        """Say what took more memory than the plan allows for, if the last step looked; "" if it did not.

        The next step then looks at every operation, on a CPU; so ``step`` and this are called in turn.
        """
        cause = "" if self._peaks is None else self._peaks.cause(self.program, self._baseline)
        looks = self._peaks is None and self._device.kind == "cpu"
        self._peaks = OperationPeaks(self._meter) if looks else None
        return cause

    def given_back(self, size_bytes: int) -> None:
        """Count memory from ``size_bytes`` less: the caller freed that much of what it had before this executor."""
        self._baseline -= size_bytes
        if self._ceiling is not None:
            self._ceiling.limit_bytes -= size_bytes

    @property
    def base_bytes(self) -> int:
        """Memory of the device in bytes that was in use before this executor: ``peak_resident_bytes`` comes on top."""
        return self._baseline

    @property
    def beside_bytes(self) -> int:
        """Bytes on the device that ``observe_peak`` does not measure: a GPU's context and code."""
        return self._meter.beside_bytes()

    @property
    def compiled(self) -> tuple[int, int]:
        """Number of calls of compiled regions that a step makes, and number of functions compiled for them."""
        return len(self._bound.regions), len({region.signature for region in self._bound.regions})

    @property
    def kind(self) -> str:
        """Kind of the device, as ``lading.ir.machine.Device.kind``."""
        return self._device.kind

    @property
    def peak_resident_bytes(self) -> int:
        """Highest memory in bytes of the executor's life so far, as ``observe_peak`` counts it."""
        return self._highest

    def _check_idle(self) -> None:
        if self._state is _ExecutorState.CLOSED:
            raise ConfigError("this Trainer is closed, and its model has the values; make another to go on")
        if self._state is _ExecutorState.RUNNING:
            raise ConfigError("expected no step under way, found one; wait for its end")

    def _run_streams(self, skipped: frozenset[int], end: Callable[[], None]) -> None:
        """Run every stream once, then ``end`` if all came to their end; none still runs when this returns or raises."""
        self._state = _ExecutorState.RUNNING
        self._running = self._bound.without(skipped) if skipped else self._bound
        if self._fence is not None and not self._fence.is_open:
            self._running = self._running.fenced(self._now.writes, self._fence.wait)
            self._values.copied = self._fence.wait
        if self._peaks is not None:
            self._running = self._running.watched(COMPUTE_STREAM, self._peaks.watched)
        self._gate.reset()
        others = [s for s in self._running.streams if s != COMPUTE_STREAM]
        interrupt: BaseException | None = None
        try:
            for action, post in self._bound.posts:
                if action not in skipped:
                    post()
            self._device.begin()
            self._workers.start(others)
            if COMPUTE_STREAM in self._running.streams:
                self._run_stream(COMPUTE_STREAM)
            self._workers.join(others)
            self._await_device()
        except BaseException as error:
            interrupt = error
            self._gate.fail(error)
        if self._gate.failure is None:
            end()
            self._state = _ExecutorState.IDLE
            return
        with HeldInterrupts():
            self._workers.settle()
            ends = zip(self._gate.reached, self._running.entries, strict=True)
            if not self._device_failed and all(far is not None and far.ended == len(queue) for far, queue in ends):
                end()
            else:
                self._salvage(skipped if self._routing is None else skipped | self._routing.left_out())
            self._state = _ExecutorState.IDLE
        raise interrupt or named_error(self.program, self._gate.failure)

    def _salvage(self, skipped: frozenset[int]) -> None:
        """Bring every value that still exists after a step that stopped to where it is between steps."""
        graph, values = self.program.graph, self._values
        self._caller.batches, reached = (), [far for far in self._gate.reached if far is not None]
        if self._device_failed or len(reached) < len(self._gate.reached):
            values.changed, values.lost, self._caught_up = {}, frozenset(self.homes), frozenset(graph.deferred)
            return
        self._drain()
        if self._fence is not None:
            self._fence.wait()
        guess, homes = self.speculation, {s: tier for s, tier in self.homes.items() if s in graph.persistent}
        if guess is not None:
            homes, skipped = guess.unguessed(homes), skipped | guess.left_out(self.program)
        salvaged = salvage(self.program, homes, self._running, reached, skipped)
        salvaged = bring_home(self.program, homes, salvaged, values.copy)
        values.changed, values.lost, self._caught_up = salvaged.changed, salvaged.lost, salvaged.caught_up
        if self._routing is not None and self._routing.hosting is not None:
            self._routing.hosting.account()
        values.write_constants(values.lost)
        if guess is not None:
            guess.rewind(values, ended_actions(self._running, reached))

    def _await_device(self) -> None:
        """Wait for the device to end a step; raise what only now failed there, which no longer tells its action."""
        try:
            self._device.end()
        except Exception as error:
            self._device_failed = True
            failure = ProgramError(
                f"an operation of the step failed on the device, which runs behind the host: {error}"
            )
            failure.__cause__ = error
            self._gate.fail(failure)

    def _drain(self) -> None:
        """Wait until an interrupted step uses nothing any more; a device that failed is not waited for."""
        if not self._device_failed:
            self._device.end()

    def _run_stream(self, name: str) -> None:
        """Run all of one stream's actions; a failure goes to the gate, which stops the other streams."""
        index = self._bound.streams.index(name)
        lane, sampling = self._bound.lanes[index], name == COMPUTE_STREAM
        try:
            with torch.inference_mode(), lane.entered():
                run_stream(self._running.entries[index], index, lane, self._gate, self._times, sampling=sampling)
        except Stopped:
            pass
        except BaseException as error:
            self._gate.fail(error)
