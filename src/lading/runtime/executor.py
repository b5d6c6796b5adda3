"""Executor: does what a Program says, with real tensors, on a device of this machine.

Everything that can be decided before a step is: addresses, views, arguments, kernels, waits. A step then walks lists
of closures: the compute stream on the calling thread, every other stream on a thread of its own, started once. What
differs between devices is behind ``lading.runtime.device``.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from lading.errors import ConfigError, LadingError, ProgramError, StorageError
from lading.ir.action import CALLER
from lading.ir.graph import DTYPE_BYTES, StepGraph, Tensor
from lading.ir.program import COMPUTE_STREAM, LINE_BYTES, Program, slot_bytes
from lading.ir.timeline import Timeline
from lading.memory.layout import DEVICE, home_tiers
from lading.runtime.arena import Arena, view_of
from lading.runtime.binding import Binder, Bound, CallerData, Place, Rates, checked_batches
from lading.runtime.device import CpuDevice, Device
from lading.runtime.fuse import fuse as fuse_regions
from lading.runtime.kernels import AdamWSettings
from lading.runtime.measure import measured_timeline, spread
from lading.runtime.resident import reuse_pages, trim
from lading.runtime.streams import ActionFailed, Clocking, Gate, Jitter, Stopped, run_stream
from lading.runtime.tiers import Tier
from lading.units import MiB

#: Most of a storage that passes between a lower tier and the caller at once.
BOUNCE_BYTES = MiB


class Executor:
    """Runs one Program, step after step. A context manager.

    Every storage holds zeros until it is written; constants hold their values.

    Args:
        program: Verified (``lading.memory.verify``).
        optimizer: AdamW's numbers other than the learning rate; rules for matrices have theirs in the Program.
        folder: Where the disk tier's file goes.
        threads: Compute threads; None leaves torch's setting. Results can depend on it.
        device: Where it runs, for this executor alone; None is the CPU.
        jitter: For tests: called with each action before it runs, on its stream's thread.
        poison: For tests: fill what is freed with NaN.
        fuse: Compile regions (``lading.runtime.fuse``): faster, close to eager's numbers, not equal to the bit.

    Raises:
        StorageError: no room in ``folder``, or another run is using it.
        ProgramError: an action cannot be executed with this torch.
    """

    def __init__(
        self,
        program: Program,
        *,
        optimizer: AdamWSettings,
        folder: Path,
        threads: int | None = None,
        device: Device | None = None,
        jitter: Jitter | None = None,
        poison: bool = False,
        fuse: bool = False,
    ) -> None:
        self.program = program
        self.homes = home_tiers(program)
        self._broken = self._has_run = self._device_failed = False
        self._highest = self._last_peak = 0
        self._device = device or CpuDevice()
        self._rates, self._caller = Rates(), CallerData()
        self._pending = False  # updates of the last step that the next one, or flush, will run
        self._timeline: Timeline | None = None
        with ExitStack() as stack:
            stack.callback(self._device.close)
            _set_threads(stack, threads)
            fused = fuse_regions(program, self._device.kind) if fuse else ()
            trim()  # what the compiler took belongs to the start of the process
            reuse_pages()
            self._open_memory(stack, folder)
            stack.callback(self._drain)
            if poison:
                self._poison_arena()
            place = Place(self._device, self._arena, self.tiers, self._caller)
            binder = Binder(
                program, place, optimizer=optimizer, rates=self._rates, poison=poison, jitter=jitter, fused=fused
            )
            self._bound = self._running = binder.bind()
            count = len(program.actions)
            self._times = Clocking([0.0] * count, [0.0] * count, sample=self._meter.sample)
            self._gate = Gate(len(self._bound.streams))
            self._workers = _Workers(self._bound.streams, self._run_stream)
            stack.callback(self._workers.close)
            self._views = named_tensors(program.graph)
            self._write_constants()
            self._cleanup = stack.pop_all()

    def _open_memory(self, stack: ExitStack, folder: Path) -> None:
        self._meter = self._device.meter()
        stack.callback(self._meter.close)
        self._baseline = self._meter.now_bytes()
        self._arena = self._device.arena(self.program.arena_bytes)
        stack.callback(self._arena.close)
        self._bounce = Arena(BOUNCE_BYTES)
        stack.callback(self._bounce.close)
        self._open_losses(stack)
        self.tiers: dict[str, Tier] = {}
        for name in self.program.slots:
            self.tiers[name] = self._device.tier(name, self.program.tier_bytes(name), folder)
            stack.callback(self.tiers[name].close)
        if not self._meter.exact:
            warnings.warn(
                "the kernel does not let its memory mark be reset: peaks are sampled every 2 ms", stacklevel=4
            )

    def _open_losses(self, stack: ExitStack) -> None:
        """A place in host memory for each loss, which the device fills without the host waiting."""
        graph = self.program.graph
        memory = self._device.host(LINE_BYTES * len(graph.losses))
        stack.callback(memory.close)
        for index, tensor in enumerate(graph.losses):
            dtype = graph.tensors[tensor].dtype
            place = memory.bytes_at(LINE_BYTES * index, DTYPE_BYTES[dtype])
            self._caller.losses.append(place.view(getattr(torch, dtype)).view(graph.tensors[tensor].shape))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads and give all memory and disk space back. May be called twice."""
        self._broken = True
        self._bound.entries.clear()
        self._running = self._bound
        self._cleanup.close()

    def step(self, batches: Sequence[Mapping[str, torch.Tensor]], *, lr: float, matrix_lr: float = 0.0) -> list[float]:
        """Run one training step. Updates that the Program defers wait for the next step, or for ``flush``.

        Args:
            batches: One mapping per micro-batch, from the graph's input names to tensors.
            lr, matrix_lr: Learning rates of this step's updates, by AdamW and by a rule for matrices.
        Returns:
            The losses of each micro-batch, as the graph computes them: ``graph.losses``.
        Raises:
            ConfigError: a batch is not what the step was captured for; nothing has run.
            StorageError: a tier failed. ProgramError: an operation failed. Both name the action, and the values are
                then those of a part of a step: load a checkpoint into a new executor.
        """
        self._check_usable()
        self._caller.batches = self._device.handed(checked_batches(self.program, batches))
        self._rates.now.value, self._rates.now.matrices = lr, matrix_lr
        self._times.samples.clear()
        self._timeline = None
        self._bounce.discard()
        self._meter.reset()
        deferred = _actions_of(self.program, updates=True) if not self._pending else frozenset[int]()
        self._run_streams(self._bound.without(deferred) if deferred else self._bound)
        self._rates.before.value, self._rates.before.matrices = lr, matrix_lr
        self._pending = bool(self.program.graph.deferred)
        self._caller.batches = ()
        self._last_peak = self.observe_peak()
        self._has_run = self._times.enabled
        return [float(loss) for loss in self._caller.losses]

    def flush(self) -> None:
        """Run the updates that the last step left to the next one; without any, do nothing.

        Values are read and written between steps only behind this. It takes the step's moves, not its computation.

        Raises:
            StorageError, ProgramError: as ``step``.
        """
        self._check_usable()
        if not self._pending:
            return
        if self._has_run:
            self.timeline()  # of the step; what follows uses the same clocks
        self._run_streams(self._bound.without(_actions_of(self.program, updates=False)))
        self._pending = False

    def write_storage(self, storage: int, tensor: torch.Tensor) -> None:
        """Set a persistent storage between steps, wherever it lives.

        Args:
            tensor: The parameter, buffer or state in its own shape and dtype, or the raw bytes (uint8, one dim).
        Raises:
            ConfigError: not persistent, or of another shape or dtype.
        """
        self.flush()
        home = self._home(storage)
        source = self._as_bytes(storage, tensor)
        if home == DEVICE:
            self._device_bytes(storage).copy_(source)
            return
        start = dict(self.program.slots[home])[storage]
        for offset in range(0, source.numel(), BOUNCE_BYTES):
            piece = source[offset : offset + BOUNCE_BYTES]
            self._bounce.bytes_at(0, piece.numel()).copy_(piece)
            self.tiers[home].write(start + offset, self._bounce.bytes_at(0, piece.numel()))

    def read_storage(self, storage: int) -> torch.Tensor:
        """A copy of a persistent storage between steps: in the shape of its parameter, buffer or state, else its bytes.

        Raises:
            ConfigError: not persistent.
        """
        self.flush()
        home = self._home(storage)
        result = torch.empty(self.program.graph.storages[storage].size_bytes, dtype=torch.uint8)
        if home == DEVICE:
            result.copy_(self._device_bytes(storage))
        else:
            start = dict(self.program.slots[home])[storage]
            for offset in range(0, result.numel(), BOUNCE_BYTES):
                piece = result[offset : offset + BOUNCE_BYTES]
                self.tiers[home].read(start + offset, self._bounce.bytes_at(0, piece.numel()))
                piece.copy_(self._bounce.bytes_at(0, piece.numel()))
        return view_of(result, self._views[storage]) if storage in self._views else result

    def chunks(self, storage: int) -> Iterator[memoryview]:
        """The bytes of a persistent tensor between steps, in the order of its elements, a few MiB at a time.

        A chunk is valid until the next is asked for.

        Raises:
            ConfigError: not persistent.
        """
        self.flush()
        home, size = self._home(storage), self.program.graph.storages[storage].size_bytes
        view = self._views.get(storage)
        if view is not None and not (view.is_row_major and view.spans(size)):
            whole = self.read_storage(storage).contiguous().flatten().view(torch.uint8)
            yield whole.numpy().data
            return
        for offset in range(0, size, BOUNCE_BYTES):
            count = min(BOUNCE_BYTES, size - offset)
            if home == DEVICE:
                piece = self._device_bytes(storage)[offset : offset + count]
            else:
                start = dict(self.program.slots[home])[storage]
                piece = self._bounce.bytes_at(0, count)
                self.tiers[home].read(start + offset, piece)
            yield piece.cpu().numpy().data

    def timeline(self) -> Timeline:
        """What happened when in the last step.

        Raises:
            ConfigError: no step has completed.
        """
        if self._timeline is None:
            if not self._has_run or self._broken:
                raise ConfigError("expected a completed step, found none; call step() first, with timing on")
            starts, ends = self._device.seconds(self._times.starts), self._device.seconds(self._times.ends)
            for action, before in self._bound.instant:
                starts[action] = ends[action] = ends[before]
            for region in self._bound.regions:
                spread(region, starts, ends)
            self._timeline = measured_timeline(
                self.program,
                starts,
                ends,
                scratch_bytes=self._bound.scratch_bytes,
                resident=tuple((t, max(0, size - self._baseline)) for t, size in self._times.samples),
                peak_bytes=self._last_peak,
            )
        return self._timeline

    @property
    def timing(self) -> bool:
        """Whether steps take the time of each action, which ``timeline`` needs; may be set between steps."""
        return self._times.enabled

    @timing.setter
    def timing(self, enabled: bool) -> None:
        self._times.enabled = enabled

    def observe_peak(self) -> int:
        """Highest memory since the last step began, above what was in use before this executor.

        The resident set on a CPU, what tensors take on a device with memory of its own.

        Called after each step; call it also after work between steps that should count.
        """
        peak = max(0, self._meter.peak_bytes() - self._baseline)
        self._highest = max(self._highest, peak)
        return peak

    def given_back(self, size_bytes: int) -> None:
        """Say that the caller freed memory it had before this executor: measured memory counts from less."""
        self._baseline -= size_bytes

    @property
    def beside_bytes(self) -> int:
        """What the process takes on the device besides what ``observe_peak`` measures: a GPU's context."""
        return self._meter.beside_bytes()

    @property
    def compiled(self) -> tuple[int, int]:
        """How many calls of compiled regions a step makes, and how many functions were compiled for them."""
        regions = self._bound.regions
        return len(regions), len({region.signature for region in regions})

    @property
    def kind(self) -> str:
        """Of the device."""
        return self._device.kind

    @property
    def peak_resident_bytes(self) -> int:
        """Highest memory observed so far, as ``observe_peak`` says."""
        return self._highest

    def _check_usable(self) -> None:
        if self._broken:
            raise ConfigError("this executor is closed or a step of it failed; make a new one and load a checkpoint")

    def _run_streams(self, bound: Bound) -> None:
        """Every stream once; an interrupt on the calling thread, wherever it lands, stops the others too."""
        self._broken = True  # until all is done
        self._running = bound
        self._gate.reset()
        others = [s for s in bound.streams if s != COMPUTE_STREAM]
        self._device.begin()
        try:
            self._workers.start(others)
            if COMPUTE_STREAM in bound.streams:
                self._run_stream(COMPUTE_STREAM)
            self._workers.join(others)
            self._await_device()
        except BaseException as error:
            self._gate.fail(error)
            raise
        if self._gate.failure is not None:
            raise self._named_error(self._gate.failure)
        self._broken = False

    def _await_device(self) -> None:
        """What a device says only now failed in one of the step's actions; which, it does not tell."""
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
        """Nothing is given back that an interrupted step still uses; a device that failed does nothing any more."""
        if not self._device_failed:
            self._device.end()

    def _run_stream(self, name: str) -> None:
        """All of one stream's actions; a failure goes to the gate."""
        index = self._bound.streams.index(name)
        lane, sampling = self._bound.lanes[index], name == COMPUTE_STREAM
        try:
            with torch.inference_mode(), lane.entered():
                run_stream(self._running.entries[index], index, lane, self._gate, self._times, sampling=sampling)
        except Stopped:
            pass
        except BaseException as error:
            self._gate.fail(error)

    def _named_error(self, failure: BaseException) -> BaseException:
        """The failure as one of Lading's errors that names the action."""
        cause = failure.__cause__
        if isinstance(failure, LadingError):
            return failure
        if not isinstance(failure, ActionFailed) or not isinstance(cause, Exception):  # KeyboardInterrupt as it is
            return cause or failure
        action = self.program.actions[failure.action]
        text = f"action {action} ({self.program.label(action)}) failed: {cause}"
        error: LadingError = (
            StorageError(text) if isinstance(cause, OSError) else ProgramError(text, action_id=action.id)
        )
        error.__cause__ = cause
        return error

    def _home(self, storage: int) -> str:
        if storage not in self.homes:
            raise ConfigError(
                f"storage {storage} holds no value between steps; only parameters, buffers, constants and states do"
            )
        return self.homes[storage]

    def _device_bytes(self, storage: int) -> torch.Tensor:
        return self._arena.bytes_at(
            dict(self.program.resident)[storage], self.program.graph.storages[storage].size_bytes
        )

    def _as_bytes(self, storage: int, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes a storage must have; no copy if ``tensor`` lies in memory as the graph wants it."""
        item = self.program.graph.storages[storage]
        given = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if given == ("uint8", (item.size_bytes,)):
            return tensor.detach()
        wanted = self._views.get(storage)
        if wanted is None or given != (wanted.dtype, wanted.shape):
            shape = f"{wanted.dtype} {wanted.shape}" if wanted else f"uint8 ({item.size_bytes},)"
            raise ConfigError(f"expected {item.name!r} as {shape}, got {given[0]} {given[1]}")
        tensor = tensor.detach()
        if tensor.stride() == wanted.stride and wanted.is_dense and wanted.spans(item.size_bytes):
            return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset()).view(torch.uint8)
        copy = torch.zeros(item.size_bytes, dtype=torch.uint8)
        view_of(copy, wanted).copy_(tensor)
        return copy

    def _write_constants(self) -> None:
        for index, storage in enumerate(self.program.graph.storages):
            if storage.data:
                self.write_storage(index, torch.frombuffer(bytearray(storage.data), dtype=torch.uint8))

    def _poison_arena(self) -> None:
        self._arena.bytes_at(0, self._arena.size_bytes).fill_(0xFF)
        for storage, offset in self.program.resident:
            self._arena.bytes_at(offset, slot_bytes(self.program.graph.storages[storage].size_bytes)).zero_()


def _actions_of(program: Program, *, updates: bool) -> frozenset[int]:
    """Actions of the deferred updates, or those of the model and the caller; moves between tiers are of neither."""
    deferred = frozenset(program.graph.deferred)
    return frozenset(
        a.id
        for a in program.actions
        if (a.op is not None and (a.op in deferred) == updates) or (not updates and CALLER in (a.source, a.target))
    )


def named_tensors(graph: StepGraph) -> dict[int, Tensor]:
    """The tensor by which each parameter, buffer and state is known, by storage."""
    ids = [p.tensor for p in graph.parameters] + [t for _, t in graph.buffers]
    ids += [part for state in graph.states for part in state.parts]
    return {graph.tensors[t].storage: graph.tensors[t] for t in ids}


def _set_threads(stack: ExitStack, threads: int | None) -> None:
    if threads is None:
        return
    if threads < 1:
        raise ConfigError(f"expected at least one compute thread, got {threads}")
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(threads)


class _Workers:
    """One thread per stream, which runs the stream once whenever it is started."""

    def __init__(self, streams: Sequence[str], run: Callable[[str], None]) -> None:
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._orders: dict[str, queue.SimpleQueue[bool]] = {
            s: queue.SimpleQueue() for s in streams if s != COMPUTE_STREAM
        }
        self._threads = [
            threading.Thread(target=self._work, args=(name, run), name=f"lading-{name}", daemon=True)
            for name in self._orders
        ]
        for thread in self._threads:
            thread.start()

    def _work(self, name: str, run: Callable[[str], None]) -> None:
        while self._orders[name].get():
            try:
                run(name)
            finally:
                self._done.put(name)

    def start(self, streams: Sequence[str]) -> None:
        """Let each of the streams run once."""
        for name in streams:
            self._orders[name].put(True)

    def join(self, streams: Sequence[str]) -> None:
        """Return when each of them has ended or given up."""
        for _ in streams:
            self._done.get()

    def close(self) -> None:
        """End the threads."""
        for orders in self._orders.values():
            orders.put(False)
        for thread in self._threads:
            thread.join()
