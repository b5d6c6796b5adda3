"""A model by name on a cluster: the request, and its answer for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lading.catalog.load import load_machine
from lading.catalog.models import model_names, named_model
from lading.catalog.networks import checked_network, node_size
from lading.catalog.stacks import stack_by_name
from lading.catalog.tables import model_table
from lading.errors import ConfigError
from lading.ir.layout import ALONE
from lading.ir.request import Architecture, Request, StepRequest
from lading.ir.table import ModelTable
from lading.planner.space import Space
from lading.report.lines import say, say_list
from lading.report.plan_table import figures_table
from lading.report.understood import understood
from lading.sim.known_runs import KnownRun, differences, shift_of
from lading.sim.occupancy import occupancy
from lading.sim.simulate import Simulated, machine_of, simulate
from lading.units import format_bytes, format_flops, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from lading.cost.owned import Update


def step_of(request: Request) -> tuple[StepRequest, ModelTable]:
    """Make the step that is asked for, and the table of its model.

    Raises:
        ConfigError: a name is not known, devices or experts and layout do not go together, or it is no training step.
    """
    if not request.training:
        raise ConfigError("expected a training step, got one forward pass, which is placed on unlike devices only")
    table, seq_len = _table(request)
    _check_experts(request.asked_layout.ep, table)
    machine = load_machine(request.machine)
    if request.network:
        checked_network(request.network, node_size(machine))
    model = Architecture(family=table.name, symbols=table.symbols, blocks=(("block", sum(table.counts) - 2),))
    step = StepRequest(
        name=request.model,
        model=model,
        seq_len=seq_len,
        machine=request.machine,
        layout=request.asked_layout,
        stack=stack_by_name(request.stack),
        network=request.network,
        task="lora" if request.lora else "qlora" if request.qlora else "pretrain",
        lora_rank=request.lora or request.qlora,
        optimizer=request.optimizer,
        assumed=_longer(request.model, seq_len),
    )
    return step, table


def _check_experts(ep: int, table: ModelTable) -> None:
    """Refuse to spread experts that a model has not.

    Raises:
        ConfigError: names the model.
    """
    if ep > 1 and "e" not in table.symbols:
        raise ConfigError(f"layout: ep spreads experts over ranks, and {table.name} has none; leave ep{ep} out")


def corrected(simulated: Simulated, request: Request, known: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Correct a step by what measured steps of its software are off by, by cause.

    Args:
        request: What was asked for.
        known: Measured steps as "LAYOUT=SECONDS", of others "LAYOUT@MODEL=SECONDS" or "LAYOUT@MODEL@MACHINE=SECONDS".
    Returns:
        Figures by name, and sentences that say them.
    Raises:
        ConfigError: no layout, no seconds, or a name is not known.
    """
    runs: list[KnownRun] = []
    measured_runs: list[dict[str, Any]] = []
    for text in known:
        known_request, measured_s = _measured(text, request)
        other = simulate(*step_of(known_request))
        ratio, unlike = measured_s / other.step.step_s, differences(simulated.request, other.request)
        runs.append(KnownRun(ratio, other.causes, unlike, other.untold, data_sheet=not other.measured))
        measured_runs.append(
            {"model": known_request.model, "machine": known_request.machine, "layout": str(other.request.layout)}
            | {"unlike": sorted(unlike), "measured_s": measured_s, "step_s": other.step.step_s}
        )
    shift = shift_of(
        simulated.causes, runs, simulated.evidence, untold=simulated.untold, data_sheet=not simulated.measured
    )
    step_s = simulated.step.step_s * shift.factor
    low_s, high_s = (step_s * bound for bound in shift.bounds(simulated.spread, simulated.evidence))
    sentences = [_said_of(run, request) for run in measured_runs]
    low, high = format_seconds(low_s), format_seconds(high_s)
    sentences.append(f"with that known, the step takes {format_seconds(step_s)} ({low} to {high})")
    return {"runs": measured_runs, "step_s": step_s, "low_s": low_s, "high_s": high_s}, sentences


def _said_of(run: Mapping[str, Any], request: Request) -> str:
    """Say a known run in a sentence, with its model and machine where another was asked for."""
    of = f" of {run['model']}" if run["model"] != request.model else ""
    on = f" on {run['machine']}" if run["machine"] != request.machine else ""
    took, step_s = format_seconds(run["measured_s"]), format_seconds(run["step_s"])
    error = run["step_s"] / run["measured_s"] - 1
    return f"known: {run['layout']}{of}{on} took {took}, predicted {step_s} ({error:+.1%})"


def _measured(text: str, request: Request) -> tuple[Request, float]:
    """Request of a measured step, and its seconds."""
    layout_text, _, seconds = text.rpartition("=")
    layout, *names = (name.strip() for name in layout_text.split("@"))
    try:
        measured_s = float(seconds.strip().removesuffix("s"))
    except ValueError:
        measured_s = 0.0
    if not layout or not all(names) or len(names) > 2 or not 0 < measured_s < float("inf"):
        raise ConfigError(
            "--known: expected LAYOUT=SECONDS such as dp8,zero3,mb2,gb64=3.1, or LAYOUT@MODEL@MACHINE=SECONDS of "
            f"another model or machine, got {text!r}"
        )
    model, machine = (*names, *(request.model, request.machine)[len(names) :])
    of = replace(request, model=model, machine=machine, layout=layout, devices=0, global_batch=0)
    return of, measured_s


def space_of(request: Request) -> Space:
    """Make the space of layouts to choose from, for a model on so many devices.

    Raises:
        ConfigError: a name is not known, or such layouts are not searched.
    """
    _check_pins(request.pins)
    step, table = step_of(replace(request, devices=0, global_batch=0))
    _check_experts(request.pins.get("ep", 1), table)
    return Space(request, step, table, machine_of(step, request.devices))


def _check_pins(pins: Mapping[str, Any]) -> None:
    """Refuse what only pipelines have beside ``pp=1``; without ``pp`` it leaves pipelines to choose from.

    Raises:
        ConfigError: both are pinned.
    """
    pipelined = pins.get("vpp", 1) > 1 or pins.get("schedule", ALONE.schedule) != ALONE.schedule
    if pipelined and pins.get("pp") == 1:
        raise ConfigError(
            "--pin: expected pp above 1 beside a schedule or chunks of a rank (vpp), which only a pipeline has, got "
            f"{', '.join(f'{key}={value}' for key, value in pins.items())}; leave pp out, or them"
        )


def _longer(name: str, seq_len: int) -> tuple[str, ...]:
    """Note that a model of the catalog is taken for one of longer sequences, where it is."""
    most = named_model(name).max_tokens if name in model_names() else seq_len
    if seq_len <= most:
        return ()
    return (f"{name} is for sequences of up to {most:,} tokens: taken as if it were for {seq_len:,}",)


def _table(request: Request) -> tuple[ModelTable, int]:
    name = request.model
    if name in model_names():
        return model_table(name), request.seq_len or named_model(name).default_tokens
    return _captured(request)


def _captured(request: Request) -> tuple[ModelTable, int]:
    """Capture the table of a model that is in no catalog; this imports torch."""
    from lading.fit import run_of_model
    from lading.run import build, example_batch, loss_of
    from lading.tracing.initial import defer
    from lading.tracing.tabulate import module_table

    run = run_of_model(request.model, request.seq_len or None)
    run = replace(run, data=replace(run.data, batch_size=3))
    processors = load_machine(request.machine).device.kind == "cpu"  # there norms run as their operations
    dtype = "fp32" if processors and "fp32" in request.layout.split(",") else "bf16"
    module = defer(lambda: build(run.model, dtype)).model
    tokens, batch, loss = run.data.sequence_length, example_batch(run), loss_of(run.model)
    return module_table(module, batch, loss, request.model, tokens=tokens, whole=not processors), tokens


def summary(simulated: Simulated, price_per_hour: float | None = None) -> dict[str, Any]:
    """Figures of a simulated step by name; seconds, bytes, FLOP/s and shares.

    Args:
        price_per_hour: Price of one device for an hour.
    """
    request, prediction = simulated.request, simulated.prediction
    devices, tokens = request.layout.devices, request.tokens
    rate = simulated.model_flops / prediction.step_s / devices
    figures: dict[str, Any] = {
        "model": simulated.table.name,
        "machine": simulated.machine.name,
        "devices": devices,
        "layout": str(request.layout),
        "stack": request.stack.name,
        "step_s": prediction.step_s,
        "low_s": prediction.low_s,
        "high_s": prediction.high_s,
        "tokens_per_s": tokens / prediction.step_s,
        "tokens_per_s_per_device": tokens / prediction.step_s / devices,
        "model_flops_per_s_per_device": rate,
        "mfu": rate / simulated.peak_flops_per_s,
        "peak_bytes": prediction.peak_bytes,
        "device_bytes": simulated.machine.device.memory_bytes,
        "fits": prediction.fits,
        "shares": dict(prediction.shares),
        "memory": [{str(role): size for role, size in roles.items()} for roles in simulated.memory],
        "offload_to": simulated.behind_tier,
        "behind_bytes": simulated.behind_bytes,
        "behind": [{str(role): size for role, size in roles.items()} for roles in simulated.lower_tier_by_rank],
        "understood": understood(request, simulated.machine),
        "assumptions": list(simulated.assumed),
    }
    if simulated.updated is not None:
        figures["optimizer"] = {"name": request.optimizer, **_update_figures(simulated.updated.update)}
    if price_per_hour is not None:
        figures["price_per_billion_tokens"] = price_per_hour * devices * prediction.step_s / 3600 / tokens * 1e9
    return figures


def _update_figures(update: Update) -> dict[str, float]:
    """Seconds and bytes of the update on the pipeline rank where it takes longest, by name."""
    return {
        "seconds": update.seconds,
        "exposed_s": update.exposed_s,
        "directions_s": update.directions.seconds,
        "directions_bound_s": update.directions.bound_s,
        "load_ratio": update.load_ratio,
        "matrices": update.matrices,
        "ranks": update.ranks,
        "moved_bytes": update.moved_bytes,
        "whole_state_bytes": update.directions.state_bytes,
    }


def update_sentence(optimizer: str, update: Update) -> str:
    """Say what owners of matrices do, and how near to their bound they are."""
    directions = update.directions
    return (
        f"{optimizer}: {update.matrices:,} matrices with owners among {update.ranks:,} ranks, "
        f"{format_seconds(directions.seconds)} on the fullest (load ratio {update.load_ratio:.3f}, bound "
        f"{format_seconds(directions.bound_s)}, {update.gap:.1%} above it); {format_bytes(int(update.moved_bytes))} to "
        f"each rank, {format_seconds(update.exposed_s)} of it with nothing beside"
    )


def print_cluster(simulated: Simulated, console: Console, price_per_hour: float | None = None) -> None:
    """Print what the step takes, what its time goes to, memory by pipeline rank, and what was assumed."""
    figures = summary(simulated, price_per_hour)
    head = f"{figures['model']} on {figures['devices']} x {simulated.machine.device.name}"
    say(console, head, "bold")
    say(console, figures["layout"])
    say(console, simulated.request.stack.sentence())
    low, high = format_seconds(figures["low_s"]), format_seconds(figures["high_s"])
    say(console, f"step {format_seconds(figures['step_s'])} ({low} to {high})", "bold")
    say(
        console,
        f"{figures['tokens_per_s_per_device']:,.0f} tokens/s a device, {figures['tokens_per_s']:,.0f} in all; "
        f"{format_flops(figures['model_flops_per_s_per_device'])}/s a device, {figures['mfu']:.1%} of its peak",
    )
    if price_per_hour is not None:
        say(console, f"{figures['price_per_billion_tokens']:,.0f} for a billion tokens")
    if simulated.updated is not None:
        sentence = update_sentence(simulated.request.optimizer, simulated.updated.update)
        say(console, sentence)
    console.print(_shares_table(simulated))
    console.print(_memory_table(simulated))
    say(console, verdict(simulated), "bold" if figures["fits"] else "bold red")
    say_list(console, "Understood", [f"{subject}: {text}" for subject, text in figures["understood"].items()])
    say_list(console, "Assumed", figures["assumptions"])


def verdict(simulated: Simulated) -> str:
    """Say whether all fits, and into how much."""
    prediction, tier = simulated.prediction, simulated.machine.tier(simulated.behind_tier)
    needed_text, memory_text = format_bytes(prediction.high_bytes), format_bytes(simulated.machine.device.memory_bytes)
    sentence = f"{'FITS' if prediction.fits else 'DOES NOT FIT'}: up to {needed_text} of {memory_text}"
    if tier is None:
        return sentence
    room = format_bytes(tier.capacity_bytes)
    return f"{sentence}, and {format_bytes(simulated.behind_bytes)} of {room} of {tier.name} for each device"


def _shares_table(simulated: Simulated) -> Any:
    table = figures_table("What the step of the busiest rank goes to", "cause", "seconds", "share")
    step_s = simulated.step.step_s
    for cause, seconds in sorted(simulated.step.shares_s.items(), key=lambda row: -row[1]):
        if seconds >= step_s / 1000:
            table.add_row(cause, format_seconds(seconds), f"{seconds / step_s:.1%}")
    return table


def _memory_table(simulated: Simulated) -> Any:
    """Table of memory of the first, last and fullest pipeline rank, and the one that has most behind its device."""
    memory = simulated.memory
    totals = [sum(roles.values()) for roles in memory]
    lower_tier_bytes = [sum(roles.values()) for roles in simulated.lower_tier_by_rank]
    shown = set(_ranks_shown(simulated))
    if max(lower_tier_bytes):
        shown.add(lower_tier_bytes.index(max(lower_tier_bytes)))
    ranks = sorted(shown)
    table = figures_table("Memory of a device", "role", *(f"pipeline rank {rank}" for rank in ranks))
    for role in memory[0]:
        table.add_row(str(role), *(format_bytes(memory[rank][role]) for rank in ranks))
    table.add_row("sum", *(format_bytes(totals[rank]) for rank in ranks), style="bold")
    for role in simulated.lower_tier_by_rank[0]:
        cells = (format_bytes(simulated.lower_tier_by_rank[rank].get(role, 0)) for rank in ranks)
        table.add_row(f"{simulated.behind_tier}: {role}", *cells)
    return table


def fullest_chart(simulated: Simulated) -> Any:
    """Chart for the terminal of memory over the step, on the pipeline rank that needs most."""
    from lading.report.memory_chart import memory_chart

    rank = _ranks_shown(simulated)[1]
    rank_occupancy = occupancy(simulated, rank)
    title = f"Memory of pipeline rank {rank} over the step" if len(simulated.memory) > 1 else "Memory over the step"
    return memory_chart(rank_occupancy.samples("device"), simulated.step.step_s, title)


def write_cluster_snapshot(path: Path, simulated: Simulated) -> None:
    """Write what the first, the fullest and the last pipeline rank hold, for pytorch.org/memory_viz."""
    from lading.report.memory_chart import write_held_snapshot

    ranks = sorted(set(_ranks_shown(simulated)))
    write_held_snapshot(path, {f"pipeline rank {rank}": occupancy(simulated, rank).spans for rank in ranks})


def _ranks_shown(simulated: Simulated) -> tuple[int, int, int]:
    """Numbers of the first, the fullest and the last pipeline rank."""
    totals = [sum(roles.values()) for roles in simulated.memory]
    return 0, totals.index(max(totals)), len(totals) - 1
