"""Master weights in plain PyTorch: what a planned step with ``master_weights`` computes, as anyone would write it."""

from __future__ import annotations

import torch

_LOW = (torch.bfloat16, torch.float16)


class MasterWeights:
    """Float32 copy of every trained bfloat16 or float16 parameter, which the optimizer moves in its stead.

    Call ``add_gradients`` after each backward, clip and step over ``parameters``, then call ``write_back``.

    Attributes:
        parameters: Parameters that the optimizer holds: masters, and the model's own parameters where they are float32.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        self._pairs = [(p, p.detach().float()) for p in trained if p.dtype in _LOW]
        masters = {id(p): master for p, master in self._pairs}
        self.parameters = [masters.get(id(p), p) for p in trained]

    def add_gradients(self) -> None:
        """Add the parameters' gradients to the masters', in float32, and drop them."""
        for parameter, master in self._pairs:
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

    def write_back(self) -> None:
        """Round the masters into the parameters."""
        with torch.no_grad():
            for parameter, master in self._pairs:
                parameter.copy_(master)
