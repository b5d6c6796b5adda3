"""``lading simulate --model``: predict one step of a model on a cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lading.errors import ConfigError
from lading.files import write_text
from lading.report.lines import line_columns, say

if TYPE_CHECKING:
    from lading.cli.commands import Simulate
    from lading.sim.simulate import Simulated


def simulate_cluster(asked: Simulate) -> None:
    """Print what a step of a model takes on a cluster, and write its figures and trace if asked."""
    from rich.console import Console

    from lading.cli.scale import cluster_page, growth, growth_table, scale
    from lading.clusters import Question, fullest_chart, print_cluster, request_of, summary
    from lading.sim.simulate import simulate

    if asked.model is None or asked.machine is None:
        raise ConfigError("expected --machine next to --model")
    if asked.overrides:
        raise ConfigError(f"settings belong to a RUN.toml, got {asked.overrides[0]!r} next to --model")
    question = Question(
        model=asked.model,
        machine=asked.machine,
        layout=asked.layout or "",
        devices=asked.devices or 0,
        seq_len=asked.seq or 0,
        stack=asked.stack,
        network=asked.network or "",
        lora=asked.lora or 0,
        qlora=asked.qlora or 0,
        optimizer=asked.optimizer or "adamw",
    )
    request, table = request_of(question)
    simulated = simulate(request, table)
    figures, sentences = scale(simulated, asked)
    console = Console(width=line_columns(), highlight=False)
    print_cluster(simulated, console, asked.price)
    console.print(fullest_chart(simulated))
    for sentence in sentences:
        say(console, sentence)
    grown = [] if asked.growth is None else growth(simulated, asked.growth)
    if grown:
        console.print(growth_table(grown))
        names = ("devices", "step_s", "tokens_per_s_per_device")
        figures["growth"] = [dict(zip(names, point, strict=True)) for point in grown]
    whole = summary(simulated, asked.price) | figures
    if asked.report is not None:
        from lading.report.cluster import write_cluster_page

        write_cluster_page(asked.report, cluster_page(simulated, whole, sentences, grown))
        print(f"wrote {asked.report}")
    _write_files(asked, simulated, whole)


def _write_files(asked: Simulate, simulated: Simulated, figures: dict[str, Any]) -> None:
    """Figures, trace and snapshot, where they are asked for."""
    if asked.json is not None:
        write_text(asked.json, json.dumps(figures, indent=1) + "\n")
    if asked.trace is not None:
        from lading.report.perfetto import write_trace
        from lading.sim.traces import step_timeline

        write_trace(asked.trace, [step_timeline(simulated)])
        print(f"wrote {asked.trace}")
    if asked.snapshot is not None:
        from lading.clusters import write_cluster_snapshot

        write_cluster_snapshot(asked.snapshot, simulated)
        print(f"wrote {asked.snapshot}")
