"""Terms of a loss: ``loss(model, batch)`` may return a scalar, or several by name or in order, whose sum is trained.

Beside them it may return tensors that are not trained: scalars to report, and outputs of any shape. They are a dict,
the second of a pair ``(loss, {...})``, or the entry "metrics" of a dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lading.errors import CaptureError

#: Name of what is trained.
TOTAL = "loss"
#: Entry of what a loss returns that has what is not trained.
_METRICS = "metrics"


def named_losses(value: Any, *, trained: bool = True) -> dict[str, torch.Tensor]:
    """Scalars of a loss by name, in order; those of a list or tuple by their number.

    Args:
        trained: Whether they are trained; those of an evaluation need no gradient.

    Raises:
        CaptureError: none, or one is no scalar tensor or depends on no trainable parameter.
    """
    value = _split_metrics(value)[0]
    if isinstance(value, Mapping):
        terms = {str(name): term for name, term in value.items() if not _has_metrics(value, name)}
    elif type(value) in (list, tuple):
        terms = {str(index): term for index, term in enumerate(value)}
    else:
        terms = {TOTAL: value}
    for name, term in terms.items():
        if not isinstance(term, torch.Tensor) or term.numel() != 1:
            actual = tuple(term.shape) if isinstance(term, torch.Tensor) else type(term).__name__
            raise CaptureError(
                f"expected loss(model, batch) to return a scalar tensor or several, got {actual}; reduce it: .mean(), "
                'and return outputs beside the loss, by name: return loss, {"logits": logits}'
            )
        if trained and not term.requires_grad:
            subject = "the loss does" if len(terms) == 1 else f"the loss {name!r} does"
            raise CaptureError(
                f"{subject} not depend on any trainable parameter; check requires_grad and torch.no_grad, and return "
                'what is not to be trained beside the loss, by name: return loss, {"accuracy": accuracy}'
            )
    if not terms:
        raise CaptureError("expected loss(model, batch) to return a scalar tensor or several, got none")
    return {name: term.reshape(()) if term.dim() else term for name, term in terms.items()}


def named_outputs(value: Any) -> dict[str, torch.Tensor]:
    """Tensors of any shape beside a loss that are not trained, by name.

    Raises:
        CaptureError: one is no tensor, or has the name of a term of the loss.
    """
    value, beside = _split_metrics(value)
    outputs = {str(name): output for name, output in beside.items()}
    for name, output in outputs.items():
        if not isinstance(output, torch.Tensor):
            raise CaptureError(
                f"expected {name!r}, which loss(model, batch) returns beside the loss, as a tensor, got "
                f"{type(output).__name__}; return each tensor of it by a name of its own"
            )
        if name == TOTAL or (isinstance(value, Mapping) and name in value):
            raise CaptureError(f"expected another name for the output {name!r}, which a term of the loss has")
    return outputs


def _split_metrics(value: Any) -> tuple[Any, Mapping[Any, Any]]:
    """Part what a loss returns in what is trained and what is not."""
    if type(value) in (list, tuple) and len(value) == 2 and isinstance(value[1], Mapping):
        return value
    if isinstance(value, Mapping) and _has_metrics(value, _METRICS):
        return value, value[_METRICS]
    return value, {}


def _has_metrics(value: Mapping[Any, Any], name: object) -> bool:
    return name == _METRICS and isinstance(value.get(name), Mapping)


def total_of(terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Sum of the terms, added in order: the scalar that is trained."""
    first, *others = terms.values()
    for term in others:
        first = first + term
    return first
