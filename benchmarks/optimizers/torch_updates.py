"""Updates by torch's own optimizers: what a plan thinks they take, beside what they take.

    python benchmarks/optimizers/torch_updates.py MACHINE.toml       # of ``lading probe``; one thread

Each update is run as a step runs it, on several parameters in turn, so that none is in a cache. Processor time counts.
The optimizers take turns with torch's fused AdamW, and a ratio to it is taken round by round: a busy machine slows
both, and its file may be of another moment. Predicted is the ratio of the plan's seconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import lading
from lading.catalog.load import as_machine
from lading.cost.compute import op_costs
from lading.ir.graph import OpKind, Role
from lading.ir.machine import Machine
from lading.memory.restore import step_of
from lading.optim.torch_update import rule_of_optimizer
from lading.runtime.kernel_calls import bind
from lading.runtime.update_kernels import Rate

#: Width and number of square parameters: small ones, where calls count, and two sizes where bytes do.
CASES = ((32, 64), (512, 24), (1024, 12), (2048, 6))
_ROUNDS = 15
Make = Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW fused": partial(torch.optim.AdamW, fused=True),
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    "AdamW amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "Adam foreach": partial(torch.optim.Adam, foreach=True),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": torch.optim.RMSprop,
    "RMSprop foreach": partial(torch.optim.RMSprop, foreach=True),
    "SGD momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "SGD foreach": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, foreach=True),
    "SGD fused": partial(torch.optim.SGD, lr=1e-3, momentum=0.9, fused=True),
    "Rprop": torch.optim.Rprop,
    "ASGD": torch.optim.ASGD,
}


def updates(machine: Machine, make: Make, width: int, count: int) -> tuple[list[Callable[[], Any]], float, Any]:
    """Calls of all updates of a step, the seconds that a plan gives them together, and their rule."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(count)))
    rule = rule_of_optimizer(make(list(model.parameters())))
    graph = lading.capture(model, torch.ones(1, width), lambda model, x: model(x).sum())
    step = step_of(graph, machine, clip_norm=0.0, master_weights=False, optimizer=rule)
    seconds = op_costs(step, machine.device)
    places: dict[int, torch.Tensor] = {}

    def view(tensor: int) -> torch.Tensor:
        t = step.tensors[tensor]
        size = step.storages[t.storage].size_bytes // 4
        if t.storage not in places:
            state = step.storages[t.storage].role is Role.OPTIMIZER_STATE
            places[t.storage] = torch.zeros(size) if state else torch.rand(size)
        return places[t.storage].as_strided(t.shape, t.stride, t.offset)

    ops = [index for index, op in enumerate(step.ops) if op.kind is OpKind.STEP]
    rate = Rate(1e-3)
    calls = [bind(step.ops[i], view, optimizer=rule, rate=rate, parameter=-1, kind="cpu").run for i in ops]
    return calls, sum(seconds[i] for i in ops), rule


def taken(calls: Sequence[Callable[[], Any]]) -> float:
    """Processor seconds of all calls."""
    start = time.process_time()
    for call in calls:
        call()
    return time.process_time() - start


def main() -> None:
    """Print a line for each optimizer and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machine")
    args = parser.parse_args()
    machine = as_machine(args.machine)
    torch.set_num_threads(1)
    for width, count in CASES:
        made = {name: updates(machine, make, width, count) for name, make in OPTIMIZERS.items()}
        fused, fused_s, _ = made["AdamW fused"]
        ratios: dict[str, list[float]] = {name: [] for name in made}
        absolute: dict[str, list[float]] = {name: [] for name in made}
        with torch.inference_mode():
            for number in range(_ROUNDS + 2):
                for name, (calls, _, _) in made.items():
                    both = taken(fused), taken(calls)
                    if number >= 2:
                        ratios[name].append(both[1] / both[0])
                        absolute[name].append(both[1])
        for name, (_, predicted_s, rule) in made.items():
            measured = statistics.median(ratios[name])
            predicted = predicted_s / fused_s
            took_us = statistics.median(absolute[name]) / count * 1e6
            print(
                f"{width:5d} {name:16s} {measured:6.2f} of fused AdamW measured, {predicted:6.2f} predicted: "
                f"{predicted / measured - 1:+.0%}; {took_us:8.1f} us each, {predicted_s / count * 1e6:8.1f} predicted; "
                f"{rule.temporaries} temporaries"
            )


if __name__ == "__main__":
    main()
