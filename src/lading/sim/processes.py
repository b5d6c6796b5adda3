"""A step of ranks that are processes of one host, running stock PyTorch over gloo.

[Note: processors]
Ranks share the host's processors, so how long a kernel takes depends on how many ranks compute at the moment: all of
them where they do the same, fewer in a pipeline, whose stages wait (``Processes.slowdown``). A collective is the work
of the same processors. FSDP2 and tensor parallel wait for theirs, as nothing else is asked for before; what
DistributedDataParallel reduces beside backward takes from it what the collective keeps busy.

Beside kernels there is what PyTorch does to gradients and parameters: a gradient is added to that of the micro-batch
before (12 bytes an element in fp32); DDP divides it into its bucket (8: csrc/distributed/c10d/reducer.cpp,
mark_variable_ready_dense); FSDP2 copies gathered parameters out of their buffer (8) and gradients into another (8), of
which gloo takes the mean (fsdp/_fully_shard/_fsdp_collectives.py, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lading.cost.kernels import adam_bytes, memory_s, step_s
from lading.errors import ConfigError
from lading.ir.graph import DTYPE_BYTES
from lading.ir.machine import Machine, Processes
from lading.ir.request import Request
from lading.memory.ranks import shards
from lading.program.emit import ListShape, emit
from lading.program.schedules import Schedule, Work, schedule_of
from lading.sim.parts import MEMORY
from lading.sim.phases import Phases
from lading.sim.pipeline import PipelineRun, pipeline_run
from lading.sim.prices import MachinePrices
from lading.sim.rank_engine import RankTimes
from lading.sim.step import Run, Stage, Step, shares_of, stage_of, trained_of

_ADD, _TO_BUCKET, _GATHERED, _REDUCED = 12, 8, 8, 8
#: DistributedDataParallel's ``bucket_cap_mb``.
_BUCKET_BYTES = 25 << 20


def processes_step(request: Request, machine: Machine, segments: Sequence[Phases], runs: Sequence[Run]) -> Step:
    """Simulate a step ([Note: processors]).

    Args:
        segments: Of one rank.
        runs: Of each stage.
    Raises:
        ConfigError: nothing was measured of this host's processes, or ZeRO-1.
    """
    shared, layout = machine.processes, request.layout
    if shared is None:
        raise ConfigError(f"{machine.name}: expected what its processes share; measure it with lading probe --ranks N")
    if layout.bucket_bytes:
        raise ConfigError(f"processes of one host reduce in DistributedDataParallel's own buckets, got {layout}")
    if layout.zero == 1 or layout.offload:
        raise ConfigError(
            f"processes of one host run stock PyTorch: expected zero0, zero2 or zero3 and no offload, got {layout}"
        )
    host = _Host(request, machine, shared, segments)
    if not layout.is_pipeline:
        stage = host.stage(runs[0], layout.devices)
        shares = shares_of(stage, layout.micro_batches, host.beside(runs[0]))
        return Step(sum(shares.values()), shares, (stage,), None, stage.flops * layout.micro_batches)
    return host.pipeline(runs)


@dataclass(frozen=True)
class _Host:
    request: Request
    machine: Machine
    shared: Processes
    segments: Sequence[Phases]

    def prices(self, computing: int) -> MachinePrices:
        return MachinePrices(self.machine, self.request.layout, self.request.stack, computing=computing)

    def stage(self, run: Run, computing: int) -> Stage:
        """A stage's seconds while so many processes compute."""
        return stage_of(run, self.segments, self.prices(computing), self.request.stack)

    def slower(self, computing: int = 0) -> float:
        return self.shared.slower(MEMORY, computing or self.request.layout.devices)

    def moved_s(self, elements: Mapping[str, int], bytes_each: float) -> float:
        """Copies and sums over parameters or gradients."""
        size = sum(elements.values()) * bytes_each
        return memory_s(size, "copy", self.machine.device) * self.slower() if size else 0.0

    def optimizer_s(self, elements: Mapping[str, int]) -> float:
        """AdamW over a rank's part."""
        kept = sum(number / shards(axes, self.request.layout) for axes, number in elements.items())
        return step_s(kept, adam_bytes(self.request.stack), self.machine.device) * self.slower()

    def beside(self, run: Run) -> dict[str, float]:
        """What is beside the kernels of a rank without a pipeline, by cause."""
        layout, stage = self.request.layout, self.stage(run, self.request.layout.devices)
        times = layout.micro_batches
        adds = 0.0 if layout.zero else self.moved_s(stage.trained, _ADD) * (times - 1)
        return {
            "data-parallel communication": self._exchanged(run, times),
            "gradients": adds,
            "optimizer": self.optimizer_s(stage.trained),
            "host": self._hooks_s(run, times),
        }

    def _exchanged(self, run: Run, times: int) -> float:
        layout, prices = self.request.layout, self.prices(0)
        if layout.dp * layout.cp == 1:
            return 0.0
        units = [self.segments[segment].without_tied for segment, count in run for _ in range(count)]
        if layout.zero == 0:
            return self._buckets_s(self.stage(run, 1).trained, prices)
        gathers = [prices.gather_s(u.elements) + self.moved_s(u.elements, _GATHERED) for u in units]
        reduces = [prices.reduce_s(u.trained) + self.moved_s(u.trained, _REDUCED) for u in units]
        again = sum(gathers[:-1]) if layout.zero == 3 else 0.0
        adds = sum(self.moved_s(u.trained, _ADD) for u in units) * (times - 1) / layout.sharding_ranks
        return times * (sum(gathers) + again + sum(reduces)) + adds

    def _buckets_s(self, elements: Mapping[str, int], prices: MachinePrices) -> float:
        """DDP's reductions, of which backward hides what leaves processors idle."""
        width, found = DTYPE_BYTES[self.request.stack.gradient_dtype], 0.0
        for axes, number in elements.items():
            pieces = max(1, round(number * width / _BUCKET_BYTES))
            alone = pieces * prices.reduce_s({axes: number // pieces})
            found += alone * min(1.0, prices.taken("all_reduce", axes))
        return found + self.moved_s(elements, _TO_BUCKET)

    def _hooks_s(self, run: Run, times: int) -> float:
        """The host's work beyond launching kernels."""
        layout, each = self.request.layout, self.shared.overhead_s
        units = sum(count for _, count in run) if layout.zero else 0
        cut = sum(count * _cut_modules(self.segments[s], layout.sp) for s, count in run) if layout.tp > 1 else 0
        seconds = units * each.get("unit", 0.0) + cut * each.get("tensor-parallel", 0.0)
        return times * seconds * self.shared.slower("products", layout.devices)

    def pipeline(self, runs: Sequence[Run]) -> Step:
        """A step of a pipeline whose ranks share the processors."""
        layout, stack = self.request.layout, self.request.stack
        plan = schedule_of(layout)
        group = layout.devices // layout.pp
        at = [[self.stage(run, k * group) for run in runs] for k in range(1, layout.pp + 1)]
        adds = [self.moved_s(stage.trained, _ADD) for stage in at[-1]]
        send_s = self.prices(0).send_s(self.segments[0].sent_bytes)
        forward = [[s.forward.seconds for s in stages] for stages in at]
        backward = [[s.backward_s + add for s, add in zip(stages, adds, strict=True)] for stages in at]
        run = shared_pipeline(plan, forward, backward, send_s)
        held = [[at[-1][stage] for stage in plan.stages_of(rank)] for rank in range(layout.pp)]
        extra = {
            "bubble": run.makespan_s - float(run.busy_s.max()),
            "data-parallel communication": self._ends_s(runs),
            "gradients": max(adds) * layout.micro_batches,
            "optimizer": max(self.optimizer_s(trained_of(own)) for own in held),
            "host": max(self._hooks_s(run, 1) for run in runs) + stack.step_s,
        }
        shares: dict[str, float] = {}
        for stage in held[int(run.busy_s.argmax())]:
            for name, seconds in shares_of(stage, layout.micro_batches, {}).items():
                shares[name] = shares.get(name, 0.0) + seconds
        step_s = run.makespan_s + sum(s for name, s in extra.items() if name not in ("bubble", "gradients"))
        counted = sum(shares.values()) + sum(extra.values())
        scale = (sum(shares.values()) + step_s - counted) / sum(shares.values())  # less where others waited meanwhile
        shares = {name: seconds * scale for name, seconds in shares.items()} | extra
        flops = sum(s.flops for s in at[-1]) * layout.micro_batches
        return Step(step_s, shares, tuple(at[-1]), run, flops)

    def _ends_s(self, runs: Sequence[Run]) -> float:
        """FSDP2 in a pipeline gathers in each stage's first forward and reduces after its last backward."""
        layout, prices = self.request.layout, self.prices(0)
        if layout.dp * layout.cp == 1:
            return 0.0
        gathers, reduces = 0.0, 0.0
        for run in runs:
            units = [self.segments[segment] for segment, count in run for _ in range(count)]
            gathers += sum(prices.gather_s(u.elements) + self.moved_s(u.elements, _GATHERED) for u in units)
            own = sum(prices.reduce_s(u.trained) + self.moved_s(u.trained, _REDUCED) for u in units)
            reduces = max(reduces, own)
        return gathers + reduces


def _cut_modules(segment: Phases, sp: bool) -> int:
    """Modules that work on DTensors: those with a matrix, with sequence parallel also those with vectors (norms)."""
    tensors = segment.segment.tensors
    named = [tensors[t] for t, _ in segment.segment.parameters]
    return len({t.name.rpartition(".")[0] for t in named if sp or len(t.shape) > 1})


def shared_pipeline(
    plan: Schedule, forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]], send_s: float
) -> PipelineRun:
    """A pipeline whose ranks are the slower the more of them compute.

    Args:
        forward, backward: Seconds of each stage while 1, 2, ... pipeline ranks compute.
        send_s: From the end of an action to the arrival of what it made.
    Raises:
        ConfigError: gradients of activations and of weights in actions of their own.
    """
    clock, done = 0.0, dict[tuple[int, int, int], float]()
    left = dict[int, float]()
    starts, ends = ([list[float]() for _ in range(plan.ranks)] for _ in range(2))
    while True:
        waits: list[float] = []
        for rank, order in enumerate(plan.orders):
            if rank in left or len(ends[rank]) == len(order):
                continue
            arrives = _arrives(plan, rank, len(ends[rank]), done, send_s)
            if arrives is not None and arrives <= clock:
                left[rank] = 1.0
                starts[rank].append(clock)
            elif arrives is not None:
                waits.append(arrives - clock)
        if not left and not waits:
            return _run_of(plan, starts, ends, send_s)
        taken = {rank: _taken(plan, rank, len(ends[rank]), (forward, backward), len(left)) for rank in left}
        step = min([*waits, *(left[rank] * seconds for rank, seconds in taken.items())])
        clock += step
        for rank, seconds in taken.items():
            left[rank] -= step / seconds
            if left[rank] <= 1e-12:
                del left[rank]
                work, chunk, micro_batch, _ = plan.orders[rank][len(ends[rank])].tolist()
                done[work, plan.stage(rank, chunk), micro_batch] = clock
                ends[rank].append(clock)


def _run_of(plan: Schedule, starts: list[list[float]], ends: list[list[float]], send_s: float) -> PipelineRun:
    """The run of a pipeline whose actions ran at such times, and whose sends left when they ended."""
    program = emit(ListShape(plan, ((),) * plan.stages, whole_first=False))
    start_s, end_s = ([0.0] * program.bounds[-1] for _ in range(2))
    for rank, actions in enumerate(program.ranks):
        base = program.bounds[rank]
        for row, ((place, _), send) in enumerate(zip(actions.rows, actions.sends, strict=True)):
            start_s[base + place], end_s[base + place] = starts[rank][row], ends[rank][row]
            if send >= 0:
                start_s[base + send], end_s[base + send] = ends[rank][row], ends[rank][row] + send_s
    none = [0.0] * plan.ranks
    return pipeline_run(RankTimes(program, start_s, end_s, none, none, max(end_s)), overlap=True)


def _taken(
    plan: Schedule, rank: int, place: int, seconds: tuple[Sequence[Sequence[float]], ...], computing: int
) -> float:
    work, chunk, _, _ = plan.orders[rank][place].tolist()
    if work not in (Work.FORWARD, Work.BACKWARD):
        raise ConfigError(f"a pipeline of processes runs gpipe, 1f1b and interleaved, got {plan.kind}")
    return max(1e-9, seconds[work][computing - 1][plan.stage(rank, chunk)])


def _arrives(
    plan: Schedule, rank: int, place: int, done: Mapping[tuple[int, int, int], float], send_s: float
) -> float | None:
    """When what a rank's next action takes from other stages is there; None while it is not made."""
    work, chunk, micro_batch, _ = plan.orders[rank][place].tolist()
    stage = plan.stage(rank, chunk)
    before = stage - 1 if work == Work.FORWARD else stage + 1
    if not 0 <= before < plan.stages:
        return 0.0
    made = done.get((work, before, micro_batch))
    return None if made is None else made + (send_s if plan.rank_of(before) != rank else 0.0)
