"""Spreading: a model by name over the ranks of one host that was measured, as a run that these ranks train.

Layouts of a cluster are searched by closed forms and simulated; what ranks of a host run is planned, so the search is
over plans. Every layout that a run may have is timed as if all of it stayed in memory; then they are planned within the
budget, the fastest first, until the next one could not be faster even if all of it stayed in memory.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from lading.config import CheckpointConfig, MemoryConfig, Optimization, RunConfig
from lading.errors import ConfigError, PlanInfeasible
from lading.fit import precision_for, run_of_model, with_sizes
from lading.grouping import Matrices
from lading.ir.action import DEVICE
from lading.ir.layout import Layout
from lading.ir.machine import Machine
from lading.ir.reporting import SILENT, PlanProgress
from lading.ir.request import Request
from lading.optim import registry
from lading.prepare import check_spread_layout, plan_run, run_in_memory
from lading.run import CapturedRun, Prepared, capture_run, sharing_batches, sharing_processors
from lading.units import format_bytes, format_seconds

#: Steps of a run that nobody has set yet.
_STEPS = 100
#: A micro-batch has no more tokens, unless it is pinned.
_MOST_TOKENS = 1 << 14
#: Micro-batches that a stage of a pipeline has, at most, for each of its stages.
_EACH_STAGE = 2
#: Sizes of a micro-batch that are tried in search of one with which everything stays in memory.
_MOST_SIZES = 3
#: Choices of a layout that a run may pin.
PINS = ("dp", "tp", "cp", "pp", "ep", "vpp", "sp", "zero", "shard", "schedule", "micro_batch")


@dataclass(frozen=True, kw_only=True)
class SpreadLayout:
    """One way to spread a run.

    Attributes:
        layout: The layout, without sizes of batches.
        micro_batch: Sequences of a micro-batch.
        micro_batches: Micro-batches of a replica in a step.
        in_memory_s: Seconds of a step if all of it stays in memory.
        in_memory_bytes: Bytes of the rank that then holds most.
        working_bytes: Most bytes that one operation of a rank reads and writes: no plan needs fewer.
        prepared: The planned run; None where it was not planned, or does not fit.
        why: Reason that it does not fit; "" where it does, or was not planned.
    """

    layout: Layout
    micro_batch: int
    micro_batches: int
    in_memory_s: float
    in_memory_bytes: int
    working_bytes: int
    prepared: Prepared | None = None
    why: str = ""

    @property
    def cells(self) -> list[str]:
        """Texts of a row: layout, micro-batches, step, memory of a rank, and why it does not fit."""
        batches = f"{self.micro_batches} x {self.micro_batch}"
        if self.prepared is None:
            step = "-" if self.why else f"> {format_seconds(self.in_memory_s)}"
            return [str(self.layout), batches, step, format_bytes(self.in_memory_bytes), self.why]
        plan = self.prepared.plan
        peak = max(rank_plan.peak_bytes[DEVICE] for rank_plan in (plan, *plan.peers))
        return [str(self.layout), batches, format_seconds(plan.step_s), format_bytes(peak), ""]


@dataclass(frozen=True)
class SpreadRun:
    """Ways to spread a run: the fastest first, and what was left out, in words."""

    ways: tuple[SpreadLayout, ...]
    left_out: tuple[str, ...]

    @property
    def best(self) -> Prepared:
        """The fastest run, planned."""
        assert self.ways[0].prepared is not None, "the first is planned"
        return self.ways[0].prepared


def spread_model(
    request: Request, machine: Machine, *, cache: bool = True, progress: PlanProgress = SILENT
) -> SpreadRun:
    """Find the fastest way to train a model by name on so many ranks of a measured host, and plan it.

    Args:
        request: Model, machine, devices, sequences of a step, and what is pinned.

    Raises:
        ConfigError: a run has no such choice, or cannot be spread so.
        PlanInfeasible: no way fits the budget.
    """
    _check_machine(request, machine)
    run = _run_of(request, machine)
    layouts, refused = layouts_of_run(request.devices, request.pins)
    search = _SpreadSearch(run, machine, request, progress, cache)
    ways, unfit = search.timed(layouts)
    if not ways:
        raise ConfigError(f"no layout of {request.devices} ranks runs this model: {unfit[0]}")
    left_out = (*_not_searched(request, layouts, refused, has_experts=search.has_experts), *unfit)
    return SpreadRun(search.planned(ways), left_out)


def _check_machine(request: Request, machine: Machine) -> None:
    if request.devices > 1 and not machine.collectives:
        raise ConfigError(
            f"expected a machine file that has the speed of collectives among {request.devices} ranks, got "
            f"{request.machine}; make one with: lading probe --ranks {request.devices} --out FILE.toml"
        )
    if unknown := sorted(request.pins.keys() - set(PINS)):
        raise ConfigError(
            f"--pin {unknown[0]}: expected one of {', '.join(PINS)} for ranks of a host, whose plan chooses by itself "
            "what is recomputed and moved; leave it out"
        )
    if len(request.precisions) > 1 or (request.precisions and request.precisions[0] not in ("fp32", "bf16")):
        raise ConfigError(f"--precision: expected fp32 or bf16 for ranks of a host, got {','.join(request.precisions)}")


def _run_of(request: Request, machine: Machine) -> RunConfig:
    """Make the run that a request asks for, spread in no way yet."""
    run = run_of_model(request.model, request.seq_len or None)
    precision = request.precisions[0] if request.precisions else precision_for(request.machine)
    matrices, rule = None, request.optimizer
    if registry.is_for_matrices(rule):
        matrices, rule = Matrices(rule=rule, lr=registry.matrix_rule(rule).usual_lr), registry.DEFAULT
    name = re.sub(r"[^\w.-]+", "-", request.model).strip("-.")
    budget = request.budgets.get(DEVICE) or machine.shared_by(request.devices).device.memory_bytes
    run = dataclasses.replace(
        run,
        optimization=Optimization(steps=_STEPS, optimizer=registry.optimizer(rule), matrices=matrices),
        memory=MemoryConfig(budget=budget),
        checkpoint=CheckpointConfig(),
        machine=request.machine,
        out=f"out/{name}-{request.devices}-ranks",
    )
    return with_sizes(run, precision=precision)


def layouts_of_run(devices: int, pins: Mapping[str, Any]) -> tuple[list[Layout], list[str]]:
    """List the layouts to search, and why the others that are pinned or could be are no layouts of a run.

    Raises:
        ConfigError: none is left.
    """
    layouts: dict[str, Layout] = {}
    refused: list[str] = []
    for layout in _candidates(devices, pins):
        if any(getattr(layout, key) != value for key, value in pins.items() if key != "micro_batch"):
            continue
        try:
            spread = check_spread_layout(str(layout), devices)
            layouts.setdefault(str(spread), spread)
        except ConfigError as error:
            refused.append(str(error))
    if not layouts:
        pinned = ", ".join(f"{key}={value}" for key, value in sorted(pins.items()))
        raise ConfigError(
            refused[0] if refused else f"--pin: no layout of {devices} devices has {pinned}; leave one out"
        )
    return list(layouts.values()), refused


def _candidates(devices: int, pins: Mapping[str, Any]) -> Iterator[Layout]:
    """Yield layouts of so many devices, those of a run and others."""
    counts = [number for number in range(1, devices + 1) if devices % number == 0]
    schedules = [pins["schedule"]] if "schedule" in pins else ["1f1b", "zero-bubble"]
    for tp, cp, pp in product(counts, counts, counts):
        if devices % (tp * cp * pp):
            continue
        dp = devices // (tp * cp * pp)
        smaller = (n for n in counts if 1 < n < dp * cp and dp * cp % n == 0 and n % cp == 0)
        shards = [pins["shard"]] if "shard" in pins else [0, *smaller]
        for zero, sp, schedule in product((0, 1, 2, 3) if dp * cp > 1 else (0,), (False, True), schedules):
            for shard, ep in product(shards, {1, pins.get("ep", 1)}):
                is_asked = "shard" in pins if shard and zero != 3 else "zero" in pins if zero == 2 and pp > 1 else True
                if (sp and tp == 1) or (pp == 1 and schedule != schedules[0]) or not is_asked:
                    continue  # of a pipeline zero 2 is zero 3
                chunks = pins.get("vpp", 2 if schedule in ("interleaved", "zbv") else 1)
                try:
                    yield Layout(
                        dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, zero=zero, shard=shard if zero else 0, sp=sp, vpp=chunks,
                        schedule=schedule if pp > 1 else Layout.schedule,
                    )  # fmt: skip
                except ConfigError:  # such a layout cannot be, whoever runs it
                    continue


def _not_searched(request: Request, layouts: list[Layout], refused: list[str], *, has_experts: bool) -> tuple[str, ...]:
    """Say which layouts a search leaves out."""
    sentences: list[str] = []
    if "schedule" not in request.pins and any(layout.pp > 1 for layout in layouts):
        sentences.append("pipelines of several chunks a rank: --pin schedule=interleaved, or zbv, searches them")
    if has_experts and "ep" not in request.pins and request.devices > 1:
        sentences.append(f"experts on ranks: --pin ep={request.devices} searches them")
    if refused:
        sentences.append(f"{len(refused)} layouts in which a run is not spread yet, such as sequence parallel with cp")
    return tuple(sentences)


@dataclass(frozen=True)
class _SpreadSearch:
    """Search for the way in which a run is fastest."""

    run: RunConfig
    machine: Machine
    request: Request
    progress: PlanProgress
    cache: bool
    captured: dict[tuple[int, int], CapturedRun] = dataclasses.field(default_factory=lambda: {})

    def timed(self, layouts: list[Layout]) -> tuple[list[SpreadLayout], list[str]]:
        """Time layouts as if all stayed in memory, the fastest first; and say why the model does not run in others."""
        ways: list[SpreadLayout] = []
        unfit: dict[str, str] = {}
        for number, layout in enumerate(layouts):
            self.progress.update(0.5 * number / len(layouts), f"{number} of {len(layouts)} layouts timed")
            if not (sizes := self._sizes(layout)):
                words = [f"{layout.dp} replicas"] if layout.dp > 1 else []
                if size := self.request.pins.get("micro_batch"):
                    words.append(f"micro-batches of {size}")
                unfit.setdefault(
                    f"dp{layout.dp}",
                    f"{layout} and the like: {self.request.global_batch} sequences are no multiple of "
                    f"{' of '.join(words)}",
                )
                continue
            try:
                if (way := self._way(layout, sizes)) is not None:
                    ways.append(way)
            except ConfigError as error:
                unfit.setdefault(str(error), f"{layout}: {error}")
        return sorted(ways, key=_order), list(unfit.values())

    def _way(self, layout: Layout, sizes: list[int]) -> SpreadLayout | None:
        """Time a layout with the first micro-batch with which all stays in memory, or the last; None without any."""
        way = None
        for size in sizes:
            run, step = self._captured(layout, size)
            if layout.zero == 1 and run.optimization.accumulation == 1 and "zero" not in self.request.pins:
                continue  # as zero 2
            predicted = run_in_memory(run, self.machine, step, layout.devices)
            way = SpreadLayout(
                layout=layout,
                micro_batch=size,
                micro_batches=run.optimization.accumulation,
                in_memory_s=predicted.seconds,
                in_memory_bytes=predicted.peak_bytes,
                working_bytes=predicted.working_bytes,
            )
            if predicted.peak_bytes <= self._budget_bytes:
                break
        return way

    @property
    def has_experts(self) -> bool:
        """Whether the model has a list of experts, as far as it was captured."""
        modules = (name for step in self.captured.values() for name, _ in step.initial.model.named_modules())
        return any(name.rpartition(".")[2] == "experts" for name in modules)

    @property
    def _budget_bytes(self) -> int:
        return int(self.run.memory.budget)

    def _sizes(self, layout: Layout) -> list[int]:
        """List sizes of a micro-batch to try, the largest first."""
        replica_batch, remainder = divmod(self.request.global_batch, layout.dp)
        if remainder:
            return []
        sizes = [size for size in range(replica_batch, 0, -1) if replica_batch % size == 0]
        if (pinned := self.request.pins.get("micro_batch")) is not None:
            return [pinned] if pinned in sizes else []
        tokens = max(1, self.run.data.sequence_length)
        sizes = [size for size in sizes if size * tokens <= _MOST_TOKENS] or sizes[-1:]
        if layout.pp > 1:
            most = max(1, replica_batch // (_EACH_STAGE * layout.pp))
            return [next((size for size in sizes if size <= most), sizes[-1])]
        return sizes[:_MOST_SIZES]

    def _captured(self, layout: Layout, size: int) -> tuple[RunConfig, CapturedRun]:
        """Capture the run in a layout, with micro-batches of a size."""
        sized = dataclasses.replace(with_sizes(self.run, batch=size), layout=str(layout))
        moved = dataclasses.replace(sized.optimization, micro_batches=self.request.global_batch // size)
        ranks = layout.devices
        run = sharing_batches(sharing_processors(dataclasses.replace(sized, optimization=moved), ranks), ranks)
        key = size, run.optimization.accumulation
        if key not in self.captured:
            built = next((step.initial for step in self.captured.values()), None)  # of any batch it is the same model
            self.captured[key] = capture_run(run, self.machine, built)
        return run, self.captured[key]

    def planned(self, ways: list[SpreadLayout]) -> tuple[SpreadLayout, ...]:
        """Plan ways until none that is left can be faster; the fastest first, then those that do not fit.

        A way of which one operation alone needs more than the budget is not planned.

        Raises:
            PlanInfeasible: none fits.
        """
        fits: list[SpreadLayout] = []
        hopeless: list[SpreadLayout] = []
        over: list[tuple[SpreadLayout, PlanInfeasible]] = []
        untried = list(ways)
        while untried and not (fits and min(_step_s(way) for way in fits) <= untried[0].in_memory_s):
            way = untried.pop(0)
            self.progress.update(0.5 + 0.5 * (len(ways) - len(untried)) / len(ways), f"planning {way.layout}")
            is_hopeless, error = way.working_bytes > self._budget_bytes, None
            if not is_hopeless:
                try:
                    fits.append(self._plan(way))
                    continue
                except PlanInfeasible as said:
                    error = said
            smaller = [size for size in self._sizes(way.layout) if size < way.micro_batch]
            if (smaller_way := self._way(way.layout, smaller)) is not None:
                untried = sorted([*untried, smaller_way], key=_order)
            elif error is None:
                hopeless.append(way)
            else:
                over.append((way, error))
        if not fits:
            raise self._none_fits(hopeless, over)
        unfit = [_over(way, error.missing_bytes) for way, error in over]
        unfit += [_over(way, way.working_bytes - self._budget_bytes, "at least ") for way in hopeless]
        return (*sorted(fits, key=lambda way: (_step_s(way), str(way.layout))), *untried, *unfit)

    def _plan(self, way: SpreadLayout) -> SpreadLayout:
        """Plan a way within the budget; raises PlanInfeasible where it does not fit."""
        run, step = self._captured(way.layout, way.micro_batch)
        prepared = plan_run(run, self.machine, step, devices=way.layout.devices, cache=self.cache)
        return dataclasses.replace(way, prepared=prepared)

    def _none_fits(
        self, hopeless: list[SpreadLayout], over: list[tuple[SpreadLayout, PlanInfeasible]]
    ) -> PlanInfeasible:
        """Make the error that no way fits, with what the nearest lacks: of hopeless ones that with least to work on."""
        count = len(hopeless) + len(over)
        if not over:
            nearest = min(hopeless, key=lambda way: (way.working_bytes, _order(way)))
            try:
                self._plan(nearest)
            except PlanInfeasible as error:
                over = [(nearest, error)]
        assert over, "what an operation needs at once is more than the budget"
        nearest, error = min(over, key=lambda candidate: candidate[1].missing_bytes)
        raised = PlanInfeasible(
            f"none of {count} layouts fits {format_bytes(self._budget_bytes)} a rank; the nearest is "
            f"{nearest.layout}: {error}",
            missing_bytes=error.missing_bytes,
            smallest_budget_bytes=error.smallest_budget_bytes,
        )
        raised.__cause__ = error
        return raised


def _over(way: SpreadLayout, missing_bytes: int, least: str = "") -> SpreadLayout:
    """Say of a way how much is missing."""
    return dataclasses.replace(way, why=f"{least}{format_bytes(missing_bytes)} over the budget")


def _order(way: SpreadLayout) -> tuple[float, str]:
    return way.in_memory_s, str(way.layout)


def _step_s(way: SpreadLayout) -> float:
    assert way.prepared is not None, "it is planned"
    return way.prepared.plan.step_s
