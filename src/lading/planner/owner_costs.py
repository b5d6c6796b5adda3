"""What a matrix costs those who compute it: seconds on a machine, or operations where none is named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lading.catalog.load import load_machine
from lading.cost.updates import direction_s, precision_of, shared_s
from lading.ir.machine import Machine
from lading.ir.routes import Moves
from lading.optim.rule import MatrixRule
from lading.planner.owners import Owners
from lading.units import format_bytes, format_seconds

#: Of an element beside products, in operations: reads and writes of AdamW count for more than its few operations.
_ADAMW_FLOPS = 100.0


@dataclass(frozen=True)
class DirectionCosts:
    """Of owners. Operations have all matrices at one rate; a machine knows decompositions, small ones and launches."""

    machine: Machine | None

    @staticmethod
    def of(name: str) -> DirectionCosts:
        """Of a machine of the catalog or a probe's file; "" for operations.

        Raises:
            ConfigError: no such machine.
        """
        return DirectionCosts(load_machine(name) if name else None)

    def matrix(self, rule: MatrixRule, rows: int, columns: int) -> float:
        """Of a direction, the mean over updates.

        Raises:
            ConfigError: the machine has no rate for its products.
        """
        work = rule.work(rows, columns)
        if self.machine is None:
            return work.flops
        device = self.machine.device
        return direction_s(work, rows * columns, device, precision_of(rule), device.op_overhead_s)

    def shared(self, rule: MatrixRule, rows: int, columns: int, shares: Sequence[float]) -> tuple[float, ...]:
        """Of a direction on each of 2, 4, 8, 16 ranks that share it; what they tell each other costs on a machine only.

        Args:
            shares: Of its work that each has, as far as it can be shared.
        Raises:
            ConfigError: the machine has no links.
        """
        if self.machine is None or not shares or rule.shared_work(1, 1, 1) is None:
            return tuple(self.matrix(rule, rows, columns) * share for share in shares)
        return shared_s(rule, rows, columns, self.machine, self.machine.device.op_overhead_s)[: len(shares)]

    def elements(self, number: int) -> float:
        """Of AdamW on so many elements."""
        return _ADAMW_FLOPS * number if self.machine is None else number / self.machine.device.optimizer_elements_per_s

    def report(self, owners: Owners, moves: Moves | None = None) -> str:
        """Owners in words: loads, whole states and what travels, each beside what no owners are below."""
        amounts = [owners.makespan_s, owners.bound_s]
        if self.machine is None:
            most, least = (f"{amount:.3g} operations" for amount in amounts)
            why = "; name a machine for seconds"
        else:
            (most, least), why = (format_seconds(amount) for amount in amounts), f" on {self.machine.name}"
        gangs = sum(len(gang) > 1 for gang in owners.ranks)
        shared = f", {gangs} of them with several" if gangs else ""
        lines = [
            f"{len(owners.ranks)} matrices with owners among {len(owners.loads_s)} ranks{shared}: fullest {most}{why}",
            f"load ratio {owners.load_ratio:.3f}, bound {least}, {owners.gap:.1%} above it",
        ]
        if max(owners.state_bytes, default=0):
            even = -(-sum(owners.state_bytes) // len(owners.state_bytes))
            whole = format_bytes(max(owners.state_bytes))
            lines.append(f"whole states: {whole} on the fullest rank, {format_bytes(even)} at least")
        if moves is not None:
            lines.append(
                f"travelling: {moves.busiest:,} elements to the busiest rank in a step, {moves.least:,} at least"
            )
        return "\n".join(lines)
