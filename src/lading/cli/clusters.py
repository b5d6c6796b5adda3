"""Commands on clusters: ``lading validate`` scores predictions against published measurements."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import FlagCreatePairsOff, Positional, arg

from lading.errors import ConfigError
from lading.files import write_text
from lading.report.lines import line_columns, say

if TYPE_CHECKING:
    from lading.cli.commands import Simulate
    from lading.sim.simulate import Simulated


@dataclass(frozen=True, kw_only=True)
class Validate:
    """Score predicted step times and memory against published measurements."""

    files: Annotated[
        Positional[tuple[Path, ...]],
        arg(
            metavar="ROWS.jsonl [ROWS.jsonl ...]",
            help="Measurements, one a line; benchmarks/validation/README.md says the fields.",
        ),
    ]
    json: Annotated[
        Path | None, arg(metavar="OUT.json", help="Also write the scores as JSON.", help_behavior_hint="")
    ] = None
    rows: Annotated[
        Path | None,
        arg(
            metavar="OUT.jsonl", help="Also write the prediction of every row as a line of JSON.", help_behavior_hint=""
        ),
    ] = None
    left_out: Annotated[
        FlagCreatePairsOff[bool],
        arg(
            help="Also score each source with nothing fitted on its own steps. Takes twice as long.",
            help_behavior_hint="",
        ),
    ] = False
    predictor: Annotated[
        Literal["lading", "constant"],
        arg(help="Who predicts: Lading, or a reference that takes one share of the peak for all."),
    ] = "lading"

    def run(self) -> None:
        """Score; the exit code is 0 whatever the scores are."""
        from rich.console import Console

        from lading.sim.simulate import Simulator
        from lading.validate.constant import ConstantEfficiency
        from lading.validate.document import document_of, predictions_of
        from lading.validate.rows import read_rows
        from lading.validate.scoring import outcomes_of
        from lading.validate.show import show

        rows, notes = read_rows(self.files)
        predictor = Simulator() if self.predictor == "lading" else ConstantEfficiency()
        outcomes = outcomes_of(rows, predictor)
        document = document_of(outcomes, outcomes_of(rows, predictor, fitted=False) if self.left_out else ())
        console = Console(width=line_columns(), highlight=False)
        show(document, notes, console)
        if self.json is not None:
            write_text(self.json, json.dumps(document, indent=1) + "\n")
        if self.rows is not None:
            write_text(self.rows, "".join(json.dumps(line) + "\n" for line in predictions_of(outcomes)))


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
