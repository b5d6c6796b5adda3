"""Fit what NCCL's own tuning model does not know to sweeps of nccl-tests, and predict others that no fit saw.

    python -m benchmarks.calibrate.collectives [--data FILE]

The rest of ``lading.cost.collective.Tuning`` is NCCL's own (src/graph/tuning.cc), bandwidths and shares of them are the
machines' (catalog/machines/*.toml). Each sweep weighs the same; a sweep's tool adds a constant of its own. The two
sweeps over four nodes are left out of the fit: the NICs of one are not stated, and what EFA's plugin adds to small
sizes of the other is not NCCL's. Printed: the constants, the error of each sweep, the error of each generation of GPUs
when fitted without it, and the error of figures published elsewhere (published_collectives.json): first those that no
constant was set from, then those that one was (which one stands in the file).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lading.catalog.load import load_machine
from lading.catalog.networks import with_network
from lading.cost.collective import NCCL, Tuning, lines
from lading.cost.topology import Group, group_of_ranks
from lading.ir.machine import Machine

_HERE = Path(__file__).parent
_DATA = _HERE.parent / "validation" / "operators_collectives.jsonl"
_TRAVELS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
#: What a constant should be about, and how far off (in logarithms) is no surprise.
_PRIORS = {
    "nvls_s": (20e-6, 0.7),
    "ll_cap": (0.31, 0.7),
    "depth_ring": (4e-6, 0.7),
    "depth_tree": (10e-6, 0.7),
    "depth_nvls": (10e-6, 0.7),
    "depth_nvls_tree": (20e-6, 0.7),
    "fill_bytes": (40e6, 0.7),
    "fill_ll128": (0.5, 0.5),
}
#: Seconds that all_reduce_bench.py adds to each call (torch's launch and a barrier); nccl-tests adds none.
_TOOL_S = 20e-6
#: Sweeps whose network is not known well enough.
_LEFT_OUT = ("4 node", "32 ranks")
#: A row that takes this many times as long as the next larger size is a cold start, not the collective.
_COLD = 1.3
#: Words of a sweep's hardware, the machine, and its network if it is another.
_MACHINES = (
    ("NOT stated", "a100", "4x 200 Gb/s InfiniBand"),
    ("EFA", "b200", "8x 400 Gb/s EFA"),
    ("A100", "a100", None),
    ("H200", "h200", None),
    ("H100", "h100", None),
    ("B200", "b200", None),
    ("MI300X", "mi300x", None),
)
_GENERATIONS = {
    "Volta": ("v100-32gb",),
    "Ampere": ("a100",),
    "Hopper": ("h100", "h200"),
    "Blackwell": ("b200",),
    "CDNA 3": ("mi300x",),
}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Times of one collective on one machine against size."""

    name: str
    op: str
    machine: Machine
    group: Group
    nvls: bool
    tool_s: float
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def errors(self, tuning: Tuning) -> np.ndarray:
        """Logarithms of predicted over measured."""
        found = lines(self.op, self.group, self.machine.links, self.nvls, tuning)
        predicted = [min(line.at(size) for line in found) + self.tool_s for size in self.sizes]
        return np.log(np.array(predicted) / np.array(self.seconds))


def measured_sweeps(path: Path) -> list[Sweep]:
    """The sweeps of a file of measured operators, without the rows of a cold start."""
    if not path.is_file():
        raise SystemExit(f"expected the file of measured operators {path}; give its path with --data")
    rows = [row for line in path.read_text().splitlines() if (row := json.loads(line))["kind"] == "collective"]
    by_sweep: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(str(row.get(name)) for name in ("hardware", "tool", "op", "algo", "gpus"))
        by_sweep.setdefault(key, []).append(row)
    return [_sweep(key, found) for key, found in by_sweep.items()]


def _sweep(key: tuple[str, ...], rows: list[dict[str, Any]]) -> Sweep:
    hardware, tool, op, algorithm, ranks = key
    name, network = next((name, network) for words, name, network in _MACHINES if words in hardware)
    machine = with_network(load_machine(name), network)
    travels = _TRAVELS[op] * (int(ranks) - 1) / int(ranks)
    seconds = [
        row["time_us"] * 1e-6 if row.get("time_us") else row["bytes"] * travels / (row["busbw_GBps"] * 1e9)
        for row in rows
    ]
    warm = [n for n, s in enumerate(seconds) if s < _COLD * min(seconds[n:])]
    return Sweep(
        name=f"{hardware[:44]} {op} {algorithm if algorithm != 'None' else ''}".strip(),
        op=op,
        machine=machine,
        group=group_of_ranks(int(ranks), machine),
        nvls=not algorithm.startswith("Ring"),
        tool_s=_TOOL_S if "bench" in tool else 0.0,
        sizes=tuple(float(rows[n]["bytes"]) for n in warm),
        seconds=tuple(seconds[n] for n in warm),
    )


def published_sweeps(used: bool) -> list[Sweep]:
    """Figures of other sources, one sweep a source, collective and number of ranks.

    Args:
        used: Those that a constant was set from, or those that none was.
    """
    entries = json.loads((_HERE / "published_collectives.json").read_text())
    return [sweep for entry in entries if used == ("used" in entry) for sweep in _entry_sweeps(entry)]


def table_sweeps(name: str) -> list[Sweep]:
    """Sweeps of a table beside this file: of A100 and V100 from vTrain, of B200 from acceptance tests."""
    entries = json.loads((_HERE / name).read_text())
    return [sweep for entry in entries for sweep in _entry_sweeps(entry)]


def _entry_sweeps(entry: dict[str, Any]) -> list[Sweep]:
    machine = _entry_machine(entry)
    found: list[Sweep] = []
    for ranks in dict.fromkeys(row[0] for row in entry["rows"]):
        rows = [row for row in entry["rows"] if row[0] == ranks]
        found.append(
            Sweep(
                name=f"{entry['source'][:60]} x{ranks} {entry['op']}",
                op=entry["op"],
                machine=machine,
                group=group_of_ranks(ranks, machine, entry.get("apart", 1)),
                nvls=True,
                tool_s=0.0,
                sizes=tuple(float(row[1]) for row in rows),
                seconds=tuple(row[2] * 1e-6 for row in rows),
            )
        )
    return found


def _entry_machine(entry: dict[str, Any]) -> Machine:
    """The machine on the entry's network, with what its NICs were measured to reach and the ranks of its domains."""
    machine = with_network(load_machine(entry["machine"]), entry.get("network"))
    near, *rest = machine.links
    near = dataclasses.replace(near, ranks=entry.get("domain", near.ranks))
    rest = [dataclasses.replace(link, efficiency=entry.get("net_efficiency", link.efficiency)) for link in rest]
    return dataclasses.replace(machine, links=(near, *rest))


def tuning_of(values: Sequence[float]) -> Tuning:
    """NCCL's constants with the fitted ones, in the order of ``_PRIORS``."""
    value = dict(zip(_PRIORS, values, strict=True))
    return dataclasses.replace(
        NCCL,
        nvls_s=value["nvls_s"],
        ll_cap=(value["ll_cap"], NCCL.ll_cap[1]),
        depth_s=(value["depth_ring"], value["depth_tree"], value["depth_nvls"], value["depth_nvls_tree"]),
        fill_bytes=value["fill_bytes"],
        fills=(0.0, value["fill_ll128"], 1.0),
    )


def fit(sweeps: Sequence[Sweep]) -> list[float]:
    """Constants of least error over the sweeps, each held near what it should be about."""
    from scipy.optimize import least_squares  # takes a second, which those who only read the sweeps need not spend

    priors = np.log([about for about, _ in _PRIORS.values()])
    widths = np.array([width for _, width in _PRIORS.values()])

    def residuals(x: np.ndarray) -> np.ndarray:
        tuning = tuning_of(np.exp(x).tolist())
        parts = [sweep.errors(tuning) / 0.1 / np.sqrt(len(sweep.sizes)) for sweep in sweeps]
        return np.concatenate([*parts, (x - priors) / widths])

    best = min(
        (least_squares(residuals, np.log(start), loss="soft_l1", diff_step=1e-3) for start in _starts()),
        key=lambda found: found.cost,
    )
    return np.exp(best.x).tolist()


def _starts() -> list[list[float]]:
    """Several: which algorithm is fastest changes with the constants, so there is more than one valley."""
    base = [about for about, _ in _PRIORS.values()]
    return [[nvls, cap, *base[2:]] for nvls in (15e-6, 20e-6, 25e-6) for cap in (0.08, 0.3)]


def _describe_errors(errors: np.ndarray) -> str:
    off, bias = np.abs(np.expm1(errors)), np.expm1(errors).mean()
    return f"mean {off.mean():6.1%}  median {np.median(off):6.1%}  worst {off.max():6.1%}  bias {bias:+6.1%}"


def main() -> None:
    """Fit, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=_DATA)
    sweeps = [*measured_sweeps(parser.parse_args().data), *table_sweeps("vtrain_collectives.json")]
    sweeps += table_sweeps("b200_collectives.json")
    fitted = [sweep for sweep in sweeps if not sweep.name.startswith(_LEFT_OUT)]
    values = fit(fitted)
    for name, value in zip(_PRIORS, values, strict=True):
        print(f"{name:12s} {value:.3g}")
    print("\nsweeps, with these constants (the last two are in no fit)")
    for sweep in [*fitted, *(sweep for sweep in sweeps if sweep not in fitted)]:
        print(f"  {sweep.name:74s} {_describe_errors(sweep.errors(tuning_of(values)))}")
    print("\neach generation, fitted without it: all sizes; 1 MiB and more")
    for title, names in _GENERATIONS.items():
        rest = tuning_of(fit([sweep for sweep in fitted if sweep.machine.name not in names]))
        own = [sweep for sweep in fitted if sweep.machine.name in names]
        errors = np.concatenate([sweep.errors(rest) for sweep in own])
        large = np.concatenate([np.array(sweep.sizes) >= 1 << 20 for sweep in own])
        print(f"  {title:10s} {_describe_errors(errors)}\n  {'':10s} {_describe_errors(errors[large])}")
    for used, title in ((False, "no constant comes from it"), (True, "a constant comes from it")):
        print(f"\npublished elsewhere, {title}; with the constants as committed")
        found = [(sweep, sweep.errors(NCCL)) for sweep in published_sweeps(used)]
        for sweep, errors in found:
            print(f"  {sweep.name:90s} {_describe_errors(errors)}")
        off = [np.abs(np.expm1(errors)).mean() for _, errors in found]
        print(f"  {'mean, each source alike':90s} {np.mean(off):6.1%}")


if __name__ == "__main__":
    main()
