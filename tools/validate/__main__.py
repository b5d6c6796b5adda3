"""``python -m tools.validate ROWS.jsonl ...``: score predictions against published measurements."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from tyro.conf import FlagCreatePairsOff, Positional, arg

from lading.errors import LadingError
from lading.files import write_text
from lading.report.lines import fitted, line_columns
from tools.validate.constant import ConstantEfficiency
from tools.validate.document import document_of, predictions_of
from tools.validate.rows import read_rows
from tools.validate.scoring import Simulator, outcomes_of
from tools.validate.show import show


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
            help="Also score each source with nothing fitted on its own steps, and each framework, with all its "
            "sources, as software that is not known. Takes thrice as long.",
            help_behavior_hint="",
        ),
    ] = False
    predictor: Annotated[
        Literal["lading", "constant"],
        arg(help="Who predicts: Lading, or a reference that takes one share of the peak for all."),
    ] = "lading"

    def run(self) -> None:
        """Print the scores, and write them where asked.

        Raises:
            ConfigError: a file cannot be read, or a row is not as expected.
        """
        rows, notes = read_rows(self.files)
        predictor = Simulator() if self.predictor == "lading" else ConstantEfficiency()
        outcomes = outcomes_of(rows, predictor)
        unfitted = outcomes_of(rows, predictor, fitted=False) if self.left_out else ()
        guessed = outcomes_of(rows, predictor, fitted=False, known=False) if self.left_out else ()
        document = document_of(outcomes, unfitted, guessed)
        show(document, notes, Console(width=line_columns(), highlight=False))
        if self.json is not None:
            write_text(self.json, json.dumps(document, indent=1) + "\n")
        if self.rows is not None:
            write_text(self.rows, "".join(json.dumps(line) + "\n" for line in predictions_of(outcomes)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Score as the arguments ask; returns 0 whatever the scores are, and 2 for an error of what was asked."""
    try:
        tyro.cli(Validate, prog="python -m tools.validate", args=arguments).run()
    except LadingError as error:
        print(fitted(f"error: {error}"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
