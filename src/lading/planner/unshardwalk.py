"""Quick evaluation of a step whose parameters are gathered in chosen groups: what ``sim.gathers`` says of its list.

The search looks at hundreds of ways to group one model, so it emits no list for each: this walks once through the order
of ``lading.program.groups.emit_groups``, with a clock for the device, one for the network, and a count of bytes. Tests
compare seconds and bytes with the list's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lading.sim.buckets import Bucket, Costs, Run
from lading.sim.gathers import LISTED, rest_s
from lading.sim.rank_engine import end_beside


@dataclass(frozen=True)
class Walked:
    """Seconds and bytes of a step.

    Attributes:
        step_s: Seconds of the whole step.
        peak_bytes: Most bytes at once.
        waits_s: Seconds that backward waited for each bucket.
    """

    step_s: float
    peak_bytes: int
    waits_s: tuple[float, ...]


def walked_step(costs: Costs, buckets: Sequence[Bucket], *, walked: int = LISTED) -> Walked:
    """Evaluate a step whose parameters are gathered in such buckets.

    Args:
        costs: Costs of the model's buckets.
        buckets: All atoms, in the order of forward.
        walked: Micro-batches that are walked one by one, the last among them; 4 or more for seconds, 2 for bytes.
    Raises:
        ConfigError: the buckets are not all atoms in order, each once.
    """
    walk = _Walk(costs, buckets)
    count = costs.modules.request.layout.micro_batches
    walked = min(count, walked)
    marks: list[float] = []
    for number in range(walked):
        for backward in (False, True):
            walk.run_pass(backward=backward, last=number == walked - 1)
        marks.append(walk.computed_s)
    more = count - walked  # the one before the last is as those left out
    left_out_s = more * (marks[-2] - marks[-3]) if more and walked > 2 else 0.0
    step_s = max(walk.device_s, walk.network_s) + rest_s(costs)
    return Walked(step_s + left_out_s, walk.peak, tuple(walk.waits_s))


class _Walk:
    """One step under way: clocks, and bytes by bucket."""

    def __init__(self, costs: Costs, buckets: Sequence[Bucket]) -> None:
        modules = costs.modules
        self.courses = costs.courses(buckets)
        self.orders = [[n for turn in course for n in turn.begins] for course in self.courses]
        self.buckets = buckets
        self.costs = [costs.of(bucket) for bucket in buckets]
        self.times = [costs.gathers(bucket) for bucket in buckets]
        self.overlaps = modules.request.stack.overlap_param_gather
        self.to_host = modules.request.layout.updates_on_host
        self.slowdown = modules.slowdown
        self.device_s = self.computed_s = self.network_s = 0.0
        self.spans: list[tuple[float, float]] = []
        self.waits_s = [0.0] * len(buckets)
        self.asked: dict[int, float] = {}
        self.present: set[int] = set()
        self.reducing_s: float | None = None
        self.coming: dict[int, int] = {}  # in a flat buffer, and how often it has been gathered
        self.copies_s = 0.0  # of what has been copied out for the next run
        self.flat = -1  # copied out last in forward: its buffer is still there
        self.input = -1  # in the buffer that is reduced
        self.reduced: set[int] = set()
        self.now = modules.state_bytes
        self.activation = self.peak = 0

    def run_pass(self, *, backward: bool, last: bool) -> None:
        """Walk a forward or a backward."""
        order, place, under_way = self.orders[backward], 0, 0
        for begins, run, ends in self.courses[backward]:
            for number in begins:
                place += 1
                self._begin(number, order[place:], begins, backward)
            if begins:
                self._copy_out(begins, backward)
            under_way += len(begins)
            if backward or not under_way:
                self._drop_buffer()
            self._run(run)
            under_way -= len(ends)
            for number in ends:
                if backward:
                    self._end_backward(number, stays=self.buckets[number].keep.until_forward and not last)
                elif not self.buckets[number].keep.until_backward:
                    self._release(number)

    def _begin(self, number: int, later: Sequence[int], begins: Sequence[int], backward: bool) -> None:
        """Wait for a bucket, and ask for those that follow."""
        bucket = self.buckets[number]
        self._ask(number, begins, backward)
        if number in self.asked:
            until = self.asked.pop(number)
            if until > self.device_s:
                self.waits_s[number] += until - self.device_s if backward else 0.0
                self.device_s = until
        if self.overlaps:
            ahead = bucket.ahead_backward if backward else bucket.ahead_forward
            for other in later[:ahead]:
                self._ask(other, begins, backward, early=backward or ahead > 1)

    def _ask(self, number: int, begins: Sequence[int], backward: bool, *, early: bool = True) -> None:
        """Have a bucket gathered; where it is not asked for ``early``, its buffer is there only when it begins."""
        if number in self.present or (backward and not self.buckets[number].gather_again):
            return
        cost, times = self.costs[number], self.times[number] if backward else 1
        if number not in self.asked and not cost.needs_no_network:
            self.asked[number] = self._take(cost.gather_s * times)
            if not self.overlaps:
                self.device_s = self.network_s
        if early:
            if number not in begins:
                self._copy_out(begins, backward)
            if backward:
                self._drop_buffer()
            self.present.add(number)
            self.coming[number] = times
            self._add(cost.gathered + cost.cast)
            self.now -= cost.cast

    def _take(self, seconds: float) -> float:
        """Let the network's next begin now or when it is free; gives when it ends."""
        start = max(self.network_s, self.device_s)
        end = self.network_s = start + seconds
        if self.overlaps:
            if self.spans and self.spans[-1][1] == start:
                self.spans[-1] = (self.spans[-1][0], end)
            elif seconds:
                self.spans.append((start, end))
        return end

    def _copy_out(self, begins: Sequence[int], backward: bool) -> None:
        """Copy what begins out of its buffers."""
        for number in [number for number in self.coming if number in begins]:
            times, cost = self.coming.pop(number), self.costs[number]
            self.copies_s += times * cost.copy_s
            self._add(cost.gathered)
            self._drop_buffer()
            if backward:
                self.now -= cost.gathered
            else:
                self.flat = number

    def _drop_buffer(self) -> None:
        if self.flat >= 0:
            self.now -= self.costs[self.flat].gathered
            self.flat = -1

    def _run(self, run: Run) -> None:
        self.activation = run.kept_bytes + run.most_bytes - run.made_bytes
        self._add(run.made_bytes)
        self.activation = run.kept_bytes + run.next_bytes
        self.peak = max(self.peak, self.now + self.activation)
        seconds, self.copies_s = run.seconds + self.copies_s, 0.0
        if self.spans and self.slowdown and self.spans[-1][1] > self.device_s:
            self.device_s = end_beside(self.spans, self.device_s, seconds, self.slowdown)
        else:
            self.device_s += seconds
        self.computed_s = self.device_s

    def _end_backward(self, number: int, *, stays: bool) -> None:
        """Release a bucket and reduce its gradients."""
        cost = self.costs[number]
        if not stays:
            self._release(number)
        if self.input >= 0:
            self.now -= self.costs[self.input].reduced
        self.input = number
        self._add(cost.reduced)
        self.now -= cost.gradient_bytes
        self._add(cost.shard)
        if number in self.reduced or self.to_host:
            self.now -= cost.shard
        self.reduced.add(number)
        if cost.needs_no_network:
            return
        before, self.reducing_s = self.reducing_s, self._take(cost.reduce_s)
        if not self.overlaps:
            self.device_s = self.network_s
        elif before is not None:
            self.device_s = max(self.device_s, before)

    def _release(self, number: int) -> None:
        if number in self.present:
            self.present.remove(number)
            self.now -= self.costs[number].gathered

    def _add(self, size: int) -> None:
        """Count so many bytes more, which may be the most there are."""
        self.now += size
        self.peak = max(self.peak, self.now + self.activation)
