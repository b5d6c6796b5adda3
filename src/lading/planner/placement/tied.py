"""Weights tied between groups: once on a device that has them all, else a copy on each, as pipelines have it.

Every copy has its gradient and optimizer states. When the last micro-batch's backward is done, each device sends the
others its part of the gradient, and all update alike (``tie``). Nothing is sent before, so that the pipeline's own
transfers wait for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lading.ir.placement import Shared, Task, TaskFlow


@dataclass(frozen=True, slots=True)
class Holder:
    """Group of tasks (a module, say) that holds a copy of a tied weight.

    Attributes:
        group: Name of the group, as in ``Task.group``.
        makers: Numbers of the group's backward tasks, which make its share of the gradient, in order.
    """

    group: str
    makers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """Sizes and times of a weight that several groups of tasks share.

    Attributes:
        resident_bytes: Bytes of value, gradient and states.
        gradient_bytes: Bytes of the gradient alone.
        update_s: Seconds of an update on each device; infinite on one that cannot run it.
    """

    resident_bytes: int
    gradient_bytes: int
    update_s: tuple[float, ...]


def tie(tasks: list[Task], flows: list[TaskFlow], holders: Sequence[Holder], weight: Weight) -> Shared:
    """Append the tasks and transfers that keep the copies of a tied weight alike.

    Every group sends its gradient to the others, and then updates its own copy with the sum.

    Args:
        tasks, flows: Tasks and transfers of the step; the new ones are appended.
        holders: Groups in the order of forward, so that the backward of the first is done last.
        weight: Sizes and times of the weight.
    Returns:
        The update tasks, which need the weight on one device once only, and its bytes.
    """
    idle = tuple(0.0 if each < float("inf") else each for each in weight.update_s)
    names, senders = " and ".join(holder.group for holder in holders), list[int]()
    for holder in holders:
        if holder is holders[0]:
            senders.append(holder.makers[-1])
            continue
        senders.append(len(tasks))
        tasks.append(Task(f"tied gradient at {holder.group}", idle, group=holder.group, once_per_step=True))
        flows += [TaskFlow(maker, (senders[-1],), 0) for maker in (*holder.makers, *holders[0].makers)]
    updates = tuple(range(len(tasks), len(tasks) + len(holders)))
    for holder, sender, update in zip(holders, senders, updates, strict=True):
        tasks.append(
            Task(f"update of {names} at {holder.group}", weight.update_s, group=holder.group, once_per_step=True)
        )
        flows += [TaskFlow(maker, (update,), 0) for maker in holder.makers]
        flows.append(
            TaskFlow(sender, tuple(u for u in updates if u != update), weight.gradient_bytes, resident_at_source=True)
        )
    return Shared(updates, weight.resident_bytes)
