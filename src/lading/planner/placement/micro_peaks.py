"""Peaks: the most bytes that one micro-batch takes of a device that has neighbors in order.

Tasks of a part run in the problem's order. A flow made there is alive from its source to its last target there; one
that comes from elsewhere, from its first target there. Of a chain that is what the simulation counts.
"""

from __future__ import annotations

import numpy as np

from lading.ir.placement import PlacementProblem

#: Groups beyond which parts are too many; the sum of what is kept and what the hungriest group needs stands for them.
_MOST_GROUPS = 200


def peaks(problem: PlacementProblem) -> np.ndarray:
    """Bytes, beside what is resident, of groups i to j - 1 on one device; an array of [i, j]."""
    groups = problem.groups
    count = len(groups)
    most = np.zeros((count, count + 1))
    if count > _MOST_GROUPS:
        kept_bytes, working = (
            np.array([float(x) for x in xs])
            for xs in zip(*((g.kept_bytes, g.working_bytes) for g in groups), strict=True)
        )
        for i in range(count):
            most[i, i + 1 :] = np.cumsum(kept_bytes[i:]) + np.maximum.accumulate(working[i:])
        return most
    walk = _FlowArrays(problem)
    for i in range(count):
        for j in range(i + 1, count + 1):
            most[i, j] = walk.peak(i, j)
    return most


class _FlowArrays:
    """Arrays of a problem's flows (bytes that one task hands to others) and of their targets."""

    def __init__(self, problem: PlacementProblem) -> None:
        flows = [flow for flow in problem.flows if not flow.resident_at_source]
        self.tasks = len(problem.tasks)
        self.group = np.array(problem.group_of)
        self.working = np.array([float(task.working_bytes) for task in problem.tasks])
        self.size = np.array([float(flow.size_bytes) for flow in flows])
        self.source = np.array([flow.source for flow in flows], int)
        self.flow = np.array([n for n, flow in enumerate(flows) for _ in flow.targets], int)
        self.target = np.array([t for flow in flows for t in flow.targets], int)

    def peak(self, first: int, end: int) -> float:
        """Largest sum of bytes at once of groups ``first`` to ``end`` - 1 on one device: flows and what works."""
        inside = (self.group >= first) & (self.group < end)
        flows_inside = inside[self.target]
        begin = np.full(len(self.size), self.tasks)
        last = np.full(len(self.size), -1)
        np.minimum.at(begin, self.flow[flows_inside], self.target[flows_inside])
        np.maximum.at(last, self.flow[flows_inside], self.target[flows_inside])
        made_here = inside[self.source]
        begin = np.where(made_here, self.source, begin)
        last = np.where(made_here, np.maximum(last, self.source), last)
        alive = last >= begin
        change = np.bincount(begin[alive], self.size[alive], self.tasks + 1)
        change -= np.bincount(last[alive] + 1, self.size[alive], self.tasks + 1)
        return float((np.cumsum(change)[:-1] + self.working)[inside].max())
