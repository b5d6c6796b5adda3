"""Terms of a loss: ``loss(model, batch)`` may return a scalar, or several by name or in order, whose sum is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lading.errors import CaptureError

#: Name of what is trained.
TOTAL = "loss"


def named_losses(value: Any) -> dict[str, torch.Tensor]:
    """Scalars of a loss by name, in order; those of a list or tuple by their number.

    Raises:
        CaptureError: none, or one is no scalar tensor or depends on no trainable parameter.
    """
    if isinstance(value, Mapping):
        terms = {str(name): term for name, term in value.items()}
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
        if not term.requires_grad:
            what = "the loss does" if len(terms) == 1 else f"the loss {name!r} does"
            raise CaptureError(
                f"{what} not depend on any trainable parameter; check requires_grad and torch.no_grad, and return "
                "nothing but what is to be trained"
            )
    if not terms:
        raise CaptureError("expected loss(model, batch) to return a scalar tensor or several, got none")
    return terms


def total_of(terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Sum of the terms, added in order: the scalar that is trained."""
    first, *others = terms.values()
    for term in others:
        first = first + term
    return first
