"""How much longer published software that was never fitted takes than the defaults of its class, by architecture.

    python benchmarks/calibrate/unknown_software.py

Each source of the files of ``benchmarks/validation/outside.py`` counts once, by the median of its rows' logarithms of
measured over predicted, held to 0.3. A share of the mean over sources, shrunk as if three sources had shown nothing,
goes into the factors of the classes (``ampere`` and ``hopper`` of ``[in_situ]`` in src/lading/catalog/stacks). The
error is that of each source when all others alone say the factor: the share with the least one is chosen. Factors
scale what a device computes, so a row's own factor is counted by the share of its step that kernels are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import mean, median

from tools.validate.protocols import kernel_share
from tools.validate.rows import read_rows
from tools.validate.scoring import Outcome, Simulator, outcomes_of, step_pairs

from lading.catalog.load import load_machine
from lading.catalog.stacks import DEFAULT, stack_by_name
from lading.ir.request import Prediction, StepRequest
from lading.ir.stack import GUESSED

_FOLDER = Path(__file__).parents[1] / "validation"
_NAMES = ("other_frameworks", "unseen_frameworks", *(f"blind_frameworks{end}" for end in ("", "_2", "_3", "_4")))
_MOST, _NOTHING = 0.3, 3
_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Seen:
    """A published step: its source, architecture of kernels, logarithm of measured over predicted, share of kernels."""

    source: str
    architecture: str
    off: float
    kernels: float


class _Plain(Simulator):
    """Predictor that takes software that is not known for as fast as that of no class."""

    def predict(self, request: StepRequest) -> Prediction:
        """The step, with the factors of running steps that all software has."""
        plain = dataclasses.replace(request.stack, in_situ=stack_by_name(DEFAULT).in_situ)
        return super().predict(dataclasses.replace(request, stack=plain))


def steps() -> list[Seen]:
    """List the steps of software that is not known."""
    outcomes: list[Outcome] = []
    for name in _NAMES:
        outcomes += outcomes_of(read_rows([_FOLDER / f"{name}.jsonl"])[0], _Plain())
    seen: list[Seen] = []
    for pair in (*step_pairs(outcomes), *step_pairs(outcomes, "B")):
        request = pair.outcome.request
        assert request is not None
        architecture = load_machine(request.machine).device.architecture
        if request.stack.evidence_on(architecture) == GUESSED:
            off = log(pair.measured / pair.predicted)
            seen.append(Seen(pair.outcome.row.family, architecture, off, kernel_share(pair)))
    return seen


def factors(seen: Sequence[Seen]) -> dict[str, float]:
    """Logarithm of how much longer than predicted steps took, by architecture."""
    by: dict[str, dict[str, list[float]]] = {}
    for step in seen:
        by.setdefault(step.architecture, {}).setdefault(step.source, []).append(step.off)
    held = {name: [max(-_MOST, min(_MOST, median(of))) for of in sources.values()] for name, sources in by.items()}
    return {name: sum(values) / (len(values) + _NOTHING) for name, values in held.items()}


def error(seen: Sequence[Seen], found: Mapping[str, float], share: float) -> float:
    """Mean absolute error of steps with so much of the factors."""
    return mean(abs(exp(share * found.get(s.architecture, 0.0) * s.kernels - s.off) - 1) for s in seen)


def main() -> None:
    """Print the factors, and the error over sources for each share of them."""
    seen = steps()
    sources = sorted({step.source for step in seen})
    away = {name: factors([step for step in seen if step.source != name]) for name in sources}
    print(
        f"{len(sources)} sources, {len(seen)} steps; logarithms: { {k: round(v, 3) for k, v in factors(seen).items()} }"
    )
    for share in _SHARES:
        each = [error([step for step in seen if step.source == name], away[name], share) for name in sources]
        print(f"share {share:.2f}: {mean(each):.2%} over sources, each without itself")


if __name__ == "__main__":
    main()
