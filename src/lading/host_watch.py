"""Watch over the host: what a run's first steps took beside the machine file, and another plan where that pays.

The machine file is from another hour: others use the disk now, or the processors. So the first steps are compared with
their prediction by cause, and what differs is said. A run that moves or recomputes tensors is then planned again for
this speed, in a process of its own, whose memory is none of the run's, and goes on by the new plan if that is shorter
at the same speed. Numbers stay the same, as those of any two plans do.

Others may come and go later. Each further step is compared with those first ones: once most of the last steps took
another time, the next are looked at by cause as the first were, which is told within ten steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from lading import replanning
from lading.catalog.load import machine_from_dict
from lading.ir.host_speed import cause_words, factors_by_cause, measured_speed
from lading.ir.machine import HostSpeed
from lading.ir.timeline import Timeline
from lading.run import Prepared
from lading.runtime.host import available_bytes, usable_bytes
from lading.runtime.probe import LoadMeter
from lading.trainer import Trainer
from lading.units import format_bytes, format_seconds

#: Steps of a run that are not looked at, as the first ones are slower; steps that are, behind these.
_SKIPPED, _LOOKED_AT = 2, 7
#: Shares by which a cause, or the step, has to differ from the machine file to be told.
TOLD = 0.15
#: Share of the memory of a host, or of its control group, below which it is told that others have the rest.
_MEMORY_LEFT = 0.05
#: Seconds of training ahead below which a plan, which takes tens of them, is not made again; share of a step that it
#: has to save.
_WORTH_S, _SAVED = 300.0, 0.03
#: Later: factor by which a step differs from the run's, such steps among so many that make the next be looked at, and
#: how many are; steps between two such tellings, twice as many after each.
_CHANGED, _OTHERS, _AMONG, _LOOKED_AT_LATER = 1.3, 3, 5, 4
_REST_STEPS = 20


@dataclass(frozen=True)
class Comparison:
    """Comparison of the last steps of a rank with their prediction.

    Attributes:
        before_s: Seconds of a step when it was compared before; 0 where it was not.
        beside: What others have of the processors and of the memory, in words.
    """

    step_s: float
    before_s: float
    planned_s: float
    speed: HostSpeed
    beside: str

    @property
    def is_usual(self) -> bool:
        """Whether nothing has to be said of the time of a step."""
        return not self.before_s and abs(self.step_s / self.planned_s - 1) <= TOLD

    @property
    def steps_words(self) -> str:
        """Seconds of a step, now and before, beside what was predicted."""
        took = f" now, {format_seconds(self.before_s)} before" if self.before_s else ""
        return f"steps take {format_seconds(self.step_s)}{took}, {format_seconds(self.planned_s)} were predicted"


class HostWatch:
    """Comparison of a run's first steps with their prediction.

    Args:
        prepared: The run as it was planned.
        plans: Whether the run may be planned again: it was not given its plan, and this process has all of it.
        beside: Numbers of the processes of the same job on this host, which are no others.

    Attributes:
        prepared: The run by its plan of now.
    """

    def __init__(self, prepared: Prepared, trainer: Trainer, *, plans: bool, beside: Sequence[int] = ()) -> None:
        self.prepared, self._trainer, self._beside = prepared, trainer, beside
        choices = prepared.plan.choices
        self._plans = plans and bool(choices.gaps or choices.deferred or choices.hosted)
        self._fingerprint = trainer.plan.fingerprint
        self._seen, self._timelines = 0, list[Timeline]()
        self._usual_s, self._last = 0.0, deque[bool](maxlen=_AMONG)
        self._rest_steps, self._rests_until = _REST_STEPS, 0
        self._load = LoadMeter(self._beside)

    def look(self, step_s: float) -> None:
        """Take the step that has just ended, and its timeline if it is one that is looked at.

        Args:
            step_s: Seconds that it took.
        """
        if self._trainer.plan.fingerprint != self._fingerprint:  # planned again by others: another prediction
            self._seen, self._usual_s = _SKIPPED + _LOOKED_AT + 1, 0.0
            self._timelines.clear()
        self._seen += 1
        if self._usual_s:
            self._look_later(step_s)
            return
        if self._seen == _SKIPPED:
            self._load = LoadMeter(self._beside)
        if _SKIPPED < self._seen <= _SKIPPED + _LOOKED_AT:
            self._timelines.append(self._trainer.rank_timeline().timeline)

    def _look_later(self, step_s: float) -> None:
        """Take timelines while most of the last steps take another time than the run's did."""
        if self._seen < self._rests_until:
            return
        self._last.append(not 1 / _CHANGED < step_s / self._usual_s < _CHANGED)
        if sum(self._last) < _OTHERS:
            self._timelines.clear()
            return
        if not self._timelines:
            self._load = LoadMeter(self._beside)
        self._timelines.append(self._trainer.rank_timeline().timeline)

    @property
    def is_due(self) -> bool:
        """Whether enough steps have been seen to compare them."""
        return len(self._timelines) >= (_LOOKED_AT_LATER if self._usual_s else _LOOKED_AT)

    def compared(self, last: Timeline | None = None) -> Comparison:
        """Compare the steps that have been looked at with their prediction, and begin to look anew.

        Args:
            last: A step to compare where none was looked at.
        """
        before_s, timelines = self._usual_s, self._timelines or ([] if last is None else [last])
        speed = measured_speed(self._trainer.program, self.prepared.predicted, timelines)
        self._usual_s = median(timeline.duration_s for timeline in timelines)
        self._timelines.clear()
        if before_s:
            self._last.clear()
            self._rests_until, self._rest_steps = self._seen + self._rest_steps, 2 * self._rest_steps
        beside = load_words(self._load.share(), self.prepared.run.num_threads)
        beside += memory_words(available_bytes(), usable_bytes())
        return Comparison(self._usual_s, before_s, self.prepared.plan.step_s, speed, beside)

    def advance(self, steps_left: int) -> str:
        """Compare, once enough steps have been seen, and plan again where that pays.

        Returns:
            What to say; "" for nothing.
        """
        if not self.is_due:
            return ""
        compared = self.compared()
        words = speed_words(compared.speed)
        if not words and compared.is_usual:
            return ""
        text = f"{compared.steps_words}: {words}" if words else compared.steps_words
        text += compared.beside
        if not self._plans or compared.step_s * steps_left < _WORTH_S:
            return text
        return f"{text}; {self._planned_again(compared.speed)}"

    def _planned_again(self, speed: HostSpeed) -> str:
        from lading.sim.device_step import job_step_s  # a run with a plan of its own needs no simulator

        started, before = time.perf_counter(), self.prepared
        now = machine_from_dict(before.plan.request.machine_table, "the plan's machine").at_speed(speed)
        now_s = job_step_s([before.program], now)
        plan = replanning.plan_apart(before, now)
        took = format_seconds(time.perf_counter() - started)
        if isinstance(plan, str):
            return f"tried for {took} to plan again for this speed, in vain: {plan}; the run keeps its plan"
        if plan.step_s > (1 - _SAVED) * now_s:
            return f"planned again for this speed in {took}, which saves nothing: {format_seconds(now_s)} are predicted"
        self.prepared = replanning.go_on_by(plan, before, self._trainer)
        self._fingerprint = self._trainer.plan.fingerprint
        self._usual_s = plan.step_s
        self._rests_until = self._seen + _REST_STEPS
        return (
            f"planned again for this speed in {took}, step predicted {format_seconds(now_s)} -> "
            f"{format_seconds(plan.step_s)}"
        )


def load_words(share: float | None, threads: int) -> str:
    """Say what share of the processors other processes took meanwhile, and what helps; "" for little, or not known.

    Threads of one operation wait for each other: where one has no processor for a while, all have none.
    """
    if share is None or share <= TOLD:
        return ""
    helps = f"; with {threads} threads each waits for the slowest: try threads = 1" if threads > 1 else ""
    return f"; meanwhile other processes took {share:.0%} of the processors{helps}"


def memory_words(free_bytes: int | None, usable: int) -> str:
    """Say that others have nearly all memory, so that what files have in it comes and goes; "" where they have not."""
    if free_bytes is None or free_bytes > _MEMORY_LEFT * usable:
        return ""
    return f"; other processes leave {format_bytes(free_bytes)} of {format_bytes(usable)} of memory: end some"


def speed_words(speed: HostSpeed) -> str:
    """Say what takes another time than the machine file says; "" where nothing does by much."""
    factors = factors_by_cause(speed)
    phrases = [f"{cause_words(cause)} {factor:.2f}" for cause, factor in factors.items() if abs(factor - 1) > TOLD]
    return f"beside the machine file, {', '.join(phrases)} times as long" if phrases else ""
