"""What steps lose when a cluster grows: published steps of one layout and batch of a replica on more and more devices.

    python -m benchmarks.calibrate.scale benchmarks/validation/measurements.jsonl

Collectives over more ranks are predicted; what measured steps grow by beyond that is put down to waiting for the
slowest of N devices, whose expected lag is that of the largest of N (``lading.sim.noise``). Printed is the loss for a
unit of it: the standard deviation of what devices differ by, where ranks meet once a step; more where they meet in
every block (parameters that are cut). Only differences within a group count, so no factor of a stack matters.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from pathlib import Path

import numpy as np
from tools.validate.requests import request_of
from tools.validate.rows import read_rows

from lading.errors import LadingError
from lading.ir.request import StepRequest
from lading.sim.noise import largest_of
from lading.sim.simulate import WAITING, simulate
from lading.sim.step import DATA_PARALLEL

ENDS, BLOCKS = "meet at the end of a step", "meet in every block"


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured step: expected largest of its devices, as far as they work, and log of measured over predicted."""

    devices: int
    lag: float
    error: float


def group_of(request: StepRequest, family: str) -> tuple[str, ...]:
    """Key that is equal for rows that differ in replicas alone."""
    layout = dataclasses.asdict(request.layout)
    own = {key: str(value) for key, value in layout.items() if key not in ("dp", "global_batch", "shard")}
    return (
        BLOCKS if request.layout.zero >= 2 else ENDS,
        family,
        str(request.model),
        request.machine,
        request.stack.name,
        str((request.seq_len, request.task, request.layout.micro_batches)),
        str(own),
    )


def groups_of(files: list[Path]) -> dict[tuple[str, ...], list[Point]]:
    """Groups with several numbers of devices."""
    found: dict[tuple[str, ...], list[Point]] = defaultdict(list)
    for row in read_rows(files)[0]:
        seconds = row.step_s
        if not seconds or row.tier == "C":
            continue
        try:
            request = request_of(row)
            step = simulate(request).step
        except LadingError:
            continue
        devices = request.layout.devices
        equal_s = step.step_s - step.shares_s[WAITING]
        working = 1 - max(0.0, step.shares_s.get(DATA_PARALLEL, 0.0)) / equal_s
        error = float(np.log(seconds / equal_s))
        found[group_of(request, row.family)].append(Point(devices, largest_of(devices) * working, error))
    return {key: points for key, points in found.items() if len({p.devices for p in points}) > 1}


def slope(groups: list[list[Point]]) -> tuple[float, float]:
    """Loss for a unit of lag within groups, and its standard error; a tenth of the groups is left out on each side."""
    apart = sorted(groups, key=lambda points: _moments(points)[0] / _moments(points)[1])
    cut = len(apart) // 10
    kept = apart[cut : len(apart) - cut]
    product, square = (sum(values) for values in zip(*(_moments(points) for points in kept), strict=True))
    found = product / square
    rest = sum(
        float(np.sum((_centered([p.error for p in points]) - found * _centered([p.lag for p in points])) ** 2))
        for points in kept
    )
    free = sum(len(points) - 1 for points in kept) - 1
    return found, float(np.sqrt(rest / max(1, free) / square))


def _moments(points: list[Point]) -> tuple[float, float]:
    lag, error = _centered([p.lag for p in points]), _centered([p.error for p in points])
    return float(np.sum(lag * error)), float(np.sum(lag**2))


def _centered(values: list[float]) -> np.ndarray:
    return np.array(values) - np.mean(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    groups = groups_of(parser.parse_args().files)
    for kind in (ENDS, BLOCKS):
        mine = {key: points for key, points in groups.items() if key[0] == kind}
        loss, error = slope(list(mine.values()))
        print(f"{kind}: {loss:.3f} +- {error:.3f} for a unit of lag, of {len(mine)} groups")
        families = sorted({key[1] for key in mine})
        for family in families:
            own = [points for key, points in mine.items() if key[1] == family]
            most = max(p.devices for points in own for p in points)
            print(f"    {family}: {slope(own)[0]:.3f} of {len(own)} groups of up to {most} devices")


if __name__ == "__main__":
    main()
