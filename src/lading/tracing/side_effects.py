"""Side effects of a forward besides tensors: attributes of modules, and random generators that torch does not own."""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import _lru_cache_wrapper, partial  # pyright: ignore[reportPrivateUsage]  the type of what lru_cache makes
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from lading.errors import CaptureError
from lading.tracing.attributes import Left, carried, carry, copied, left_in, tables_of


@contextmanager
def left_as_it_was(
    model: torch.nn.Module,
    was_read: Callable[[torch.Tensor], bool],
    before: Left | None = None,
    seen: set[str] | None = None,
    loss: Any = None,
) -> Iterator[Left]:
    """Context in which a step is traced, and after which no attribute of the model or its loss has changed.

    Args:
        model: Model that is traced.
        was_read: Whether the step has read a tensor by now.
        before: Changes that an earlier step left, to begin with; ``seen`` then gets the names of the numbers that
            decide something.

    Raises:
        CaptureError: what was traced depends on something that the next step would find changed: numbers of another
            random generator than torch's, or a tensor that is kept in a plain attribute.
    """
    tables, left = tables_of(model, loss), Left()
    drawn = _generators()
    refused = ""
    if before is not None:
        carry(tables, before, set() if seen is None else seen)
    started = tables if before is None else [dataclasses.replace(t, before=copied(t.held)) for t in tables]
    for name, module in model.named_modules():
        vars(module)["_apply"] = partial(_unconverted, name, module)
    try:
        yield left
        vars(left).update(vars(left_in(started)))
        refused = next(carried(tables, was_read), "")
    finally:
        for table in tables:
            table.restore()
    if refused:
        raise CaptureError(
            f"the forward assigns a tensor to {refused!r}, which held one before and is no buffer; use "
            "register_buffer, so that the value is carried from step to step, or, where it is made from parameters, "
            "torch.nn.utils.parametrizations"
        )
    for name, changed in zip(("numpy", "Python", "torch"), map(_differ, drawn, _generators()), strict=True):
        if changed:
            raise CaptureError(
                f"the step draws from the random generator of {name} itself, so every step would use the numbers "
                "drawn now; use torch.rand and its like (or switch the augmentation or masking off)"
            )


@contextmanager
def without_cached_fakes(model: torch.nn.Module) -> Iterator[None]:
    """Empty, at the end, each ``functools.lru_cache`` that holds a tensor without values, as eager calls would get it.

    All objects of the process are looked through, some tens of milliseconds, but for those that ``gc.freeze`` hid: of
    them only what the classes of the model's modules have.
    """
    try:
        yield
    finally:
        for cache in _caches(model):
            leaves = (leaf for result in gc.get_referents(cache) for leaf in tree_leaves(result))
            if any(isinstance(leaf, FakeTensor) for leaf in leaves):
                cache.cache_clear()


def _caches(model: torch.nn.Module) -> list[Any]:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    methods = [value for kind in kinds for value in vars(kind).values()]
    inner = [value for method in methods for value in _enclosed(method)]
    candidates = chain(gc.get_objects(), methods, inner)  # a list of them made here would hold itself, and so all
    return [candidate for candidate in candidates if type(candidate) is _lru_cache_wrapper]


def _enclosed(function: object) -> Iterator[object]:
    """Yield what the names mean that a function takes from around it."""
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # a name that means nothing yet
            yield cell.cell_contents


@contextmanager
def branches_of_eager() -> Iterator[None]:
    """Let transformers take the branches it takes in eager.

    It asks whether a tensor is fake, and then makes masks and tables by other operations, with other roundings.
    Capture can answer what eager would read instead, or refuses.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    is_fake_tensor = getattr(module, "is_fake_tensor", None)
    if module is None or is_fake_tensor is None:
        yield
        return
    vars(module)["is_fake_tensor"] = lambda _: False
    try:
        yield
    finally:
        vars(module)["is_fake_tensor"] = is_fake_tensor


def as_written(model: torch.nn.Module) -> torch.nn.Module:
    """Module that ``torch.compile`` was given, where ``model`` is what it returned; its parameters have plain names."""
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    while compiled is not None and isinstance(model, compiled):
        model = model._orig_mod  # pyright: ignore[reportAssignmentType]
    return model


@contextmanager
def uncompiled() -> Iterator[None]:
    """Let what ``torch.compile`` made run as it was written: the plan compiles regions of its own.

    Without torch's compiler in the process nothing is compiled, and it is not loaded for that.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        # capture looks at every module through a hook of all modules, which is not the user's
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        yield


@contextmanager
def stepwise_lstm() -> Iterator[None]:
    """Let each LSTM run as the products and gates of its steps, as the other RNNs do.

    On a processor oneDNN has a kernel for the whole, which hands its backward a workspace of its own making.
    """
    kernels: Any = torch._VF
    before = kernels.lstm

    def lstm(*args: Any) -> Any:
        with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):  # pyright: ignore[reportArgumentType]
            return before(*args)

    kernels.lstm = lstm
    try:
        yield
    finally:
        del kernels.lstm


@contextmanager
def refusing_scalers() -> Iterator[None]:
    """Refuse a loss that a ``GradScaler`` scales: its scale would be frozen, and no step skipped.

    Raises:
        CaptureError: inside, where ``scale`` of one that is enabled is called.
    """
    kind: Any = torch.amp.GradScaler
    before = kind.scale

    def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if not scaler.is_enabled():
            return before(scaler, outputs)
        raise CaptureError(
            "GradScaler: expected a loss without a scale, which changes as gradients overflow and skips such steps; a "
            "planned step does neither. Train in bfloat16, which needs no scale: torch.autocast(..., torch.bfloat16)"
        )

    kind.scale = scale
    try:
        yield
    finally:
        kind.scale = before


@contextmanager
def refusing_steps() -> Iterator[None]:
    """Refuse a loss that does what a Trainer's step does after it: backward, or the step of an optimizer.

    Raises:
        CaptureError: inside, where either is called.
    """
    advice = (
        "return the loss, and let Trainer.step run backward and the optimizer, which lading.plan and lading.Trainer "
        "take as optimizer="
    )

    def backward(*_: Any, **__: Any) -> None:
        raise CaptureError(f"loss(model, batch): expected no backward() inside, found one; {advice}")

    def step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        raise CaptureError(
            f"loss(model, batch): expected no optimizer inside, found {type(optimizer).__name__}.step(); {advice}"
        )

    engine: Any = torch.autograd
    before, hook = engine.backward, register_optimizer_step_pre_hook(step)
    engine.backward = backward
    try:
        yield
    finally:
        engine.backward = before
        hook.remove()


def _unconverted(
    name: str, module: torch.nn.Module, convert: Callable[[torch.Tensor], Any], recurse: bool = True
) -> Any:
    """Stand in for ``module.to(...)`` inside a forward, where it changes nothing.

    Raises:
        CaptureError: it would change a parameter or buffer.
    """
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        with torch.no_grad():
            if convert(tensor) is not tensor:
                raise CaptureError(
                    f"the forward converts its own module {name!r} to another dtype or device; "
                    "build or convert the model that way before capture"
                )
    return module


def _generators() -> tuple[Any, Any, Any]:
    """States of the generators a forward could draw from; torch's own draws nothing while tracing."""
    kind, keys, *position = np.random.get_state()
    return (kind, bytes(np.asarray(keys)), position), random.getstate(), torch.get_rng_state()


def _differ(before: Any, after: Any) -> bool:
    return not torch.equal(before, after) if isinstance(before, torch.Tensor) else before != after
