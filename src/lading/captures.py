"""Captures of a trainer: which batches run by which of them, and whether a model is the one that was captured."""

from __future__ import annotations

import dataclasses
import warnings
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lading import __version__
from lading.errors import ConfigError, check_rate
from lading.ir.frozen import Frozen
from lading.ir.graph import StepGraph, refs
from lading.ir.plan import Plan
from lading.ir.program import Program
from lading.memory.restore import planned_step
from lading.optim.registry import name_of
from lading.optim.rule import ParameterRule
from lading.runtime.custody import is_held
from lading.runtime.named import differences, dtype_of, first_few, tensors_of
from lading.runtime.tiers import tiers_of_rank
from lading.runtime.value_layout import Value, values_of_ranks
from lading.tracing.batches import input_leaves
from lading.tracing.frozen_values import Watch
from lading.tracing.interpret import Answer, answer_of

if TYPE_CHECKING:
    from lading.runtime.job import Replicas
    from lading.runtime.parameter_groups import ParameterGroups

#: Operation that makes sure that a batch gives the same answer.
_ASSERT = "aten._assert_async.msg"
#: Loss function, as ``lading.capture`` takes it.
Loss = Callable[[torch.nn.Module, Any], Any]


@dataclass(frozen=True)
class Question:
    """Question about the batch alone that the forward asked at capture (``if mask.all()``).

    Attributes:
        answer: Operations that it follows from.
        names: Input tensors of the graph, by name.
        message: What to say of a batch that gives another answer than the captured one.
    """

    answer: Answer
    names: Mapping[str, int]
    message: str

    def holds(self, feed: Mapping[str, torch.Tensor]) -> bool:
        """Whether a micro-batch gives the same answer."""
        return bool(self.answer.values({tensor: feed[name] for name, tensor in self.names.items()})[0])


def questions_of(captured: StepGraph) -> tuple[Question, ...]:
    """Find what a forward asked of its batch; where parameters take part too, the step itself asks again."""
    names = dict(captured.inputs[0])
    questions: list[Question] = []
    for at, op in enumerate(captured.ops):
        if op.name == _ASSERT:
            answer_tensors = refs(op.args[0])
            answer = answer_of(
                captured.storages, captured.tensors, captured.ops[:at], tuple(answer_tensors), names.values()
            )
            if answer is not None:
                questions.append(Question(answer, names, str(op.args[1]).partition("; ")[0]))
    return tuple(questions)


@dataclass(frozen=True)
class CapturedStep:
    """Step of a trainer, with the number that its Program has in the executor.

    Attributes:
        trains: Whether it is a training step, of which a rank of a pipeline may have the forward alone.
        outputs: Names of its outputs, which a rank of a pipeline may not have.
        questions: What the forward asked of the batch, which decided what it ran.
    """

    number: int
    trains: bool
    outputs: tuple[str, ...]
    program: Program
    frozen: Frozen | None
    model: torch.nn.Module | None
    questions: tuple[Question, ...] = ()

    @property
    def loss(self) -> object:
        """Loss function that was captured; None where it is not known."""
        return None if self.frozen is None else self.frozen.loss_function

    @cached_property
    def watch(self) -> Watch:
        """Watch over what was captured, from the first step on: until then the model may be set up for another."""
        with torch._C.DisableTorchFunctionSubclass():  # parameters whose values a trainer has answer little else
            return Watch(self.frozen, self.model)

    @cached_property
    def _leaves(self) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
        """Dtype and shape of the inputs of each micro-batch by name."""
        graph = self.program.graph
        return [
            {name: (graph.tensors[t].dtype, graph.tensors[t].shape) for name, t in leaves} for leaves in graph.inputs
        ]

    def takes(self, batches: Any, *, of_size: bool = True) -> bool:
        """Whether it was captured with batches like these; without ``of_size``, with inputs of the same names."""
        feeds, expected = self.fed(batches)[1], self._leaves
        if not of_size:
            return [feed.keys() for feed in feeds] == [leaves.keys() for leaves in expected]
        return [{name: (dtype_of(t), tuple(t.shape)) for name, t in feed.items()} for feed in feeds] == expected

    def unlike(self, batches: Any) -> str:
        """Say what its forward would read otherwise in these batches, which it takes; "" for nothing."""
        feeds = self.fed(batches)[1] if self.questions else []
        return next((question.message for feed in feeds for question in self.questions if not question.holds(feed)), "")

    def fed(self, batches: Any) -> tuple[list[Any], list[dict[str, torch.Tensor]]]:
        """Micro-batches of the step, and the tensors of each by name.

        A single batch may be a list itself, if the captured one was.
        """
        inputs = self.program.graph.inputs
        if isinstance(batches, list):
            names = {name for name, _ in inputs[0]}
            is_batch = len(inputs) == 1 and {name for name, _ in input_leaves(batches)} == names
            micro = [batches] if is_batch else batches
        else:
            micro = [batches]
        return micro, [dict(input_leaves(batch)) for batch in micro]


def captured_step(number: int, captured: StepGraph, program: Program, model: torch.nn.Module | None) -> CapturedStep:
    """Make the step of a capture, as ``program`` runs it."""
    outputs, questions = captured.output_names, questions_of(captured)
    return CapturedStep(number, captured.trains, outputs, program, captured.frozen, model, questions)


def step_for(batches: Any, steps: Sequence[CapturedStep], loss: Loss | None) -> CapturedStep:
    """Choose the first of several steps that takes batches like these; without one, the one that is nearest.

    Args:
        loss: The function that was captured; None for any.

    Raises:
        ConfigError: it was not captured, or its forward would ask something of these batches, and be told otherwise.
    """
    steps = [step for step in steps if loss in (None, step.loss)]
    if not steps:
        raise ConfigError(
            f"loss: expected one of the functions that were captured, got {getattr(loss, '__name__', loss)}; "
            "capture it, and give lading.plan and the Trainer the capture in others="
        )
    matching = [step for step in steps if step.takes(batches)]
    unlike = [step.unlike(batches) for step in matching]
    if matching and all(unlike):
        raise ConfigError(
            f"{unlike[0]}; its answer decides which operations run: give lading.plan and the Trainer a capture of such "
            "a batch too, in others="
        )
    if matching:
        return matching[unlike.index("")]
    return next((step for step in steps if step.takes(batches, of_size=False)), steps[0])


def checked_model(model: torch.nn.Module, graph: StepGraph) -> torch.nn.Module:
    """Return the model if it is the captured one.

    Raises:
        ConfigError: it is another, or another Trainer has its values, or it has none.

    Warns where parameters have gradients of before: they are left as they are.
    """
    if elsewhere := [name for name, tensor in tensors_of(model) if is_held(tensor)]:
        raise ConfigError(
            f"expected a model with its values, found that another Trainer has them ({first_few(elsewhere)}); "
            "close that one first"
        )
    if empty := [name for name, tensor in tensors_of(model) if tensor.is_meta or isinstance(tensor, FakeTensor)]:
        raise ConfigError(
            f"expected a model with values, found tensors without any ({first_few(empty)}); build it outside of "
            "torch.device('meta') and FakeTensorMode, or give model=None and trainer.set_value each of them"
        )
    expected = {alias: graph.tensors[p.tensor] for p in graph.parameters for alias in p.names}
    expected |= {name: graph.tensors[tensor] for name, tensor in graph.buffers}
    actual = {name: (dtype_of(t), tuple(t.shape)) for name, t in tensors_of(model, tied=True)}
    if differing := differences(actual, {name: (t.dtype, t.shape) for name, t in expected.items()}):
        raise ConfigError(f"expected the model that was captured, these parameters or buffers differ: {differing}")
    tensors = dict(tensors_of(model, tied=True))
    for parameter in graph.parameters:
        if len({id(tensors[name]) for name in parameter.names}) > 1:
            raise ConfigError(
                f"expected {' and '.join(parameter.names)} as one parameter, as in the model that was captured, "
                "found several; tie them again, or capture this model"
            )
    if with_gradients := [name for name, tensor in tensors.items() if tensor.grad is not None]:
        warnings.warn(
            f"gradients of a backward pass before are left as they are ({first_few(with_gradients)}): no planned step "
            "adds them to its own, and no budget counts them; drop them by model.zero_grad() before the Trainer",
            stacklevel=4,
        )
    return model


def digest_of(feeds: Sequence[Mapping[str, torch.Tensor]]) -> float:
    """Hash of micro-batches, exact as a float."""
    digest = 0
    for tensor in chain.from_iterable(feed.values() for feed in feeds):
        digest = zlib.crc32(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data, digest)
    return float(digest)


def of_stages(plan: Plan, captured: StepGraph, rank: int) -> tuple[dict[str, Value], list[StepGraph]] | None:
    """Values of all stages of a pipeline by name, as one of its ranks has them, and the step of each rank."""
    steps = [planned_step(peer_plan, captured) for peer_plan in (plan, *plan.peers)] if plan.peers else []
    return (values_of_ranks(steps, rank), steps) if steps else None


def of_this_rank(plan: Plan) -> Plan:
    """Plan of this rank of a pipeline; of anything else the plan itself."""
    if not plan.peers:
        return plan
    from lading.runtime.job import start_job

    return plan.of_rank(start_job(plan.ranks))


def join(
    plan: Plan,
    programs: Sequence[Program],
    optimizer: ParameterRule,
    model: torch.nn.Module | None,
    groups: ParameterGroups | None,
) -> Replicas:
    """Join the other ranks of a plan, which must have been given the same.

    Args:
        programs: Those of this rank, that of the training step first.
        groups: Parameter groups and states of the optimizer of torch that the plan was made for, if it was.

    Raises:
        ConfigError: they were not, or have not come; or the job has another number of ranks.
    """
    from lading.runtime.agreement import agree_on, digest, digests, structure
    from lading.runtime.job import Replicas, sequences, start_job

    start_job(plan.ranks)
    facts: dict[str, Mapping[str, object]] = {
        "plan": {"": plan.fingerprint},
        "program": {"": "of each rank" if plan.peers else programs[0].fingerprint},
        "optimizer": {"": repr(optimizer)},
        "versions": {"torch": torch.__version__, "lading": __version__},
    }
    if model is not None:
        facts |= {"model": structure(model), **digests(model)}
    if groups is not None:
        facts["states of the optimizer"] = {name: digest(state) for name, state in groups.filled().items()}
    agree_on("lading.Trainer", range(plan.ranks), lambda: (None, facts))
    return Replicas(plan.parsed_layout, sequences(programs))


def in_folders_of_rank(programs: Sequence[Program], folder: Path, replicas: Replicas | None) -> list[Program]:
    """Copies of Programs whose files lie in folders of this rank, as ranks share those that all are given.

    Args:
        folder: Folder of files that have no location.
    """
    rank = 0 if replicas is None else replicas.rank
    tiers = tiers_of_rank(programs[0].tiers, folder, rank)
    return [dataclasses.replace(program, tiers=tiers) for program in programs] if rank else [*programs]


@contextmanager
def left_if_it_fails(replicas: Replicas | None) -> Generator[None]:
    """Leave the other ranks where a block fails: they notice at once, though this process may live on."""
    try:
        yield
    except Exception as error:
        if replicas is not None:
            replicas.abandon(error)
            replicas.close()
        raise


def step_rates(
    plan: Plan, optimizer: ParameterRule, has_groups: bool, lr: float | None, matrix_lr: float | None
) -> tuple[float, float]:
    """Learning rates of a step's optimizer and of its rule for matrices.

    Args:
        has_groups: Whether the parameter groups of an optimizer of torch have them.
        lr, matrix_lr: Those that were asked for; None takes what the optimizer and the plan say.

    Raises:
        ConfigError: they are none, or not those of this plan.
    """
    for name, rate in (("lr", lr), ("matrix_lr", matrix_lr)):
        if rate is not None:
            check_rate(name, rate)
    matrices = plan.request.matrices
    if has_groups:
        if lr is not None:
            raise ConfigError("expected no lr: the optimizer's parameter groups have the rates; set them there")
        return 0.0, float((matrices or {"lr": 0.0})["lr"] if matrix_lr is None else matrix_lr)
    usual = optimizer.lr if lr is None else lr
    if matrices is None:
        if matrix_lr is not None:
            raise ConfigError("expected no matrix_lr: the plan has no rule for matrices; give lading.plan matrices=")
        return usual, 0.0
    if (lr is None) != (matrix_lr is None):
        beside = name_of(optimizer)
        raise ConfigError(
            f"expected lr and matrix_lr, or neither, as {matrices['rule']} moves matrices beside {beside}"
        )
    return usual, float(matrices["lr"] if matrix_lr is None else matrix_lr)
