"""Capture: forward, loss and backward of an ``nn.Module`` on fake tensors, as a StepGraph.

Nothing is computed and no memory is taken; ``tracer`` writes the operations down.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lading.alone import check_alone, check_whole, import_groupless, refusing_wrappers
from lading.errors import CaptureError, ConfigError, LadingError, check_type
from lading.ir.fold import fold
from lading.ir.frozen import ReadTensor
from lading.ir.graph import Phase, StepGraph
from lading.tracing.attributes import Left, check_steady
from lading.tracing.batches import input_leaves, map_batch
from lading.tracing.frozen_values import ANOMALY, freeze, hooks_label, without
from lading.tracing.loss_terms import TOTAL, named_losses, named_outputs, total_of
from lading.tracing.module_hooks import carry_hooks, check_hooks, hooks_as_they_were
from lading.tracing.shared_memory import check_apart, storage_of
from lading.tracing.side_effects import (
    as_written,
    branches_of_eager,
    left_as_it_was,
    refusing_scalers,
    refusing_steps,
    stepwise_lstm,
    uncompiled,
    without_cached_fakes,
)
from lading.tracing.slow_notice import told_if_slow
from lading.tracing.tracer import Tracer


def capture(
    model: torch.nn.Module,
    batch: Any,
    loss: Callable[[torch.nn.Module, Any], Any],
    *,
    accumulation: int = 1,
    evaluation: bool = False,
) -> StepGraph:
    """Record one micro-batch's forward, loss and backward.

    Args:
        model: Any module; real, meta or fake parameters. It is left unchanged. What ``torch.compile`` made, of it, of a
            part or of the loss, is captured as it was written: a plan compiles regions of its own.
        batch: Dicts, lists, tuples and dataclasses whose tensors give shapes and dtypes. Values are read only where the
            model itself asks for a number (``if mask.any()``); the graph then checks that later batches give the same.
        loss: ``loss(model, batch)`` runs the forward and returns a scalar, or a dict, list or tuple of scalars, whose
            sum is trained; each is reported by its name or number. Or it returns a pair ``(loss, {...})`` of that and
            of tensors that are not trained, by name: scalars are reported beside the loss, others are the Trainer's
            ``outputs``. An entry "metrics" of a dict is such a dict, too.
        accumulation: Micro-batches of a step, >= 1; the loss is divided by it, so a step uses the mean.
        evaluation: Record forward and loss alone, with every module in ``eval()`` mode meanwhile: without dropout, on
            running statistics, and without gradients. For ``Trainer.evaluate``.

    Returns:
        The StepGraph of one micro-batch; ``lading.ir.expand.expand`` adds accumulation, clipping and the optimizer.

    Raises:
        CaptureError: an operation cannot be captured; says which, in which module, and what to do.
        ConfigError: an argument is of another type.
    """
    check_type("model", model, torch.nn.Module, "a torch.nn.Module")
    if not callable(loss):
        raise ConfigError(f"loss: expected a function loss(model, batch), got {type(loss).__name__}")
    if type(accumulation) is not int or accumulation < 1:
        raise ConfigError(f"accumulation: expected an integer >= 1, got {accumulation!r}")
    model = as_written(model)
    _check_plain(model)
    import_groupless()
    mode = fake_mode_of(model) or FakeTensorMode(allow_non_fake_inputs=True)
    run, reads = partial(forward_backward, loss, evaluation=evaluation), list[tuple[torch.Tensor, ReadTensor]]()
    capture_once = partial(_once, mode, model, batch, run, accumulation, reads)
    with _evaluating(model) if evaluation else nullcontext():
        frozen, generators = freeze(model, batch, loss)
        if evaluation:
            frozen = without(frozen, {label for label in frozen.modules if label.rpartition(".")[2] == "training"})
        with hooks_as_they_were(model) as hooked:
            graph, left = capture_once()
            generators.check()
            if left.labels:
                check_steady(graph, left, lambda read_labels: capture_once(left, read_labels))
                frozen = without(frozen, {*left.labels.values(), *(hooks_label(name) for name in hooked())})
    check_apart(model, batch, graph, [(read.said, tensor) for tensor, read in reads])
    frozen = dataclasses.replace(frozen, tensors=tuple(read for _, read in reads))
    return dataclasses.replace(graph, accumulation=accumulation, blocks=fold(graph), frozen=frozen)


def _check_plain(model: torch.nn.Module) -> None:
    """Refuse what cannot be traced: scripted modules, lazy ones that have seen no batch yet, torch's anomaly mode.

    Raises:
        CaptureError: names the module, or the first parameter or buffer without a shape.
    """
    if torch.is_anomaly_enabled():
        raise CaptureError(f"expected torch.autograd.set_detect_anomaly(False) at capture, found it on; {ANOMALY}")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name or 'the model'}: expected a module with a forward in Python, found one of torch.jit "
                f"({module.original_name}), into which no capture looks; capture the module that it was made of"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise CaptureError(
                f"{name}: expected a shape, found an {type(tensor).__name__} of a lazy module; run the model once on a "
                "batch before it is captured"
            )


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Set the flag that ``eval()`` sets, and nothing else: some modules change their weights in ``eval()``."""
    before = {module: module.training for module in model.modules()}
    try:
        for module in before:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module, training in before.items():
            module.training = training


def _once(
    mode: FakeTensorMode,
    model: torch.nn.Module,
    batch: Any,
    run: partial[dict[str, torch.Tensor]],
    accumulation: int,
    reads: list[tuple[torch.Tensor, ReadTensor]],
    before: Left | None = None,
    seen: set[str] | None = None,
) -> tuple[StepGraph, Left]:
    """Capture once, from what an earlier step left in attributes; returns what this one leaves, too.

    Tensors that it read as constants are added to ``reads``.
    """
    tracer = Tracer()
    with mode:
        fakes = fake_copies(model)
        inputs, faked = fake_batch(batch)
    tracer.declare(fakes, inputs, dict(input_leaves(batch)))
    carry_hooks(model, fakes)
    with (
        told_if_slow("capture", lambda: len(tracer.ops)),
        left_as_it_was(model, tracer.has_read, before, seen, run.args[0]) as left,
        without_cached_fakes(model),
        branches_of_eager(),
        uncompiled(),
        refusing_wrappers(),
        refusing_scalers(),
        stepwise_lstm(),
        mode,
        tracer,
        module_paths(model, tracer),
    ):
        losses = call_on(model, fakes, faked, partial(run, tracer, accumulation, fakes))
    check_hooks(model, fakes)
    reads.extend(tracer.read_tensors)
    left.forget_steady(tracer.is_constant)
    return tracer.graph(fakes, inputs, losses), left


def forward_backward(
    loss: Any,
    tracer: Tracer,
    accumulation: int,
    fakes: Mapping[str, torch.Tensor],
    model: torch.nn.Module,
    batch: Any,
    *,
    evaluation: bool = False,
) -> dict[str, torch.Tensor]:
    """Run forward, loss and, but for an evaluation, backward inside the tracer; returns the loss and its terms by name.

    Backward is inside too, as a model with its own checkpointing runs its modules again there.
    """
    homes = {name: storage_of(fake) for name, fake in fakes.items()}
    try:
        with refusing_steps():
            returned = loss(model, batch)
        terms, outputs = named_losses(returned, trained=not evaluation), named_outputs(returned)
        value = total_of(terms)
        if len(terms) == 1:
            terms = {}  # it is the total
        with torch.no_grad():  # a value that lives on, such as a parameter, changes before the step ends
            beside = {name: t.clone() if tracer.lives_on(t) else t for name, t in (terms | outputs).items()}
        if accumulation > 1:
            value = value / accumulation
        if not evaluation:
            tracer.phase = Phase.BACKWARD
            value.backward()
    except LadingError:
        raise
    except Exception as error:
        if tracer.phase is Phase.BACKWARD and "graph a second time" in str(error):
            raise CaptureError(
                "loss(model, batch): expected create_graph=True or retain_graph=True with torch.autograd.grad, as "
                "backward goes through the same operations after it, found neither; pass create_graph=True where the "
                "loss depends on these gradients, else retain_graph=True"
            ) from error
        raise CaptureError(
            f"{tracer.failed_in or tracer.place()} fails on tensors without values: {type(error).__name__}: {error}; "
            "check that loss(model, batch) runs in eager PyTorch, with the model first, and that it asks for no values"
        ) from error
    if moved := [name for name, fake in fakes.items() if storage_of(fake) != homes[name]]:
        raise CaptureError(
            f"the forward assigns to the .data of {moved[0]!r}, which no later operation would see; change it in place "
            "under torch.no_grad() (copy_), or assign the buffer itself"
        )
    _keep_assigned_buffers(model, fakes)
    return {TOTAL: value, **beside}


def _keep_assigned_buffers(model: torch.nn.Module, fakes: Mapping[str, torch.Tensor]) -> None:
    """Write a buffer in place that the forward assigns anew (``self.mean = 0.9 * self.mean + ...``)."""
    with torch.no_grad():
        for name, now in model.named_buffers(remove_duplicate=False):
            before = fakes.get(name)
            if before is None or now is before:
                continue
            if (now.shape, now.dtype) != (before.shape, before.dtype):
                raise CaptureError(
                    f"buffer {name!r}: expected to stay {before.dtype} {tuple(before.shape)}, the forward made it "
                    f"{now.dtype} {tuple(now.shape)}; a step must leave what it found"
                )
            before.copy_(now)


class _Step(torch.nn.Module):
    """A model and its loss as one module, so that functional_call can swap the parameters under both."""

    def __init__(self, model: torch.nn.Module, loss: Callable[[torch.nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any) -> Any:
        return self.loss(self.model, batch)

    def __call__(self, batch: Any) -> Any:
        """Run without the hooks that all modules have: this one is none of the user's."""
        return self.forward(batch)


def call_on(
    model: torch.nn.Module, fakes: Mapping[str, torch.Tensor], batch: Any, loss: Any
) -> dict[str, torch.Tensor]:
    """Call ``loss(model, batch)`` with the model's parameters and buffers exchanged for ``fakes``, of every name.

    A module that has several paths is given its tensors by one: torch would put the fakes that it finds by the second
    back in the place of the model's own.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    parts = {name: name.rpartition(".") for name in fakes}
    slots = {(modules[path], attribute): name for name, (path, _, attribute) in parts.items()}
    named = {f"model.{name}": fakes[name] for name in slots.values()}
    step = _Step(model, loss)
    step.training = model.training  # train() would also switch submodules that are in another mode on purpose
    return torch.func.functional_call(step, named, (batch,), tie_weights=False)


def fake_mode_of(model: torch.nn.Module) -> FakeTensorMode | None:
    """Fake mode of a model that was built from fake tensors, so that its tensors can be used as they are; else None."""
    for tensor in (*model.parameters(), *model.buffers()):
        if isinstance(tensor, FakeTensor):
            tensor.fake_mode.allow_non_fake_inputs = True
            return tensor.fake_mode
    return None


def fake_copies(model: torch.nn.Module, *, tied: bool = True) -> dict[str, torch.Tensor]:
    """Make fake CPU tensors of every parameter and buffer by every name; tied ones are shared if ``tied``."""
    check_alone(model)
    fakes_by_key: dict[int | str, torch.Tensor] = {}
    fakes: dict[str, torch.Tensor] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        key = id(tensor) if tied else name
        if key not in fakes_by_key:
            fakes_by_key[key] = _fake_like(name, tensor)
        fakes[name] = fakes_by_key[key]
    return fakes


def _fake_like(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = f"{type(tensor).__name__} ({tensor.layout})"
        raise CaptureError(f"{name}: expected a dense tensor, got {kind}; make it dense")
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def fake_batch(batch: Any) -> tuple[list[tuple[str, torch.Tensor]], Any]:
    """Make fake tensors of a batch: pairs (name, tensor), and the batch made of them."""
    inputs: list[tuple[str, torch.Tensor]] = []

    def visit(name: str, leaf: torch.Tensor) -> torch.Tensor:
        check_whole(name, leaf)
        inputs.append((name, _fake_leaf(leaf)))
        return inputs[-1][1]

    return inputs, map_batch(batch, visit)


def _fake_leaf(leaf: torch.Tensor) -> torch.Tensor:
    overlaps = any(s == 0 and n > 1 for n, s in zip(leaf.shape, leaf.stride(), strict=True))  # expanded
    if overlaps:
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
    fake = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu")
    return fake.requires_grad_(leaf.requires_grad)


@contextmanager
def module_paths(model: torch.nn.Module, tracer: Tracer) -> Iterator[None]:
    """Keep ``tracer.modules`` the stack of module paths whose forward is running."""

    def leave(*_: Any) -> None:
        if sys.exc_info()[0] is not None and not tracer.failed_in:
            tracer.failed_in = tracer.place()
        tracer.modules.pop()

    handles: list[Any] = []
    for name, module in model.named_modules():
        enter = partial(_enter, tracer.modules, name)
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _enter(stack: list[str], name: str, *_: Any) -> None:
    stack.append(name)
