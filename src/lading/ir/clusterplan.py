"""ClusterPlan: a layout of many devices, and for each group of parameters when its pieces are gathered and released.

What ``lading plan --model`` finds, and what ``lading.apply`` hands to a model that PyTorch's FSDP2 cuts.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from lading.errors import ConfigError
from lading.files import read_json, write_text
from lading.ir.layout import parse_layout
from lading.ir.reading import check_plan, read_as
from lading.units import format_seconds

#: Raised whenever what a saved plan means changes.
CLUSTER_PLAN_FORMAT = 2


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


@dataclass(frozen=True, kw_only=True)
class GatherGroup:
    """Parameters that one collective gathers: a bucket.

    Attributes:
        modules: Paths of the modules whose parameters they are, in order of forward; a parameter belongs to the nearest
            module named by any group. "" is the model itself: what no other group has.
        keep: How long they stay gathered.
        again: Whether released parameters are gathered again for backward; False where backward does not read it (an
            embedding).
        ahead: Number of groups behind it, in order of forward, whose gathers are asked for when it begins.
        ahead_backward: Likewise in order of backward.
        offload: Whether shards, gradients and optimizer states lie in host memory between uses.
        gathered_bytes: Bytes of the parameters as they are gathered, on one rank.
    """

    modules: tuple[str, ...]
    keep: Keep = Keep.RELEASE
    again: bool = True
    ahead: int = 1
    ahead_backward: int = 1
    offload: bool = False
    gathered_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.modules:
            raise ConfigError("a gather group: expected at least one module, got none")
        ahead = min(self.ahead, self.ahead_backward)
        if ahead < 1:
            raise ConfigError(f"gather group {self.modules[0]!r}: expected ahead >= 1, got {ahead}")


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """Plan of training one model on many devices.

    Attributes:
        version: Version of Lading.
        model, machine, machine_fingerprint, stack: Model, machine and software that it was made for.
        devices, seq_len: Number of devices, and tokens of a sequence.
        layout: Layout as it prints.
        groups: Groups in order of forward; empty where parameters are not cut (zero below 3).
        step_s, bound_s: Predicted seconds of a step, and a bound below which no choice of groups can be.
        peaks: Predicted bytes on the busiest rank by moment ("start", "step", "longest", "save", "resume") and tier
            ("device", "host").
        budget_bytes: Bytes of the device that may be used.
        policy: Policy that chose the groups.
        assumptions: Assumptions, a sentence each.
        recomputed: Paths of modules whose forward runs again in backward, each as a whole (activation checkpointing).
        gather_dtype, reduce_dtype: Number formats in which parameters are gathered and gradients reduced; "" as they
            are.
    """

    version: str
    model: str
    machine: str
    machine_fingerprint: str
    stack: str
    devices: int
    seq_len: int
    layout: str
    groups: tuple[GatherGroup, ...] = ()
    step_s: float
    bound_s: float
    peaks: dict[str, dict[str, int]] = field(default_factory=lambda: {})
    budget_bytes: int
    policy: str = ""
    assumptions: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    gather_dtype: str = ""
    reduce_dtype: str = ""
    format: int = CLUSTER_PLAN_FORMAT

    def __repr__(self) -> str:
        step = f"step {format_seconds(self.step_s)}, {self.gap:.1%} above the bound"
        return f"ClusterPlan({self.model} on {self.devices:,} x {self.machine}: {self.layout}; {step})"

    @property
    def gap(self) -> float:
        """Share of the bound by which the plan is above it."""
        return self.step_s / self.bound_s - 1.0 if self.bound_s else 0.0

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of each replica in a step."""
        return parse_layout(self.layout).micro_batches

    @property
    def micro_batch(self) -> int:
        """Sequences of each micro-batch."""
        return parse_layout(self.layout).micro_batch

    @property
    def gathers(self) -> tuple[int, int]:
        """Number of all-gathers of parameters in one step of a rank: in forward and in backward."""
        count = self.micro_batches
        forward = sum(1 if group.keep.until_forward else count for group in self.groups)
        return forward, sum(count for group in self.groups if group.again and not group.keep.until_backward)

    def save(self, path: Path | str) -> None:
        """Write as JSON, whole or not at all; raises as ``lading.files.write_aside``."""
        write_text(Path(path), json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path | str) -> ClusterPlan:
        """Read the plan that ``save`` wrote.

        Raises:
            ConfigError: not such a plan, of another format, or with a field missing, unknown or of the wrong type.
        """
        how = "make one with: lading plan --model NAME --machine NAME --devices N"
        data: Any = read_json(path, "a plan of a cluster", how)
        check_plan(data, "cluster plan", CLUSTER_PLAN_FORMAT, str(path), how)
        try:
            return read_as(ClusterPlan, data, str(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from error
