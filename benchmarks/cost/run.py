"""Cost model against the clock: every operation of a training step, predicted and measured, by class and in total.

The step is captured, laid out in one arena with memory reused as a plan would, and run in program order with the
executor's kernels; each operation's time is the lowest decile over the steps. No tiers: this judges operations only.

    python benchmarks/cost/run.py --threads 1 --probe-seconds 50
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

from lading.catalog.load import load_machine, save_machine
from lading.cost.compute import missing_rates, op_bytes, op_costs
from lading.ir.expand import expand
from lading.ir.graph import PERSISTENT, Role, StepGraph
from lading.ir.machine import Machine
from lading.memory.packing import Buffer, pack
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.runtime.host_arena import Arena, view_of
from lading.runtime.kernel_calls import Rate, bind
from lading.runtime.probe import probe
from lading.runtime.resident import reuse_pages
from lading.tracing.trace import capture

MODELS = {
    "tiny": ("llama", {"num_layers": 4, "dim": 128, "num_heads": 4, "num_kv_heads": 4}, (16, 128)),
    "small": ("llama", {"num_layers": 4, "dim": 512, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 8192}, (2, 256)),
    "gpt": ("gpt", {"num_layers": 4, "dim": 512, "num_heads": 8, "vocab_size": 8192}, (2, 256)),
    "wide": ("llama", {"num_layers": 2, "dim": 1024, "num_heads": 16, "num_kv_heads": 8, "vocab_size": 8192}, (1, 512)),
    "moe": ("moe", {"num_layers": 2, "dim": 256, "num_heads": 4, "num_kv_heads": 4}, (4, 128)),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of ``expand`` and of the timed AdamW updates."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1


def captured(name: str) -> tuple[torch.nn.Module, StepGraph, torch.Tensor]:
    """The model, its whole step with clipping and AdamW, and a batch."""
    kind, sizes, (batch, tokens) = MODELS[name]
    torch.manual_seed(0)
    model = build_model(kind, max_seq_len=tokens, **sizes)
    data = torch.randint(model.config.vocab_size, (batch, tokens + 1))
    return model, expand(capture(model, {"tokens": data}, next_byte_loss), clip_norm=1.0), data


def placed(graph: StepGraph) -> list[torch.Tensor]:
    """Memory of every storage, reused as soon as its last reader has run."""
    last = len(graph.ops) - 1
    spans: dict[int, list[int]] = {}
    for position, op in enumerate(graph.ops):
        for storage in (*graph.reads(op), *graph.writes(op)):
            spans.setdefault(storage, [position, position])[1] = position
    items = [
        Buffer(
            s.size_bytes,
            ((0, last),) if s.role in PERSISTENT or s.role is Role.INPUT else (tuple(spans.get(i, (0, 0))),),
        )
        for i, s in enumerate(graph.storages)
    ]
    packing = pack(items)
    arena = Arena(packing.size_bytes)
    return [arena.bytes_at(o, s.size_bytes) for o, s in zip(packing.offsets, graph.storages, strict=True)]


def filled(model: torch.nn.Module, graph: StepGraph, memory: list[torch.Tensor], tokens: torch.Tensor) -> None:
    """Give what exists before the step its value; optimizer state starts at zero."""
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for parameter in graph.parameters:
        view_of(memory[graph.storage_of(parameter.tensor)], graph.tensors[parameter.tensor]).copy_(
            values[parameter.names[0]].detach()
        )
    for name, tensor in graph.buffers:
        view_of(memory[graph.storage_of(tensor)], graph.tensors[tensor]).copy_(values[name])
    for leaves in graph.inputs:
        for _, tensor in leaves:
            view_of(memory[graph.storage_of(tensor)], graph.tensors[tensor]).copy_(tokens)
    for index, storage in enumerate(graph.storages):
        if storage.data is not None:
            memory[index].copy_(torch.frombuffer(bytearray(storage.data), dtype=torch.uint8))


def measured(name: str, steps: int) -> tuple[StepGraph, list[float], float]:
    """The graph, each operation's seconds, and the seconds of a step."""
    model, graph, tokens = captured(name)
    memory = placed(graph)
    with torch.no_grad():
        filled(model, graph, memory, tokens)
        kernels = [
            bind(
                op,
                lambda t: view_of(memory[graph.storage_of(t)], graph.tensors[t]),
                optimizer=Settings(),
                rate=Rate(1e-5),
            ).run
            for op in graph.ops
        ]
        for _ in range(3):
            for run in kernels:
                run()
        samples: list[list[float]] = []
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        for _ in range(steps):
            marks = [clock()]
            for run in kernels:
                run()
                marks.append(clock())
            samples.append([b - a for a, b in pairwise(marks)])
    per_op = [_decile(column) for column in zip(*samples, strict=True)]
    return graph, per_op, _decile(list(map(sum, samples)))


def _decile(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 10]


def compare(
    graph: StepGraph, machine: Machine, seconds: Sequence[float], whole: float, detail: bool
) -> dict[str, object]:
    """Print the table; returns its numbers."""
    costs = op_costs(graph, machine.device)
    rows: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for op, cost, real in zip(graph.ops, costs, seconds, strict=True):
        for key in (op.kind.value, f"  {op.name}") if detail else (op.kind.value,):
            row = rows[f"{op.kind.value}|{key}"]
            row[0] += cost
            row[1] += real
            row[2] += 1
    print(f"{'':48}{'ops':>6}{'predicted':>12}{'measured':>12}{'error':>8}{'share':>8}")
    for key in sorted(rows):
        cost, real, count = rows[key]
        print(_line(key.split("|")[1], count, cost, real) + f"{real / sum(seconds):8.0%}")
    total = sum(costs)
    print(_line("sum of operations", len(costs), total, sum(seconds)))
    print(_line("step", len(costs), total, whole))
    for line in missing_rates(graph, machine.device):
        print(f"assumption: {line}")
    return {
        "predicted_s": total, "measured_s": whole, "error": total / whole - 1,
        "kinds": {k.split("|")[1]: v for k, v in rows.items() if not k.split("|")[1].startswith(" ")},
    }  # fmt: skip


def _line(name: str, count: float, cost: float, real: float) -> str:
    return f"{name:48}{count:6.0f}{cost * 1e3:9.2f} ms{real * 1e3:9.2f} ms{cost / real - 1:+8.1%}"


def worst(graph: StepGraph, machine: Machine, seconds: Sequence[float], count: int) -> None:
    """Print the operations with the largest absolute error."""
    costs = op_costs(graph, machine.device)
    found: dict[tuple[object, ...], list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for op, cost, real in zip(graph.ops, costs, seconds, strict=True):
        shapes = tuple((graph.tensors[t].shape, graph.tensors[t].stride) for t in op.inputs)
        row = found[op.name, shapes, op_bytes(graph, op)]
        row[0] += cost
        row[1] += real
        row[2] += 1
    for key, (cost, real, n) in sorted(found.items(), key=lambda item: -abs(item[1][0] - item[1][1]))[:count]:
        print(f"  {key[0]} {key[2]} B {key[1]}\n  " + _line("", n, cost, real))


def main() -> None:
    """Parse the command line and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "small", "gpt"], choices=MODELS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--machine", help="a machine file; without it this host is probed")
    parser.add_argument("--probe-seconds", type=float, default=50.0)
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the probe may put its temporary file")
    parser.add_argument("--save-machine", type=Path)
    parser.add_argument("--detail", action="store_true", help="one line per operation name")
    parser.add_argument("--worst", type=int, default=0, help="print the operations with the largest error")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    reuse_pages()
    if options.machine:
        machine = load_machine(options.machine)
    else:
        machine = probe(folder=options.folder, threads=options.threads, seconds=options.probe_seconds, progress=print)
    if options.save_machine:
        save_machine(machine, options.save_machine)
    results: dict[str, object] = {"threads": options.threads, "torch": torch.__version__, "host": machine.host_id}
    for name in options.models:
        graph, seconds, whole = measured(name, options.steps)
        print(f"\n{name}: {MODELS[name]}, {options.threads} threads")
        results[name] = compare(graph, machine, seconds, whole, options.detail)
        worst(graph, machine, seconds, options.worst)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
