"""A step whose parameters are gathered group by group: seconds and bytes, in the order in which FSDP2 asks.

[Note: who asks when]
When a group begins, its gather is asked for, and those of so many (``ahead``) behind it. Gathers and reductions share
one communicator, so the network takes one at a time in the order asked (torch 2.13, ``FSDPParamGroup.unshard``,
``foreach_reduce``). When the backward of a group ends its gradients are copied into one
buffer, which waits for the reduction before it (``reduce_scatter_max_input_buffers`` is 1), and are reduced from there.
Between micro-batches nothing is waited for; behind the last one everything is.

[Note: bytes as they are asked for]
Memory is counted in the order in which the host asks, as an allocator does: what is gathered is a flat buffer first and
copied out of it into the parameters. In forward the buffer stays until the next group's comes or the model's forward
ends (torch 2.13, ``FSDPState._post_forward``); in backward it goes at once. A group's gradients stay until they are in
the buffer that is reduced, and that until the next group's backward has ended. Activations and gradients of one piece
([Note: pieces of a block]) are counted together. Whole blocks have the peak that the lists have (tested).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lading.sim.buckets import Bucket, Costs, Run

#: Micro-batches that are walked one by one: from the second on they are alike, but for the last.
_WALKED = 4


@dataclass(frozen=True)
class Gathered:
    """Seconds and bytes of a step.

    Attributes:
        step_s: Seconds of the whole step.
        exposed_s: Seconds of the step in which the device waited for the network.
        network_s: Seconds in which the network was busy.
        peak_bytes: Most bytes at once.
        forward, backward: Gathers of each bucket in a step.
        waits_s: Seconds that backward waited for each bucket.
        peak: The moment of the peak.
    """

    step_s: float
    exposed_s: float
    network_s: float
    peak_bytes: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    waits_s: tuple[float, ...]
    peak: Moment


@dataclass(frozen=True)
class Moment:
    """Memory at one moment of a step.

    Attributes:
        micro_batch, is_backward, place: The place is that of the block in the order of forward.
        gathered, coming, gradients, reduced: Buckets that are gathered, in a flat buffer, have gradients, or have these
            in the buffer that is reduced; with their bytes.
        activation_bytes, state_bytes: Bytes of activations, and of what is always there.
    """

    micro_batch: int = 0
    is_backward: bool = False
    place: int = 0
    gathered: dict[int, int] = field(default_factory=lambda: {})
    coming: dict[int, int] = field(default_factory=lambda: {})
    gradients: dict[int, int] = field(default_factory=lambda: {})
    reduced: dict[int, int] = field(default_factory=lambda: {})
    activation_bytes: int = 0
    state_bytes: int = 0


def gathered_step(costs: Costs, buckets: Sequence[Bucket], *, trace: bool = False, walked: int = _WALKED) -> Gathered:
    """Walk a step whose parameters are gathered in such buckets.

    Args:
        costs: Costs of the model's buckets.
        buckets: All atoms, in the order of forward.
        trace: Whether to say what is there at the peak.
        walked: Micro-batches that are walked one by one, the last among them; 4 or more for seconds, 2 for bytes.
    """
    walk = _Walk(costs, buckets, trace=trace)
    count = costs.modules.request.layout.micro_batches
    walked = min(count, walked)
    for number in range(walked):
        walk.micro_batch(number, last=number == walked - 1)
    more = count - walked
    if more and walked > 2:  # the one before the last is as those left out
        device, busy, used = (now - was for now, was in zip(walk.marks[-2], walk.marks[-3], strict=True))
        walk.streams.device += more * device
        walk.streams.busy += more * busy
        walk.streams.used += more * used
    modules = costs.modules
    return Gathered(
        step_s=walk.streams.device + modules.rest_s + (count * modules.computing_s + modules.rest_s) * modules.waits,
        exposed_s=walk.streams.device - walk.streams.busy,
        network_s=walk.streams.used,
        peak_bytes=walk.peak,
        forward=tuple(sum(c) + more * c[-2 if more else -1] for c in zip(*walk.counts[0], strict=True)),
        backward=tuple(sum(c) + more * c[-2 if more else -1] for c in zip(*walk.counts[1], strict=True)),
        waits_s=tuple(walk.waits),
        peak=walk.moment,
    )


class _Streams:
    """Clocks of the device and of the network."""

    def __init__(self, slowdown: float) -> None:
        self.slowdown = slowdown
        self.device = self.network = self.busy = self.used = 0.0
        self.spans: list[tuple[float, float]] = []

    def take(self, seconds: float) -> float:
        """The network's next; it may begin now. Gives when it ends."""
        if seconds:
            start = max(self.network, self.device)
            self.network = start + seconds
            self.used += seconds
            if self.spans and self.spans[-1][1] == start:
                self.spans[-1] = (self.spans[-1][0], self.network)
            else:
                self.spans.append((start, self.network))
        return self.network if seconds else 0.0

    def wait(self, until: float) -> float:
        """Hold the device; gives for how long."""
        waited = max(0.0, until - self.device)
        self.device += waited
        return waited

    def compute(self, seconds: float) -> None:
        """Run so long, longer while the network is busy."""
        now, left, factor = self.device, seconds, 1 + self.slowdown
        if self.spans and self.spans[0][1] <= now:
            self.spans = [span for span in self.spans if span[1] > now]
        for begin, end in self.spans:
            alone = min(left, max(0.0, begin - now))
            now, left = now + alone, left - alone
            beside = max(0.0, min(left * factor, end - now))
            now, left = now + beside, max(0.0, left - beside / factor)
        self.busy += now + left - self.device
        self.device = now + left


class _Walk:
    """One step under way: clocks, and bytes by bucket."""

    def __init__(self, costs: Costs, buckets: Sequence[Bucket], *, trace: bool) -> None:
        stack, modules = costs.modules.request.stack, costs.modules
        self.courses = costs.courses(buckets)
        self.buckets, self.trace = buckets, trace
        self.costs = [costs.of(bucket) for bucket in buckets]
        self.overlaps = stack.overlap_param_gather
        layout = modules.request.layout
        self.makes_gradients = layout.micro_batches == 1 and not layout.updates_on_host
        # Where recomputing releases them again, backward gathers them once more.
        self.times = [stack.gathers - 1 if costs.runs_again(bucket) else 1 for bucket in buckets]
        self.streams = _Streams(modules.slowdown)
        self.asked: dict[int, float] = {}
        self.gathered: set[int] = set()
        self.flat: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.reduced: dict[int, int] = {}
        self.reducing: list[float] = []
        self.held = -1
        self.states = self.now = modules.state_bytes
        self.activation = self.peak = 0
        self.moment = Moment()
        self.at = (0, False, 0)
        self.counts: tuple[list[list[int]], list[list[int]]] = ([], [])
        self.waits = [0.0] * len(buckets)
        self.marks: list[tuple[float, float, float]] = []

    def micro_batch(self, number: int, *, last: bool) -> None:
        """Forward and backward."""
        for backward in (False, True):
            self.counts[backward].append([0] * len(self.buckets))
            self._pass(number, backward=backward, last=last)
        if last:
            self.streams.wait(self.streams.network)
        self.marks.append((self.streams.device, self.streams.busy, self.streams.used))

    def _pass(self, number: int, *, backward: bool, last: bool) -> None:
        course = self.courses[backward]
        runs, begun = iter(course.runs), 0
        for act in course.acts:
            if not act:
                self._run(next(runs), number, backward)
            elif act > 0:
                self._begin(course.order, begun, backward)
                begun += 1
            elif backward:
                self._end_backward(-1 - act, number, last)
            else:
                self._end_forward(-1 - act, last_of=course.order)

    def _begin(self, order: Sequence[int], index: int, backward: bool) -> None:
        """Wait for a bucket, copy it out, and ask for those that follow."""
        number = order[index]
        cost, is_new = self.costs[number], number not in self.gathered and (self.buckets[number].again or not backward)
        if is_new:
            self._ask(number, backward)
            waited = self.streams.wait(self.asked.pop(number))
            self.waits[number] += waited if backward else 0.0
            self._drop_flat(self.held)
            self.gathered.add(number)
            self._add(cost.gathered)
            self.held = number
            if backward:
                self._drop_flat(number)
                self.held = -1
        if self.overlaps:
            bucket = self.buckets[number]
            ahead = bucket.ahead_backward if backward else bucket.ahead
            for later in order[index + 1 : index + 1 + ahead]:
                self._ask(later, backward, early=ahead > 1 or backward)
        if is_new and cost.copy_s:
            self.streams.compute(cost.copy_s * (self.times[number] if backward else 1))

    def _ask(self, number: int, backward: bool, *, early: bool = True) -> None:
        """Have a bucket gathered; where it is not asked for ``early``, its buffer is there only when it begins."""
        if backward and not self.buckets[number].again:
            return
        if number not in self.gathered and number not in self.asked:
            times = self.times[number] if backward else 1
            self.asked[number] = self.streams.take(self.costs[number].gather_s * times)
            self.counts[backward][-1][number] += times
            if not self.overlaps:
                self.streams.wait(self.asked[number])
        if early and number not in self.gathered and number not in self.flat:
            self.flat[number] = self.costs[number].gathered
            self._add(self.costs[number].gathered + self.costs[number].part)  # which is cast first
            self.now -= self.costs[number].part

    def _run(self, run: Run, number: int, backward: bool) -> None:
        self.at = (number, backward, run.place)
        made = 0
        for bucket, size in run.gradients:
            self.gradients[bucket] = self.gradients.get(bucket, 0) + size
            made += size
        self.activation = run.alive_bytes - made
        self._add(made)
        self.activation = run.end_bytes
        self.streams.compute(run.seconds)

    def _end_forward(self, number: int, *, last_of: Sequence[int]) -> None:
        """Release a bucket; behind the last one the model's forward ends, and with it the last buffer goes."""
        if not self.buckets[number].keep.until_backward:
            self._release(number)
        if number == last_of[-1]:
            self._drop_flat(self.held)
            self.held = -1

    def _end_backward(self, number: int, micro_batch: int, last: bool) -> None:
        """Release a bucket and reduce its gradients."""
        cost, made = self.costs[number], self.gradients.pop(number, 0)
        if last or not self.buckets[number].keep.until_forward:
            self._release(number)
        for bucket in self.reduced:
            self.now -= self.reduced[bucket]
        self.reduced.clear()
        if self.reducing:
            self.streams.wait(self.reducing.pop())
        self.reduced[number] = cost.reduced
        self._add(cost.reduced)
        self.now -= made
        if self.makes_gradients or micro_batch:  # what is reduced: it stays, or is added to what is there
            self._add(cost.shard)
        if self.makes_gradients:
            self.states += cost.shard
        elif micro_batch:
            self.now -= cost.shard
        if cost.reduce_copy_s:
            self.streams.compute(cost.reduce_copy_s)
        self.reducing.append(self.streams.take(cost.reduce_s))
        if not self.overlaps:
            self.streams.wait(self.reducing[-1])

    def _release(self, number: int) -> None:
        if number in self.gathered:
            self.gathered.remove(number)
            self.now -= self.costs[number].gathered

    def _drop_flat(self, number: int) -> None:
        self.now -= self.flat.pop(number, 0)

    def _add(self, size: int) -> None:
        """So many bytes more, which may be the most there are."""
        self.now += size
        if self.now + self.activation > self.peak:
            self.peak = self.now + self.activation
            if self.trace:
                self.moment = Moment(
                    *self.at,
                    gathered={number: self.costs[number].gathered for number in sorted(self.gathered)},
                    coming=dict(self.flat),
                    gradients=dict(self.gradients),
                    reduced=dict(self.reduced),
                    activation_bytes=self.activation,
                    state_bytes=self.states,
                )
