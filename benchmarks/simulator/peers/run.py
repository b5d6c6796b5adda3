"""Score a simulator on published measurements: Lading, another, or the constant reference, all by the same rules.

python benchmarks/simulator/peers/run.py calculon --folder ../calculon --out benchmarks/simulator/peers/results
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

from drive_calculon import Calculon
from drive_llm_analysis import LlmAnalysis
from drive_simumax import SimuMax
from tools.validate.constant import ConstantEfficiency
from tools.validate.document import document_of
from tools.validate.rows import read_rows
from tools.validate.scoring import Predictor, Simulator, outcomes_of
from tools.validate.show import show

ROWS = Path(__file__).parents[2] / "validation"
FILES = [ROWS / "measurements.jsonl", ROWS / "measurements_vtrain_single_node.jsonl"]
PEERS = ("lading", "calculon", "llm-analysis", "simumax", "constant")


def predictor_of(arguments: argparse.Namespace) -> Predictor:
    """The peer that was asked for."""
    if arguments.peer == "calculon":
        return Calculon(arguments.folder)
    if arguments.peer == "simumax":
        return SimuMax(arguments.folder)
    if arguments.peer == "llm-analysis":
        return LlmAnalysis(arguments.efficiency)
    return Simulator() if arguments.peer == "lading" else ConstantEfficiency()


def trimmed(document: dict[str, Any]) -> dict[str, Any]:
    """The document with reasons counted instead of rows named, so that results stay short."""
    reasons = Counter(skipped["reason"] for skipped in document["skipped"])
    kept = [name for name in document if name not in ("skipped", "by")]
    return {"skipped": dict(reasons.most_common()), **{name: document[name] for name in kept}}


def main() -> None:
    """Print the scores; write them if a folder is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("files", nargs="*", type=Path, default=FILES, help="measurements (default: all)")
    parser.add_argument("--folder", type=Path, help="checkout of calculon or simumax")
    parser.add_argument("--efficiency", type=float, default=0.5, help="of llm-analysis")
    parser.add_argument("--out", type=Path, help="folder for results")
    arguments = parser.parse_args()
    if arguments.peer in ("calculon", "simumax") and not (arguments.folder and arguments.folder.is_dir()):
        parser.error(f"--folder: expected a checkout of {arguments.peer}, got {arguments.folder}")
    rows, notes = read_rows(arguments.files)
    predictor = predictor_of(arguments)
    outcomes = outcomes_of(rows, predictor)
    plain = [outcomes_of(rows, predictor, fitted=False, known=known) for known in (True, False)]
    document = document_of(outcomes, *(plain if arguments.peer == "lading" else ()))
    show(document, notes, Console(width=150, highlight=False))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{arguments.peer}.json").write_text(json.dumps(trimmed(document), indent=1) + "\n")
        found = [(outcome.row.id, outcome.prediction.step_s) for outcome in outcomes if outcome.prediction is not None]
        lines = (json.dumps({"id": name, "step_s": float(f"{step_s:.6g}")}) + "\n" for name, step_s in found)
        (arguments.out / f"{arguments.peer}.rows.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
