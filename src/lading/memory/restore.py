"""Restoring: a saved plan and the graph it was made for become the Program that runs, proven again, and its Timeline.

Nothing is planned, timed or simulated here: a Program is read as it was written, and a Timeline is what the simulator
said when the plan was made.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

from lading.catalog.load import machine_from_dict
from lading.errors import ConfigError, ProgramError
from lading.grouping import MATRIX, REST, Matrices, matrices_from
from lading.ir.context_shards import shard_context
from lading.ir.defer import defer, updates
from lading.ir.expand import expand
from lading.ir.expert_shards import shard_experts
from lading.ir.gradient_pieces import with_gradient_pieces
from lading.ir.graph import Op, StepGraph
from lading.ir.guess import SPECULATES, with_guess
from lading.ir.head_parts import with_head_parts
from lading.ir.host_ops import hosted
from lading.ir.late_updates import with_late_updates
from lading.ir.layout import ALONE, Layout
from lading.ir.loss_parts import MOST_PARTS, with_loss_parts
from lading.ir.machine import Machine
from lading.ir.plan import Choices, Plan
from lading.ir.program import Program, parse_program
from lading.ir.reduction import reduce_gradients, with_draws
from lading.ir.retarget import retarget
from lading.ir.schedules import Schedule, schedule_of
from lading.ir.sharding import GatheredUnit, shard_parameters, unshard_parameters
from lading.ir.stage_cuts import RankStep, rank_steps, stage_of_ops, with_copies
from lading.ir.statistics import share_statistics
from lading.ir.tensor_shards import shard_tensors
from lading.ir.timeline import Event, Timeline
from lading.ir.together import numbered_as, with_states
from lading.ir.update_ops import grouped
from lading.ir.weight_pieces import with_weight_pieces
from lading.memory.staircase import memory_samples
from lading.memory.tier_layout import homes_of
from lading.memory.verify import verify
from lading.optim.registry import default_rule
from lading.optim.registry import optimizer as optimizer_by_name
from lading.optim.rule import ParameterRule

_ACTION_TIMES = re.compile(r"(\d{1,15}\.\d{3}) (\d{1,15}\.\d{3})\Z")


def step_of(  # noqa: PLR0913  what a step depends on
    captured: StepGraph,
    machine: Machine,
    *,
    clip_norm: float,
    master_weights: bool,
    optimizer: ParameterRule | None = None,
    matrices: Matrices | None = None,
    layout: Layout = ALONE,
    widen: bool = False,
    choices: Choices | None = None,
) -> StepGraph:
    """Whole step of a captured micro-batch, with the operations of the machine's device.

    Args:
        layout: How the step is spread: gradients are reduced over ``dp`` ranks, in buckets of ``bucket_bytes``; with
            ``zero``, each rank keeps a shard of the optimizer's states, and of parameters with ZeRO 3; with ``tp``, of
            matrices and of what products with them make.
        choices: Where a pipeline is cut, and the rank whose step it is; parameters that share no unit of shards.
        widen: Take gradients to float32 as for several ranks (``lading.ir.expand.expand``).

    Raises:
        ConfigError: an operation has no kernel there, the rule for matrices cannot move what it is told to, or the step
            cannot be run by several ranks.
    """
    captured = of_each_rank(captured, layout, machine.device.kind)
    part = None if layout.pp == 1 else _part(captured, layout, choices)
    micro = captured if part is None else part.graph
    if part is not None:
        matrices = matrices and _named(matrices, _rows(captured, matrices), micro)
    sharded, units, sizes = micro, (), {}
    if layout.zero:
        optimizer = optimizer or default_rule()
        moved = {} if matrices is None else grouped(micro, matrices)[0]
        sharded, units, origins = shard_parameters(
            micro, layout, _unit_keys(part, choices), moved, _blocks(micro, optimizer)
        )
        sizes = {unit.parameter: _smallest(micro, sharded, unit) for unit in units}
        part = part and part.with_shards(sharded, origins)
        stacks = {sharded.storage_of(tensor): parts for tensor, parts in moved.items()}
        owned = {unit.parameter: stacks[unit.whole] for unit in units if unit.whole in stacks}
        matrices = matrices and _named(matrices, owned, sharded)
    step = expand(
        sharded,
        clip_norm=clip_norm,
        master_weights=master_weights,
        optimizer=optimizer,
        matrices=matrices,
        widen=widen or layout.dp * layout.cp > 1 or layout.zero > 0,
        layout=layout,
        order=() if part is None else part.order(pipeline_of(layout, captured.accumulation)),
        sizes=sizes,
        clipped=captured,
    )
    if units:
        step = unshard_parameters(step, micro, units, layout)
    if part is not None:
        step = with_copies(step, part)
    step = retarget(step, machine.device.kind, flash="bfloat16" in machine.device.peak_flops_per_s)
    if layout.dp * layout.cp > 1 and not layout.zero:
        step = reduce_gradients(step, layout)
    return share_statistics(step, layout) if layout.dp > 1 else step


def of_each_rank(captured: StepGraph, layout: Layout, kind: str) -> StepGraph:
    """Rewrite a captured micro-batch into what every rank computes of it, but for a pipeline's stages.

    Args:
        kind: Kind of the device.

    Raises:
        ConfigError: it cannot be cut so.
    """
    if layout.devices > 1:
        captured = with_draws(captured, kind)
    if layout.tp > 1:
        captured = shard_tensors(captured, layout)
    if layout.cp > 1:
        captured = shard_context(captured, layout)
    if layout.ep > 1:
        captured = shard_experts(captured, layout)
    return captured


def _part(captured: StepGraph, layout: Layout, choices: Choices | None) -> RankStep:
    """Cut a captured micro-batch for one rank along a pipeline.

    Raises:
        ConfigError: what is returned beside the loss is of another stage.
    """
    assert choices is not None, "a pipeline is cut somewhere"
    rank_of = pipeline_of(layout, captured.accumulation).rank_of
    part = rank_steps(captured, stage_of_ops(captured, choices.cuts), layout, rank_of)[choices.rank]
    if len(part.graph.losses) not in (0, len(captured.losses)):
        raise ConfigError(
            "layout: expected a loss and what is returned beside it to be of the pipeline's last stage, found some "
            f"of {', '.join(captured.loss_names)} on an earlier one; return what the last layers make, or train "
            "without pp"
        )
    return part


def _unit_keys(part: RankStep | None, choices: Choices | None) -> dict[str, object]:
    """Say by a parameter's first name what parameters in one unit of shards have in common."""
    unit_keys: dict[str, object] = {} if part is None else {**part.gather_keys()}
    groups = enumerate(choices.groups, 1) if choices is not None else ()
    return unit_keys | {name: (number, unit_keys.get(name)) for number, names in groups for name in names}


def _blocks(micro: StepGraph, rule: ParameterRule) -> dict[str, int]:
    """Elements that share a number of a state, by the first name of each parameter that has such states."""
    blocks: dict[str, int] = {}
    for parameter in micro.parameters:
        shape = micro.tensors[parameter.tensor].shape
        specs = rule.of_size(prod(shape)).state_specs(shape)
        blocks[parameter.names[0]] = max((spec.block for spec in specs.values()), default=1)
    return {name: block for name, block in blocks.items() if block > 1}


def _smallest(micro: StepGraph, sharded: StepGraph, unit: GatheredUnit) -> int:
    """Elements of the smallest parameter of a unit."""
    members = (p.tensor for p in micro.parameters if sharded.storage_of(p.tensor) == unit.whole)
    return min(prod(micro.tensors[tensor].shape) for tensor in members)


def _rows(captured: StepGraph, matrices: Matrices) -> dict[str, tuple[int, ...]]:
    """Rows of the parts of each matrix of the whole model, by its first name."""
    moved = grouped(captured, matrices)[0]
    return {p.names[0]: moved[p.tensor] for p in captured.parameters if p.tensor in moved}


def _named(matrices: Matrices, rows: Mapping[str, tuple[int, ...]], part: StepGraph) -> Matrices | None:
    """Say for each parameter of a part of the model, or of its shards, what the rule makes of it.

    Args:
        rows: Rows of the parts of each matrix, by its first name.
    Returns:
        None without a matrix.
    """
    trained = [p.names[0] for p in part.parameters if p.gradient is not None]
    by_parameter = {name: (" ".join(map(str, rows[name])) or MATRIX) if name in rows else REST for name in trained}
    return dataclasses.replace(matrices, parameters=by_parameter) if rows.keys() & by_parameter.keys() else None


def pipeline_of(layout: Layout, micro_batches: int) -> Schedule:
    """Schedule of a run's pipeline, whose micro-batches are those of the capture.

    Raises:
        ConfigError: as ``lading.ir.schedules.schedule``.
    """
    spread = dataclasses.replace(layout, global_batch=micro_batches * layout.micro_batch * layout.dp)
    return schedule_of(spread, rules="megatron" if layout.vpp == 1 else "torch")  # any number for one chunk a rank


def planned_step(plan: Plan, captured: StepGraph) -> StepGraph:
    """Whole step that a plan was made for, of its captured micro-batch; raises as ``step_of``."""
    request, settings = plan.request, plan.request.settings
    step = step_of(
        captured,
        machine_from_dict(request.machine_table, "the plan's machine"),
        clip_norm=settings.get("clip_norm", 0.0),
        master_weights=bool(settings.get("master_weights", 0.0)),
        optimizer=planned_optimizer(plan),
        matrices=matrices_from(request.matrices) if request.matrices is not None else None,
        layout=plan.parsed_layout,
        choices=plan.choices,
    )
    return as_planned(plan, step)


def as_planned(plan: Plan, step: StepGraph) -> StepGraph:
    """Whole step in which updates wait for the norm of all gradients, or do not, as a plan has it."""
    guesses = SPECULATES in plan.request.settings
    return with_guess(step, frozenset(plan.choices.waiting)) if guesses else step


def program_of(plan: Plan, captured: StepGraph) -> Program:
    """Program of a plan without others, for the micro-batch that it was made for; raises as ``restore_program``."""
    return programs_of(plan, captured, ())[0]


def programs_of(
    plan: Plan, captured: StepGraph, others: Sequence[StepGraph], program: Program | None = None
) -> tuple[Program, ...]:
    """Programs of a plan and of its others, each for the micro-batch that it was made for.

    Args:
        program: The plan's own, where it was restored already.

    Raises:
        ConfigError: as ``restore_program``; there are more or fewer others than in the plan, or one leaves values
            elsewhere than the plan does.
    """
    if len(others) != len(plan.others):
        raise ConfigError(
            f"others: expected the {len(plan.others)} captures that the plan was made with, got {len(others)}; give "
            "lading.plan and the Trainer the same"
        )
    machine = machine_from_dict(plan.request.machine_table, "the plan's machine")
    rest = [planned_step(plan, other) for other in others]
    if program is None:
        program = restore_program(plan, with_states(planned_step(plan, captured), rest), machine)
    rest = [numbered_as(program.graph, step) for step in rest]
    programs = [restore_program(other, step, machine) for other, step in zip(plan.others, rest, strict=True)]
    homes = homes_of(program)
    for other in programs:
        homes_now = homes_of(other)
        same_places = all(
            places.items() <= homes_now.slots.get(tier, {}).items() for tier, places in homes.slots.items()
        )
        if not (same_places and homes.resident.items() <= homes_now.resident.items()):
            raise ConfigError("others: expected values where the plan has them between steps, found others; plan again")
    return program, *programs


def smaller_program(
    plan: Plan, programs: Sequence[Program], captured: StepGraph, others: Sequence[StepGraph] = ()
) -> tuple[Program, int]:
    """Program of a smaller batch of a step that a plan was made for: its actions and addresses as they are.

    Args:
        programs: The plan's own and those of its others.
        captured: Graph of a planned step over tensors of the planned size or smaller; no value that lasts may differ.
        others: Captures that the plan was made with besides.

    Returns:
        The Program, and the number of the one whose step it is.

    Raises:
        ConfigError: it is another step, or a larger one, and says where; or the plan has none for smaller batches.
    """
    if plan.compiled or plan.parsed_layout.pp > 1:
        obstacle = "compile=True" if plan.compiled else "a pipeline"
        raise ConfigError(
            f"shapes: expected a plan without compiled regions and without stages, got {obstacle}; plan again without"
        )
    step = planned_step(plan, captured)
    graphs = [with_states(step, [planned_step(plan, other) for other in others])]
    if others:
        graphs += [numbered_as(programs[0].graph, step)] * len(others)
    refusal: ConfigError | None = None
    for number, (program, graph) in enumerate(zip(programs, graphs, strict=True)):
        try:
            return _smaller(program, graph, plan.choices if number == 0 else plan.others[number - 1].choices), number
        except ConfigError as error:
            refusal = refusal or error
    assert refusal is not None, "a plan has a program"
    raise refusal


def _smaller(of: Program, graph: StepGraph, choices: Choices) -> Program:
    """Program of a step that is that of another on smaller tensors; raises as ``smaller_program``."""
    refused: ConfigError | None = None
    try:
        made = apply_choices(graph, choices)
    except ConfigError as error:  # it has no such operations
        made, refused = graph, error
    if len(made.ops) != len(of.graph.ops):
        parts = choices.head_parts
        few = f", or it has too few tokens for the {parts} parts of the plan's head" if parts else ""
        raise ConfigError(
            f"shapes: expected the {len(of.graph.ops)} operations of the step that was planned, found "
            f"{len(made.ops)}; the model computes this batch in another way{few}: plan for it as one of others"
        ) from refused
    _check_same_step(of.graph, made)
    other = dataclasses.replace(of, graph=made)
    verify(other)
    return other


def _check_same_step(planned: StepGraph, other: StepGraph) -> None:
    """Refuse a step whose operations, or whose lasting values, are not those that were planned, or that is larger."""
    for index, (op, now) in enumerate(zip(planned.ops, other.ops, strict=True)):
        if _wiring(planned, op) != _wiring(other, now):
            where, there = op.module or "the loss", now.module or "the loss"
            raise ConfigError(
                f"shapes: expected operation {index} to be {op.name} of {where}, on the same tensors as planned, found "
                f"{now.name} of {there}; the model computes this batch in another way: plan for it as one of others"
            )
    if _results(planned) != _results(other) or len(planned.storages) != len(other.storages):
        raise ConfigError(
            "shapes: expected tensors on the same storages as planned, found others; plan for it by itself"
        )
    lasting = planned.persistent
    for index, (storage, now) in enumerate(zip(planned.storages, other.storages, strict=True)):
        fits = now.size_bytes == storage.size_bytes if index in lasting else now.size_bytes <= storage.size_bytes
        if not fits or now.role is not storage.role or now.data != storage.data:
            raise ConfigError(
                f"shapes: expected {storage.name} of at most {storage.size_bytes} bytes, as planned, and with the same "
                f"values if it is a constant, found {now.size_bytes} bytes; plan for the largest batch"
            )


def _wiring(graph: StepGraph, op: Op) -> tuple[object, ...]:
    """Say what an operation is and on which storages it works: views of them, as of part of a table, may differ."""
    tensors = [tuple(map(partial(_place, graph), ids)) for ids in (op.inputs, op.outputs, op.results, op.mutates)]
    return op.name, op.phase, *tensors, op.module, op.on_host


def _place(graph: StepGraph, tensor: int | None) -> tuple[int, str] | None:
    """Storage and dtype of a tensor."""
    return None if tensor is None else (graph.tensors[tensor].storage, graph.tensors[tensor].dtype)


def _results(graph: StepGraph) -> tuple[object, ...]:
    """Storages of what comes in, by name, and of what goes out."""
    inputs = [[(name, _place(graph, tensor)) for name, tensor in each] for each in graph.inputs]
    return inputs, [_place(graph, tensor) for tensor in graph.results]


def planned_optimizer(plan: Plan) -> ParameterRule:
    """Rule that moves parameters, with the settings that the plan was made with.

    Raises:
        ConfigError: no such rule here.
    """
    return optimizer_by_name(plan.request.optimizer, settings=plan.request.optimizer_settings)


def restore_program(plan: Plan, step: StepGraph, machine: Machine) -> Program:
    """Read the Program of a plan and prove it by the verifier.

    Args:
        step: The whole step, from ``step_of``; the plan's choices are applied to it here.
        machine: Machine that the plan was made for.

    Raises:
        ConfigError: the plan was made for another model, batch, optimizer or machine, or chooses what the step lacks;
            or its Program cannot be read, breaks a budget, or is not safe in every timing.
    """
    check_made_for(plan, step, machine)
    try:
        tiers = tuple(tier for tier in machine.tiers if plan.budgets.get(tier.name))
        program = parse_program(plan.program, apply_choices(step, plan.choices), tiers)
        if program.budgets != plan.budgets:
            raise ProgramError(f"expected the plan's budgets {plan.budgets}, found {program.budgets} in its program")
        verify(program)
    except ProgramError as error:
        raise ConfigError(
            f"the Program in the plan (Lading {plan.version}) is not safe to run: {error}; plan again"
        ) from error
    return program


def apply_choices(step: StepGraph, choices: Choices) -> StepGraph:
    """Step with the loss in parts, the updates late or deferred, and the operations on the host, that a plan chose.

    Raises:
        ConfigError: it has no such loss or updates, or one of the operations may not run on the host.
    """
    if not 0 <= choices.loss_parts <= MOST_PARTS:
        raise ConfigError(
            f"the plan has {choices.loss_parts} parts of the loss, expected 0 to {MOST_PARTS}; plan again"
        )
    if choices.gradient_pieces < 0:
        raise ConfigError(f"the plan has pieces of gradients of {choices.gradient_pieces} bytes; plan again")
    if not 0 <= choices.head_parts <= MOST_PARTS:
        raise ConfigError(
            f"the plan has {choices.head_parts} parts of the head, expected 0 to {MOST_PARTS}; plan again"
        )
    step = with_head_parts(with_loss_parts(step, choices.loss_parts)[0], choices.head_parts)[0]
    step = with_gradient_pieces(step, choices.gradient_pieces, late_products=choices.late_products)[0]
    if choices.weight_pieces < 0:
        raise ConfigError(f"the plan has pieces of weights of {choices.weight_pieces} bytes; plan again")
    step = with_weight_pieces(step, choices.weight_pieces)
    step = with_late_updates(step, choices.late_updates)[0]
    known = len(updates(step))
    if not 0 <= choices.deferred <= known:
        raise ConfigError(f"the plan defers {choices.deferred} updates, expected 0 to {known}; plan again")
    ordered = defer(step, choices.deferred)[0] if choices.deferred else step
    return hosted(ordered, choices.hosted) if choices.hosted else ordered


def check_made_for(plan: Plan, graph: StepGraph, machine: Machine) -> None:
    """Refuse a plan made for something else.

    Raises:
        ConfigError: naming what differs.
    """
    pairs = (
        ("model, batch or optimizer", plan.request.graph_fingerprint, graph.fingerprint),
        ("machine", plan.request.machine_fingerprint, machine.fingerprint),
    )
    for what, wanted, actual in pairs:
        if wanted != actual:
            raise ConfigError(f"the plan was made for another {what} (expected {wanted}, found {actual}); plan again")


def action_times(events: Sequence[Event]) -> tuple[str, ...]:
    """List when each action starts and how long it takes, in microseconds as ``Predictions.actions`` has them.

    Args:
        events: One for each action of a Program, in any order.
    """
    by_id = sorted(events, key=lambda event: event.action)
    return tuple(f"{event.start_s * 1e6:.3f} {(event.end_s - event.start_s) * 1e6:.3f}" for event in by_id)


def predicted_timeline(plan: Plan, program: Program) -> Timeline:
    """Timeline that the simulator predicted when the plan was made, to the nanosecond.

    Raises:
        ConfigError: the plan does not say when each action of ``program`` runs.
    """
    times = plan.predictions.actions
    matches = [match for line in times if (match := _ACTION_TIMES.match(line)) is not None]
    if not len(matches) == len(times) == len(program.actions):
        raise ConfigError(
            f"expected start and seconds of {len(program.actions)} actions among the plan's predictions, "
            f"found {len(matches)} in {len(times)} lines; plan again"
        )
    events: list[Event] = []
    for action, match in zip(program.actions, matches, strict=True):
        start_us, took_us = float(match[1]), float(match[2])
        events.append(Event(0, action.stream, action.id, start_us / 1e6, (start_us + took_us) / 1e6))
    return Timeline(
        source="predicted",
        events=tuple(sorted(events, key=lambda event: (event.start_s, event.action))),
        memory=memory_samples(program, events, {}, overhead_bytes=program.overhead_bytes),
        labels={action.id: program.label(action) for action in program.actions},
        peak_bytes=program.predicted_bytes,
    )
