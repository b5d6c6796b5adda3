"""Watch over the ranks of a run: which of them is slower than its machine file says, and by what.

All ranks of a step take about as long, as they wait for each other, so the time of a step names none. Each rank
compares its own computing and its own tiers with their prediction, as ``lading.host_watch`` does for one process; the
first compares the ranks with each other. What transfers took is counted from the moment at which the last rank of a
transfer had come to it, so a slow rank does not pass for a slow network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from lading.host_watch import TOLD, Comparison, HostWatch
from lading.ir.host_speed import cause_words, factors_by_cause, seconds_by_cause
from lading.ir.job_timeline import SLOW_AMONG_OTHERS, CommunicationKind, JobTimeline, RankTimeline, rank_timeline
from lading.run import Prepared
from lading.run_ranks import RunRanks
from lading.trainer import Trainer
from lading.units import format_seconds

#: Steps after each of which ranks say whether one of them has something to compare.
_EVERY = 5
#: How many times as long as predicted transfers have to take to be told, where that is a part of the step that is told.
_SLOW_TRANSFERS = 1.5
#: Most ranks that are named.
_NAMED = 4


@dataclass(frozen=True)
class RankComparison:
    """Comparison of one rank's steps with what was predicted.

    Attributes:
        work_s: Seconds that work was predicted to take, by cause (``lading.ir.host_speed``).
        transfers_s: Seconds that transfers were predicted to take, by the group of ranks that they join.
    """

    compared: Comparison
    work_s: Mapping[str, float]
    transfers_s: Mapping[str, float]


class RankWatch:
    """Comparison of the steps of all ranks of a run with their predictions; all ranks call its methods.

    Attributes:
        prepared: The run as it was planned.
    """

    def __init__(self, prepared: Prepared, trainer: Trainer, ranks: RunRanks) -> None:
        self.prepared, self._trainer, self._ranks = prepared, trainer, ranks
        self._host = HostWatch(prepared, trainer, plans=False, beside=ranks.beside)
        self._fingerprint, self._is_asked = trainer.plan.fingerprint, False
        self._mine: RankTimeline | None = None

    def look(self, step_s: float) -> None:
        """Take the step that has just ended, and its timeline where all ranks compare it.

        Args:
            step_s: Seconds that it took.
        """
        self._host.look(step_s)
        self._is_asked = self._is_asked and self._trainer.plan.fingerprint == self._fingerprint
        self._mine = self._trainer.rank_timeline() if self._is_asked else None

    def advance(self, steps_left: int) -> str:
        """Compare the ranks, once one of them has seen enough steps.

        Args:
            steps_left: Steps that are left, after the last of which nothing is begun.
        Returns:
            What to say, on the first rank; "" for nothing.
        """
        if self._mine is not None:
            self._is_asked = False
            return self._told(self._mine)
        if self._trainer.steps % _EVERY == 0 and steps_left:
            self._is_asked = bool(self._trainer.largest(self._host.is_due)[0])
        return ""

    def _told(self, mine: RankTimeline) -> str:
        layout, program = self.prepared.plan.parsed_layout, self._trainer.program
        predicted = rank_timeline(program, layout, self._ranks.rank, self.prepared.predicted)
        seconds = {event.action: event.end_s - event.start_s for event in predicted.timeline.events}
        predicted_s: defaultdict[str, float] = defaultdict(float)
        for communication in predicted.communications:
            predicted_s[_group(communication.key)] += seconds[communication.action]
        work_s = seconds_by_cause(program, self.prepared.predicted)
        job = self._trainer.timelines(mine)
        facts = RankComparison(self._host.compared(mine.timeline), work_s, dict(predicted_s))
        by_rank = self._ranks.gathered(facts)
        return "" if job is None else job_words(by_rank, transfers_s(job))


def transfers_s(job: JobTimeline) -> dict[str, dict[int, float]]:
    """Seconds of transfers after the last of their ranks had come, by the group that they join and by rank."""
    seconds: dict[str, dict[int, float]] = {}
    for each in job.ranks:
        ends = {event.action: event.end_s for event in each.timeline.events}
        for communication in each.communications:
            if communication.kind is CommunicationKind.SEND:  # its end is when the bytes are handed over
                continue
            _, came_s = job.last_to_come(each.rank, communication)
            of_rank = seconds.setdefault(_group(communication.key), {})
            of_rank[each.rank] = of_rank.get(each.rank, 0.0) + max(0.0, ends[communication.action] - came_s)
    return seconds


def job_words(by_rank: Sequence[RankComparison], transfers: Mapping[str, Mapping[int, float]]) -> str:
    """Say what takes another time on which rank than was predicted; "" where nothing does by much.

    Args:
        by_rank: What each rank compared, in order.
        transfers: As ``transfers_s`` gives them.
    """
    first = by_rank[0].compared
    factors = [factors_by_cause(each.compared.speed) for each in by_rank]
    common = {name: median_low(each[name] for each in factors if name in each) for row in factors for name in row}
    on_all = ", ".join(f"{cause_words(name)} {factor:.2f}" for name, factor in common.items() if abs(factor - 1) > TOLD)
    parts = [f"beside the machine file, {on_all} times as long"] if on_all else []
    slow = {rank: words for rank, each in enumerate(by_rank) if (words := _slow_words(rank, each, factors))}
    parts += [f"rank {rank} is slow: {words}" for rank, words in [*slow.items()][:_NAMED]]
    parts += [f"{len(slow) - _NAMED} more ranks are slow"] if len(slow) > _NAMED else []
    parts += _transfer_words(by_rank, transfers)
    if not parts and first.is_usual:
        return ""
    if not parts and not first.before_s:
        parts = ["no rank's computing, tiers or transfers explain it"]
    told = [*slow][:_NAMED] or [0]
    beside = "".join(f"{words} (rank {rank})" for rank in told if (words := by_rank[rank].compared.beside))
    return f"{first.steps_words}{': ' if parts else ''}{'; '.join(parts)}{beside}"


def _slow_words(rank: int, each: RankComparison, factors: Sequence[Mapping[str, float]]) -> str:
    """Say what a rank does slower than the others, where that is a part of its step that is told; "" for nothing."""
    phrases: list[str] = []
    for cause, factor in factors[rank].items():
        others = [row[cause] for number, row in enumerate(factors) if number != rank and cause in row]
        usual = median_low(others) if others else 1.0
        excess_s = (factor - usual) * each.work_s.get(cause, 0.0)
        if factor > max(1 + TOLD, SLOW_AMONG_OTHERS * usual) and excess_s > TOLD * each.compared.step_s:
            phrases.append(f"{cause_words(cause)} {factor:.2f} times as long as predicted, {usual:.2f} on the others")
    return ", ".join(phrases)


def _transfer_words(by_rank: Sequence[RankComparison], transfers: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Say between which ranks transfers take longer than predicted, the worst first."""
    told: list[tuple[float, str]] = []
    for group, measured in transfers.items():
        taken_s = median(measured.values())
        expected_s = max(each.transfers_s.get(group, 0.0) for each in by_rank)  # of a pipeline the sender has it
        excess_s = taken_s - expected_s
        if taken_s > _SLOW_TRANSFERS * expected_s and excess_s > TOLD * by_rank[0].compared.planned_s:
            times = f"{format_seconds(taken_s)}, {format_seconds(expected_s)} were predicted"
            told.append((excess_s, f"transfers {_ranks_words(group, sorted(measured))} take {times}"))
    return [words for _, words in sorted(told, reverse=True)[:_NAMED]]


def _group(key: str) -> str:
    """Group of ranks of a communication, without its number and its tag."""
    return key.rpartition(", ")[0].partition(" by ")[0]


def _ranks_words(group: str, ranks: Sequence[int]) -> str:
    """Name the ranks of a transfer: two ends, or all that have it."""
    source, to, target = group.partition(" to ")
    if to:
        return f"from rank {source} to rank {target}"
    listed = ", ".join(map(str, ranks[:-1])) if len(ranks) <= 2 * _NAMED else f"{ranks[0]} to {ranks[-2]}"
    return f"among ranks {listed} and {ranks[-1]}"
