"""Plan: the bill of lading. What was asked, what goes where between two uses, the Program that does it, and its cost.

One type says it of a run on one machine (what happens to each storage between two uses), of a model on a cluster (a
layout, and when each unit of sharded parameters is unsharded and resharded) and of a model on unlike devices (which of
them runs each part). One JSON holds it (docs/plan-json.md).

A saved plan of a run is all that training needs beside the captured graph: its Program is in it, as text, and so is
what the simulator predicted of every action. What a Program means is known to the graph it was made for;
``lading.memory.restore`` puts the two together and proves the result again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from lading.errors import ConfigError
from lading.files import read_json, write_text
from lading.ir.action import DEVICE
from lading.ir.layout import Layout, parse_layout
from lading.ir.reading import read_as
from lading.ir.request import Request
from lading.units import format_bytes, format_seconds

#: Raised whenever what a saved plan means changes.
PLAN_FORMAT = 16
#: Settings of a plan, "host_tokens.ROUTER.EXPERT": most tokens for which the host computes an expert.
HOST_TOKENS = "host_tokens."
#: Beginning of a plan's words on why the host computes no expert, where it may.
NOT_ON_HOST = "no expert is computed on the host"


class PlanKind(StrEnum):
    """Kinds of plans, each with its reader: ``lading train``, ``lading.apply`` or ``lading.place``."""

    RUN = "plan of a run"
    CLUSTER = "plan of a cluster"
    PLACEMENT = "placement"

    @property
    def advice(self) -> str:
        """Command that makes such a plan."""
        return {
            PlanKind.RUN: "make one with: lading plan RUN.toml",
            PlanKind.CLUSTER: "make one with: lading plan --model NAME --machine NAME --devices N",
            PlanKind.PLACEMENT: "make one with: lading place --model NAME --machine LIST --units N --out "
            "placement.json",
        }[self]


class Option(str):
    """Place of a storage between two uses: ``Option.KEEP``, ``Option.RECOMPUTE``, or in the tier it names."""

    __slots__ = ()
    KEEP: ClassVar[Option]
    RECOMPUTE: ClassVar[Option]

    @property
    def tier(self) -> str:
        """Name of the tier in which the storage waits; "" where it is kept or recomputed."""
        return "" if self in (Option.KEEP, Option.RECOMPUTE) else str(self)


Option.KEEP, Option.RECOMPUTE = Option("keep"), Option("recompute")


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice for a gap: what happens to ``storage`` between its uses at op positions ``start`` and ``end``.

    A gap with ``end <= start`` passes over the step's boundary.
    """

    storage: int
    start: int
    end: int
    option: Option


class UnitResidency(StrEnum):
    """Time for which the unsharded parameters of a unit stay on a device.

    RELEASE: until the unit's forward ends; unsharded again for backward (ZeRO-3).
    BACKWARD: from forward until the unit's backward ends, in each micro-batch (ZeRO-2, within a micro-batch).
    FORWARD: from backward until the next micro-batch's forward ends; unsharded again for backward. Between two
        micro-batches there are no activations, so there is room.
    STEP: from the first forward to the last backward of a step, over its micro-batches (as DeepSpeed's ZeRO-2).
    """

    RELEASE = "release"
    BACKWARD = "backward"
    FORWARD = "forward"
    STEP = "step"

    @property
    def until_backward(self) -> bool:
        """Whether a unit's parameters stay unsharded when its forward ends."""
        return self in (UnitResidency.BACKWARD, UnitResidency.STEP)

    @property
    def until_forward(self) -> bool:
        """Whether a unit's parameters stay unsharded when its backward ends, but for the last of a step."""
        return self in (UnitResidency.FORWARD, UnitResidency.STEP)


@dataclass(frozen=True, kw_only=True)
class ShardedUnit:
    """Parameters that one collective unshards, in torch's words for it (``torch.distributed.fsdp.fully_shard``).

    Attributes:
        modules: Paths of the modules whose parameters they are, in order of forward; a parameter belongs to the nearest
            module named by any unit. "" is the model itself: what no other unit has.
        reshard_after_forward: Whether they are resharded when the unit's forward ends, to be unsharded for backward.
        reshard_after_backward: Whether they are resharded when its backward ends; they always are behind the last
            micro-batch of a step.
        unshard_in_backward: Whether backward unshards what is resharded; False where it does not read it (an
            embedding).
        prefetch_forward: When this unit begins, so many units behind it in order of forward are asked for.
        prefetch_backward: The number in order of backward.
        offload: Shards, gradients and optimizer states lie in host memory between uses.
        unsharded_bytes: Size of the parameters as they are unsharded, on one rank.
    """

    modules: tuple[str, ...]
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    prefetch_forward: int = 1
    prefetch_backward: int = 1
    offload: bool = False
    unsharded_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.modules:
            raise ConfigError("a sharded unit: expected at least one module, got none")
        prefetch = min(self.prefetch_forward, self.prefetch_backward)
        if prefetch < 1:
            raise ConfigError(f"sharded unit {self.modules[0]!r}: expected a prefetch of 1 or more, got {prefetch}")


@dataclass(frozen=True, kw_only=True)
class PlacedStage:
    """Neighbors on one device: a stage of a pipeline over unlike devices.

    Attributes:
        device: Name of the device.
        begins: Module before which it begins: a path, or what the catalog's table calls a block, such as "layers 3".
        blocks: How many blocks of that kind the model has; 0 for a path.
        behind: It begins behind ``begins`` instead: with what the table has after the last block.
    """

    device: str
    begins: str
    blocks: int = 0
    behind: bool = False


@dataclass(frozen=True, kw_only=True)
class PolicyRow:
    """Row of one policy in the comparison of policies.

    Attributes:
        step_s: Predicted step time; None if the policy does not fit.
        peak_bytes: Predicted device peak, or what the policy would need when it does not fit.
        stall_s: Part of ``step_s`` in which compute waits for a move.
    """

    policy: str
    fits: bool
    peak_bytes: int
    step_s: float | None = None
    recompute_s: float = 0.0
    stall_s: float = 0.0
    moved_bytes: dict[str, int] = field(default_factory=lambda: {})
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class ResourceLimit:
    """Least seconds that a step takes of one resource, whatever is chosen inside the budgets (``planner.limit``).

    Attributes:
        resource: What takes the time: "computing", "reads from disk".
        size_bytes: Bytes that have to move; 0 for what moves none.
    """

    resource: str
    seconds: float
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices of a plan about the step.

    Attributes:
        gaps: Choice for each gap between two uses of a storage; a gap that is not listed is KEEP.
        loss_parts: Number of parts in which cross-entropies are computed (``lading.ir.loss_parts``); 0 for whole ones.
        head_parts: Number of parts in which heads are computed with their loss (``lading.ir.head_parts``); 0 for whole
            ones.
        gradient_pieces: Least bytes of the pieces in which large gradients are made (``lading.ir.gradient_pieces``);
            0 for whole ones.
        late_products: Whether products that make such pieces run right before what adds to them.
        weight_pieces: Least bytes of the pieces in which large weights move (``lading.ir.weight_pieces``); 0 for whole
            ones.
        late_updates: Updates that wait inside the step, each with the operation behind which it runs, as numbered in
            the step with its loss in parts and its gradients in pieces (``lading.ir.late_updates``).
        deferred: Number of updates, the last ones of the step, that run in the next step's forward
            (``lading.ir.defer``).
        hosted: Operations that the host's processors run, as numbered in the step with its updates deferred.
        retimed: Number of times that transfers were scheduled again, by the times simulated.
        units: Sharded parameters in order of forward; () where none are sharded.
        recomputed: Paths of modules whose forward runs again in backward, each as a whole (activation checkpointing).
        gather_dtype, reduce_dtype: Number format in which parameters are unsharded and gradients reduced; "" as they
            are.
        placement: Each part of the model, in order, and the name of the device that runs it.
        in_flight: Micro-batches that a device may have under way, by its name.
        cuts: Operations of a captured forward at which the stages of a pipeline but the first begin.
        rank: Number along the pipeline of the rank that this is the plan of.
        groups: Names of the parameters in each group of the optimizer but the first, and of those that have had other
            numbers of updates, where no shard is of several.
        waiting: First names of the parameters whose updates wait for the norm of all gradients, in a step whose others
            do not (``lading.ir.guess``).
    """

    gaps: tuple[Choice, ...] = ()
    loss_parts: int = 0
    head_parts: int = 0
    gradient_pieces: int = 0
    late_products: bool = False
    weight_pieces: int = 0
    late_updates: tuple[tuple[int, int], ...] = ()
    deferred: int = 0
    retimed: int = 0
    hosted: tuple[int, ...] = ()
    units: tuple[ShardedUnit, ...] = ()
    recomputed: tuple[str, ...] = ()
    gather_dtype: str = ""
    reduce_dtype: str = ""
    placement: tuple[tuple[str, str], ...] = ()
    in_flight: dict[str, int] = field(default_factory=lambda: {})
    cuts: tuple[int, ...] = ()
    rank: int = 0
    groups: tuple[tuple[str, ...], ...] = ()
    waiting: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := sorted({device for _, device in self.placement} - self.in_flight.keys()):
            known = ", ".join(sorted(self.in_flight))
            raise ConfigError(f"a placement: expected devices among {known}, got {unknown[0]!r}")


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Predictions of the simulator for a plan, and for the policies it was compared with.

    Attributes:
        step_s: Seconds of a step.
        lower_bound_s: Seconds that no plan within the budgets, with the same operations on the host, is below, as
            modelled; 0.0 where no bound is known.
        limits: Least seconds of each resource by itself, the largest first; () where they were not asked for.
        peaks: Most bytes by moment ("start", "step", "longest", "save", "resume") and tier, or by device where devices
            are unlike; on the busiest rank.
        keep_all_bytes: Device bytes that keeping everything needs; 0 where that was not asked.
        host_saves_s: Seconds by which running operations on the host makes the step shorter.
        bytes_by_role: Bytes by role at the peak of a step.
        policies: Policies that were compared.
        actions: For each action its start and its seconds, both as decimal microseconds: "12.500 3.250".
    """

    step_s: float
    lower_bound_s: float = 0.0
    limits: tuple[ResourceLimit, ...] = ()
    peaks: dict[str, dict[str, int]] = field(default_factory=lambda: {})
    keep_all_bytes: int = 0
    host_saves_s: float = 0.0
    bytes_by_role: dict[str, int] = field(default_factory=lambda: {})
    policies: tuple[PolicyRow, ...] = ()
    actions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a step: the request, the choices, the Program that does it, and what that should cost.

    Attributes:
        version: Version of Lading.
        layout: How the step is spread over devices, as ``lading.ir.layout.Layout`` prints; None on one device.
        program: ``Program.text``, line by line; () where it is emitted again from the layout and the choices.
        assumptions: Assumptions, a sentence each.
        others: Plans of further steps over the same values, such as an evaluation, which find them where this plan
            leaves them; each is of a captured graph, in the order in which these were given.
        peers: Plans of the other ranks along a pipeline, in order; this is the first one's. Replicas of a rank have
            the same.
    """

    version: str
    request: Request
    layout: str | None = None
    choices: Choices
    program: tuple[str, ...] = ()
    predictions: Predictions
    assumptions: tuple[str, ...] = ()
    others: tuple[Plan, ...] = ()
    peers: tuple[Plan, ...] = ()
    format: int = PLAN_FORMAT

    def __post_init__(self) -> None:
        if self.layout is not None:
            parse_layout(self.layout)

    def __repr__(self) -> str:
        step = f"step {format_seconds(self.step_s)}, {self.gap:.1%} above the bound"
        request = self.request
        if self.kind is PlanKind.PLACEMENT:
            what, devices = "step" if request.training else "pass", dict.fromkeys(d for _, d in self.choices.placement)
            parts = f"{len(self.choices.placement)} parts, {what} {format_seconds(self.step_s)}"
            return f"Plan({request.model} on {', '.join(devices)}: {parts})"
        if self.kind is PlanKind.CLUSTER:
            return f"Plan({request.model} on {request.devices:,} x {request.machine}: {self.layout}; {step})"
        options = Counter(choice.option for choice in self.choices.gaps)
        done = {Option.RECOMPUTE: "recomputed", **{tier: f"on {tier}" for tier in self.options[2:]}}
        chosen = "".join(f", {options[o]} gaps {done[o]}" for o in done if options[o])
        memory = f"device {format_bytes(self.peak_bytes[DEVICE])} of {format_bytes(self.budgets[DEVICE])}"
        return f"Plan({request.policy} on {request.machine}: {step}; {memory}{chosen})"

    @property
    def kind(self) -> PlanKind:
        """Kind of the plan: of a run on one machine, a model on a cluster, or a model on unlike devices."""
        if self.choices.placement:
            return PlanKind.PLACEMENT
        is_run = self.layout is None or self.request.graph_fingerprint
        return PlanKind.RUN if is_run else PlanKind.CLUSTER

    @property
    def replicas(self) -> int:
        """Ranks that a run is planned for, each with a batch of its own."""
        return self.parsed_layout.dp if self.kind is PlanKind.RUN else 1

    @property
    def ranks(self) -> int:
        """Number of ranks that run a run's plan together."""
        return self.parsed_layout.devices if self.kind is PlanKind.RUN else 1

    def replica(self, rank: int) -> int:
        """Number of the replica, of ``replicas``, that a rank is of: all ranks of one are given the same batches."""
        return self.parsed_layout.replica(rank)

    def of_rank(self, rank: int) -> Plan:
        """Plan of one rank; each along a pipeline has its own, as have the replicas of each."""
        return (self, *self.peers)[self.parsed_layout.place(rank)["pp"]] if self.peers else self

    @property
    def parsed_layout(self) -> Layout:
        """Layout of the step over devices; that of one device where nothing is spread."""
        return parse_layout(self.layout or "")

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes that the plan may use, by name of the tier."""
        return self.request.budgets

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.predictions.step_s

    @property
    def lower_bound_s(self) -> float:
        """Seconds of a step that no plan within the budgets takes less than, as modelled; 0.0 where none is known."""
        return max(each.predictions.lower_bound_s for each in (self, *self.peers))

    @property
    def limits(self) -> tuple[ResourceLimit, ...]:
        """Least seconds of each resource, the largest first; of a pipeline those of the rank that is limited most."""
        limits_by_rank = (each.predictions.limits for each in (self, *self.peers))
        return max(limits_by_rank, key=lambda limits: limits[0].seconds if limits else 0.0)

    @property
    def policies(self) -> tuple[PolicyRow, ...]:
        """Policies that were compared, a row each."""
        return self.predictions.policies

    @property
    def peak_bytes(self) -> dict[str, int]:
        """Predicted peak of each tier, bytes."""
        return self.predictions.peaks["step"]

    @property
    def options(self) -> tuple[Option, ...]:
        """Options for a gap: keep, recompute, and the tiers of the machine, nearest first."""
        return Option.KEEP, Option.RECOMPUTE, *(Option(tier) for tier in self.budgets if tier != DEVICE)

    @property
    def gap(self) -> float:
        """Share of the lower bound by which the plan is above it."""
        return self.step_s / self.lower_bound_s - 1.0 if self.lower_bound_s else 0.0

    @property
    def compiled(self) -> bool:
        """Whether runs of light operations are compiled into one call each."""
        return bool(self.request.settings.get("compile", 0.0))

    @property
    def leaves_out_experts(self) -> bool:
        """Whether experts without tokens are left out of a step (``lading.plan(experts=)``)."""
        return bool(self.request.settings.get("experts", 0.0))

    @property
    def experts(self) -> bool | Literal["count"]:
        """Whether steps leave out experts without tokens, or only count what routers choose, for another plan."""
        counts = bool(self.request.settings.get("counted_experts", 0.0))
        return self.leaves_out_experts or ("count" if counts else False)

    @property
    def host_tokens(self) -> dict[str, dict[int, int]]:
        """Most tokens for which the host computes an expert, by the router's module and the expert."""
        limits: dict[str, dict[int, int]] = {}
        for key, tokens in self.request.settings.items():
            if key.startswith(HOST_TOKENS):
                layer, _, expert = key.removeprefix(HOST_TOKENS).rpartition(".")
                limits.setdefault(layer, {})[int(expert)] = int(tokens)
        return limits

    def of_run(self, run: dict[str, Any]) -> Plan:
        """Copy the plan for a run of this configuration."""
        return dataclasses.replace(self, request=dataclasses.replace(self.request, run=run))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of each replica in a step."""
        return self.parsed_layout.micro_batches

    @property
    def micro_batch(self) -> int:
        """Number of sequences of a micro-batch."""
        return self.parsed_layout.micro_batch

    @property
    def unshards(self) -> tuple[int, int]:
        """Number of all-gathers of parameters in one step on each rank: in forward and in backward."""
        count, units = self.micro_batches, self.choices.units
        forward = sum(count if unit.reshard_after_backward else 1 for unit in units)
        return forward, sum(count for unit in units if unit.unshard_in_backward and unit.reshard_after_forward)

    @property
    def stages(self) -> tuple[PlacedStage, ...]:
        """Parts of the model that unlike devices run, in order, each on a device of its own.

        Raises:
            ConfigError: a device has several parts, so that they are no pipeline.
        """
        stages: list[PlacedStage] = []
        place = 0
        for device, parts in groupby(self.choices.placement, key=lambda part: part[1]):
            stages.append(self._stage(device, place))
            place += len(tuple(parts))
        names = [stage.device for stage in stages]
        if len(set(names)) < len(names):
            raise ConfigError(
                f"expected one part on each device, got parts on {', '.join(names)}; place with the policy chain"
            )
        return tuple(stages)

    def _stage(self, device: str, place: int) -> PlacedStage:
        """The stage that begins with a part."""
        names = [name for name, _ in self.choices.placement]
        if self.request.units is not None:  # parts of a captured model are modules, by their paths
            return PlacedStage(device=device, begins=names[place])
        kinds = ["" if not number.isdecimal() else kind for kind, _, number in (n.rpartition(" ") for n in names)]
        behind = not kinds[place] and place > 0 and bool(kinds[place - 1])
        known = place - 1 if behind else place
        blocks = kinds.count(kinds[known]) if kinds[known] else 0
        return PlacedStage(device=device, begins=names[known], blocks=blocks, behind=behind)

    @property
    def windows(self) -> tuple[int, ...]:
        """Micro-batches under way on each stage, as its memory has room for, and at most as on the stage before."""
        windows: list[int] = []
        for stage in self.stages:
            windows.append(min([self.micro_batches, self.choices.in_flight[stage.device], *windows[-1:]]))
        return tuple(windows)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all but the run's configuration; a file whose content has another is refused."""
        table = dataclasses.asdict(self)
        del table["request"]["run"]
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the fingerprint; ``plan_from_dict`` reads it back."""
        return {**dataclasses.asdict(self), "fingerprint": self.fingerprint}

    def save(self, path: Path | str) -> None:
        """Write as JSON, whole or not at all; raises as ``lading.files.write_aside``."""
        write_text(Path(path), json.dumps(self.to_dict(), indent=1) + "\n")

    @staticmethod
    def load(path: Path | str, kind: PlanKind | None = None) -> Plan:
        """Read the plan that ``save`` wrote.

        Args:
            kind: What it is to be of; None takes any.
        Raises:
            ConfigError: not a plan, of another kind or format, changed by hand or damaged, or with a field missing,
                unknown or of the wrong type.
        """
        advice = (kind or PlanKind.RUN).advice
        what = f"a {kind}" if kind else "a plan"
        plan = plan_from_dict(read_json(path, what, advice), str(path), advice)
        return plan if kind is None else plan.of_kind(kind, str(path))

    def of_kind(self, kind: PlanKind, origin: str) -> Plan:
        """The plan, if it is of this kind; ``origin`` is named in errors.

        Raises:
            ConfigError: it is of another kind.
        """
        if self.kind is not kind:
            raise ConfigError(f"{origin}: expected a {kind}, found a {self.kind}; {kind.advice}")
        return self


def plan_for(reader: str, plan: Plan | Path | str, kind: PlanKind) -> Plan:
    """Take a plan as a public function is given it, or read it from its file.

    Args:
        reader: The function, to be named in errors, such as "lading.apply".
        plan: The plan, or the path of its file.
        kind: The kind that the function takes.
    Raises:
        ConfigError: neither a plan nor a path, a plan of another kind, or a file as ``Plan.load`` refuses it.
    """
    if isinstance(plan, (str, Path)):
        return Plan.load(plan, kind)
    if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"{reader}: expected a {kind} or the path of its file, got {type(plan).__name__}; {kind.advice}"
        )
    return plan.of_kind(kind, reader)


def plan_from_dict(data: Any, origin: str, advice: str = "plan again") -> Plan:
    """Build a Plan from parsed JSON; ``origin`` is named in errors.

    Raises:
        ConfigError: another format, a field is missing, unknown or of the wrong type, or something but the run's
            configuration was changed since the plan was saved.
    """
    table = _of_this_format(data, origin, advice)
    saved = table.pop("fingerprint", None)
    try:
        plan: Plan = read_as(Plan, table, origin)
    except ConfigError as error:  # of a part that refuses its values, which does not know the file
        raise ConfigError(str(error) if origin in str(error) else f"{origin}: {error}; plan again") from error
    for index, choice in enumerate(plan.choices.gaps):
        if choice.option not in plan.options:
            raise ConfigError(
                f"{origin}.choices.gaps[{index}].option: expected one of {', '.join(plan.options)}, found "
                f"{choice.option[:40]!r}; plan again"
            )
    if saved != plan.fingerprint:
        raise ConfigError(
            f"{origin}: expected a plan as it was saved, fingerprint {saved!r}, found one that was changed or damaged, "
            f"fingerprint {plan.fingerprint!r} (request.run may be changed by hand, nothing else); plan again"
        )
    return plan


def _of_this_format(data: Any, origin: str, advice: str) -> dict[str, Any]:
    """The table of a file, a copy, if it is a plan of this format."""
    if not isinstance(data, dict):
        found = type(cast("object", data)).__name__
        raise ConfigError(f"{origin}: expected a plan of format {PLAN_FORMAT}, found {found}; {advice}")
    table = dict(cast("dict[str, Any]", data))
    number = table.get("format")
    if type(number) is int and number == PLAN_FORMAT:
        return table
    found = "no format" if number is None else f"format {repr(number)[:40]}"
    if type(number) is int and number < PLAN_FORMAT:
        found += " of an earlier Lading"
        advice = "plan again"
    raise ConfigError(f"{origin}: expected a plan of format {PLAN_FORMAT}, found {found}; {advice}")
