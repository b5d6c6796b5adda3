"""Policies of what stays unsharded under a budget, for several models, at budgets between ZeRO-3 and ZeRO-2.

    python benchmarks/planner/unshard.py [--json FILE] [--markdown FILE]

Each budget is the peak of ZeRO-3 and a share of what ZeRO-2 needs more. Steps are simulated; nothing is measured here.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from lading.clusters import step_of
from lading.ir.request import Request
from lading.planner.unshard import choose_groups, neighbor_peaks

#: Model, machine, devices, layout, tokens, software stack.
CASES = (
    ("gpt2", "h100", 64, "zero3", 1024, "torchtitan-compile"),
    ("gpt3-6.7b", "a100", 64, "zero3,gb256", 2048, "torchtitan-compile"),
    ("llama3-8b", "h100", 64, "zero3", 8192, "torchtitan-compile"),
    ("llama3-8b", "h100", 256, "zero3,gb1024", 8192, "torchtitan-compile"),
    ("llama3-70b", "h100", 64, "zero3,recompute=full,gb256", 8192, "torchtitan-compile"),
    ("llama3-70b", "h100", 256, "zero3,recompute=full", 8192, "torchtitan-compile"),
    ("llama3-70b", "h100", 256, "tp8,sp,zero3,gb256,recompute=full", 8192, "torchtitan-compile"),
    ("qwen3-30b-a3b", "h100", 64, "zero3,ep8,gb256", 4096, "torchtitan-compile"),
    ("mixtral-8x7b", "h100", 256, "zero3,recompute=full", 4096, "torchtitan-compile"),
)
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)


def rows_of(case: tuple[str, str, int, str, int, str]) -> list[dict[str, Any]]:
    """Every policy at every budget."""
    model, machine, devices, layout, tokens, stack = case
    asked = Request(model=model, machine=machine, devices=devices, layout=layout, seq_len=tokens, stack=stack)
    request, table = step_of(asked)
    low, high = neighbor_peaks(request, table)
    found: list[dict[str, Any]] = []
    for share in SHARES:
        budget = int(low + share * (high - low))
        begun = time.process_time()
        chosen = choose_groups(request, table, budget)
        seconds = time.process_time() - begun
        base = {"model": model, "machine": machine, "devices": devices, "layout": layout, "tokens": tokens}
        base |= {"share": share, "budget_bytes": budget, "bound_s": chosen.bound_s, "planned_in_s": seconds}
        base |= {"why": chosen.why}
        for row in chosen.rows:
            figures = {"policy": row.policy, "step_s": row.step_s, "exposed_s": row.exposed_s, "gap": row.gap}
            figures |= {"peak_bytes": row.peak_bytes, "fill": row.fill, "gathers": row.gathers, "groups": row.buckets}
            found.append(base | figures)
    return found


def markdown(rows: list[dict[str, Any]]) -> str:
    """One line for each budget."""
    lines = [
        "| model | devices | layout | budget | ZeRO-3 | reverse-greedy | ZeRO-2 | residency | filled | above bound |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for start in range(0, len(rows), 4):
        own = {row["policy"]: row for row in rows[start : start + 4]}
        best = own["residency"]

        def step(name: str, of: dict[str, dict[str, Any]] = own) -> str:
            return f"{of[name]['step_s'] * 1e3:,.1f}" if of[name]["fill"] <= 1 else "no fit"

        lines.append(
            f"| {best['model']} | {best['devices']} x {best['machine']} | {best['layout']} | "
            f"{best['budget_bytes'] / 2**30:.1f} GiB | {step('zero3')} | {step('reverse-greedy')} | {step('zero2')} | "
            f"**{step('residency')}** | {best['fill']:.1%} | {best['gap']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def check(rows: list[dict[str, Any]]) -> None:
    """Stop at what is not as claimed: never slower than what fits, above the bound; print why a budget is not full."""
    for start in range(0, len(rows), 4):
        own = rows[start : start + 4]
        best = next(row for row in own if row["policy"] == "residency")
        name = f"{best['model']} on {best['devices']}, {best['share']:.0%}"
        slower = [row["policy"] for row in own if row["fill"] <= 1 and row["step_s"] < best["step_s"]]
        if slower or best["gap"] < 0 or best["fill"] > 1:
            said = f"{best['gap']:.2%} above the bound, {best['fill']:.2%} full"
            raise SystemExit(f"not as claimed: {name}: slower than {slower}, {said}")
        if best["fill"] < 0.98:
            print(f"{name}: {best['fill']:.1%} full; {best['why']}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    rows = [row for case in CASES for row in rows_of(case)]
    check(rows)
    print(markdown(rows))
    best = [row for row in rows if row["policy"] == "residency"]
    print(f"{len(best)} plans: mean gap {sum(row['gap'] for row in best) / len(best):.1%}, at most "
          f"{max(row['gap'] for row in best):.1%}; filled from {min(row['fill'] for row in best):.1%}; planned in "
          f"{max(row['planned_in_s'] for row in best):.1f} s at most")  # fmt: skip
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    if asked.markdown:
        asked.markdown.write_text(markdown(rows))


if __name__ == "__main__":
    main()
