"""Commands on clusters: ``lading validate`` scores predictions against published measurements."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from lading.errors import StorageError


@dataclass(frozen=True, kw_only=True)
class Validate:
    """Score predicted step times and memory against published measurements."""

    files: Annotated[
        Positional[tuple[Path, ...]],
        arg(
            metavar="ROWS.jsonl [ROWS.jsonl ...]", help="Measurements: benchmarks/validation/README.md has the fields."
        ),
    ]
    json: Annotated[
        Path | None, arg(metavar="OUT.json", help="Also write the scores as JSON.", help_behavior_hint="")
    ] = None
    rows: Annotated[
        Path | None,
        arg(metavar="OUT.jsonl", help="Also write every row's prediction as a line of JSON.", help_behavior_hint=""),
    ] = None
    predictor: Annotated[
        Literal["constant"],
        arg(help="What predicts: constant is one share of the peak for all, a reference to beat."),
    ] = "constant"

    def run(self) -> None:
        """Score; the exit code is 0 whatever the scores are."""
        from rich.console import Console

        from lading.validate.constant import ConstantEfficiency
        from lading.validate.document import document_of, predictions_of
        from lading.validate.rows import read_rows
        from lading.validate.scoring import outcomes_of
        from lading.validate.show import show

        rows, notes = read_rows(self.files)
        outcomes = outcomes_of(rows, ConstantEfficiency())
        document = document_of(outcomes)
        console = Console(width=None if Console().is_terminal else 150, highlight=False)
        show(document, notes, console)
        if self.json is not None:
            _write(self.json, json.dumps(document, indent=1) + "\n")
        if self.rows is not None:
            _write(self.rows, "".join(json.dumps(line) + "\n" for line in predictions_of(outcomes)))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}; choose a writable folder with space") from error
