"""Keep: how long the unsharded parameters of a unit stay."""

from __future__ import annotations

from enum import StrEnum


class Keep(StrEnum):
    """Time for which the gathered parameters of a group stay.

    RELEASE: until the group's forward ends; gathered again for backward (ZeRO-3).
    BACKWARD: from forward until the group's backward ends, in each micro-batch (ZeRO-2, within a micro-batch).
    FORWARD: from backward until the next micro-batch's forward ends; gathered again for backward. Between two
        micro-batches there are no activations, so there is room.
    STEP: from the first forward to the last backward of a step, over its micro-batches (as DeepSpeed's ZeRO-2).
    """

    RELEASE = "release"
    BACKWARD = "backward"
    FORWARD = "forward"
    STEP = "step"

    @property
    def until_backward(self) -> bool:
        """Whether they stay when the group's forward ends."""
        return self in (Keep.BACKWARD, Keep.STEP)

    @property
    def until_forward(self) -> bool:
        """Whether they stay when the group's backward ends, but for the last of a step."""
        return self in (Keep.FORWARD, Keep.STEP)
