"""Terms of a loss: ``loss(model, batch)`` may return a scalar, or several by name or in order, whose sum is trained.

Beside them a dict may have an entry "metrics", a dict of scalars that are reported and not trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lading.errors import CaptureError

#: Name of what is trained.
TOTAL = "loss"
#: Entry of what a loss returns that has scalars to report.
_METRICS = "metrics"


def named_losses(value: Any, *, trained: bool = True) -> dict[str, torch.Tensor]:
    """Scalars of a loss by name, in order; those of a list or tuple by their number.

    Args:
        trained: Whether they are trained; those of an evaluation need no gradient.

    Raises:
        CaptureError: none, or one is no scalar tensor or depends on no trainable parameter.
    """
    if isinstance(value, Mapping):
        terms = {str(name): term for name, term in value.items() if not _has_metrics(value, name)}
    elif type(value) in (list, tuple):
        terms = {str(index): term for index, term in enumerate(value)}
    else:
        terms = {TOTAL: value}
    for name, term in terms.items():
        if not isinstance(term, torch.Tensor) or term.numel() != 1:
            got = tuple(term.shape) if isinstance(term, torch.Tensor) else type(term).__name__
            raise CaptureError(
                f"expected loss(model, batch) to return a scalar tensor or several, got {got}; reduce it: .mean()"
            )
        if trained and not term.requires_grad:
            what = "the loss does" if len(terms) == 1 else f"the loss {name!r} does"
            raise CaptureError(
                f"{what} not depend on any trainable parameter; check requires_grad and torch.no_grad, and return what "
                'is not to be trained in an entry "metrics", a dict of its own'
            )
    if not terms:
        raise CaptureError("expected loss(model, batch) to return a scalar tensor or several, got none")
    return terms


def named_metrics(value: Any) -> dict[str, torch.Tensor]:
    """Scalars beside a loss that are reported and not trained, by name.

    Raises:
        CaptureError: one is no scalar tensor, or has the name of a term of the loss.
    """
    metrics: dict[str, torch.Tensor] = {}
    if isinstance(value, Mapping) and _has_metrics(value, _METRICS):
        metrics = {str(name): metric for name, metric in value[_METRICS].items()}
    for name, metric in metrics.items():
        if not isinstance(metric, torch.Tensor) or metric.numel() != 1:
            raise CaptureError(
                f"expected the metric {name!r} as a scalar tensor, got {type(metric).__name__}; reduce it"
            )
        if name in value or name == TOTAL:
            raise CaptureError(f"expected another name for the metric {name!r}, which a term of the loss has")
    return metrics


def _has_metrics(value: Mapping[Any, Any], name: object) -> bool:
    return name == _METRICS and isinstance(value.get(name), Mapping)


def total_of(terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Sum of the terms, added in order: the scalar that is trained."""
    first, *others = terms.values()
    for term in others:
        first = first + term
    return first
