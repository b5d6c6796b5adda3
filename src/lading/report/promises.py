"""Promises of a run and what it did: the numbers at the top of every report."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from lading.errors import ConfigError
from lading.ir.action import DEVICE
from lading.ir.machine import FILE
from lading.ir.plan import Plan
from lading.units import MiB, format_bytes, format_seconds


class Promise(StrEnum):
    """Outcome of the promised budget."""

    KEPT = "kept"
    BROKEN = "broken"
    OPEN = "open"


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Numbers of one run, or of one plan that has not run.

    Attributes:
        title: Name of the run.
        model: The model and the batch, in words.
        machine: Name of the machine.
        date: When the report was made, as text.
        budget_bytes: Device memory promised.
        keep_all_bytes: Predicted peak when nothing is moved or recomputed.
        plain_step_s: Measured median seconds of a step of the plain run; None if it was not run.
        plain_peak_bytes: Measured peak of the plain PyTorch run of the same model; None if it was not run.
        predicted_step_s, measured_step_s: Seconds of one step; measured is the median, None if not run.
        measured_step_spread_s: Largest minus smallest measured step.
        predicted_peak_bytes, measured_peak_bytes: Device peak; None for a plan that has not run.
        container: What container holds the run, in words; "" where unknown or not the budget's memory (a GPU).
        excess: Sentences on the first step above the budget and on what had not been predicted.
        identical_to_plain: Whether losses equal the plain run's bit for bit; None if not compared.
        losses: (step, loss) to draw, the first step being 1; empty means those in the metrics.
        plain_losses: (step, loss) of the plain run, drawn behind.
        versions: Version of each library that took part.
        command: What to type to get the same run.
    """

    title: str
    model: str
    machine: str
    date: str
    budget_bytes: int
    keep_all_bytes: int
    predicted_step_s: float
    predicted_peak_bytes: int
    plain_step_s: float | None = None
    plain_peak_bytes: int | None = None
    measured_step_s: float | None = None
    measured_step_spread_s: float = 0.0
    measured_peak_bytes: int | None = None
    container: str = ""
    excess: tuple[str, ...] = ()
    identical_to_plain: bool | None = None
    losses: tuple[tuple[int, float], ...] = ()
    plain_losses: tuple[tuple[int, float], ...] = ()
    versions: dict[str, str] = field(default_factory=lambda: {})
    command: str = ""

    def __post_init__(self) -> None:
        for key in ("budget_bytes", "predicted_peak_bytes", "predicted_step_s"):
            if getattr(self, key) <= 0:
                raise ConfigError(f"RunSummary.{key} must be positive, got {getattr(self, key)}")
        if self.measured_step_s is not None and self.measured_step_s <= 0:
            raise ConfigError(f"RunSummary.measured_step_s must be positive or None, got {self.measured_step_s}")
        if (self.measured_step_s is None) != (self.measured_peak_bytes is None):
            raise ConfigError(
                "expected measured_step_s and measured_peak_bytes both set (a run) or both None (a plan only), "
                f"got {self.measured_step_s} and {self.measured_peak_bytes}"
            )

    @property
    def promise(self) -> Promise:
        """Whether the budget was kept, broken, or is open while nothing has run."""
        if self.measured_peak_bytes is None:
            return Promise.OPEN
        return Promise.KEPT if self.measured_peak_bytes <= self.budget_bytes else Promise.BROKEN


def relative_error(predicted: float, measured: float) -> float:
    """Relative error ``predicted / measured - 1``: positive is too high, ``inf`` when only measured is 0."""
    if measured == 0:
        return 0.0 if predicted == 0 else float("inf")
    return predicted / measured - 1.0


def error_words(predicted: float, measured: float) -> str:
    """Say an error: ``'4.4% too low'``, ``'3.7% too high'`` or ``'exact'`` when it rounds to 0.0%."""
    error = relative_error(predicted, measured)
    if abs(error) < 0.0005:
        return "exact"
    return f"{abs(error):.1%} too {'high' if error > 0 else 'low'}"


def verdict(summary: RunSummary) -> str:
    """Say in one sentence whether the promise was kept, and how far off the predictions were."""
    budget, peak, step = summary.budget_bytes, summary.measured_peak_bytes, summary.measured_step_s
    if peak is None or step is None:
        return (
            f"Not run yet: predicted to peak at {format_bytes(summary.predicted_peak_bytes)} of a "
            f"{format_bytes(budget)} budget, at {format_seconds(summary.predicted_step_s)} a step."
        )
    side = "under" if peak <= budget else "over"
    return (
        f"Promise {summary.promise.value}: peaked at {format_bytes(peak)}, {abs(peak / budget - 1):.1%} {side} the "
        f"{format_bytes(budget)} budget (predicted {format_bytes(summary.predicted_peak_bytes)}, "
        f"{error_words(summary.predicted_peak_bytes, peak)}), at {format_seconds(step)} a step "
        f"(predicted {format_seconds(summary.predicted_step_s)}, {error_words(summary.predicted_step_s, step)})."
    )


def limit_words(plan: Plan) -> str:
    """Say the limit of a plan's step by resource, which of them binds, and how far above it the plan is.

    Returns:
        One sentence; "" where the plan knows no limits.
    """
    limits = plan.limits
    if not limits:
        return ""
    first, *others = [f"{limit.resource} {format_seconds(limit.seconds)}{_moved(limit.size_bytes)}" for limit in limits]
    above = plan.step_s / limits[0].seconds - 1.0
    beside = f" (beside it: {', '.join(others)})" if others else ""
    return (
        f"limit of a step in this budget: {first}{beside}; planned {format_seconds(plan.step_s)}, {above:.1%} above it"
    )


def room_words(plan: Plan, free_bytes: int | None, local_ranks: int = 1) -> str:
    """Say that a run will not find the memory that its plan takes on a CPU, as others have it.

    Args:
        free_bytes: Bytes that the processes of the run on this host could have now; None where that is not known.
        local_ranks: How many there are, the first ranks of the job.

    Returns:
        One sentence; "" where there is room.
    """
    needed_bytes = sum(plan.of_rank(rank).peak_bytes[DEVICE] for rank in range(local_ranks))
    is_host = plan.request.machine_table["device"]["kind"] == "cpu"
    if free_bytes is None or not is_host or needed_bytes <= free_bytes:
        return ""
    whose, killed = ("the run", "this one") if local_ranks == 1 else (f"the {local_ranks} ranks here", "one of them")
    return (
        f"expected {format_bytes(needed_bytes)} of memory for {whose}, found {format_bytes(free_bytes)} "
        f"that other processes leave: the system may kill {killed} (--resume then goes on); end others, or plan with a "
        "smaller budget"
    )


#: Seconds of a day.
_DAY_S = 86_400.0


def wear_words(plan: Plan) -> str:
    """Say what a plan writes to disks in a step, and in a day of steps as long as predicted: disks wear by it.

    Returns:
        One sentence; "" where it writes nothing there. A plan that leaves out experts writes so much at most.
    """
    by_rank = [_written_bytes(rank_plan) for rank_plan in (plan, *plan.peers)]
    written = max(by_rank, key=lambda sizes: sum(sizes.values()))
    parts = [
        f"{format_bytes(size)} a step to {name}, {format_bytes(int(size * _DAY_S / plan.step_s))} a day"
        for name, size in written.items()
        if size and plan.step_s > 0
    ]
    each = ", on each rank" if plan.ranks > 1 else " at most" if plan.leaves_out_experts else ""
    each = ", on the rank that writes most" if any(sizes != written for sizes in by_rank) else each
    return f"written{each}: {'; '.join(parts)} of steps as predicted, checkpoints aside" if parts else ""


def _written_bytes(plan: Plan) -> dict[str, int]:
    """Bytes that a rank's plan writes to each disk in a step."""
    files = [tier["name"] for tier in plan.request.machine_table["tiers"] if tier["kind"] == FILE]
    row = next((policy for policy in plan.policies if policy.policy == plan.request.policy), None)
    return {} if row is None else {name: row.moved_bytes.get(f"{name}_write", 0) for name in files}


def _moved(size_bytes: int) -> str:
    return f" for {format_bytes(size_bytes)}" if size_bytes else ""


def budget_remedy(budget_bytes: int, predicted_bytes: int, peak_bytes: int) -> str:
    """Say which budget would have done, of a run that peaked above its own."""
    words = f"this plan needs a budget of {format_bytes(peak_bytes)}, which it took"
    inside = budget_bytes - (peak_bytes - predicted_bytes)
    if inside > 0:
        words += (
            f"; to stay under {format_bytes(budget_bytes)}, plan for {format_bytes(inside)}, less by what was not "
            "predicted"
        )
    return words


def container_words(base_bytes: int, peak_bytes: int, budget_bytes: int, processes: int = 1) -> str:
    """Say what the whole process takes and the limit of a container that holds it, in steps of 64 MiB.

    Args:
        base_bytes: Memory before training: the budget counts from there.
        processes: Ranks of one host, whose numbers were added up.
    """
    process_bytes = base_bytes + max(peak_bytes, budget_bytes)
    limit = -(-process_bytes // (64 * MiB)) * 64
    who, peak = ("the process", "the peak") if processes == 1 else (f"{processes} ranks together", "their peaks")
    return (
        f"{who} had {format_bytes(base_bytes)} before training, which the budget does not count, and "
        f"{format_bytes(base_bytes + peak_bytes)} at {peak}; a container to train in needs --memory={limit}m or more "
        "(planning may need more: lading train --plan skips it)"
    )


def sentence_of(words: str) -> str:
    """Begin words with a capital and end them with a full stop."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def remarks(summary: RunSummary) -> list[str]:
    """List what the verdict leaves out: bytes without a plan, and whether the numbers are the same."""
    lines = [f"Keeping everything on the device would take {format_bytes(summary.keep_all_bytes)}, as predicted"]
    if summary.plain_peak_bytes is not None:
        lines[0] += f"; the plain PyTorch run took {format_bytes(summary.plain_peak_bytes)}, as measured"
    lines[0] += "."
    peak = summary.measured_peak_bytes
    if peak is not None and summary.promise is Promise.BROKEN:
        remedy = budget_remedy(summary.budget_bytes, summary.predicted_peak_bytes, peak)
        lines[:0] = [sentence_of(words) for words in (*summary.excess, remedy)]
    if peak is not None and summary.container:
        lines.append(sentence_of(summary.container))
    if summary.identical_to_plain is not None:
        lines.append(
            "Losses are identical to the plain run, bit for bit."
            if summary.identical_to_plain
            else "Losses are not identical to the plain run."
        )
    return lines
