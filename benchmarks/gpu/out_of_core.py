"""One GPU, unattended: Llama shapes of 1B to 13B with the device capped at 8, 16 and 24 GB, beside other ways.

    PYTHONPATH=src python benchmarks/gpu/out_of_core.py           # under nine minutes
    PYTHONPATH=src python benchmarks/gpu/out_of_core.py --dry     # the same script on the CPU at tiny sizes

bfloat16 with float32 masters and moments, one sequence of 2,048 tokens a step. Lading plans for the cap with the host's
memory and the disk behind the device. Plain PyTorch runs where it fits; FSDP2 with CPU offload, torchao's
CPUOffloadOptimizer and DeepSpeed ZeRO-Offload where they can be imported, each under the same cap by
``torch.cuda.set_per_process_memory_fraction``. Results are written after each section; one that fails is recorded with
its error and the others go on; one for which no time is left is skipped. Values of parameters are a tiled block of
random numbers: to draw 13 billion takes minutes, and times do not depend on them.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import importlib.util
import multiprocessing
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from one_device import FOLDER, OPTIMIZER, Bench, Report, as_text, environment, probed, settle, times

import lading
from lading.errors import PlanInfeasible
from lading.ir.plan import Plan
from lading.memory.restore import program_of
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.optim.master import MasterWeights
from lading.tracing.initial import defer
from lading.units import GiB

GB = 10**9
STEPS, DRY_STEPS = 6, 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama, and the tokens of a step."""

    name: str
    sizes: dict[str, Any]
    tokens: int = 2048

    def module(self, dtype: torch.dtype) -> torch.nn.Module:
        """Build it with parameters of a dtype."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return build_model("llama", **self.sizes, max_seq_len=self.tokens).train()
        finally:
            torch.set_default_dtype(before)

    def on_meta(self, dtype: torch.dtype) -> torch.nn.Module:
        """Build it without values."""
        return defer(lambda: self.module(dtype)).model

    def filled(self, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
        """Build it on a device with tiled values, without drawing all of them."""
        with torch.device("meta"):
            module = self.module(dtype)
        module = module.to_empty(device=device)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(tiled(parameter.shape, dtype))
            for name, buffer in module.named_buffers():
                buffer.copy_(self.buffer(name))
        return module

    def buffer(self, name: str) -> torch.Tensor:
        """Value of a buffer, from a model with one layer: all layers share those of rotation."""
        small = build_model("llama", **{**self.sizes, "num_layers": 1}, max_seq_len=self.tokens)
        found = dict(small.named_buffers())
        return found.get(name, next(iter(found.values())))

    def batch(self, number: int) -> dict[str, torch.Tensor]:
        """Draw the tokens of a step."""
        draw = torch.Generator().manual_seed(number)
        return {"tokens": torch.randint(self.sizes["vocab_size"], (1, self.tokens + 1), generator=draw)}


def _llama(name: str, layers: int, dim: int, heads: int, kv: int, hidden: int, vocabulary: int) -> Shape:
    sizes = {"num_layers": layers, "dim": dim, "num_heads": heads, "num_kv_heads": kv, "hidden_dim": hidden}
    return Shape(name=name, sizes={**sizes, "vocab_size": vocabulary})


#: TinyLlama 1.1B, Llama 3.2 3B, Llama 2 7B and 13B, with heads of their own.
SHAPES = (
    _llama("1b", 22, 2048, 32, 4, 5632, 32000),
    _llama("3b", 28, 3072, 24, 8, 8192, 128256),
    _llama("7b", 32, 4096, 32, 32, 11008, 32000),
    _llama("13b", 40, 5120, 40, 40, 13824, 32000),
)
DRY_SHAPES = (
    dataclasses.replace(_llama("tiny-1", 2, 128, 4, 2, 256, 512), tokens=64),
    dataclasses.replace(_llama("tiny-2", 4, 128, 4, 2, 256, 512), tokens=64),
)
#: Pairs of a shape and a cap in GB, what says most first: each shape under the cap it belongs to.
ORDER = (
    *(("1b", 8), ("7b", 16), ("13b", 24), ("3b", 8), ("7b", 24), ("7b", 8)),
    *(("13b", 16), ("3b", 16), ("1b", 16), ("1b", 24), ("3b", 24), ("13b", 8)),
)


def tiled(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Values of a parameter: one block of random numbers again and again; ones for a vector, as of a norm."""
    if len(shape) < 2:
        return torch.ones(shape, dtype=dtype)
    block = torch.randn(4096, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    count = shape.numel()
    return block.repeat(-(-count // len(block)))[:count].view(shape)


@dataclass
class Cases:
    """State of the run: the bench, what was planned, and rows of the table."""

    bench: Bench
    shapes: Mapping[str, Shape]
    driver: str
    dry: bool
    sides: tuple[str, ...] = ()
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Steps of each side; the first quarter does not count."""
        return DRY_STEPS if self.dry else STEPS

    def budget(self, cap: float) -> str | int:
        """Budget of a cap: GB, or at tiny sizes a share of what keep-all needs, in percent."""
        return f"{cap:g}%" if self.dry else int(cap * GB)


def lading_side(cases: Cases, shape: Shape, cap: float) -> dict[str, Any]:
    """Plan for the cap, train, and compare with what was predicted and with the limit."""
    machine = cases.bench.machine
    assert machine is not None
    if cases.driver:
        machine = dataclasses.replace(machine, device=dataclasses.replace(machine.device, kind=cases.driver))
    started = time.monotonic()
    graph = lading.capture(shape.on_meta(torch.bfloat16), shape.batch(0), next_byte_loss)
    captured_s = time.monotonic() - started
    plan = lading.plan(graph, machine, budget=cases.budget(cap), master_weights=True, cache=False)
    planned_s = time.monotonic() - started - captured_s
    seconds: list[float] = []
    losses: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        lading.Trainer(
            plan, graph, None, optimizer=OPTIMIZER, folder=folder, program=program_of(plan, graph)
        ) as trainer,
    ):
        names = dict(shape.on_meta(torch.bfloat16).named_parameters())
        named = dict(shape.on_meta(torch.bfloat16).named_buffers())
        buffers = {name: shape.buffer(name).to(buffer.dtype) for name, buffer in named.items()}
        for name, parameter in names.items():
            trainer.set_value(name, tiled(parameter.shape, torch.bfloat16))
        for name, value in buffers.items():
            trainer.set_value(name, value)
        for number in range(cases.steps):
            begin = time.perf_counter()
            losses.append(trainer.step(shape.batch(number)))
            seconds.append(time.perf_counter() - begin)
        timeline, peak = trainer.timeline(), trainer.peak_bytes
        busy = timeline.busy_s("compute")
    found = {"capture_s": round(captured_s, 1), "plan_s": round(planned_s, 1), "losses": losses, **times(seconds)}
    found |= {"peak_bytes": peak, "exposed_s": max(0.0, timeline.duration_s - busy), **_predictions(plan)}
    found["above_limit"] = found["step_s"] / found["limit_s"] - 1
    return found


def _predictions(plan: Plan) -> dict[str, Any]:
    first = plan.predictions.limits[0]
    return {
        "predicted_step_s": plan.step_s,
        "bound_s": plan.lower_bound_s,
        "limit_s": first.seconds,
        "binds": first.resource,
        "limits_s": {each.resource: each.seconds for each in plan.predictions.limits},
        "predicted_peak_bytes": plan.peak_bytes["device"],
        "budget_bytes": plan.budgets["device"],
    }


def _trained(
    cases: Cases, shape: Shape, cap: float, step: Callable[[dict[str, torch.Tensor]], float]
) -> dict[str, Any]:
    """Train with a step of another way; peak and times."""
    kind, losses, seconds = cases.bench.kind, list[float](), list[float]()
    for number in range(cases.steps):
        settle(kind)
        begin = time.perf_counter()
        losses.append(step(shape.batch(number)))
        settle(kind)
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_reserved() if kind == "cuda" else 0
    return {"losses": losses, **times(seconds), "peak_bytes": peak}


def plain_side(cases: Cases, shape: Shape, cap: float) -> dict[str, Any]:
    """Plain PyTorch, all on the device."""
    device = cases.bench.device
    module = shape.filled(torch.bfloat16, device)
    masters = MasterWeights(module)
    optimizer = torch.optim.AdamW(masters.parameters, lr=OPTIMIZER.lr, weight_decay=OPTIMIZER.weight_decay, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = next_byte_loss(module, {k: v.to(device) for k, v in batch.items()})
        loss.backward()
        masters.add_gradients()
        optimizer.step()
        masters.write_back()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return _trained(cases, shape, cap, step)


def fsdp2_side(cases: Cases, shape: Shape, cap: float) -> dict[str, Any]:
    """FSDP2 on one rank with float32 parameters and states on the host, products in bfloat16."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    device, mesh = cases.bench.device, _mesh(cases.bench.kind)
    module = shape.filled(torch.float32, torch.device("cpu"))
    policy: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=cases.bench.kind == "cuda"),
    }
    for layer in module.layers:  # pyright: ignore[reportGeneralTypeIssues]
        fully_shard(layer, **policy)
    fully_shard(module, **policy)
    for buffers in module.modules():
        for name, buffer in buffers.named_buffers(recurse=False):
            setattr(buffers, name, buffer.to(device, torch.bfloat16))
    optimizer = torch.optim.AdamW(module.parameters(), lr=OPTIMIZER.lr, weight_decay=OPTIMIZER.weight_decay, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = next_byte_loss(module, {k: v.to(device) for k, v in batch.items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return _trained(cases, shape, cap, step)


def torchao_side(cases: Cases, shape: Shape, cap: float) -> dict[str, Any]:
    """Torchao's CPUOffloadOptimizer: parameters on the device, states and updates on the host."""
    optim: Any = importlib.import_module("torchao.optim")
    device = cases.bench.device
    module = shape.filled(torch.bfloat16, device)
    optimizer = optim.CPUOffloadOptimizer(module.parameters(), torch.optim.AdamW, lr=OPTIMIZER.lr, fused=True)

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = next_byte_loss(module, {k: v.to(device) for k, v in batch.items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return _trained(cases, shape, cap, step)


def deepspeed_side(cases: Cases, shape: Shape, cap: float) -> dict[str, Any]:
    """DeepSpeed ZeRO-Offload: stage 3 with parameters and states on the host."""
    package: Any = importlib.import_module("deepspeed")
    _mesh(cases.bench.kind)
    offload = {"device": "cpu", "pin_memory": cases.bench.kind == "cuda"}
    engine, *_ = package.initialize(
        model=(module := shape.filled(torch.bfloat16, torch.device("cpu"))),
        model_parameters=module.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": OPTIMIZER.lr}},
            "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload},
        },
    )
    device = cases.bench.device

    def step(batch: dict[str, torch.Tensor]) -> float:
        loss = next_byte_loss(engine, {k: v.to(device) for k, v in batch.items()})
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return _trained(cases, shape, cap, step)


def _mesh(kind: str) -> Any:
    """Mesh of this one process, made once."""
    distributed: Any = importlib.import_module("torch.distributed")
    if not distributed.is_initialized():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "1", "RANK": "0"}
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        distributed.init_process_group("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl")
    return distributed.device_mesh.init_device_mesh(kind, (1,))


SIDES: dict[str, tuple[Callable[[Cases, Shape, float], dict[str, Any]], str, float]] = {
    "Lading": (lading_side, "", 80.0),
    "plain PyTorch": (plain_side, "", 20.0),
    "FSDP2, CPU offload": (fsdp2_side, "", 50.0),
    "torchao": (torchao_side, "torchao", 30.0),
    "DeepSpeed": (deepspeed_side, "deepspeed", 70.0),
}


def attempted(cases: Cases, name: str, shape: Shape, cap: float) -> dict[str, Any]:
    """Run one side of a shape under a cap, or say that it does not fit."""
    _cap(cases, cap)
    try:
        return SIDES[name][0](cases, shape, cap)
    except (PlanInfeasible, torch.OutOfMemoryError) as error:
        return {"does_not_fit": str(error).splitlines()[0][:300]}


def run_case(cases: Cases, shape: Shape, cap: float) -> None:
    """Run all sides of a shape under a cap, each a section of the report and a process, which leaves nothing behind."""
    for name, (_, package, needs_s) in SIDES.items():
        if cases.sides and name not in cases.sides:
            continue
        if package and importlib.util.find_spec(package) is None:
            continue
        unit = "%" if cases.dry else " GB"
        title = f"{shape.name} in {cap:g}{unit}: {name}"

        alone = dataclasses.replace(cases, bench=Bench(cases.bench.kind, Report(Path()), 0.0), rows=[])
        alone.bench.machine = cases.bench.machine

        def attempt(name: str = name, alone: Cases = alone) -> dict[str, Any]:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                return pool.submit(attempted, alone, name, shape, cap).result()

        cases.bench.section(title, attempt, needs_s=0.0 if cases.dry else needs_s)
        found = cases.bench.report.data["sections"][title]
        if "step_s" in found:
            found["tokens_per_s"] = shape.tokens / found["step_s"]
            cases.rows.append({"case": title, **found})
        cases.bench.report.data["table"] = table(cases.rows)
        cases.bench.report.write()


def _cap(cases: Cases, cap: float) -> None:
    if cases.bench.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap * GB / total))


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Table of all sides, in Markdown."""
    lines = [
        "| case | tokens/s | step, s | predicted | limit | above it | binds | exposed, s | peak, GiB | predicted |",
        "|" + "---|" * 10,
    ]
    for row in rows:
        planned = [
            f"{row['predicted_step_s']:.3f}", f"{row['limit_s']:.3f}", f"{row['above_limit']:+.0%}", row["binds"],
            f"{row['exposed_s']:.3f}",
        ] if "limit_s" in row else ["-"] * 5  # fmt: skip
        peaks = [f"{row['peak_bytes'] / GiB:.2f}"]
        peaks += [f"{row['predicted_peak_bytes'] / GiB:.2f}" if "limit_s" in row else "-"]
        cells = [row["case"], f"{row['tokens_per_s']:.0f}", f"{row['step_s']:.3f}", *planned, *peaks]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def pairs_of(text: str) -> list[tuple[str, float]]:
    """Pairs of a shape and a cap that a text such as ``1b:8,7b:16`` names."""
    return [(name, float(cap)) for name, cap in (pair.split(":") for pair in text.split(",") if pair)]


@dataclass
class TableReport(Report):
    """Report whose text begins with the table."""

    def write(self) -> None:
        """Write JSON, and text with the table first."""
        super().write()
        text = as_text(self.data)
        head, _, rest = text.partition("\n\n")
        self.path.with_suffix(".md").write_text("\n".join([head, "", *self.data.get("table", []), "", rest]))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on the CPU, at tiny sizes")
    parser.add_argument("--driver", default="", help="with --dry: the device that Lading trains on, module:function")
    parser.add_argument("--minutes", type=float, default=8.0, help="no section starts that would end later")
    parser.add_argument(
        "--pairs", default="", help="pairs of a shape and a cap to run, such as 1b:8,7b:16; all if empty"
    )
    parser.add_argument("--sides", default="", help="sides to run, such as Lading,torchao; all if empty")
    parser.add_argument("--probe-seconds", type=float, default=40.0, help="time to spend on measuring the machine")
    parser.add_argument("--out", type=Path, help="where results go, without suffix")
    options = parser.parse_args()
    kind = "cpu" if options.dry else "cuda"
    if kind == "cuda" and not torch.cuda.is_available():
        sys.exit(f"expected a GPU, found none (torch {torch.__version__}); run on one, or try --dry")
    if options.driver and not options.dry:
        sys.exit(f"expected --driver with --dry alone, got {options.driver!r}; a GPU's driver is chosen by its kind")
    name = torch.cuda.get_device_name(0) if kind == "cuda" else "cpu dry run"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    path = options.out or FOLDER / f"out_of_core_{slug}_{datetime.date.today():%Y%m}"
    report = TableReport(path)
    report.data |= {"device": name, "date": datetime.date.today().isoformat(), "command": " ".join(sys.argv)}
    bench = Bench(kind, report, time.monotonic() + 60 * options.minutes)
    bench.section("environment", lambda: environment(bench.kind))
    bench.section("probe", lambda: probed(bench, 1.0 if options.dry else options.probe_seconds))
    shapes = {shape.name: shape for shape in (DRY_SHAPES if options.dry else SHAPES)}
    sides = tuple(filter(None, options.sides.split(",")))
    cases = Cases(bench=bench, shapes=shapes, driver=options.driver, dry=options.dry, sides=sides)
    order = [(name, cap) for name in shapes for cap in (100, 85)] if options.dry else pairs_of(options.pairs) or ORDER
    for shape, cap in order if bench.machine is not None else ():
        run_case(cases, shapes[shape], cap)
    print("\n".join(table(cases.rows)))
    print(f"wrote {path}.json and .md")


if __name__ == "__main__":
    main()
