"""One GPU, end to end, unattended: probe it, check the numbers against eager, and time plans at several budgets.

    PYTHONPATH=src python benchmarks/gpu/one_device.py           # under nine minutes
    PYTHONPATH=src python benchmarks/gpu/one_device.py --dry     # the same script on the CPU at tiny sizes

Results are written after each section: one that fails is recorded with its traceback and the others go on; one for
which no time is left is skipped. Budgets are shares of what tensors and scratch need; a GPU's context comes on top.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Read by cuBLAS when it starts: without it torch warns that products are not deterministic.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from parity import check_operations, parity_cases, run_parity

import lading
from lading.catalog.load import save_machine
from lading.ir.graph import StepGraph
from lading.ir.machine import MEMORY, Machine
from lading.memory.restore import program_of, step_of
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.optim.adamw import AdamW
from lading.optim.master import MasterWeights
from lading.runtime.kernel_calls import workspace_of
from lading.runtime.probe import probe
from lading.sim.device_step import simulate
from lading.units import GiB, MiB

FOLDER = Path(__file__).parent / "results"
BUDGETS = ("100%", "50%", "25%")
NEEDED = {"numpy": "everything", "safetensors": "checkpoints", "rich": "tables", "highspy": "plans below 100%"}
OPTIMIZER = AdamW(lr=3e-4, weight_decay=0.1)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the model that is trained for the times."""

    model: dict[str, Any]
    batch: int
    length: int
    steps: int


def sizes_of(kind: str, memory_bytes: int) -> Sizes:
    """Sizes of a Llama that takes roughly a quarter of the device, so that eager has room beside it.

    On the CPU several times the 10 MiB of the process besides tensors, so that half of its memory holds a plan.
    """
    if kind == "cpu":
        model = {"num_layers": 2, "dim": 256, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 1024, "max_seq_len": 64}
        return Sizes(model=model, batch=2, length=64, steps=3)
    large = memory_bytes > 60 * GiB
    model = {
        "num_layers": 12 if large else 8, "dim": 2048 if large else 1024, "num_heads": 16 if large else 8,
        "num_kv_heads": 8 if large else 4, "vocab_size": 32000, "max_seq_len": 2048,
    }  # fmt: skip
    return Sizes(model=model, batch=4 if large else 2, length=2048, steps=12)


@dataclass
class Report:
    """Results so far, written after each section."""

    path: Path
    data: dict[str, Any] = field(default_factory=lambda: {"sections": {}})

    def write(self) -> None:
        """JSON for programs, and the same as text."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.with_suffix(".json").write_text(json.dumps(self.data, indent=1, default=str) + "\n")
        self.path.with_suffix(".md").write_text(as_text(self.data))


@dataclass
class Bench:
    """State that sections share; ``only`` is a regular expression on the names of those to run, "" for all."""

    kind: str
    report: Report
    deadline_s: float
    only: str = ""
    machine: Machine | None = None
    graph: StepGraph | None = None

    @property
    def device(self) -> torch.device:
        """Where eager runs."""
        return torch.device(self.kind)

    def left_s(self) -> float:
        """Seconds until no section may start any more."""
        return self.deadline_s - time.monotonic()

    def section(self, name: str, run: Callable[[], dict[str, Any]], *, needs_s: float = 0.0) -> None:
        """Run one section, whatever becomes of it, if it is among those asked for."""
        if self.only and not re.search(self.only, name):
            return
        started = time.monotonic()
        if self.left_s() < needs_s:
            found: dict[str, Any] = {"skipped": f"{self.left_s():.0f} s were left, it takes about {needs_s:.0f} s"}
        else:
            try:
                found = run()
            except Exception as error:
                found = {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        if self.kind == "cuda":
            found |= {"gpu_bytes_left_behind": torch.cuda.memory_allocated()}
        found["seconds"] = round(time.monotonic() - started, 1)
        self.report.data["sections"][name] = found
        self.report.write()
        print(
            f"[{found['seconds']:6.1f} s] {name}: {found.get('failed') or found.get('skipped') or 'done'}", flush=True
        )


def environment(kind: str) -> dict[str, Any]:
    """Versions, and what is missing and what it costs."""
    missing = {name: what for name, what in NEEDED.items() if importlib.util.find_spec(name) is None}
    found: dict[str, Any] = {
        "torch": torch.__version__, "lading": lading.__version__, "python": sys.version.split()[0], "missing": missing,
        "cpu_threads": torch.get_num_threads(),
    }  # fmt: skip
    if kind == "cuda":
        free, total = torch.cuda.mem_get_info()
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name, "capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(), "memory_bytes": total, "free_bytes": free,
            "processors": properties.multi_processor_count,
        }  # fmt: skip
    return found


def probed(bench: Bench, seconds: float) -> dict[str, Any]:
    """Measure the machine; its file goes beside the results."""
    with tempfile.TemporaryDirectory() as folder:
        machine = probe(folder=Path(folder), seconds=seconds, device=bench.kind, progress=print)
    if bench.kind == "cpu":  # a stand-in, so that moves to a host are planned and made
        host = dataclasses.replace(
            machine.tiers[-1], name="host", kind=MEMORY, host_computes=True, persistent=False, capacity_bytes=4 * GiB
        )
        machine = dataclasses.replace(machine, tiers=(host, *machine.tiers))
    bench.machine = machine
    save_machine(machine, bench.report.path.with_suffix(".machine.toml"))
    device = machine.device
    return {
        "peak_flops_per_s": device.peak_flops_per_s,
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
        "op_overhead_s": device.op_overhead_s, "overhead_bytes": device.overhead_bytes,
        "tiers": {t.name: [t.read_bytes_per_s, t.write_bytes_per_s, t.latency_s] for t in machine.tiers},
    }  # fmt: skip


def with_lower_tier(machine: Machine, tier: str) -> Machine:
    """The machine with one lower tier, and no overhead: a share of a small model's memory is less than a context."""
    device = dataclasses.replace(machine.device, overhead_bytes=0)
    return dataclasses.replace(machine, device=device, tiers=tuple(t for t in machine.tiers if t.name == tier))


def batches_of(sizes: Sizes, count: int) -> list[dict[str, torch.Tensor]]:
    """Draw random tokens, alike for everyone."""
    generator = torch.Generator().manual_seed(1)
    shape = (sizes.batch, sizes.length + 1)
    return [{"tokens": torch.randint(sizes.model["vocab_size"], shape, generator=generator)} for _ in range(count)]


def llama_of(sizes: Sizes, dtype: torch.dtype, kind: str) -> torch.nn.Module:
    """Build the model on the device, which draws a billion weights at once; they are alike for everyone."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(kind):
            return build_model("llama", **sizes.model).train()
    finally:
        torch.set_default_dtype(before)


def same_attention(kind: str) -> AbstractContextManager[object]:
    """Eager with the attention kernels that plans are made with; newer GPUs would take cuDNN's."""
    if kind == "cpu":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def settle(kind: str) -> None:
    """Return once the device has done all it was given."""
    if kind == "cuda":
        torch.cuda.synchronize()


@contextmanager
def measured_peak(kind: str) -> Iterator[list[int]]:
    """Highest bytes of tensors on the GPU inside the block, above those before it."""
    if kind == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before, peak = (torch.cuda.memory_allocated() if kind == "cuda" else 0), [0]
    yield peak
    peak[0] = torch.cuda.max_memory_allocated() - before if kind == "cuda" else 0


def eager(bench: Bench, sizes: Sizes, dtype: torch.dtype, *, stock: bool) -> dict[str, Any]:
    """Plain PyTorch: autograd, fused AdamW, float32 masters for 16-bit weights."""
    batches = batches_of(sizes, sizes.steps)
    losses: list[float] = []
    seconds: list[float] = []
    with measured_peak(bench.kind) as peak, nullcontext() if stock else same_attention(bench.kind):
        model = llama_of(sizes, dtype, bench.kind)
        masters = MasterWeights(model)
        optimizer = torch.optim.AdamW(
            masters.parameters, lr=OPTIMIZER.lr, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps,
            weight_decay=OPTIMIZER.weight_decay, fused=True,
        )  # fmt: skip
        for batch in batches:
            settle(bench.kind)
            started = time.perf_counter()
            tokens = {k: v.to(bench.device) for k, v in batch.items()}
            loss = next_byte_loss(model, tokens)
            loss.backward()
            masters.add_gradients()
            optimizer.step()
            masters.write_back()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            settle(bench.kind)
            seconds.append(time.perf_counter() - started)
        del model, masters, optimizer, loss, tokens
    return {"losses": losses, **times(seconds), "peak_bytes": peak[0]}


def times(seconds: Sequence[float]) -> dict[str, Any]:
    """Median and spread, the first quarter left out."""
    steady = sorted(seconds[max(1, len(seconds) // 4) :])
    return {"step_s": statistics.median(steady), "fastest_s": steady[0], "slowest_s": steady[-1]}


def planned_run(bench: Bench, sizes: Sizes, dtype: torch.dtype, budget: str, machine: Machine) -> dict[str, Any]:
    """Plan for a budget, train, and compare with what was predicted."""
    assert bench.graph is not None
    started = time.monotonic()
    masters = dtype is torch.bfloat16
    plan = lading.plan(bench.graph, machine, budget=budget, master_weights=masters)
    program = program_of(plan, bench.graph)
    predicted = simulate(program, machine)
    found: dict[str, Any] = {
        "plan_s": round(time.monotonic() - started, 1), "predicted_step_s": plan.step_s, "bound_s": plan.lower_bound_s,
        "arena_bytes": program.arena_bytes, "workspace_bytes": program.workspace_bytes,
        "overhead_bytes": program.overhead_bytes, "budget_bytes": plan.budgets["device"],
        "lower_tier_bytes": {tier: program.tier_bytes(tier) for tier in program.slots},
        "choices": len(plan.choices.gaps), "predicted_busy_s": {s: predicted.busy_s(s) for s in program.streams},
    }  # fmt: skip
    batches = batches_of(sizes, sizes.steps)
    model = llama_of(sizes, dtype, bench.kind).cpu()
    losses: list[float] = []
    seconds: list[float] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        lading.Trainer(plan, bench.graph, model, optimizer=OPTIMIZER, folder=folder, program=program) as trainer,
    ):
        trainer._executor.timing = False
        for batch in batches[:-1]:
            started_s = time.perf_counter()
            losses.append(trainer.step(batch))
            seconds.append(time.perf_counter() - started_s)
        trainer._executor.timing = True  # the last step also writes down when each action ran
        started_s = time.perf_counter()
        losses.append(trainer.step(batches[-1]))
        found["timed_step_s"] = time.perf_counter() - started_s
        timeline = trainer.timeline()
        found |= {
            "peak_bytes": trainer._executor.peak_resident_bytes, "beside_bytes": trainer._executor.beside_bytes,
            "timeline_s": timeline.duration_s, "busy_s": {s: timeline.busy_s(s) for s in program.streams},
            "slowest": slowest(predicted, timeline),
        }  # fmt: skip
    found |= {"losses": losses, **times(seconds)}
    found["step_error"] = plan.step_s / found["step_s"] - 1
    found["peak_error"] = (program.arena_bytes + program.workspace_bytes) / max(1, found["peak_bytes"]) - 1
    return found


def slowest(predicted: Any, measured: Any, count: int = 15) -> list[list[Any]]:
    """The kinds of actions with the largest error in sum: name, predicted and measured seconds."""
    sums: dict[str, list[float]] = {}
    for column, timeline in enumerate((predicted, measured)):
        for event in timeline.events:
            name = timeline.labels[event.action].split(" ")[0] if event.stream == "compute" else event.stream
            sums.setdefault(name, [0.0, 0.0])[column] += event.end_s - event.start_s
    ordered = sorted(sums.items(), key=lambda row: -abs(row[1][0] - row[1][1]))
    return [[name, *pair] for name, pair in ordered[:count]]


def captured(bench: Bench, sizes: Sizes, dtype: torch.dtype) -> dict[str, Any]:
    """Capture the step that the times are about."""
    started = time.monotonic()
    bench.graph = lading.capture(llama_of(sizes, dtype, bench.kind).cpu(), batches_of(sizes, 1)[0], next_byte_loss)
    assert bench.machine is not None
    step = step_of(bench.graph, bench.machine, clip_norm=0.0, master_weights=dtype is torch.bfloat16)
    return {
        "capture_s": round(time.monotonic() - started, 1), "operations": len(step.ops), "flops": step.flops,
        "model": sizes.model, "batch": sizes.batch, "length": sizes.length, "dtype": str(dtype),
        "estimated_workspace_bytes": max(workspace_of(step, bench.machine.device.kind)),
    }  # fmt: skip


def compared(bench: Bench) -> dict[str, Any]:
    """Losses of every budget against eager's, and times against eager's."""
    sections = bench.report.data["sections"]
    reference = sections.get("eager, same attention kernels", {})
    rows: dict[str, Any] = {}
    for name, found in sections.items():
        own = name.startswith(("budget", "eager")) and found is not reference
        if own and "losses" in found and "losses" in reference:
            pairs = list(zip(found["losses"], reference["losses"], strict=True))
            rows[name] = {
                "equal_bits": all(a == b for a, b in pairs), "largest_difference": max(abs(a - b) for a, b in pairs),
                "relative_step_time": found["step_s"] / reference["step_s"],
            }  # fmt: skip
    return {
        "rows": rows,
        "why_not_equal": "flash attention's backward adds in no fixed order; bits are compared in the parity section",
    }


def as_text(data: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    lines = [f"# One device: {data.get('device', '')}", "", f"{data.get('date', '')}, {data.get('command', '')}", ""]
    lines += [f"Said of this run: {data['says']}", ""] if "says" in data else []
    for name, found in data["sections"].items():
        lines += [f"## {name} ({found.get('seconds', 0)} s)", ""]
        if "failed" in found:
            lines += [f"FAILED: {found['failed']}", "", "```", str(found["traceback"]).rstrip(), "```", ""]
            continue
        lines += [f"- {key}: {_short(value)}" for key, value in found.items() if key not in ("seconds", "slowest")]
        lines += [
            f"  - {row[0]}: predicted {row[1]:.3g} s, measured {row[2]:.3g} s" for row in found.get("slowest", ())
        ]
        lines.append("")
    return "\n".join(lines) + "\n"


def _short(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int) and abs(value) >= 10 * MiB:
        return f"{value} ({value / GiB:.2f} GiB)"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_short(v)}" for k, v in value.items()) + "}"
    return "[" + ", ".join(map(_short, value)) + "]" if isinstance(value, (list, tuple)) else str(value)


def run_all(bench: Bench, *, dry: bool, probe_s: float) -> None:
    """Every section, the ones that others need first."""
    bench.section("environment", lambda: environment(bench.kind))
    memory = torch.cuda.get_device_properties(0).total_memory if bench.kind == "cuda" else 0
    sizes, dtype = sizes_of(bench.kind, memory), torch.bfloat16 if bench.kind == "cuda" else torch.float32
    bench.section("probe", lambda: probed(bench, 1.0 if dry else probe_s))
    if bench.machine is None:
        return
    machine = with_lower_tier(bench.machine, "host")
    for case in parity_cases(dry):
        bench.section(f"parity: {case.name}", lambda case=case: run_parity(case, machine), needs_s=0 if dry else 15)
    bench.section("capture", lambda: captured(bench, sizes, dtype))
    bench.section("eager, same attention kernels", lambda: eager(bench, sizes, dtype, stock=False))
    bench.section("eager, again", lambda: eager(bench, sizes, dtype, stock=False))
    bench.section("eager, as it comes", lambda: eager(bench, sizes, dtype, stock=True))
    for budget in BUDGETS:
        name = f"budget {budget}, host"
        bench.section(name, lambda b=budget: planned_run(bench, sizes, dtype, b, machine), needs_s=0 if dry else 60)
    bench.section("operations", lambda: check_operations(bench.graph, bench.machine), needs_s=0 if dry else 30)
    disk = with_lower_tier(bench.machine, "disk")
    bench.section("budget 50%, disk", lambda: planned_run(bench, sizes, dtype, "50%", disk), needs_s=0 if dry else 90)
    bench.section("compared", lambda: compared(bench))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on the CPU, at tiny sizes")
    parser.add_argument("--minutes", type=float, default=8.0, help="no section starts that would end later")
    parser.add_argument("--only", default="", help="sections to run, a regular expression on their names")
    parser.add_argument("--probe-seconds", type=float, default=40.0, help="time to spend on measuring the machine")
    parser.add_argument("--out", type=Path, help="where results go, without suffix")
    options = parser.parse_args()
    kind = "cpu" if options.dry else "cuda"
    if kind == "cuda" and not torch.cuda.is_available():
        sys.exit(f"expected a GPU, found none (torch {torch.__version__}); run on one, or try --dry")
    if options.dry:
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name(0) if kind == "cuda" else "cpu dry run"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    path = options.out or FOLDER / f"one_device_{slug}_{datetime.date.today():%Y%m}"
    report = Report(path)
    report.data |= {"device": name, "date": datetime.date.today().isoformat(), "command": " ".join(sys.argv)}
    bench = Bench(kind, report, time.monotonic() + 60 * options.minutes, options.only)
    run_all(bench, dry=options.dry, probe_s=options.probe_seconds)
    print(f"wrote {path}.json and .md")


if __name__ == "__main__":
    main()
