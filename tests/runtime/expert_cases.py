"""A mixture of experts whose batches say which experts are chosen, and plain PyTorch's numbers for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tests.runtime.cases import OPTIMIZER
from torch import nn
from torch.nn import functional as F

EXPERTS, WIDTH, HIDDEN, VOCABULARY = 4, 32, 64, 16
#: Experts that get tokens in each of the steps that are compared: some get none for many steps.
USES = ([0, 1], [0], [0, 3], [0], [0], [2, 0], [0], [1], [0], [0], [0, 1, 2, 3], [0], [3], [0], [1], [0], [0], [2], [0],
        [0], [0, 1])  # fmt: skip
Batch = dict[str, torch.Tensor]


class Expert(nn.Module):
    """Two products."""

    def __init__(self, dropout: float, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(hidden, WIDTH, bias=False)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.down(F.silu(self.up(x))), self.dropout)


class Mixture(nn.Module):
    """Tokens choose an expert by a table of scores; ``style`` is how a user writes it."""

    def __init__(self, style: str, dropout: float, hidden: int) -> None:
        super().__init__()
        self.style = style
        self.scores = nn.Embedding(VOCABULARY, EXPERTS)
        self.experts = nn.ModuleList(Expert(dropout, hidden) for _ in range(EXPERTS))
        with torch.no_grad():
            self.scores.weight.mul_(0.1)
            for token in range(VOCABULARY):
                self.scores.weight[token, token % EXPERTS] += 8

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.scores(tokens)
        if self.style == "mask":  # probabilities times a mask of the chosen
            chosen = scores.argmax(-1, keepdim=True)
            mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
            weights = scores.softmax(-1) * mask
        else:
            top, chosen = scores.topk(1, dim=-1)
            weights = torch.zeros_like(scores).scatter(-1, chosen, top.sigmoid())
        if self.style == "dense":  # no column is zero
            weights = scores.softmax(-1)
        columns = weights.unbind(-1) if self.style == "unbind" else [weights[..., e] for e in range(EXPERTS)]
        if self.style == "slice":
            columns = [weights[..., e : e + 1].squeeze(-1) for e in range(EXPERTS)]
        for column, expert in zip(columns, self.experts, strict=True):
            part = column.unsqueeze(-1) * expert(x)
            x = x + (part + 0.5 if self.style == "shift" else part)
        return x


class Model(nn.Module):
    """Embedding, two mixtures, head."""

    def __init__(self, style: str = "slice", dropout: float = 0.0, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Mixture(style, dropout, hidden) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, tokens)
        return self.head(x)


def loss_fn(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Cross-entropy, times a number of the batch."""
    tokens = batch["tokens"]
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()) * batch["scale"]


def model_of(style: str = "slice", dropout: float = 0.0, hidden: int = HIDDEN) -> Model:
    """The same weights every time."""
    torch.manual_seed(0)
    return Model(style, dropout, hidden)


def batches_of(uses: Sequence[Sequence[int]], micro: int) -> list[list[Batch]]:
    """Micro-batches whose tokens choose these experts; those after the first choose the first of them alone."""
    torch.manual_seed(1)
    steps: list[list[Batch]] = []
    for used in uses:
        steps.append([])
        for number in range(micro):
            mine = torch.tensor(used[:1] if number else used)
            tokens = mine[torch.randint(len(mine), (2, 8))]
            if not number:
                tokens[0, : len(used)] = torch.tensor(used)
            more = EXPERTS * torch.randint(VOCABULARY // EXPERTS, (2, 8))
            steps[-1].append({"tokens": tokens + more, "scale": torch.ones(())})
    return steps


def rate_of(step: int) -> float:
    """Learning rate of a step."""
    return 1e-2 * (1 - step / 40)


class Plain:
    """Plain PyTorch with everything in memory."""

    def __init__(self, model: nn.Module, clip: float) -> None:
        self.model, self.clip = copy.deepcopy(model), clip
        self.optimizer = OPTIMIZER.plain(self.model.parameters())

    def step(self, micro_batches: Sequence[Batch], lr: float) -> list[float]:
        """Run one step; returns the losses as an executor does."""
        losses: list[float] = []
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        for batch in micro_batches:
            loss = loss_fn(self.model, batch) / len(micro_batches)
            loss.backward()
            losses.append(loss.item())
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return losses

    def values(self) -> dict[str, torch.Tensor]:
        """Parameters and states by Lading's names."""
        named = dict(self.model.named_parameters())
        states = {f"{n}.{key}": v for n, p in named.items() for key, v in self.optimizer.state[p].items()}
        return {**{n: p.detach() for n, p in named.items()}, **states}
