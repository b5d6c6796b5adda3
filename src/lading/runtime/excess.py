"""Excess: what of a step took more memory than its plan allows for, found by looking at every operation of one step."""

from __future__ import annotations

from collections.abc import Callable

from lading.ir.program import Program
from lading.runtime.device import Call, Meter
from lading.runtime.streams import Entry
from lading.units import format_bytes


class OperationPeaks:
    """Memory before and during each operation of a step; looking costs some 50 us an operation.

    Args:
        meter: Reset before each operation, so that it no longer has the peak of the step: ``peak_bytes`` does.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._rows: list[tuple[int, int, int]] = []  # action, bytes before it, highest while it ran

    def watched(self, entry: Entry) -> Call:
        """A call that runs an action and looks."""
        run: Callable[[], object] = entry.run

        def watch() -> None:
            before = self._meter.now_bytes()
            self._meter.reset()
            run()
            self._rows.append((entry.action, before, self._meter.peak_bytes()))

        return watch

    @property
    def peak_bytes(self) -> int:
        """Highest while any of them ran."""
        return max((peak for _, _, peak in self._rows), default=0)

    def cause(self, program: Program, baseline_bytes: int) -> str:
        """What was not predicted, in a sentence.

        Args:
            baseline_bytes: In use before anything of the run.
        """
        action, before, peak = max(self._rows, key=lambda row: row[2], default=(0, 0, 0))
        scratch, beside = peak - before, before - baseline_bytes - program.arena_bytes
        name = program.label(program.actions[action])
        parts: list[str] = []
        if scratch > program.workspace_bytes:
            parts.append(
                f"{name} took {format_bytes(scratch)} while it ran, where {format_bytes(program.workspace_bytes)} were "
                "planned for any operation"
            )
        if beside > program.overhead_bytes:
            parts.append(
                f"before {name} the process held {format_bytes(beside)} beside the tensors, where "
                f"{format_bytes(program.overhead_bytes)} were planned"
            )
        return " and ".join(parts) or "no operation took it: another thread did, or the caller between two steps"
