"""PlacedPlan: which part of a model runs on which of several unlike devices.

What ``lading place --out`` and ``lading plan`` with a list of devices write; ``lading place --plan`` simulates it
again, and ``lading.place`` hands it to stock PyTorch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from lading.errors import ConfigError
from lading.files import read_json, write_text
from lading.ir.reading import check_plan, read_as
from lading.units import format_seconds

#: Raised whenever what a saved placement means changes.
PLACED_PLAN_FORMAT = 1
_ADVICE = "make one with: lading place --model NAME --machine LIST --units N --out placement.json"


@dataclass(frozen=True, kw_only=True)
class PlacedDevice:
    """Device of a placement.

    Attributes:
        under_way: Micro-batches that may be under way on it at a time.
        peak_bytes: Predicted bytes at its peak; ``memory_bytes`` is what it has for tensors.
    """

    name: str
    under_way: int
    peak_bytes: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlacedGroup:
    """A group of the problem, by its name, and the name of its device."""

    name: str
    device: str


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Stage of a placement: neighboring groups on one device.

    Attributes:
        begins: Module before which it begins: a path, or what the catalog's table calls a block, such as "layers 3".
        blocks: Number of blocks of that kind in the model; 0 for a path.
        behind: Whether it begins behind ``begins`` instead: with what the table has after the last block.
    """

    device: str
    begins: str
    blocks: int = 0
    behind: bool = False


@dataclass(frozen=True, kw_only=True)
class PlacedPlan:
    """Plan of the devices on which the parts of one model run.

    Attributes:
        version: Version of Lading.
        model, machine, machine_fingerprint: Model and machine that it was made for; ``machine`` is a name or a path.
        seq_len, batch, micro_batches: Tokens of a sequence, sequences of a micro-batch, micro-batches of a step.
        training: Whether a step is placed; else one forward pass.
        units, captured, precision, stack: How the model was taken apart: see ``lading.placing.Placing``.
        devices: All devices of the list.
        groups: Groups of tasks, in order.
        step_s, bound_s: Predicted seconds, and a bound below which no placement can be (0: none known).
    """

    version: str
    model: str
    machine: str
    machine_fingerprint: str
    seq_len: int
    batch: int
    micro_batches: int
    training: bool
    units: int
    captured: bool
    precision: str
    stack: str
    devices: tuple[PlacedDevice, ...]
    groups: tuple[PlacedGroup, ...]
    step_s: float
    bound_s: float
    policy: str
    assumptions: tuple[str, ...] = ()
    format: int = PLACED_PLAN_FORMAT

    def __post_init__(self) -> None:
        names = {device.name for device in self.devices}
        if unknown := sorted({group.device for group in self.groups} - names):
            raise ConfigError(f"a placement: expected devices among {', '.join(sorted(names))}, got {unknown[0]!r}")
        if not self.groups or min(self.batch, self.micro_batches) < 1:
            raise ConfigError(
                f"a placement: expected groups, a batch and micro-batches of 1 or more, got {len(self.groups)}, "
                f"{self.batch} and {self.micro_batches}"
            )

    def __repr__(self) -> str:
        devices = ", ".join(dict.fromkeys(group.device for group in self.groups))
        what = "step" if self.training else "pass"
        return f"PlacedPlan({self.model} on {devices}: {len(self.groups)} groups, {what} {format_seconds(self.step_s)})"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The parts in order, each on a device of its own.

        Raises:
            ConfigError: a device has several parts, so that they are no pipeline.
        """
        found: list[Stage] = []
        place = 0
        for device, own in groupby(self.groups, key=lambda group: group.device):
            found.append(self._stage(device, place))
            place += len(tuple(own))
        names = [stage.device for stage in found]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"expected one part on each device, got parts on {', '.join(names)}; place with the policy chain"
            )
        return tuple(found)

    def _stage(self, device: str, place: int) -> Stage:
        """The part that begins with a group."""
        names = [group.name for group in self.groups]
        if self.captured:
            return Stage(device=device, begins=names[place])
        kinds = ["" if not number.isdecimal() else kind for kind, _, number in (n.rpartition(" ") for n in names)]
        behind = not kinds[place] and place > 0 and bool(kinds[place - 1])
        known = place - 1 if behind else place
        blocks = kinds.count(kinds[known]) if kinds[known] else 0
        return Stage(device=device, begins=names[known], blocks=blocks, behind=behind)

    @property
    def windows(self) -> tuple[int, ...]:
        """Micro-batches under way on each stage, as its memory has room for, and at most as on the stage before."""
        room = {device.name: device.under_way for device in self.devices}
        found: list[int] = []
        for stage in self.stages:
            found.append(min([self.micro_batches, room[stage.device], *found[-1:]]))
        return tuple(found)

    def save(self, path: Path | str) -> None:
        """Write as JSON, whole or not at all; raises as ``lading.files.write_aside``."""
        write_text(Path(path), json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: Path | str) -> PlacedPlan:
        """Read the placement that ``save`` wrote.

        Raises:
            ConfigError: not such a plan, of another format, or with a field missing, unknown or of the wrong type.
        """
        data: Any = read_json(path, "a placement", _ADVICE)
        check_plan(data, "placement", PLACED_PLAN_FORMAT, str(path), _ADVICE)
        try:
            return read_as(PlacedPlan, data, str(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from error
