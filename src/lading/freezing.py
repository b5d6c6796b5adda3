"""Freezing: which leading layers of a model are trained no more, from epoch to epoch.

The rules are functions of numbers. ``by_gradient_norm`` is the published one (PipeTransformer, He et al. 2021,
https://arxiv.org/abs/2102.03161, section 3.1), ``by_percentile`` that of the code released with it
(``freeze/auto_freeze.py`` of github.com/Distributed-AI/PipeTransformer).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import hypot
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lading.errors import ConfigError, check_number

if TYPE_CHECKING:
    from lading.trainer import Trainer


def by_gradient_norm(frozen: int, norms: Sequence[float], alpha: float) -> int:
    """Number of leading layers to freeze: up to the layer with the smallest gradient, at most a share of the rest.

    With ``L`` layers, ``min(frozen + alpha (L - frozen), argmin of norms over the layers not yet frozen)``, where
    layers count from 1 and the first term is rounded down.

    Args:
        frozen: Number of layers that are frozen now.
        norms: L2 norm of each layer's gradient; those of frozen layers are not looked at.
        alpha: Largest share of the layers not yet frozen that freezes at once, in [0, 1].
    """
    if frozen >= len(norms):
        return frozen
    smallest = min(range(frozen, len(norms)), key=lambda layer: norms[layer]) + 1
    return min(int(frozen + alpha * (len(norms) - frozen)), smallest)


def by_percentile(frozen: int, norms: Sequence[float], before: Sequence[float], percentile: float) -> int:
    """Number of leading layers to freeze: up to the first whose gradient changes as much as a percentile of the rest.

    A layer's change is ``|before - now| / before``, 0 where its gradient is 0. The layer that reaches the percentile
    is frozen too, as in the released code; layers that are frozen stay so, which that code does not see to.

    Args:
        frozen: Number of layers that are frozen now.
        norms: L1 norm of each layer's gradient now.
        before: Their norms when this was asked last.
        percentile: In [0, 100], interpolated linearly between layers.
    """
    if frozen >= len(norms):
        return frozen
    pairs = list(zip(before, norms, strict=True))[frozen:]
    changes = [abs(then - now) / then if now and then else 0.0 for then, now in pairs]
    limit = float(np.percentile(changes, percentile))
    return frozen + next(number for number, change in enumerate(changes, 1) if change >= limit)


class Freezing:
    """Leading layers of a model that freeze while it is trained, by one of three rules.

    Args:
        model: Model that is trained.
        layers: Its layers in the order of the forward, each a module or several (``(model.tokens, model.layers[0])``).
            What is in none of them is always trained.
        epochs: Number of frozen leading layers from an epoch on, by the epoch, counted from 0: ``{1: 6, 3: 8}``.
        alpha: The published rule, ``by_gradient_norm``.
        percentile: The rule of the released code, ``by_percentile``.

    Attributes:
        frozen: Number of leading layers that are frozen.
        needs_norms: Whether the last step of each epoch has to take the norms of its gradients (``step(norms=True)``).

    Raises:
        ConfigError: not one rule, or one that means nothing.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Iterable[torch.nn.Module | Iterable[torch.nn.Module]],
        *,
        epochs: Mapping[int, int] | None = None,
        alpha: float | None = None,
        percentile: float | None = None,
    ) -> None:
        rules = {"epochs": epochs, "alpha": alpha, "percentile": percentile}
        if len(given := [name for name, rule in rules.items() if rule is not None]) != 1:
            raise ConfigError(
                f"Freezing: expected one of epochs, alpha and percentile, got {' and '.join(given) or 'none'}"
            )
        self._layers = [[layer] if isinstance(layer, torch.nn.Module) else [*layer] for layer in layers]
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        check_number("alpha", alpha or 0.0, 0, 1)
        check_number("percentile", percentile or 0.0, 0, 100)
        counts = [count for _, count in sorted((epochs or {}).items())]
        if [*sorted({0, *counts})] != [*dict.fromkeys((0, *counts))] or max((0, *counts)) > len(self._layers):
            raise ConfigError(
                f"epochs: expected numbers of frozen layers that grow, up to {len(self._layers)}, as so many layers "
                f"are given, got {epochs}"
            )
        self._epochs, self._alpha, self._percentile = epochs, alpha, percentile
        self.needs_norms = epochs is None
        self.frozen, self._before = 0, list[float]()

    def advance(self, epoch: int, trainer: Trainer) -> bool:
        """Freeze the layers that are due before an epoch; all ranks call this.

        Args:
            epoch: Number of the epoch that is about to begin, from 0.
            trainer: Trainer of the model, which has ended the epoch before.

        Returns:
            Whether layers froze: pause the trainer, capture and plan again, and resume.

        Raises:
            ConfigError: as ``Trainer.gradient_norms``.
        """
        due = self.frozen
        if self._epochs is not None:
            due = max((count for since, count in self._epochs.items() if since <= epoch), default=0)
        elif epoch and self._alpha is not None:
            norms = [hypot(*each) for each in self._by_layer(trainer.gradient_norms(2))]
            due = by_gradient_norm(due, norms, self._alpha)
        elif epoch and self._percentile is not None:
            norms = [sum(each) for each in self._by_layer(trainer.gradient_norms(1))]
            due = by_percentile(due, norms, self._before, self._percentile) if self._before else 0
            self._before = norms
        before, self.frozen = self.frozen, max(self.frozen, due)
        self._freeze()
        return self.frozen > before

    def _by_layer(self, norms: Mapping[str, float]) -> list[list[float]]:
        """Norms of the parameters of each layer; none of frozen ones."""
        parameters = [dict.fromkeys(p for module in layer for p in module.parameters()) for layer in self._layers]
        return [[norms[self._names[id(p)]] for p in each if self._names[id(p)] in norms] for each in parameters]

    def _freeze(self) -> None:
        for layer in self._layers[: self.frozen]:
            for module in layer:
                module.requires_grad_(False)

    def state(self) -> dict[str, Any]:
        """State to go on from, for the ``meta`` of a checkpoint."""
        return {"frozen": self.frozen, "norms": self._before}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: its layers are frozen now; capture and plan after this."""
        self.frozen, self._before = state["frozen"], [*state["norms"]]
        self._freeze()
