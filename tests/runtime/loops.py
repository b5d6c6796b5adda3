"""Training loops that people bring to ranks: each takes a model and the number of micro-batches in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim.optimizer import Optimizer

from lading.models.loss import next_byte_loss

STEPS = 2


class Container(Optimizer):
    """Optimizer of several, as torchtitan's: its own step, of all their parameters, steps each of them."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([p for each in optimizers for group in each.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)


class Loop:
    """A model's steps of ``count`` micro-batches; ``stock`` also tells FSDP2 which is the last."""

    def __init__(self, model: Any, count: int, *, stock: bool) -> None:
        self.model, self.count, self.stock = model, count, stock
        self._draw = torch.Generator().manual_seed(17 + dist.get_rank())

    def tokens(self) -> dict[str, torch.Tensor]:
        return {"tokens": torch.randint(0, 8, (2, 33), generator=self._draw)}

    def backward(self, last: bool, losses: Iterable[torch.Tensor]) -> None:
        if self.stock:
            self.model.set_is_last_backward(last)
        for loss in losses:
            loss.backward()

    def optimizers(self) -> list[Optimizer]:
        """Make two, of half the parameters each."""
        params = [p for p in self.model.parameters() if p.requires_grad]
        half = len(params) // 2
        return [torch.optim.AdamW(params[:half], lr=1e-2), torch.optim.SGD(params[half:], lr=1e-2, momentum=0.9)]

    def several(self) -> None:
        """Step two optimizers one after another."""
        for number in self._micro_batches(self.optimizers()):
            self.backward(number == self.count - 1, [next_byte_loss(self.model, self.tokens())])

    def contained(self) -> None:
        """Step two optimizers in one."""
        for number in self._micro_batches([Container(self.optimizers())]):
            self.backward(number == self.count - 1, [next_byte_loss(self.model, self.tokens())])

    def given_up(self) -> None:
        """Begin each step, give it up after a micro-batch, and begin again."""
        optimizers = self.optimizers()
        for number in self._micro_batches(optimizers):
            if not number:
                self.backward(False, [next_byte_loss(self.model, self.tokens())])
                for optimizer in optimizers:
                    optimizer.zero_grad()
            self.backward(number == self.count - 1, [next_byte_loss(self.model, self.tokens())])

    def preferred(self) -> None:
        """Run two forwards a micro-batch, chosen and rejected, and one backward of both."""
        for number in self._micro_batches(self.optimizers()):
            chosen, rejected = (next_byte_loss(self.model, self.tokens()) for _ in range(2))
            self.backward(number == self.count - 1, [chosen - 0.1 * rejected])

    def apart(self) -> None:
        """Run two forwards a micro-batch, and a backward of each."""
        for number in self._micro_batches(self.optimizers()):
            losses = [next_byte_loss(self.model, self.tokens()) for _ in range(2)]
            self.backward(number == self.count - 1, losses)

    def looked_at(self) -> None:
        """Validate between backward and step, with and without gradients, which changes nothing."""
        for number in self._micro_batches(self.optimizers()):
            self.backward(number == self.count - 1, [next_byte_loss(self.model, self.tokens())])
            if not self.stock:
                next_byte_loss(self.model, {"tokens": torch.zeros(2, 33, dtype=torch.int64)})
                with torch.no_grad():
                    next_byte_loss(self.model, {"tokens": torch.zeros(2, 33, dtype=torch.int64)})

    def restored(self) -> None:
        """Ask for states before the first step, as a script does that goes on from a checkpoint: torch then steps."""
        optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        model, states = get_state_dict(self.model, optimizer)
        set_state_dict(self.model, optimizer, model_state_dict=model, optim_state_dict=states)
        for number in self._micro_batches([optimizer]):
            self.backward(number == self.count - 1, [next_byte_loss(self.model, self.tokens())])

    def _micro_batches(self, optimizers: list[Optimizer]) -> Iterator[int]:
        """Numbers of the micro-batches of each step, behind the last of which optimizers step."""
        for _ in range(STEPS):
            yield from range(self.count)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()


LOOPS: dict[str, Callable[[Loop], None]] = {
    each.__name__: each
    for each in (Loop.several, Loop.contained, Loop.given_up, Loop.preferred, Loop.apart, Loop.looked_at, Loop.restored)
}
#: Those that try most; the others are run in a slow test.
SOME_LOOPS = ("contained", "given_up", "apart", "restored")
