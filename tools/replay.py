"""Reference of a capture in one process: run a StepGraph in program order with plain tensors, freeing nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lading.ir.graph import StepGraph
from lading.tracing.interpret import Interpreter


class Replay:
    """A StepGraph with real values.

    Args:
        graph: One micro-batch as captured (no optimizer operations).
        named: Parameters and buffers by name; they are copied.
        batch: Input leaves by the graph's input names.
    """

    def __init__(self, graph: StepGraph, named: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor]) -> None:
        self.graph = graph
        self._values = Interpreter(graph.storages, graph.tensors)
        for parameter in graph.parameters:
            self._values.put(parameter.tensor, named[parameter.names[0]])
        for name, tensor in graph.buffers:
            self._values.put(tensor, named[name])
        for name, tensor in graph.inputs[0]:
            self._values.put(tensor, batch[name])

    def run(self) -> torch.Tensor:
        """Run every operation; returns the loss."""
        with torch.no_grad():
            for op in self.graph.ops:
                self._values.run(op)
        return self.tensor(self.graph.losses[0])

    def tensor(self, index: int) -> torch.Tensor:
        """Value of a graph tensor."""
        return self._values.tensor(index)
