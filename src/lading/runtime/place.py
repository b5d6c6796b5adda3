"""A placement run by stock PyTorch: the model is cut where the plan says, and each process keeps one part.

``place`` traces a model with ``torch.distributed.pipelining.pipeline``, split before the module with which each part
begins, and gives this process its part; ranks go by the order of parts. Parts run one forward, one backward
(``Schedule1F1B``). What torch leaves to its user is done here:

- A weight tied between parts is a copy in each: their gradients are added up after the last micro-batch, in the same
  order everywhere, so that the copies stay equal to the bit.
- Torch sets buffers aside for what comes in of every micro-batch; here as many as are under way take turns (``_Ring``).
- What passes from part to part lies row by row, as ranks send nothing else: a transpose is copied where it leaves.
- Where the memory of a device has no room for as many micro-batches as the schedule keeps under way, it keeps fewer
  (``Plan.windows``).

[Note: private fields of torch]
Two of these are set on fields of torch's that have no public setting (torch 2.11 to 2.13). ``_set_private`` refuses a
torch that lacks one, since nothing would be set then.

- ``PipelineStage._create_act_recv_info`` and ``_create_grad_recv_info`` make a buffer for every micro-batch of a step;
  as many as are under way would do: https://github.com/pytorch/pytorch/issues/136380.
- ``Schedule1F1B`` takes its micro-batches under way from ``_num_stages``; its constructor refuses fewer than stages, to
  guard a bug of its own: https://github.com/pytorch/pytorch/pull/144702, to be lifted by
  https://github.com/pytorch/pytorch/issues/144701.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

from lading import __version__
from lading.errors import ConfigError, did_you_mean
from lading.ir.plan import PlacedStage, Plan, PlanKind, plan_for
from lading.runtime.agreement import ARRIVAL_S, Facts, agree_on, digests, flattened, structure

#: From the last part's output and its targets to a scalar, the mean over a micro-batch.
Loss = Callable[[Any, Any], torch.Tensor]


class Placed:
    """Part of a placed model that this process has.

    Attributes:
        plan: The plan that it follows.
        rank: Number of the part, in order.
        module: The part; its parameters have the names they have in the whole model.
        stage: Torch's ``PipelineStage`` of it, for schedules of one's own.
    """

    def __init__(self, plan: Plan, rank: int, stage: Any, loss: Loss | None, tied: Sequence[_Tied]) -> None:
        self.plan, self.rank, self.stage, self._tied = plan, rank, stage, tied
        self.module: nn.Module = stage.submod
        self._loss, self._passing = loss, False
        own_loss = None if loss is None else self._scaled
        self._schedule = _OneForwardOneBackward(stage, plan.micro_batches, plan.windows[rank], own_loss)

    @property
    def is_first(self) -> bool:
        """Whether this part takes the model's inputs."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this part gives the model's output, and its loss."""
        return self.rank == len(self.plan.stages) - 1

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this part, for an optimizer."""
        return self.module.parameters()

    def step(self, *inputs: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        """Run forward and backward of a step's micro-batches; gradients of the mean loss are added to what is there.

        Args:
            inputs: Inputs of all micro-batches, along the first dim; used by the first part.
            target: Targets of all micro-batches, along the first dim; used by the last part.
        Returns:
            The loss of each micro-batch on the last part; nothing elsewhere.
        Raises:
            ConfigError: the plan is of one pass, or the rows are not those of its micro-batches.
        """
        if not self.plan.request.training:
            raise ConfigError(
                "step: expected a placement of a training step, got one of a pass; plan without --latency"
            )
        self._check(target if self.is_last else inputs[0] if self.is_first else None)
        losses: list[torch.Tensor] = []
        options: dict[str, Any] = {"target": target, "losses": losses} if self.is_last else {}
        for weight in self._tied:
            weight.set_aside()
        self._schedule.step(*(inputs if self.is_first else ()), return_outputs=False, **options)
        for weight in self._tied:
            weight.add_up()
        return [loss.detach() * self.plan.micro_batches for loss in losses]

    def run(self, *inputs: torch.Tensor) -> Any:
        """Run one forward pass of all micro-batches, without gradients; the output on the last part, else None."""
        self._check(inputs[0] if self.is_first else None)
        options: dict[str, Any] = {"target": inputs[0]} if self.is_last and self._loss is not None else {}
        self._passing = True
        try:
            with torch.no_grad():
                output = self._schedule.eval(*(inputs if self.is_first else ()), **options)
        finally:
            self._passing = False
        return output if self.is_last else None

    def _scaled(self, output: Any, target: Any) -> torch.Tensor:
        """Scale a micro-batch's loss to its share of the mean; zero in a pass, though torch asks for it."""
        if self._passing or self._loss is None:
            return torch.zeros(())
        return self._loss(output, target) / self.plan.micro_batches

    def _check(self, given: torch.Tensor | None) -> None:
        count, size = self.plan.micro_batches, self.plan.micro_batch
        if given is not None and len(given) != count * size:
            raise ConfigError(f"expected {count * size} rows, {count} micro-batches of {size}, got {len(given)}")


class _OneForwardOneBackward(Schedule1F1B):
    """Torch's schedule with a given number of micro-batches under way on a stage, where its own is that of stages left.

    Also of fewer micro-batches than stages, which torch's constructor refuses though its steps do it ([Note: private
    fields of torch]).
    """

    def __init__(self, stage: Any, micro_batches: int, window: int, loss: Loss | None) -> None:
        super().__init__(stage, max(micro_batches, stage.num_stages), loss_fn=loss, scale_grads=False)
        _set_private(self, "_n_microbatches", micro_batches)
        # What a step takes the number under way from, and nothing else.
        _set_private(self, "_num_stages", stage.stage_index + window)


def _set_private(owner: object, name: str, value: object) -> None:
    """Set a field of torch's that has no public setting ([Note: private fields of torch]).

    Raises:
        ConfigError: this torch has no such field, so that setting it would change nothing.
    """
    if not hasattr(owner, name):
        raise ConfigError(
            f"place: expected {type(owner).__name__}.{name} in torch.distributed.pipelining, which torch "
            f"{torch.__version__} does not have; take a torch that this Lading was tested with, such as 2.13"
        )
    setattr(owner, name, value)


class _Ring:
    """Buffers to receive into, made for the first micro-batches of a run and used again by later ones."""

    def __init__(self, make: Any, size: int, micro_batches: int) -> None:
        self._make, self._size, self._micro_batches = make, size, micro_batches
        self._made: dict[int, Any] = {}
        self._calls = 0

    def __call__(self, *args: Any) -> Any:
        """Buffers of the next micro-batch; torch asks for all of a run, and again when it goes from steps to passes."""
        number = self._calls % self._micro_batches
        self._calls += 1
        if number < self._size:
            self._made[number] = self._make(*args)
        return self._made[number % self._size]


class _Tied:
    """Parameter of this part that other parts have too."""

    def __init__(
        self, module: nn.Module, name: str, parts: Sequence[int], rank: int, group: dist.ProcessGroup | None
    ) -> None:
        self.module, self.name, self.parts, self.rank, self.group = module, name, parts, rank, group
        self._before: torch.Tensor | None = None

    def set_aside(self) -> None:
        """Set the gradient that earlier steps left aside before a step: it is the sum of all parts already."""
        parameter = self.module.get_parameter(self.name)
        self._before, parameter.grad = parameter.grad, None

    def add_up(self) -> None:
        """Add up all parts' gradients, in order of parts, and what was set aside."""
        parameter = self.module.get_parameter(self.name)  # by its name, as filling a part from meta replaces it
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        grads = {part: gradient if part == self.rank else torch.empty_like(gradient) for part in self.parts}
        operations: list[dist.P2POp] = []
        for part in self.parts:
            if part != self.rank:
                peer = part if self.group is None else dist.get_global_rank(self.group, part)
                operations.append(dist.P2POp(dist.isend, gradient, peer, self.group))
                operations.append(dist.P2POp(dist.irecv, grads[part], peer, self.group))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        first, *others = (grads[part] for part in self.parts)
        total = first.clone() if first is gradient else first
        for grad in others:
            total += grad
        if self._before is not None:
            total += self._before
        parameter.grad, self._before = total, None


def place(
    plan: Plan | Path | str,
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    loss: Loss | None = None,
    *,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    timeout_s: float = ARRIVAL_S,
) -> Placed:
    """Make this process's part of a model, as a placement says.

    Args:
        plan: Plan from ``lading place --out``, or the path of its file.
        model: Whole model, the same in every process, its values too, as ``torch.export`` takes it; in all of them it
            may lie on the meta device, and the part (``Placed.module``) is then to be filled. It is taken apart: what
            other parts have is freed here.
        inputs: Positional inputs of one micro-batch, as an example of their shapes.
        loss: ``loss(output, target)``, the mean over a micro-batch; None for passes only.
        device: Device of this process.
        group: Process group of as many ranks as the plan has parts; None for all.
        timeout_s: Seconds within which all ranks are to call it, from when one does.
    Raises:
        ConfigError: the plan is no placement, its parts are no pipeline, ranks are too few or too many, or a module of
            the plan is not in the model; ranks were given unlike plans, models or inputs, or one did not call.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    plan = agree_on("lading.place", ranks, lambda: _facts(plan, model, inputs, loss, len(ranks)), timeout_s=timeout_s)
    return _placed(plan, model, inputs, loss, torch.device(device), group)


def _facts(
    plan: Plan | Path | str, model: nn.Module, inputs: tuple[torch.Tensor, ...], loss: Loss | None, ranks: int
) -> tuple[Plan, Facts]:
    """Check the plan; returns it, and the facts that all ranks must have alike."""
    plan = _checked(plan, model, inputs, loss, ranks)
    input_facts = {f"input {number}": f"{tensor.dtype} {tuple(tensor.shape)}" for number, tensor in enumerate(inputs)}
    settings = {**input_facts, "has a loss": loss is not None, "lading": __version__, "torch": torch.__version__}
    return plan, {
        "plan": flattened(asdict(plan)),
        "model": structure(model),
        **digests(model),
        "settings": settings,
    }


def _checked(
    plan: Plan | Path | str, model: nn.Module, inputs: tuple[torch.Tensor, ...], loss: Loss | None, ranks: int
) -> Plan:
    """Read the plan, if it can be set on this model and as many ranks.

    Raises:
        ConfigError: it cannot.
    """
    plan = plan_for("lading.place", plan, PlanKind.PLACEMENT)
    stages = plan.stages
    if ranks != len(stages):
        names = ", ".join(stage.device for stage in stages)
        raise ConfigError(f"place: expected a rank for each part, {len(stages)} in order on {names}; got {ranks} ranks")
    if plan.request.training and loss is None:
        raise ConfigError("place: expected a loss, as the placement is of a training step; give loss(output, target)")
    if len(inputs[0]) != plan.micro_batch:
        raise ConfigError(f"place: expected inputs of one micro-batch, {plan.micro_batch} rows, got {len(inputs[0])}")
    for stage in stages[1:]:
        _path(stage, model)
    return plan


def _placed(
    plan: Plan, model: nn.Module, inputs: tuple[torch.Tensor, ...], loss: Loss | None, place_on: torch.device,
    group: dist.ProcessGroup | None,
) -> Placed:  # fmt: skip
    stages, rank = plan.stages, dist.get_rank(group)
    split = {_path(s, model): SplitPoint.END if s.behind else SplitPoint.BEGINNING for s in stages[1:]}
    aliases = _aliases(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's tracer uses what torch deprecates
        pipe = pipeline(model, mb_args=inputs, split_spec=split)
    if pipe.num_stages != len(stages):
        raise ConfigError(
            f"place: expected {len(stages)} parts, got {pipe.num_stages}; a part's first module runs twice"
        )
    stage: Any = pipe.build_stage(rank, torch.device("meta") if _is_meta(model) else place_on, group)
    stage.device = place_on
    _drop_unread(stage.submod, aliases)
    _lay_row_by_row(stage.submod, comes_in=not stage.is_first, goes_out=not stage.is_last)
    for name, size in (("_create_act_recv_info", plan.windows[rank]), ("_create_grad_recv_info", 1)):
        _set_private(stage, name, _Ring(getattr(stage, name, None), size, plan.micro_batches))
    others = [pipe.get_stage_module(number) for number in range(len(stages)) if number != rank]
    _release([model, *others], stage.submod)
    return Placed(plan, rank, stage, loss, _tied(pipe.replicated_params, stage.submod, rank, group))


def _is_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _release(modules: Sequence[nn.Module], part_module: nn.Module) -> None:
    """Free tensors that this part does not use: what traced the model keeps hold of all of it."""
    used = {tensor.untyped_storage().data_ptr() for tensor in (*part_module.parameters(), *part_module.buffers())}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta and tensor.untyped_storage().data_ptr() not in used:
                tensor.data = tensor.new_empty(0)


def _aliases(model: nn.Module) -> set[str]:
    """Names of parameters that have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for aliases in names.values() if len(aliases) > 1 for name in aliases}


def _drop_unread(module: nn.Module, aliases: set[str]) -> None:
    """Remove other names of tied weights, under which the tracer leaves copies that nothing reads."""
    read: set[str] = set()
    for path, submodule in module.named_modules():
        graph = getattr(submodule, "graph", None)
        for node in graph.nodes if graph is not None else ():
            if node.op == "get_attr":
                read.add(f"{path}.{node.target}" if path else str(node.target))
    for name, _ in list(module.named_parameters(remove_duplicate=False)):
        if name in aliases and name not in read:
            parent, _, leaf = name.rpartition(".")
            delattr(module.get_submodule(parent), leaf)


def _lay_row_by_row(part: Any, *, comes_in: bool, goes_out: bool) -> None:
    """Copy what leaves a traced part where it is not contiguous, and expect what comes in to be.

    Torch takes strides of buffers from the trace, and sends tensors as they lie; ranks send none but contiguous ones.
    """
    graph = part.graph
    (output,) = graph.find_nodes(op="output")
    traced = [*graph.find_nodes(op="placeholder")] if comes_in else []
    for node in output.all_input_nodes if goes_out else ():
        if not node.meta["val"].is_contiguous():
            with graph.inserting_before(output):
                copied = graph.call_function(torch.ops.aten.contiguous.default, (node,))
            copied.meta["val"] = node.meta["val"]
            output.replace_input_with(node, copied)
            traced.append(copied)
    for node in traced:
        node.meta["val"] = node.meta["val"].contiguous()
    part.recompile()


def _tied(
    shared: Sequence[dict[str, str]], module: nn.Module, rank: int, group: dist.ProcessGroup | None
) -> list[_Tied]:
    """Parameters of this part that others have too; ``shared`` has for each its name by part ("submod_1")."""
    tied: list[_Tied] = []
    for names in shared:
        parts = {int(part.rpartition("_")[2]): name for part, name in names.items()}
        if rank in parts:
            tied.append(_Tied(module, parts[rank], sorted(parts), rank, group))
    return tied


def _path(stage: PlacedStage, model: nn.Module) -> str:
    """Path of the module with which a part begins."""
    modules = dict(model.named_modules())
    if stage.begins in modules:
        return stage.begins
    if stage.blocks:
        rows = [path for path, m in modules.items() if isinstance(m, nn.ModuleList) and len(m) == stage.blocks]
        if len(rows) == 1:
            return f"{rows[0]}.{stage.begins.rpartition(' ')[2]}"
        found_lists = f"found {', '.join(rows) or 'none'}"
        raise ConfigError(
            f"place: expected one list of {stage.blocks} modules for the plan's {stage.begins!r}, {found_lists}; "
            "place with --units N, which names modules"
        )
    hint = did_you_mean(stage.begins, modules)
    raise ConfigError(f"place: expected the plan's model, found no module {stage.begins!r}{hint}")
