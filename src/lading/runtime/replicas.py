"""One update of replicas (ZeRO-1): gradients are summed at owners, owners' results return to every replica.

[Note: bytes]
A matrix's gradient goes from every rank to its owner and its direction from the owner to every rank. Each rank sends
and takes (R - 1) / R of all elements each way: what a reduce-scatter and an all-gather of them move, and no more. The
direction may travel in fewer bytes than a parameter would.

Owners add up in the order of ranks and divide at the end, so that the sum is that of one process which does the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lading.ir.routes import Box, Whole
from lading.optim.adam import AdamWRule
from lading.optim.rule import Rule, States
from lading.runtime.exchange import FAILURES, Team, Traffic, agree_done


@dataclass(frozen=True)
class Replica:
    """A parameter of every rank in one step.

    Attributes:
        grad: This rank's own, not reduced.
        update: From 1.
    """

    param: torch.Tensor
    grad: torch.Tensor
    lr: float
    update: int


class ReplicaStep:
    """Owners of matrices, and of parameters that are none, whose states lie with their owner alone."""

    def __init__(
        self, wholes: Sequence[tuple[Whole, Rule | AdamWRule]], owners: Sequence[int],
        groups: Sequence[Sequence[int]], team: Team,
    ) -> None:  # fmt: skip
        """A step of ``wholes``; groups of them travel together, in order."""
        self.wholes, self.owners, self.groups, self.team = wholes, owners, groups, team
        self.traffic = Traffic()
        self._failed: Exception | None = None
        self._may_fail = any(hasattr(rule.settings, "frequency") for _, rule in wholes)

    def run(self, moving: Mapping[int, Replica], states: Mapping[int, States]) -> None:
        """Move every parameter of ``moving``, the same ones on every rank.

        While a group computes, the next one's gradients travel in and the last one's results out.

        Args:
            states: All states of the matrices that this rank owns, by matrix.
        """
        groups = [[n for n in group if self.wholes[n][0].parameter in moving] for group in self.groups]
        groups = [group for group in groups if group]
        self._failed = None
        inbound = self._send_in(groups[0], moving) if groups else None
        last: tuple[list[int], _Sent] | None = None
        for place, group in enumerate(groups):
            following = self._send_in(groups[place + 1], moving) if place + 1 < len(groups) else None
            assert inbound is not None
            found = self._compute(group, inbound, moving, states)
            if last is not None:
                self._apply(*last, moving)
            last = (group, self._send_out(group, found, moving))
            inbound = following
        if last is not None:
            self._apply(*last, moving)
        if groups and self._may_fail:
            agree_done(self._failed, self.team, next(iter(moving.values())).param.device)

    def _size(self, number: int) -> int:
        return self.wholes[number][0].box.size

    def _view(self, number: int, moving: Mapping[int, Replica], which: str) -> torch.Tensor:
        whole = self.wholes[number][0]
        tensor: torch.Tensor = getattr(moving[whole.parameter], which)
        return tensor[whole.box.within(Box((0,) * tensor.ndim, tuple(tensor.shape)))]

    def _of(self, group: Sequence[int], rank: int) -> list[int]:
        return [number for number in group if self.owners[number] == rank]

    def _send_in(self, group: Sequence[int], moving: Mapping[int, Replica]) -> _Sent:
        """Every rank's gradients to their owners."""
        rows = [self._of(group, rank) for rank in range(self.team.ranks)]
        parts = [self._view(number, moving, "grad").reshape(-1) for row in rows for number in row]
        mine = sum(map(self._size, rows[self.team.rank]))
        return self._exchange(
            torch.cat(parts), [mine] * self.team.ranks, [sum(map(self._size, row)) for row in rows], self.team.inbound
        )

    def _compute(
        self, group: Sequence[int], sent: _Sent, moving: Mapping[int, Replica], states: Mapping[int, States]
    ) -> list[torch.Tensor]:
        """What every replica is to get of the matrices that this rank owns, flat."""
        total = sent.take(self.team.ranks)
        for other in sent.rows[1:]:
            total.add_(other)
        total.div_(self.team.ranks)
        found: list[torch.Tensor] = []
        start = 0
        for number in self._of(group, self.team.rank):
            whole, rule = self.wholes[number]
            own, shape = moving[whole.parameter], whole.box.shape
            # A tensor of its own: products differ in bits with where in memory their operands begin.
            grad = total[start : start + whole.box.size].view(shape).to(own.grad.dtype, copy=True)
            start += whole.box.size
            if isinstance(rule, AdamWRule):
                value = self._view(number, moving, "param").clone()
                rule.step(value, grad, states[number], lr=own.lr, update=own.update)
                found.append(value.reshape(-1))
                continue
            matrix = rule.pre(grad.view(whole.rows_columns), states[number], own.update)
            found.append(self._direction(rule, matrix.contiguous(), states[number], own.update).reshape(-1))
        return found

    def _direction(self, rule: Rule, seen: torch.Tensor, states: States, update: int) -> torch.Tensor:
        """As the rule has it; where it fails, zeros travel, and all ranks are told at the end."""
        try:
            return rule.direction(seen, states, update).to(seen.dtype)
        except FAILURES as error:
            self._failed = error
            return torch.zeros_like(seen)

    def _send_out(self, group: Sequence[int], found: list[torch.Tensor], moving: Mapping[int, Replica]) -> _Sent:
        """Results to every replica; one dtype travels, that of the group's widest."""
        dtype = self._dtype(group, moving)
        device = next(iter(moving.values())).param.device
        flat = torch.cat([part.to(dtype) for part in found]) if found else torch.empty(0, dtype=dtype, device=device)
        sizes = [sum(map(self._size, self._of(group, rank))) for rank in range(self.team.ranks)]
        return self._exchange(flat.repeat(self.team.ranks), sizes, [flat.numel()] * self.team.ranks, self.team.outbound)

    def _dtype(self, group: Sequence[int], moving: Mapping[int, Replica]) -> torch.dtype:
        kinds = {self._travels(number, moving) for number in group}
        return max(kinds, key=lambda kind: kind.itemsize)

    def _travels(self, number: int, moving: Mapping[int, Replica]) -> torch.dtype:
        whole, rule = self.wholes[number]
        sent = None if isinstance(rule, AdamWRule) else rule.travels
        return sent or moving[whole.parameter].param.dtype

    def _apply(self, group: Sequence[int], sent: _Sent, moving: Mapping[int, Replica]) -> None:
        sent.wait()
        start = 0
        for rank in range(self.team.ranks):
            for number in self._of(group, rank):
                whole, rule = self.wholes[number]
                own, param = moving[whole.parameter], self._view(number, moving, "param")
                part = sent.arrived[start : start + whole.box.size].view(whole.box.shape)
                start += whole.box.size
                if isinstance(rule, AdamWRule):
                    param.copy_(part)
                else:
                    direction = part.to(self._travels(number, moving))
                    rule.post(param, direction, whole.rows_columns, lr=own.lr, update=own.update)

    def _exchange(
        self, out: torch.Tensor, taken: list[int], given: list[int], group: dist.ProcessGroup | None
    ) -> _Sent:
        arrived = out.new_empty(sum(taken))
        if self.team.ranks == 1:
            return _Sent(None, out, out)
        self.traffic.collectives += 1
        self.traffic.elements += sum(given) - given[self.team.rank]
        work = dist.all_to_all_single(arrived, out, taken, given, group=group, async_op=True)
        return _Sent(work, arrived, out)


class _Sent:
    """An exchange under way; ``out`` is kept until it has been sent."""

    def __init__(self, work: Any, arrived: torch.Tensor, out: torch.Tensor) -> None:
        self.work, self.arrived, self.out = work, arrived, out
        self.rows: Sequence[torch.Tensor] = ()

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()

    def take(self, ranks: int) -> torch.Tensor:
        """The first rank's part, as ``rows`` has those of all."""
        self.wait()
        self.rows = self.arrived.chunk(ranks) if self.arrived.numel() else [self.arrived] * ranks
        return self.rows[0].clone()
