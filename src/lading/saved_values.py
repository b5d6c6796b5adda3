"""Snapshot: values of a trainer between two steps, as its checkpoints have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lading.checkpoint.state import TensorSource
from lading.ir.action import DEVICE
from lading.ir.graph import Storage
from lading.ir.machine import MEMORY
from lading.ir.program import Program
from lading.runtime.executor import Executor
from lading.runtime.gathering import Gathering
from lading.runtime.named import NamedValues
from lading.staging_layout import Run, staged_runs

if TYPE_CHECKING:
    from lading.runtime.job import Replicas


@dataclass(frozen=True)
class Snapshot:
    """Values of a trainer between two steps, and what a checkpoint has beside them.

    Attributes:
        programs: Programs that take turns over the values.
        beside: Further tensors (name, bytes), saved as uint8.
        ranks: Ranks that have some of the values, or shards of them; None alone.
    """

    step: int
    executor: Executor
    values: NamedValues
    programs: Sequence[Program]
    beside: Mapping[str, bytes]
    ranks: Replicas | None = None

    def sources(self, gathering: Gathering) -> list[TensorSource]:
        """List the tensors of a checkpoint; those that ranks share are read by ``gathering``."""
        named: list[TensorSource] = [
            (name, value.dtype, value.shape, self.values.chunks(name, gathering)) for name, value in self.values.items()
        ]
        more: list[TensorSource] = [(n, "uint8", (len(data),), [memoryview(data)]) for n, data in self.beside.items()]
        return named + more

    def runs(self) -> tuple[dict[str, list[Run]], list[str]]:
        """Find what this rank stages: runs of bytes of values by name, and the values that have to be gathered."""
        return staged_runs(self.values, self.storages, self.executor.can_stage, self.ranks)

    @property
    def storages(self) -> Sequence[Storage]:
        """Storages of the step, by number."""
        return self.executor.program.graph.storages

    @property
    def room_bytes(self) -> int:
        """Bytes that the plan's budget leaves for staging: of the device's memory if that is the host's.

        Experts that the host computes while values are staged have theirs.
        """
        if self.executor.kind == "cpu":
            budgets = (p.budgets[DEVICE] - p.peak_bytes + p.staging_bytes for p in self.programs)
            return max(0, min(budgets))
        host = next((tier.name for tier in self.programs[0].tiers if tier.kind == MEMORY), "")
        hosting = None if self.executor.experts is None else self.executor.experts.hosting
        taken = 0 if hosting is None or self.programs[0].host_tier != host else hosting.host_bytes
        return max(0, min(p.budgets.get(host, 0) - p.tier_bytes(host) for p in self.programs) - taken)
