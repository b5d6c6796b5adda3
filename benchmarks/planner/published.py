"""Published set-ups against the layouts that ``lading plan --model`` finds for them, both as simulated.

    python benchmarks/planner/published.py benchmarks/validation/measurements*.jsonl --out results.json
    python benchmarks/planner/published.py --show results.json [--markdown results.md]

A set-up is a model, a machine with its network, devices, sequences of a step and their length, a precision and a
software stack; of several published layouts of one set-up the one that is fastest as simulated counts. The plan is
found with the same stack, under the memory of the machine, while a published layout may not fit as predicted: where the
plan is slower then, it is found once more with as much memory as the published layout is predicted to need. The
smallest set-ups come first; those that the file of results has are not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tools.validate.requests import request_of
from tools.validate.rows import read_rows

from lading.errors import LadingError, PlanInfeasible
from lading.ir.request import Request, StepRequest
from lading.planner.layouts import find_layouts
from lading.planner.peaks import budget_for, peaks_of
from lading.planner.space import Space
from lading.sim.simulate import Simulated, machine_of, simulate

#: By which equal steps may differ.
_EQUAL = 1e-9


def setups(files: list[Path]) -> dict[str, Simulated]:
    """The fastest published layout of each set-up, as simulated."""
    rows, _ = read_rows(files)
    found: dict[str, Simulated] = {}
    for row in rows:
        try:
            request = request_of(row)
            if request.task not in ("pretrain", "sft") or request.layout.offload not in ((), ("optimizer",)):
                continue
            simulated = simulate(request)
        except LadingError:
            continue
        key = name_of(request)
        if key not in found or simulated.step.step_s < found[key].step.step_s:
            found[key] = simulated
    return found


def name_of(request: StepRequest) -> str:
    """Name of a set-up: all that makes it."""
    model, layout = request.model, request.layout
    blocks = "+".join(f"{count} {kind}" for kind, count in model.blocks)
    sizes = f"h{model.symbols.get('h', 0)}"
    precision = f"{layout.precision} {request.linear_dtype}".strip()
    nodes = f" in nodes of {request.ranks_per_node}" if request.ranks_per_node else ""
    network = f" over {request.network}" if request.network else ""
    return (
        f"{model.family} {blocks} {sizes}, {layout.devices} x {request.machine}{nodes}{network}, {layout.global_batch} "
        f"x {request.seq_len}, {precision}, {request.stack.name}"
    )


def space_of(published: Simulated) -> Space:
    """Space of layouts that a published layout was an answer to."""
    request = published.request
    plain = dataclasses.replace(request.layout, recompute_modules=())
    devices, batch = request.layout.devices, request.layout.global_batch
    return Space(
        wanted_request=Request(model=request.name, machine=request.machine, devices=devices, global_batch=batch, top=1),
        request=dataclasses.replace(request, layout=plain, schedule_detail="", edge_layers_fewer=0),
        table=published.table,
        machine=machine_of(request),
    )


def roomy(space: Space, published: Simulated) -> Space:
    """Copy on a device on which the published layout fits as predicted: its run shows that it did."""
    needed = max(tiers["device"] for tiers in peaks_of(published, space.wanted_request).values())
    device = space.machine.device
    memory = max(device.memory_bytes, budget_for(needed, space.machine))
    machine = dataclasses.replace(space.machine, device=dataclasses.replace(device, memory_bytes=memory))
    return dataclasses.replace(space, machine=machine)


def compare(published: Simulated) -> dict[str, Any]:
    """The plan found for a set-up, next to the published layout."""
    request, space = published.request, space_of(published)
    row: dict[str, Any] = {
        "published": str(request.layout),
        "published_s": published.step.step_s,
        "published_fits": published.prediction.fits,
        "ratio_with_its_memory": None,
    }
    begun = time.process_time()
    try:
        found = find_layouts(space)
    except PlanInfeasible as error:
        row |= {"found": "", "ratio": None, "why": str(error).splitlines()[0]}
    else:
        row |= {
            "found": str(found.winner.layout),
            "found_s": found.winner.step_s,
            "ratio": found.winner.step_s / published.step.step_s,
            "proven": found.proven,
            "plans": found.counted,
            "cpu_s": round(time.process_time() - begun, 1),
        }
    if (row["ratio"] is None or row["ratio"] > 1 + _EQUAL) and not row["published_fits"]:
        other = find_layouts(roomy(space, published)).winner
        row |= {
            "ratio_with_its_memory": other.step_s / published.step.step_s,
            "found_with_its_memory": str(other.layout),
        }
    return row


def short(setup: str) -> str:
    """A set-up's name with the blocks of each kind added up."""
    head, _, rest = setup.partition(" h")
    family, _, blocks = head.partition(" ")
    counts: Counter[str] = Counter()
    for block in blocks.split("+"):
        number, _, kind = block.partition(" ")
        counts[kind] += int(number)
    return f"{family} {'+'.join(f'{number} {kind}' for kind, number in counts.items())} h{rest}"


def shown(rows: list[dict[str, Any]]) -> str:
    """The outcome, the exceptions and a table, as markdown."""
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    good = sum(ratio <= 1 + _EQUAL for ratio in ratios)
    proven = sum(bool(row.get("proven")) for row in rows)
    lines = [
        f"{good} of {len(rows)} set-ups: the plan found is at least as fast as the published layout, both simulated; "
        f"in the mean of {len(ratios)} it takes {sum(ratios) / max(1, len(ratios)):.1%} of the step. {proven} are "
        "proven: no layout of the space that fits is faster as simulated.",
        "",
    ]
    for row in rows:
        if row["ratio"] is None or row["ratio"] > 1 + _EQUAL:
            fits = "fits" if row["published_fits"] else "does not fit as predicted"
            ratio = "none" if row["ratio"] is None else f"{row['ratio']:.3f} of the step"
            found = row["found"] or "nothing"
            text = f"- {short(row['setup'])}: published {row['published']} ({fits}), found {found}: {ratio}. "
            lines.append((text + row.get("why", "")).rstrip())
            if row["ratio_with_its_memory"] is not None:
                lines[-1] += (
                    f" With as much memory as the published layout is predicted to need: "
                    f"{row['found_with_its_memory']}, {row['ratio_with_its_memory']:.3f} of the step."
                )
    lines += ["", "| set-up | published | found | of its step | plans |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: row["setup"]):
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.1%}"
        lines.append(
            f"| {short(row['setup'])} | {row['published']} | {row['found']} | {ratio} | {row.get('plans', 0):,} |"
        )
    return "\n".join(lines) + "\n"


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--most", type=int, default=0, help="set-ups, spread evenly over all; 0 for all")
    parser.add_argument("--devices", type=int, default=1 << 30, help="of a set-up, at most")
    parser.add_argument("--out", type=Path, help="results, read first where it is there")
    parser.add_argument("--show", type=Path, help="only print what a file of results says")
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def main() -> int:
    """Print one line a set-up, and the exceptions."""
    asked = parsed()
    read = asked.show or asked.out
    rows: list[dict[str, Any]] = json.loads(read.read_text())["rows"] if read and read.exists() else []
    if not asked.show:
        every = sorted(setups(asked.files).items(), key=lambda item: (item[1].request.layout.devices, item[0]))
        known = {row["setup"] for row in rows}
        step = max(1, -(-len(every) // asked.most)) if asked.most else 1
        for name, published in every[::step]:
            if name in known or published.request.layout.devices > asked.devices:
                continue
            rows.append({"setup": name} | compare(published))
            ratio = rows[-1]["ratio"]
            print(f"{'none fits' if ratio is None else f'{ratio:9.3f}'}  {name}", flush=True)
            if asked.out:
                asked.out.write_text(json.dumps({"setups": len(every), "rows": rows}, indent=1) + "\n")
    text = shown(rows)
    print(text.split("| set-up")[0])
    if asked.markdown:
        asked.markdown.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
