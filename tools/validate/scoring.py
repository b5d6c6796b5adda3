"""Scores: predictions against measurements, averaged over sources, by the rules of ``benchmarks/validation``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lading.errors import LadingError
from lading.ir.request import Prediction, StepRequest
from lading.sim.simulate import simulate
from lading.units import GiB
from tools.validate.requests import request_of
from tools.validate.rows import Row

#: What nvidia-smi counts beside what the allocator reserved: the context and the libraries' kernels (README, "Traps").
CONTEXT_BYTES = 1.3e9
MEMORY_KINDS = ("allocated", "reserved", "nvidia-smi")


@dataclass(frozen=True)
class Outcome:
    """A row with what was predicted for it, or the reason why nothing was."""

    row: Row
    request: StepRequest | None = None
    prediction: Prediction | None = None
    reason: str = ""

    @property
    def measured_s(self) -> float | None:
        """Measured seconds of a step, of the predicted batch where a rate is printed and no batch is stated."""
        return self.row.step_s_of(self.request.layout.global_batch) if self.request else self.row.step_s


@dataclass(frozen=True)
class Pair:
    """A measured and a predicted value of a row, with the interval said to hold the measured one."""

    outcome: Outcome
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Signed error, as a fraction of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def in_interval(self) -> bool:
        """Whether the measured value lies in the interval."""
        return self.low <= self.measured <= self.high


class Predictor(Protocol):
    """Protocol of whatever predicts a request's step."""

    def predict(self, request: StepRequest) -> Prediction:
        """Predict the step's time and memory.

        Raises:
            LadingError: the request cannot be simulated; the message says why.
        """
        ...


class Simulator:
    """Predictor by simulation."""

    def predict(self, request: StepRequest) -> Prediction:
        """The step's time and memory."""
        return simulate(request).prediction


def outcomes_of(rows: Iterable[Row], predictor: Predictor, *, fitted: bool = True, known: bool = True) -> list[Outcome]:
    """Predict every row; one that cannot be simulated keeps the reason, a fault of ours included.

    Args:
        fitted: Whether to use the factors of stacks that were fitted on whole steps (``Stack.in_situ``), and the
            narrower intervals that come with them.
        known: Whether named sets of switches count; else each row's software is taken as not known.
    """
    return [_outcome(row, predictor, fitted, known) for row in rows]


def _outcome(row: Row, predictor: Predictor, fitted: bool, known: bool) -> Outcome:
    request = None
    try:
        request = request_of(row, known=known)
        if not fitted:
            request = dataclasses.replace(request, stack=dataclasses.replace(request.stack, in_situ={}, fitted=()))
        return Outcome(row, request, predictor.predict(request))
    except LadingError as error:
        return Outcome(row, request, reason=str(error))
    except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        return Outcome(row, request, reason=f"a fault inside Lading: {type(error).__name__}: {error}")


def newest(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Choose one outcome for each configuration: of repeats the newest, by the dates and releases its source names."""
    chosen: dict[str, Outcome] = {}
    for outcome in outcomes:
        other = chosen.get(outcome.row.key)
        if other is None or _age(outcome.row) >= _age(other.row):
            chosen[outcome.row.key] = outcome
    return list(chosen.values())


def _age(row: Row) -> tuple[int, int, int]:
    """Year, month and day of a row's source, as far as it tells: later is newer."""
    dates = [(int(y), int(m), int(d or 0)) for y, m, d in re.findall(r"\b(20\d\d)-(\d\d)(?:-(\d\d))?\b", row.source)]
    releases = re.findall(r"(?:release |\bv|NeMo |container )(\d\d)\.(\d\d)\b", row.source)
    dates += [(2000 + int(y), int(m), 0) for y, m in releases]
    year, month, day = max(dates, default=(0, 0, 0))
    if told := re.search(r"date (\d\d)-(\d\d)", row.notes):
        month, day = int(told[1]), int(told[2])
    return year, month, day


def step_pairs(outcomes: Iterable[Outcome], tier: str = "A") -> list[Pair]:
    """Seconds of a step, one pair for each configuration of the tier."""
    chosen = [o for o in outcomes if o.row.tier == tier and o.prediction is not None and o.measured_s is not None]
    return [_step_pair(outcome) for outcome in newest(chosen)]


def _step_pair(outcome: Outcome) -> Pair:
    prediction, measured = outcome.prediction, outcome.measured_s
    assert prediction is not None
    assert measured is not None
    return Pair(outcome, measured, prediction.step_s, prediction.low_s, prediction.high_s)


def memory_kind(row: Row) -> str:
    """Kind of a row's figure of memory: one of MEMORY_KINDS, or "" if it has none or does not tell."""
    if "peak_memory_gib" in row.measured:
        words = str(row.measured.get("memory_kind", "")).lower()
        return next((kind for kind in ("reserved", "allocated") if kind in words), "")
    return "nvidia-smi" if "nvidia_smi_memory_gb" in row.measured else ""


def memory_pairs(outcomes: Iterable[Outcome], kind: str = "allocated", tier: str = "A") -> list[Pair]:
    """Bytes measured as ``kind``, on the ranks the row speaks of, one pair for each configuration of the tier."""
    chosen = [
        o
        for o in outcomes
        if o.row.tier == tier and memory_kind(o.row) == kind and o.prediction is not None and _bytes(o.prediction, kind)
    ]
    return [_memory_pair(outcome, kind) for outcome in newest(chosen)]


def _bytes(prediction: Prediction, kind: str) -> float:
    """Predicted bytes as ``kind`` counts them; 0 if they were not predicted."""
    if kind == "allocated":
        return prediction.peak_bytes
    reserved = prediction.reserved_bytes
    return reserved + CONTEXT_BYTES if reserved and kind == "nvidia-smi" else reserved


def reported_bytes(row: Row, prediction: Prediction, devices: int) -> int:
    """Predicted bytes of the pipeline rank that a row's figure is of: the fullest, unless its words say which.

    Args:
        devices: Ranks of the job; those of one stage have consecutive numbers.
    """
    words, ranks = str(row.measured.get("memory_kind", "")).lower(), prediction.rank_bytes
    if len(ranks) < 2 or re.search(r"max[\w ]* over|largest|fullest|all ranks", words):
        return prediction.peak_bytes
    if re.search(r"mean|average", words):
        return round(sum(ranks) / len(ranks))
    if re.search(r"last (?:rank|stage|pipeline)", words):
        return ranks[-1]
    if stage := re.search(r"(?:stage|(?:pp|pipeline)[-_ ]rank)[ =#]*(\d+)", words):
        return ranks[min(len(ranks) - 1, int(stage[1]))]
    if named := re.search(r"(?:rank|gpu|device)[ =#]*(\d+)", words):
        return ranks[min(len(ranks) - 1, int(named[1]) * len(ranks) // max(1, devices))]
    return ranks[0] if re.search(r"first (?:rank|stage|pipeline)", words) else prediction.peak_bytes


def _memory_pair(outcome: Outcome, kind: str) -> Pair:
    prediction, measured = outcome.prediction, outcome.row.measured
    assert prediction is not None
    printed = measured["nvidia_smi_memory_gb"] if kind == "nvidia-smi" else measured["peak_memory_gib"]
    assert outcome.request is not None
    beside = _bytes(prediction, kind) - prediction.peak_bytes
    peak = reported_bytes(outcome.row, prediction, outcome.request.layout.devices)
    share, predicted = peak / prediction.peak_bytes, peak + beside
    low = (prediction.low_bytes or prediction.peak_bytes) * share + beside
    high = (prediction.high_bytes or prediction.peak_bytes) * share + beside
    return Pair(outcome, printed * GiB, predicted, low, high)


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Errors as fractions: macro-averaged over families, median and 90th percentile over rows; None without rows."""
    families = grouped(pairs, lambda pair: pair.outcome.row.family)
    details = {name: figures(group) for name, group in sorted(families.items())}
    absolute = [abs(pair.error) for pair in pairs]
    return {
        "rows": len(pairs),
        "macro_abs_error": _mean([d["abs_error"] for d in details.values()]),
        "median": float(np.median(absolute)) if absolute else None,
        "p90": float(np.percentile(absolute, 90)) if absolute else None,
        "bias": _mean([d["bias"] for d in details.values()]),
        "coverage": _mean([d["coverage"] for d in details.values()]),
        "width": _mean([d["width"] for d in details.values()]),
        "families": {name: d["abs_error"] for name, d in details.items()},
        "family_details": details,
    }


def figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Figures of one group: rows, mean absolute error, bias, median, 90th percentile, largest error, coverage and
    median width of the intervals, as a share of what is predicted."""
    errors = np.array([pair.error for pair in pairs])
    absolute = np.abs(errors)
    return {
        "rows": len(pairs),
        "abs_error": float(absolute.mean()),
        "bias": float(errors.mean()),
        "median": float(np.median(absolute)),
        "p90": float(np.percentile(absolute, 90)),
        "max": float(absolute.max()),
        "coverage": float(np.mean([pair.in_interval for pair in pairs])),
        "width": float(np.median([(pair.high - pair.low) / pair.predicted for pair in pairs])),
    }


def grouped(pairs: Iterable[Pair], by: Callable[[Pair], str]) -> dict[str, list[Pair]]:
    """Group pairs by a label."""
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(by(pair), []).append(pair)
    return groups


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _device(pair: Pair) -> str:
    return pair.outcome.request.machine if pair.outcome.request else ""


def _kind(pair: Pair) -> str:
    request = pair.outcome.request
    assert request is not None
    family = request.model.family
    return {"mamba2": "hybrid", "moe": "MoE", "mla-moe": "MoE", "dit": "DiT", "wan": "DiT"}.get(family, "dense")


def _recompute(pair: Pair) -> str:
    return pair.outcome.request.layout.recompute if pair.outcome.request else ""


def _precision(pair: Pair) -> str:
    return pair.outcome.request.layout.precision if pair.outcome.request else ""


def _stack(pair: Pair) -> str:
    return pair.outcome.request.stack.name if pair.outcome.request else ""


def _task(pair: Pair) -> str:
    return pair.outcome.request.task if pair.outcome.request else ""


def _parallelism(pair: Pair) -> str:
    """Axes that a pair's layout uses, such as "dp+tp+pp"."""
    request = pair.outcome.request
    assert request is not None
    layout = request.layout
    data = "fsdp" if layout.zero == 3 else "dp"
    names = {data: layout.dp, "tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ep": layout.ep}
    return "+".join(name for name, ways in names.items() if ways > 1) or "one device"


#: How pairs are broken down, by title.
BREAKDOWNS: Mapping[str, Callable[[Pair], str]] = {
    "device": _device,
    "kind": _kind,
    "recompute": _recompute,
    "precision": _precision,
    "parallelism": _parallelism,
    "stack": _stack,
    "task": _task,
}


def breakdown(pairs: Sequence[Pair]) -> dict[str, dict[str, Any]]:
    """Figures by device, kind of model, recomputing, precision, parallelism, stack and task."""
    return {
        title: {label: figures(group) for label, group in sorted(grouped(pairs, by).items())}
        for title, by in BREAKDOWNS.items()
    }


def worst(pairs: Sequence[Pair], count: int = 10) -> list[Pair]:
    """Pairs of largest error, largest first."""
    return sorted(pairs, key=lambda pair: (-abs(pair.error), pair.outcome.row.id))[:count]
