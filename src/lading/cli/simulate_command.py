"""``lading simulate``: one step of a run or of a model on a cluster, many unequal ranks, and long runs."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import OmitArgPrefixes, Positional, arg

from lading.cli.options import (
    JsonFile,
    ModelOptions,
    Overrides,
    RunOptions,
    TraceFile,
    Trust,
    check_asked,
    check_targets,
    load_plan,
    optional,
    refuse_beside,
    refuse_run_options,
)
from lading.config import load_run
from lading.errors import ConfigError
from lading.files import write_text
from lading.ir.timeline import Timeline
from lading.report.lines import fitted, line_columns, say
from lading.units import format_bytes, format_capacity, format_seconds

if TYPE_CHECKING:
    from lading.report.cluster_page import ClusterPage
    from lading.run import Prepared
    from lading.sim.simulate import Simulated

_RESTART_S = 600.0
_RUN_S = 30 * 86400.0


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """With --model, how it is spread and trained, and what is said of it:"""

    layout: Annotated[
        str | None,
        optional(
            "LAYOUT",
            "How the model is spread, such as tp8,cp2,pp16,vpp8,sp,zero1,mb1,gb2048: tensor, context and pipeline "
            "parallel, chunks of a stage, sequence parallel, ZeRO stage, sequences of a micro-batch and of a step. "
            "Also recompute=full, offload=optimizer+activations. Devices beyond it are replicas.",
        ),
    ] = None
    lora: Annotated[int | None, optional("RANK", "Train LoRA adapters of this rank beside frozen weights.")] = None
    qlora: Annotated[int | None, optional("RANK", "As --lora, with frozen weights of 4 bits.")] = None
    known: Annotated[
        tuple[str, ...],
        optional(
            "LAYOUT=S",
            "Measured steps (seconds) of this software, such as dp8,zero3,mb2,gb64=3.1 of this model and machine or "
            "dp8,zero3,mb2,gb64@llama3-8b@a100=3.1 of others. What they are off by corrects the prediction, by cause.",
        ),
    ] = ()
    report: Annotated[Path | None, optional("FILE.html", "Also write a report for the browser.")] = None
    json: JsonFile = None


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """With --model, what many unequal ranks and a long run cost (--straggler with a plan of several ranks, too):"""

    jitter: Annotated[
        float | None, optional("SHARE", "By how much equal work varies, such as 0.02. Every rank is then simulated.")
    ] = None
    straggler: Annotated[
        float | None, optional("FACTOR", "One device takes so many times as long to compute, such as 1.5.")
    ] = None
    slow_link: Annotated[
        float | None, optional("FACTOR", "The links of one device take so many times as long, such as 2.")
    ] = None
    growth: Annotated[
        int | None, optional("N", "Also double the replicas up to so many devices, and show what a device loses.")
    ] = None
    mtbf: Annotated[
        float | None,
        optional("HOURS", "Mean time between failures of one device: says what share of a long run is useful."),
    ] = None
    storage: Annotated[
        str | None, optional("SIZE", "With --mtbf, bytes a second at which checkpoints are written, such as 2TB.")
    ] = None
    restart: Annotated[float | None, optional("SECONDS", "With --mtbf, time from a failure to the next step.")] = None


@dataclass(frozen=True, kw_only=True)
class SimulateCommand:
    """Predict the time and the memory of one training step.

    Give a run file or a plan; or --model, to predict a model on many devices.
    """

    source: Annotated[
        Positional[Path | None], optional("[RUN.toml|PLAN.json]", "Run file or plan; or give --model.")
    ] = None
    overrides: Overrides = ()
    trace: TraceFile = None
    snapshot: Annotated[
        Path | None,
        optional("FILE.pickle", "Also write what memory holds over the step, for pytorch.org/memory_viz."),
    ] = None
    trust: Trust = False
    with_run: Annotated[RunOptions, OmitArgPrefixes, arg(name="run")] = field(default_factory=RunOptions)
    with_model: Annotated[ModelOptions, OmitArgPrefixes, arg(name="model")] = field(default_factory=ModelOptions)
    spread: Annotated[LayoutOptions, OmitArgPrefixes, arg(name="layout")] = field(default_factory=LayoutOptions)
    scale: Annotated[ScaleOptions, OmitArgPrefixes, arg(name="scale")] = field(default_factory=ScaleOptions)

    def run(self) -> None:
        """Print the predicted step, and write its trace and snapshot if asked."""
        check_targets(trace=self.trace, snapshot=self.snapshot, report=self.spread.report, json=self.spread.json)
        check_asked(self.source, "RUN.toml, PLAN.json", self.with_model)
        if self.source is None:
            refuse_run_options(self.with_run, self.overrides, "--model")
            _simulate_model(self)
        else:
            refuse_beside(self.source, self.with_model, self.spread, dataclasses.replace(self.scale, straggler=None))
            _simulate_run(self, self.source)


def _simulate_run(asked: SimulateCommand, source: Path) -> None:
    """Print the step of a run file, or of a plan."""
    if source.suffix == ".json":
        plan = load_plan(source, asked.overrides)
        refuse_run_options(asked.with_run, (), "a plan")
        from lading.run import prepare_plan

        prepared = prepare_plan(plan)
    else:
        run = load_run(source, asked.overrides)
        from lading.prepare import plan_run
        from lading.report.progress import planning_progress

        with planning_progress() as progress:
            prepared = plan_run(run, cache=not asked.with_run.no_cache, progress=progress)
    timeline = prepared.predicted
    print(fitted(timeline_text(timeline)))
    if asked.scale.straggler is not None:
        print(fitted(_straggler_text(prepared, asked.scale.straggler)))
    if asked.trace is not None:
        from lading.report.perfetto import write_trace

        write_trace(asked.trace, [timeline])
        print(f"wrote {asked.trace}")
    if asked.snapshot is not None:
        from lading.report.snapshot import write_snapshot

        write_snapshot(asked.snapshot, prepared.program, timeline)
        print(f"wrote {asked.snapshot}")


def _straggler_text(prepared: Prepared, factor: float) -> str:
    """Say how long a step of a planned run takes if one of its ranks is slower by a factor.

    Raises:
        ConfigError: the plan is for one rank, or the factor is not above 0.
    """
    from lading.stragglers import straggler_steps_s

    plan = prepared.plan
    if plan.ranks == 1 or factor <= 0:
        raise ConfigError(
            f"--straggler: expected a factor above 0 on one of several ranks (layout=dp2, --devices 2 of lading plan), "
            f"got {factor:g} on a plan of {plan.ranks}"
        )
    seconds = straggler_steps_s(prepared, factor)
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    ranks_per_stage = plan.ranks // len(seconds)
    subject = f"rank {slowest * ranks_per_stage}" if plan.peers else "any rank"
    subject += " or a replica of it" if plan.peers and ranks_per_stage > 1 else ""
    return (
        f"{subject} computing {factor:g} times as long: step {format_seconds(seconds[slowest])}, "
        f"{seconds[slowest] / plan.step_s - 1:.1%} longer than of equal ranks"
    )


def timeline_text(timeline: Timeline) -> str:
    """Describe a step in a few lines: how long, how full, and how busy each stream is."""
    streams = tuple(dict.fromkeys(event.stream for event in timeline.events))
    duration_s = timeline.duration_s
    lines = [f"{timeline.source} step {format_seconds(duration_s)}, device peak {format_bytes(timeline.peak_bytes)}"]
    for stream in streams:
        busy_s = timeline.busy_s(stream)
        share = busy_s / duration_s if duration_s else 0.0
        lines.append(f"  {stream:<12} busy {format_seconds(busy_s):>10}  {share:4.0%}")
    return "\n".join(lines)


def _simulate_model(asked: SimulateCommand) -> None:
    """Print what a step of a model takes on a cluster, and write its figures and trace if asked."""
    from rich.console import Console

    from lading.clusters import fullest_chart, print_cluster, step_of, summary
    from lading.sim.simulate import simulate

    model, spread = asked.with_model, asked.spread
    _check_batch(spread.layout, model.global_batch)
    request = model.request(layout=spread.layout, lora=spread.lora, qlora=spread.qlora)
    simulated = simulate(*step_of(request))
    figures, sentences = _scaled(simulated, asked.scale, model.price)
    if spread.known:
        from lading.clusters import corrected

        figures["known"], corrections = corrected(simulated, request, spread.known)
        sentences = [*corrections, *sentences]
    console = Console(width=line_columns(), highlight=False)
    print_cluster(simulated, console, model.price)
    console.print(fullest_chart(simulated))
    for sentence in sentences:
        say(console, sentence)
    grown = [] if asked.scale.growth is None else _growth(simulated, asked.scale.growth)
    if grown:
        console.print(_growth_table(grown))
        names = ("devices", "step_s", "tokens_per_s_per_device")
        figures["growth"] = [dict(zip(names, point, strict=True)) for point in grown]
    all_figures = summary(simulated, model.price) | figures
    if spread.report is not None:
        from lading.report.cluster_page import write_cluster_page

        write_cluster_page(spread.report, _cluster_page(simulated, all_figures, sentences, grown))
        print(f"wrote {spread.report}")
    _write_files(asked, simulated, all_figures)


def _check_batch(layout: str | None, global_batch: int | None) -> None:
    """Refuse two settings of the number of sequences in a step."""
    if global_batch is None or layout is None:
        return
    if re.search(r"(^|,)\s*(gb|global_batch)\s*=?\s*\d", layout):
        raise ConfigError(
            f"--global-batch {global_batch} and --layout {layout} both say how many sequences a step has; leave one out"
        )


def _write_files(asked: SimulateCommand, simulated: Simulated, figures: dict[str, Any]) -> None:
    """Write figures, trace and snapshot, where they are asked for."""
    if asked.spread.json is not None:
        write_text(asked.spread.json, json.dumps(figures, indent=1) + "\n")
    if asked.trace is not None:
        from lading.report.perfetto import write_trace
        from lading.sim.traces import step_timeline

        write_trace(asked.trace, [step_timeline(simulated)])
        print(f"wrote {asked.trace}")
    if asked.snapshot is not None:
        from lading.clusters import write_cluster_snapshot

        write_cluster_snapshot(asked.snapshot, simulated)
        print(f"wrote {asked.snapshot}")


def _scaled(simulated: Simulated, asked: ScaleOptions, price: float | None) -> tuple[dict[str, Any], list[str]]:
    """Simulate unequal ranks and long runs as asked; returns figures by name, and sentences that state them.

    Raises:
        ConfigError: a setting that another one needs is missing.
    """
    figures: dict[str, Any] = {}
    lines: list[str] = []
    step_s = simulated.step.step_s
    if any(value is not None for value in (asked.jitter, asked.straggler, asked.slow_link)):
        figures_of_ranks, sentence = _unequal(simulated, asked)
        step_s = figures_of_ranks["step_s"]
        figures["unequal_ranks"] = figures_of_ranks
        lines.append(sentence)
    if asked.mtbf is not None:
        figures_of_run, sentences = _long_run(simulated, asked, price, step_s)
        figures["long_run"] = figures_of_run
        lines += sentences
    elif asked.storage is not None or asked.restart is not None:
        raise ConfigError("--storage and --restart say what failures cost; expected --mtbf HOURS next to them")
    return figures, lines


def _growth(simulated: Simulated, most: int) -> list[tuple[int, float, float]]:
    """Simulate steps with replicas doubled up to ``most`` devices.

    From one replica on, each with the micro-batches it has; numbers of replicas that the layout cannot have are left
    out.

    Returns:
        Rows (devices, seconds of a step, tokens a second of a device).

    Raises:
        ConfigError: fewer devices than a replica takes.
    """
    from lading.sim.simulate import simulate

    request = simulated.request
    replica_devices = request.layout.devices // request.layout.dp
    if most < replica_devices:
        raise ConfigError(f"expected --growth of at least one replica's {replica_devices} devices, got {most}")
    batch = request.layout.micro_batch * request.layout.micro_batches
    growth: list[tuple[int, float, float]] = []
    replicas = 1
    while replicas * replica_devices <= most:
        try:
            layout = dataclasses.replace(request.layout, dp=replicas, global_batch=replicas * batch)
            step_s = simulate(dataclasses.replace(request, layout=layout), simulated.table).step.step_s
        except ConfigError:
            replicas *= 2
            continue
        growth.append((layout.devices, step_s, layout.global_batch * request.seq_len / step_s / layout.devices))
        replicas *= 2
    return growth


def _growth_table(growth: Sequence[tuple[int, float, float]]) -> Any:
    """Table for the terminal, with a bar for a device's tokens a second relative to the smallest number of devices."""
    from lading.report.plan_table import figures_table

    table = figures_table(
        "Replicas added, each with its own batch", "devices", "step", "tokens/s a device", "of the fewest"
    )
    table.columns[-1].justify = "left"
    for devices, step_s, rate in growth:
        kept_share = rate / growth[0][2]
        bar = "#" * round(30 * min(kept_share, 1.0))
        table.add_row(f"{devices:,}", format_seconds(step_s), f"{rate:,.0f}", f"{kept_share:6.1%} {bar}")
    return table


def _cluster_page(
    simulated: Simulated, figures: dict[str, Any], sentences: Sequence[str], grown: Sequence[tuple[int, float, float]]
) -> ClusterPage:
    """Collect what the HTML page of a simulated step shows.

    Args:
        figures: Figures of ``lading.clusters.summary``.
    """
    from lading.clusters import verdict
    from lading.report.cluster_page import ClusterPage
    from lading.sim.traces import step_timeline

    prediction, request = simulated.prediction, simulated.request
    low, high = format_seconds(prediction.low_s), format_seconds(prediction.high_s)
    memory_text, verdict_text = format_bytes(figures["device_bytes"]), verdict(simulated)
    verb = verdict_text.partition(":")[0]
    tiles = [
        ("Step", format_seconds(prediction.step_s), f"{low} to {high}"),
        (
            "Tokens a second of a device",
            f"{figures['tokens_per_s_per_device']:,.0f}",
            f"{figures['tokens_per_s']:,.0f} in all",
        ),
        ("Of the device's peak", f"{figures['mfu']:.1%}", "of the model's own FLOP"),
        ("Peak memory", format_bytes(prediction.peak_bytes), f"of {memory_text}"),
    ]
    return ClusterPage(
        title=f"{simulated.table.name} on {request.layout.devices:,} x {simulated.machine.device.name}",
        subtitle=f"{request.layout}; software stack {request.stack.name}",
        fits=(prediction.fits, f"{verdict_text[0]}{verdict_text[1:].replace(verb[1:], verb[1:].lower(), 1)}"),
        tiles=tiles,
        shares_s=simulated.step.shares_s,
        memory=[{str(role): size for role, size in roles.items()} for roles in simulated.memory],
        lower_tier_by_rank=figures["behind"],
        behind_tier=figures["offload_to"],
        device_bytes=figures["device_bytes"],
        timeline=step_timeline(simulated),
        growth=grown,
        sentences=sentences,
        assumed=simulated.assumed,
    )


def _unequal(simulated: Simulated, asked: ScaleOptions) -> tuple[dict[str, Any], str]:
    """Simulate all ranks one by one, with stragglers on the pipeline rank that computes most, where they cost most."""
    from lading.sim.cluster import simulate_cluster
    from lading.sim.jobs import job_of
    from lading.sim.noise import Noise
    from lading.sim.simulate import WAITING

    job = job_of(simulated)
    rank, jitter = simulated.step.busiest * job.replicas * job.group, asked.jitter or 0.0
    noise = Noise(
        jitter=jitter,
        slow_ranks={} if asked.straggler is None else {rank: asked.straggler},
        slow_links={} if asked.slow_link is None else {rank: asked.slow_link},
    )
    calm_s, unequal_s = (float(simulate_cluster(job, n).step_s[0]) for n in (Noise(), noise))
    equal_s = simulated.step.step_s - simulated.step.shares_s[WAITING]
    longer = unequal_s / calm_s
    # One slow device is waited for beside the others' own differences: the larger of both counts.
    step_s = equal_s * longer if asked.jitter is not None else max(equal_s * longer, simulated.step.step_s)
    causes = [
        text
        for value, text in (
            (asked.jitter, f"equal work varying by {jitter:.1%}"),
            (asked.straggler, f"rank {rank} computing {asked.straggler} times as long"),
            (asked.slow_link, f"its links taking {asked.slow_link} times as long"),
        )
        if value is not None
    ]
    sentence = (
        f"{job.ranks:,} ranks one by one, {', '.join(causes)}: step {format_seconds(step_s)}, "
        f"{longer - 1:.1%} longer than of equal ranks"
    )
    return {"jitter": jitter, "rank": rank, "ranks": job.ranks, "step_s": step_s, "longer": longer - 1}, sentence


def _long_run(
    simulated: Simulated, asked: ScaleOptions, price: float | None, step_s: float
) -> tuple[dict[str, Any], list[str]]:
    from lading.catalog.rates import parse_rate
    from lading.sim.goodput import best_interval_steps, cost_per_billion_tokens, goodput
    from lading.sim.jobs import checkpoint_bytes, failures_of

    if asked.mtbf is None or asked.storage is None:
        raise ConfigError(
            "expected --storage SIZE next to --mtbf: bytes a second that checkpoints are written at, such as 2TB"
        )
    restart_s = _RESTART_S if asked.restart is None else asked.restart
    failures = failures_of(
        simulated,
        device_mtbf_hours=asked.mtbf,
        restart_s=restart_s,
        storage_bytes_per_s=parse_rate(asked.storage, "--storage"),
    )
    steps = best_interval_steps(failures, step_s)
    long_run = goodput(failures, steps * step_s, run_s=_RUN_S)
    figures: dict[str, Any] = {
        "mtbf_s": failures.mtbf_s,
        "checkpoint_bytes": checkpoint_bytes(simulated),
        "checkpoint_s": failures.checkpoint_s,
        "interval_steps": steps,
        "goodput": long_run.useful,
        "deviation_in_30_days": long_run.deviation,
        "checkpoint": long_run.checkpoint,
        "restart": long_run.restart,
        "redone": long_run.redone,
    }
    size, takes = format_capacity(figures["checkpoint_bytes"]), format_seconds(failures.checkpoint_s)
    lines = [
        f"a failure every {failures.mtbf_s / 3600:,.1f} h: checkpoints of {size} in {takes}, "
        f"best every {steps:,} steps ({format_seconds(long_run.interval_s)})",
        f"goodput {long_run.useful:.1%}, give or take {long_run.deviation:.1%} in 30 days; "
        f"{long_run.checkpoint:.1%} checkpoints, {long_run.restart:.1%} restarts, {long_run.redone:.1%} done again",
    ]
    if asked.restart is None:
        lines.append(f"Assumed - a restart takes {_RESTART_S:.0f} s; --restart says another")
    if price is not None:
        request = simulated.request
        figures["price_per_billion_tokens"] = cost_per_billion_tokens(
            tokens_per_s=request.tokens / step_s,
            price_per_device_hour=price,
            devices=request.layout.devices,
            useful=long_run.useful,
        )
        lines.append(f"{figures['price_per_billion_tokens']:,.0f} for a billion tokens, failures included")
    return figures, lines
