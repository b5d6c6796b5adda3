"""Seconds and memory that planning takes, by the size of the step.

Each case runs in a process of its own: the model is built on fake tensors, captured and expanded, then planned; only
the planning is timed. One thread; user CPU seconds are printed beside wall seconds, as a busy host adds to the latter.

    python benchmarks/planner/speed.py                  # all cases
    python benchmarks/planner/speed.py llama3-70b       # one of them
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

DEMO = {"vocab_size": 256, "dim": 256, "num_heads": 4, "num_layers": 8}
LLAMA_8B = {"vocab_size": 128256, "dim": 4096, "num_heads": 32, "num_kv_heads": 8, "hidden_dim": 14336}
LLAMA_70B = {"vocab_size": 128256, "dim": 8192, "num_heads": 64, "num_kv_heads": 8, "hidden_dim": 28672}
LLAMA_1B = {"vocab_size": 32000, "dim": 2048, "num_heads": 32, "num_kv_heads": 32, "hidden_dim": 5504}
LLAMA_7B = {"vocab_size": 32000, "dim": 4096, "num_heads": 32, "num_kv_heads": 32, "hidden_dim": 11008}
LLAMA_13B = {"vocab_size": 32000, "dim": 5120, "num_heads": 40, "num_kv_heads": 40, "hidden_dim": 13824}
#: Sizes of models of one family, of which half of what keep-all needs is asked for, whatever the device has.
HALVED = {
    "llama-1b": {**LLAMA_1B, "num_layers": 22},
    "llama-7b": {**LLAMA_7B, "num_layers": 32},
    "llama-13b": {**LLAMA_13B, "num_layers": 40},
    "llama-70b": {**LLAMA_70B, "num_layers": 80},
}
#: Name: (model, sizes, dtype, batch and tokens, machine, budget); "all" is all the memory of the machine's device.
CASES: dict[str, tuple[str, dict[str, Any], str, tuple[int, int], str, str]] = {
    "demo 75%": ("llama", DEMO, "float32", (8, 128), "cpu", "75%"),
    "demo 50%": ("llama", DEMO, "float32", (8, 128), "cpu", "50%"),
    "moe 50%": ("moe", {**DEMO, "num_layers": 4}, "float32", (8, 128), "cpu", "50%"),
    "llama3-8b": ("llama", {**LLAMA_8B, "num_layers": 32}, "bfloat16", (1, 4096), "rtx4090", "all"),
    "llama3-70b": ("llama", {**LLAMA_70B, "num_layers": 80}, "bfloat16", (1, 4096), "rtx4090", "all"),
    "llama3-70b h100": ("llama", {**LLAMA_70B, "num_layers": 80}, "bfloat16", (1, 4096), "h100", "all"),
    **{
        f"{name} {machine} 50%": ("llama", sizes, "bfloat16", (1, 4096), machine, "50%")
        for name, sizes in HALVED.items()
        for machine in ("h100", "rtx4090")
    },
}
#: The process overhead of the catalog's CPU would be most of a small model's budget.
SMALL_OVERHEAD_BYTES = 4_000_000


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Capture one case in this process and plan it ``repeats`` times."""
    import dataclasses

    import torch

    from lading.catalog.load import load_machine
    from lading.ir.expand import expand
    from lading.models.loss import next_byte_loss
    from lading.models.reference import build_model
    from lading.planner.api import make_plan
    from lading.tracing.initial import defer
    from lading.tracing.trace import capture

    model, sizes, dtype, (batch, tokens), machine_name, budget = CASES[name]
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, dtype))
    initial = defer(lambda: build_model(model, max_seq_len=tokens, **sizes))
    torch.set_default_dtype(torch.float32)
    graph = expand(
        capture(initial.model, {"tokens": torch.zeros(batch, tokens + 1, dtype=torch.int64)}, next_byte_loss)
    )
    machine = load_machine(machine_name)
    if machine.device.kind == "cpu":
        device = dataclasses.replace(machine.device, overhead_bytes=SMALL_OVERHEAD_BYTES)
        machine = dataclasses.replace(machine, device=device)
    elif budget != "all":
        machine = dataclasses.replace(machine, device=dataclasses.replace(machine.device, memory_bytes=1 << 45))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    runs: list[tuple[float, float, str]] = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        made = make_plan(graph, machine, budget=machine.device.memory_bytes if budget == "all" else budget)
        runs.append((time.perf_counter() - wall, time.process_time() - cpu, made.plan.fingerprint))
    assert len({fingerprint for _, _, fingerprint in runs}) == 1, "same input, same plan"
    return {
        "case": name,
        "ops": len(graph.ops),
        "machine": machine_name,
        "budget": budget,
        "wall_s": median(wall for wall, _, _ in runs),
        "cpu_s": median(cpu for _, cpu, _ in runs),
        "cpu_least_s": min(cpu for _, cpu, _ in runs),
        "cpu_most_s": max(cpu for _, cpu, _ in runs),
        "repeats": repeats,
        "step_s": made.plan.step_s,
        "bound_s": made.plan.lower_bound_s,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "rss_added_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3,
        "torch": torch.__version__,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| case | operations | plan, CPU s (least to most) | wall s | step s | bound s | above it | resident MB |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        spread = f"{row['cpu_s']:.2f} ({row['cpu_least_s']:.2f} to {row['cpu_most_s']:.2f})"
        times = f"{row['wall_s']:.2f} | {row['step_s']:.4g} | {row['bound_s']:.4g}"
        times += f" | {row['step_s'] / row['bound_s'] - 1:.1%}" if row["bound_s"] else " | -"
        lines.append(f"| {row['case']} ({row['machine']}) | {row['ops']} | {spread} | {times} | {row['rss_mb']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="run the case in this process and print JSON")
    parser.add_argument("--out", type=Path, help="write results here as .json and .md")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.cases[0], args.repeats)))
        return
    rows: list[dict[str, Any]] = []
    for name in args.cases:
        command = [sys.executable, __file__, name, "--one", "--repeats", str(args.repeats)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        if args.out is not None:
            args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
            note = f"{platform.processor() or platform.machine()}, one thread, torch {rows[0]['torch']}, medians\n\n"
            args.out.with_suffix(".md").write_text(note + table(rows) + "\n")


if __name__ == "__main__":
    main()
