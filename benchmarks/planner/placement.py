"""Placement policies, and those of others, on published shapes of graphs, on the catalog's fleets of unlike devices.

    python benchmarks/planner/placement.py --out benchmarks/planner/results/placement_catalog_YYYYMM
    python benchmarks/planner/placement.py --shapes gnmt randwire --fleets two-desktops --cases tight

Cases: "tight": a training step where all devices together have 1.5 times what the graph needs, so that none holds it;
"pass": one forward pass; "pipe": a training step of eight micro-batches. ``--brute`` cuts each graph in a few units and
tries every placement. All times are as simulated; a bound holds for all placements of the same units.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.planner import listing
from benchmarks.planner.graphs import SHAPES, Shape

from lading import __version__
from lading.catalog.fleets import load_fleet
from lading.errors import PlanInfeasible
from lading.ir.fleet import Fleet
from lading.ir.graph import StepGraph
from lading.ir.placement import PlacementProblem
from lading.planner.placement.contest import POLICIES, contest
from lading.planner.placement.from_graph import Grain, problem_of
from lading.planner.placement.trial import Trial
from lading.tracing.initial import defer
from lading.tracing.trace import capture
from lading.units import format_seconds

#: Cases of each fleet, unless asked otherwise.
FLEETS = {
    "two-desktops": ("tight",),
    "laptop-and-server": ("tight",),
    "one-server-four-gpus": ("tight", "pipe", "pass"),
    "eight-unlike-gpus": ("tight",),
}
CASES = ("tight", "pass", "pipe")
#: Of what a graph needs, what all devices of the case "tight" have together.
TIGHT = 1.5
_PIPE = 8
_UNITS = 64
#: Units of a graph that may be few enough to try every placement, and how many are tried at most.
_FEW, _MOST_TRIED = (12, 10, 8, 7, 6, 5, 4, 3), 6600


def problem(graph: StepGraph, fleet: Fleet, case: str, name: str, units: int = _UNITS) -> PlacementProblem:
    """One case of one graph."""
    grain = Grain(max_units=units, training=case != "pass")
    made = problem_of(graph, fleet, grain=grain, micro_batches=_PIPE if case == "pipe" else 1, name=name)
    return tightened(made) if case == "tight" else made


def tightened(made: PlacementProblem) -> PlacementProblem:
    """Copy of a problem with less memory, but for each device enough for the largest group."""
    needs = made.alone_bytes
    least = max(n + g.working_bytes for n, g in zip(needs, made.groups, strict=True))
    have = made.network.memory_bytes
    share = min(1.0, TIGHT * made.least_bytes / sum(have))
    memory = tuple(min(size, max(int(size * share), least)) for size in have)
    return dataclasses.replace(made, network=dataclasses.replace(made.network, memory_bytes=memory))


def row(made: PlacementProblem, fleet: str, case: str, effort: int) -> dict[str, Any]:
    """Every policy on one problem."""
    begun = time.process_time()
    try:
        found = contest(made, effort=effort)
    except PlanInfeasible as error:
        return {"graph": made.name, "fleet": fleet, "case": case, "infeasible": str(error)}
    best = found.best
    others = {name: placement.step_s for name, placement in listing.placed(made).items() if placement.fits}
    return {
        "graph": made.name,
        "fleet": fleet,
        "case": case,
        "tasks": len(made.tasks),
        "groups": len(made.groups),
        "flows": len(made.flows),
        "bound_s": found.bound_s,
        "steps_s": {p.policy: p.step_s for p in found.placements} | others,
        "failed": dict(found.failed) | {n: "finds none that fits" for n in listing.POLICIES if n not in others},
        "best_from": best.note,
        "devices_used": len(set(best.devices)),
        "parts": len(best.parts),
        "peak_bytes": list(best.peak_bytes),
        "memory_bytes": list(made.network.memory_bytes),
        "planned_s": time.process_time() - begun,
    }


def brute(made: PlacementProblem, fleet: str, effort: int) -> dict[str, Any]:
    """Every placement of a problem of few groups."""
    trial = Trial(made)
    tried = product(range(len(made.network.devices)), repeat=len(made.groups))
    placed = (trial.of(devices) for devices in tried if trial.can_run(devices))
    best = min((p.step_s for p in placed if p.fits), default=math.inf)
    return {**row(made, fleet, "few units", effort), "brute_s": best}


def captured(shape: Shape) -> StepGraph:
    """The graph of a shape; nothing is computed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture(defer(shape.build).model, shape.batch(), shape.loss)


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown: each policy's step over the best one's."""
    names = [*POLICIES, *listing.POLICIES]
    yield "| graph | devices | case | groups | best | above bound | devices used | from | " + " | ".join(names) + " |"
    yield "|---" * (8 + len(names)) + "|"
    for one in rows:
        head = f"| {one['graph']} | {one['fleet']} | {one['case']} "
        if "infeasible" in one:
            yield head + f"| {one['infeasible']} |"
            continue
        best, bound = one["steps_s"]["best"], one["bound_s"]
        cells = [str(one["groups"]), format_seconds(best), f"{best / bound - 1:.1%}" if bound else "-"]
        cells += [str(one["devices_used"]), one["best_from"].removeprefix("from ")]
        cells += [_cell(one, name, 2) for name in names]
        yield head + "| " + " | ".join(cells) + " |"


def _cell(one: dict[str, Any], name: str, digits: int, base: float = 0.0) -> str:
    """A policy's step over the best one's, or why there is none."""
    if name in one["steps_s"]:
        return f"{one['steps_s'][name] / (base or one['steps_s']['best']):.{digits}f}"
    return "-" if one["failed"][name].startswith("not tried") else "does not fit"


def summary(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Means over all rows where a policy finds a placement."""
    done = [one for one in rows if "infeasible" not in one]
    yield "| policy | finds a placement | step over the best, geometric mean | fastest or equal |"
    yield "|---|---|---|---|"
    for name in (*POLICIES, *listing.POLICIES):
        ratios = [one["steps_s"][name] / one["steps_s"]["best"] for one in done if name in one["steps_s"]]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.nan
        first = sum(ratio <= 1 + 1e-9 for ratio in ratios)
        yield f"| {name} | {len(ratios)} of {len(done)} | {mean:.2f} | {first} |"


def tried_table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown: every placement tried against what the policies find."""
    names = ("best", "branch", "lp", "chain", "heft", "m-sct", "m-etf", "m-topo")
    yield "| graph | devices | groups | every placement | bound below it | " + " | ".join(names) + " |"
    yield "|---" * (5 + len(names)) + "|"
    for one in rows:
        best = one["brute_s"]
        cells = [str(one["groups"]), format_seconds(best), f"{1 - one['bound_s'] / best:.1%}"]
        cells += [_cell(one, name, 3, best) for name in names]
        yield f"| {one['graph']} | {one['fleet']} | " + " | ".join(cells) + " |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--fleets", nargs="*", default=list(FLEETS))
    parser.add_argument("--cases", nargs="*", choices=CASES, help="default: those of each fleet")
    parser.add_argument("--effort", type=int, default=4)
    parser.add_argument("--brute", action="store_true", help="also every placement of each graph in a few units")
    parser.add_argument("--out", type=Path, help="writes OUT.json and OUT.md")
    return parser.parse_args()


def main() -> None:
    """Run all cases, printing each."""
    asked = _arguments()
    rows: list[dict[str, Any]] = []
    tried: list[dict[str, Any]] = []
    for shape in (s for s in SHAPES if s.name in asked.shapes):
        graph = captured(shape)
        for name in asked.fleets:
            fleet = load_fleet(name)
            for case in asked.cases or FLEETS.get(name, CASES):
                rows.append(row(problem(graph, fleet, case, shape.name), name, case, asked.effort))
                print(json.dumps(rows[-1]), flush=True)
            if asked.brute and len(fleet.devices) <= 3:
                cuts = (tightened(problem(graph, fleet, "step", shape.name, units)) for units in _FEW)
                small = next((p for p in cuts if len(fleet.devices) ** len(p.groups) <= _MOST_TRIED), None)
                if small is not None and math.isfinite((tried_row := brute(small, name, asked.effort))["brute_s"]):
                    tried.append(tried_row)
    lines = [f"Lading {__version__}; times as simulated; steps of policies are shown over the best one's.", ""]
    lines += [*summary(rows), "", *table(rows)]
    if tried:
        lines += ["", "Every placement of the same graphs cut in few units, memory as in tight:", ""]
        lines += tried_table(tried)
    print("\n".join(lines))
    if asked.out is not None:
        asked.out.with_suffix(".json").write_text(json.dumps({"rows": rows, "tried": tried}, indent=1) + "\n")
        asked.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
        used = sum(one.get("planned_s", 0.0) for one in rows)
        print(f"wrote {asked.out}.json and .md; planned in {used:.0f} s of CPU")


if __name__ == "__main__":
    main()
