"""What ``lading simulate --model`` says of many ranks and long runs: waiting for the slowest, and failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lading.errors import ConfigError
from lading.units import format_bytes, format_capacity, format_seconds, parse_bytes

if TYPE_CHECKING:
    from lading.cli.commands import Simulate
    from lading.report.cluster import ClusterPage
    from lading.sim.simulate import Simulated

_RESTART_S = 600.0
_RUN_S = 30 * 86400.0


def scale(simulated: Simulated, asked: Simulate) -> tuple[dict[str, Any], list[str]]:
    """Figures by name, and sentences that say them, of what was asked.

    Raises:
        ConfigError: a setting that another one needs is missing.
    """
    figures: dict[str, Any] = {}
    lines: list[str] = []
    step_s = simulated.step.step_s
    if any(value is not None for value in (asked.jitter, asked.straggler, asked.slow_link)):
        found, sentence = _unequal(simulated, asked)
        step_s = found["step_s"]
        figures["unequal_ranks"] = found
        lines.append(sentence)
    if asked.mtbf is not None:
        found, sentences = _long_run(simulated, asked, step_s)
        figures["long_run"] = found
        lines += sentences
    elif asked.storage is not None or asked.restart is not None:
        raise ConfigError("--storage and --restart say what failures cost; expected --mtbf HOURS next to them")
    return figures, lines


def growth(simulated: Simulated, most: int) -> list[tuple[int, float, float]]:
    """(devices, seconds of a step, tokens a second of a device) with replicas doubled up to ``most`` devices.

    From one replica on, each with the micro-batches it has; numbers of replicas that the layout cannot have are left
    out.

    Raises:
        ConfigError: fewer devices than a replica takes.
    """
    from lading.sim.simulate import simulate

    request = simulated.request
    each = request.layout.devices // request.layout.dp
    if most < each:
        raise ConfigError(f"expected --growth of at least one replica's {each} devices, got {most}")
    batch = request.layout.micro_batch * request.layout.micro_batches
    found: list[tuple[int, float, float]] = []
    replicas = 1
    while replicas * each <= most:
        try:
            layout = dataclasses.replace(request.layout, dp=replicas, global_batch=replicas * batch)
            step_s = simulate(dataclasses.replace(request, layout=layout), simulated.table).step.step_s
        except ConfigError:
            replicas *= 2
            continue
        found.append((layout.devices, step_s, layout.global_batch * request.seq_len / step_s / layout.devices))
        replicas *= 2
    return found


def growth_table(found: Sequence[tuple[int, float, float]]) -> Any:
    """For the terminal, with a bar for what a device keeps of its tokens with the fewest devices."""
    from lading.report.table import figures_table

    table = figures_table(
        "Replicas added, each with its own batch", "devices", "step", "tokens/s a device", "of the fewest"
    )
    table.columns[-1].justify = "left"
    for devices, step_s, rate in found:
        kept = rate / found[0][2]
        bar = "#" * round(30 * min(kept, 1.0))
        table.add_row(f"{devices:,}", format_seconds(step_s), f"{rate:,.0f}", f"{kept:6.1%} {bar}")
    return table


def cluster_page(
    simulated: Simulated, figures: dict[str, Any], sentences: Sequence[str], grown: Sequence[tuple[int, float, float]]
) -> ClusterPage:
    """What the HTML page of a simulated step shows.

    Args:
        figures: Of ``lading.clusters.summary``.
    """
    from lading.clusters import verdict
    from lading.report.cluster import ClusterPage
    from lading.sim.traces import step_timeline

    prediction, request = simulated.prediction, simulated.request
    low, high = format_seconds(prediction.low_s), format_seconds(prediction.high_s)
    there, said = format_bytes(figures["device_bytes"]), verdict(simulated)
    verb = said.partition(":")[0]
    tiles = [
        ("Step", format_seconds(prediction.step_s), f"{low} to {high}"),
        (
            "Tokens a second of a device",
            f"{figures['tokens_per_s_per_device']:,.0f}",
            f"{figures['tokens_per_s']:,.0f} in all",
        ),
        ("Of the device's peak", f"{figures['mfu']:.1%}", "of the model's own FLOP"),
        ("Peak memory", format_bytes(prediction.peak_bytes), f"of {there}"),
    ]
    return ClusterPage(
        title=f"{simulated.table.name} on {request.layout.devices:,} x {simulated.machine.device.name}",
        subtitle=f"{request.layout}; software stack {request.stack.name}",
        fits=(prediction.fits, f"{said[0]}{said[1:].replace(verb[1:], verb[1:].lower(), 1)}"),
        tiles=tiles,
        shares_s=simulated.step.shares_s,
        memory=[{str(role): size for role, size in roles.items()} for roles in simulated.memory],
        behind=figures["behind"],
        behind_tier=figures["offload_to"],
        device_bytes=figures["device_bytes"],
        timeline=step_timeline(simulated),
        growth=grown,
        sentences=sentences,
        assumed=simulated.assumed,
    )


def _unequal(simulated: Simulated, asked: Simulate) -> tuple[dict[str, Any], str]:
    """All ranks one by one; what is slow is on the pipeline rank that computes most, where it costs most."""
    from lading.sim.cluster import simulate_cluster
    from lading.sim.jobs import job_of
    from lading.sim.noise import Noise
    from lading.sim.simulate import WAITING

    job, run = job_of(simulated), simulated.step.pipeline
    place = 0 if run is None else int(run.busy_s.argmax())
    rank, jitter = place * job.replicas * job.group, asked.jitter or 0.0
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
    said = [
        text
        for value, text in (
            (asked.jitter, f"equal work varying by {jitter:.1%}"),
            (asked.straggler, f"rank {rank} computing {asked.straggler} times as long"),
            (asked.slow_link, f"its links taking {asked.slow_link} times as long"),
        )
        if value is not None
    ]
    sentence = (
        f"{job.ranks:,} ranks one by one, {', '.join(said)}: step {format_seconds(step_s)}, "
        f"{longer - 1:.1%} longer than of equal ranks"
    )
    return {"jitter": jitter, "rank": rank, "ranks": job.ranks, "step_s": step_s, "longer": longer - 1}, sentence


def _long_run(simulated: Simulated, asked: Simulate, step_s: float) -> tuple[dict[str, Any], list[str]]:
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
        storage_bytes_per_s=parse_bytes(asked.storage, "--storage"),
    )
    steps = best_interval_steps(failures, step_s)
    found = goodput(failures, steps * step_s, run_s=_RUN_S)
    figures: dict[str, Any] = {
        "mtbf_s": failures.mtbf_s,
        "checkpoint_bytes": checkpoint_bytes(simulated),
        "checkpoint_s": failures.checkpoint_s,
        "interval_steps": steps,
        "goodput": found.useful,
        "deviation_in_30_days": found.deviation,
        "checkpoint": found.checkpoint,
        "restart": found.restart,
        "redone": found.redone,
    }
    size, takes = format_capacity(figures["checkpoint_bytes"]), format_seconds(failures.checkpoint_s)
    lines = [
        f"a failure every {failures.mtbf_s / 3600:,.1f} h: checkpoints of {size} in {takes}, "
        f"best every {steps:,} steps ({format_seconds(found.interval_s)})",
        f"goodput {found.useful:.1%}, give or take {found.deviation:.1%} in 30 days; "
        f"{found.checkpoint:.1%} checkpoints, {found.restart:.1%} restarts, {found.redone:.1%} done again",
    ]
    if asked.restart is None:
        lines.append(f"Assumed - a restart takes {_RESTART_S:.0f} s; --restart says another")
    if asked.price is not None:
        request = simulated.request
        figures["price_per_billion_tokens"] = cost_per_billion_tokens(
            tokens_per_s=request.tokens / step_s,
            price_per_device_hour=asked.price,
            devices=request.layout.devices,
            useful=found.useful,
        )
        lines.append(f"{figures['price_per_billion_tokens']:,.0f} for a billion tokens, failures included")
    return figures, lines
