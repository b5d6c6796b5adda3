"""Lading against PyTorch, step by step in turn: everything fits; compiled; a half and a quarter of the memory.

    python benchmarks/executor/run.py --folder F --json results.json     all cases, about an hour
    python benchmarks/executor/run.py --list                             names of the cases

In parts, of which only ``measure`` (under 90 s a case) needs a quiet machine from end to end:

    python benchmarks/executor/run.py --folder F --only probe --threads 2
    python benchmarks/executor/run.py --folder F --only plan --cases "gpt-deep 50% 2" "llama fits 2"
    python benchmarks/executor/run.py --folder F --only measure --cases "gpt-deep 50% 2" --json results.json

Each side is a process of its own, as a user would run it; one steps while the others wait, in turns that rotate.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sides import Side
from turns import Running, against, finish, interleave, interval, start

from lading import __version__
from lading.catalog.load import save_machine
from lading.errors import ConfigError
from lading.runtime.host import host_id
from lading.runtime.probe import probe


def _model(name: str, batch: int = 4, **sizes: int) -> dict[str, Any]:
    return {"model": name, "batch": batch, "tokens": 256, "sizes": sizes}


MODELS = {
    "llama": _model("llama", num_layers=8, dim=320, num_heads=5, num_kv_heads=5, vocab_size=256),
    "llama-deep": _model("llama", num_layers=24, dim=256, num_heads=4, num_kv_heads=4, vocab_size=256),
    "gpt": _model("gpt", batch=2, num_layers=8, dim=512, num_heads=8, vocab_size=8192),
    "gpt-deep": _model("gpt", num_layers=20, dim=256, num_heads=4, vocab_size=512),
    "moe": _model("moe", batch=2, num_layers=8, dim=256, num_heads=4, vocab_size=512),
    "dit": _model("dit", num_layers=8, dim=320, num_heads=5, image_size=32),
}
_FITS, _COMPILED = "fits", "compiled"
#: Models of each kind of case. By hand in a quarter of the memory lives where activations are most of it.
_CASES = {
    _FITS: ("llama", "gpt", "moe", "dit"),
    _COMPILED: ("llama", "gpt", "moe", "dit"),
    "75%": ("llama-deep",),
    "50%": ("llama", "llama-deep", "gpt-deep", "moe", "dit"),
    "25%": ("llama-deep", "gpt-deep", "moe", "dit"),
}
_WARM_UP = 3
_PLANNED, _COMPILED_REGIONS = "Lading", "Lading, compiled regions"
#: Squeezed cases in which Lading with compiled regions steps too.
_ALSO_COMPILED = {("llama-deep", "50%"), ("llama-deep", "25%"), ("gpt-deep", "50%")}


@dataclass(frozen=True)
class Case:
    """One comparison: a model, what is compared (``_CASES``) and the number of threads."""

    model: str
    kind: str
    threads: int

    def __str__(self) -> str:
        return f"{self.model} {self.kind} {self.threads}"

    def side(self, folder: Path, kind: str = "lading") -> Side:
        """A side of this case; its plan, made once, lies in the folder, and what it swaps in one of its own."""
        own = folder / kind
        own.mkdir(exist_ok=True)
        return Side(
            kind=kind,
            **MODELS[self.model],
            threads=self.threads,
            machine=str(machine_file(folder, self.threads)),
            folder=str(own),
            budget=self.kind if "%" in self.kind else "100%",
            plan=str(folder / f"{self.model}-{self.kind.rstrip('%')}-{kind}-{self.threads}.json"),
        )

    def sides(self, folder: Path) -> tuple[dict[str, Side], list[tuple[str, str]]]:
        """The sides by name, and the pairs whose ratio is asked for."""
        side = self.side(folder)
        if self.kind == _FITS:
            return {"PyTorch eager": replace(side, kind="plain"), _PLANNED: side}, [(_PLANNED, "PyTorch eager")]
        if self.kind == _COMPILED:
            fused, compiled = _COMPILED_REGIONS, "torch.compile (compiled)"
            sides = {
                "PyTorch eager": replace(side, kind="plain"),
                compiled: replace(side, kind="plain-compiled"),
                fused: self.side(folder, "lading-compiled"),
            }
            return sides, [(fused, compiled), (fused, "PyTorch eager"), (compiled, "PyTorch eager")]
        hands = {"by hand": "by-hand", "by hand, updates in backward": "by-hand-in-backward"}
        sides = {_PLANNED: side} | {name: replace(side, kind=kind) for name, kind in hands.items()}
        pairs = [(_PLANNED, hand) for hand in hands]
        if (self.model, self.kind) in _ALSO_COMPILED:
            sides[_COMPILED_REGIONS] = self.side(folder, "lading-compiled")
            pairs.append((_COMPILED_REGIONS, _PLANNED))
        return sides, pairs


def cases(threads: list[int]) -> list[Case]:
    """All of them."""
    return [Case(model, kind, n) for kind, models in _CASES.items() for model in models for n in threads]


def machine_file(folder: Path, threads: int) -> Path:
    """Machine file of this host as measured with so many threads, made if it is not there."""
    return folder / f"machine-{threads}.toml"


def needs_file(folder: Path, case: Case) -> Path:
    """File of the memory that the sides by hand were found to need."""
    return folder / f"{case.model}-{case.kind.rstrip('%')}-needs-{case.threads}.json"


def confined(sides: dict[str, Side], limit_bytes: int) -> dict[str, Side]:
    """Copy of the sides in which those by hand have the limit; Lading's is that of its plan."""
    return {name: replace(side, limit_bytes=limit_bytes) for name, side in sides.items()}


def planned(case: Case, folder: Path) -> tuple[dict[str, Side], list[tuple[str, str]]]:
    """The sides of a case that was planned, confined if it is to be.

    Raises:
        ConfigError: it was not planned.
    """
    sides, pairs = case.sides(folder)
    if "%" not in case.kind:
        return sides, pairs
    file = needs_file(folder, case)
    if not file.is_file():
        raise ConfigError(f"expected {file}; plan first: --only plan --cases '{case}'")
    return confined(sides, json.loads(file.read_text())["limit_bytes"]), pairs


def prepare(case: Case, folder: Path) -> None:
    """Make the plans, fill the compiler's cache, and find what the sides by hand need where they are killed."""
    sides, _ = case.sides(folder)
    own = {name: side for name, side in sides.items() if side.kind.startswith("lading")}
    running, failed = start(own)
    if failed:
        raise SystemExit(f"{case}: {failed}")
    limit = running[next(iter(own))].facts["budget_bytes"]
    finish(running)
    if "%" not in case.kind:
        running, failed = start(sides)
        interleave(running, failed, warm_up=1, rounds=0, seconds=0.0)
        finish(running)
        print(f"{case}: prepared{', ' + str(failed) if failed else ''}", flush=True)
        return
    found = {"limit_bytes": limit} | {
        name: least_limit(replace(side, limit_bytes=limit))
        for name, side in sides.items()
        if side.kind.startswith("by-hand")
    }
    needs_file(folder, case).write_text(json.dumps(found))
    print(f"{case}: prepared, {found}", flush=True)


def least_limit(side: Side) -> int:
    """The least limit, in steps of a tenth from its own on, in which a side lives through three steps."""
    while True:
        running, failed = start({"side": side})
        interleave(running, failed, warm_up=3, rounds=0, seconds=0.0)
        finish(running)
        if not failed:
            return side.limit_bytes
        if "out of memory" not in failed["side"]:
            raise SystemExit(f"{side.kind}: {failed['side']}")
        side = replace(side, limit_bytes=side.limit_bytes * 11 // 10)


def measure(case: Case, folder: Path, *, seconds: float, rounds: int) -> dict[str, Any]:
    """The sides of a case against each other."""
    sides, pairs = planned(case, folder)
    running, failed = start(sides)
    interleave(running, failed, warm_up=_WARM_UP, rounds=rounds, seconds=seconds)
    finish(running)
    found: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "sides": {name: figures(one) for name, one in running.items()},
        "failed": failed,
        "ratios": {
            f"{name} / {base}": {
                "wall": against(running[name].seconds, running[base].seconds),
                "cpu": against(running[name].cpu, running[base].cpu),
            }
            for name, base in pairs
            if name in running and base in running
        },
    }
    same = [one.losses for name, one in running.items() if "compiled" not in name]
    found["equal"] = all(a[: len(b)] == b[: len(a)] for a in same for b in same) if len(same) > 1 else None
    found["furthest_loss"] = max(abs(a[0] - b[0]) for a in _losses(running) for b in _losses(running))
    if "%" in case.kind:
        found["needs"] = json.loads(needs_file(folder, case).read_text())
        if _PLANNED in running:
            found["limit"] = physical_limit(running[_PLANNED].facts)
    return found


def _losses(running: dict[str, Running]) -> list[list[float]]:
    return [one.losses for one in running.values()]


def figures(one: Running) -> dict[str, Any]:
    """Figures of a side that are written down."""
    middle, low, high = interval(one.seconds)
    return {
        "median_s": middle, "low_s": low, "high_s": high, "cpu_s": statistics.median(one.cpu),
        "steps": len(one.seconds), "last_loss": one.losses[-1], **one.facts,
    }  # fmt: skip


def physical_limit(facts: dict[str, Any]) -> dict[str, Any]:
    """Seconds that no program gets below here: products at their peak, bytes without room to and from the disk."""
    disk = facts["disk"]
    compute_s = facts["flops"] / facts["peak_flops_per_s"]
    homeless = max(0, facts["persistent_bytes"] - facts["budget_bytes"])
    alone_s = homeless / disk["read_bytes_per_s"], homeless / disk["write_bytes_per_s"]
    both_s = 2 * homeless / (disk["mixed_read_bytes_per_s"] + disk["mixed_write_bytes_per_s"])
    moved_s = max(*alone_s, both_s)
    text = (
        f"{facts['flops'] / 1e9:.0f} GFLOP at {facts['peak_flops_per_s'] / 1e9:.0f} GFLOP/s "
        f"take {compute_s * 1e3:.1f} ms, "
        f"{homeless / 2**20:.0f} MiB of weights and states read and written {moved_s * 1e3:.1f} ms; "
        f"the plan's own bound is {facts['bound_s'] * 1e3:.1f} ms"
    )
    return {"milliseconds": max(compute_s, moved_s) * 1e3, "why": text}


def show(case: str, found: dict[str, Any]) -> None:
    """Print a case as a table."""
    model, kind, threads = case.rsplit(" ", 2)
    size = f" ({found['needs']['limit_bytes'] / 2**20:.0f} MiB)" if "needs" in found else ""
    print(f"\n{model}, {kind}{size}, {threads} thread(s), {found['when']}")
    for name, row in found["sides"].items():
        spread = f"[{row['low_s'] * 1e3:.1f}, {row['high_s'] * 1e3:.1f}]"
        print(f"  {name:34}{row['median_s'] * 1e3:9.1f} ms {spread}{_memory(row)}")
    for name, why in found["failed"].items():
        needed = found.get("needs", {}).get(name)
        print(f"  {name:34}{why}{f'; lives in {needed / 2**20:.0f} MiB' if needed else ''}")
    for pair, ratio in found["ratios"].items():
        wall, cpu = ratio["wall"], ratio["cpu"]
        print(f"  {pair}: {wall[0]:.3f} [{wall[1]:.3f}, {wall[2]:.3f}], processor time {cpu[0]:.3f}")
    if found["equal"] is not None:
        print(f"  losses of the sides that do not compile: {'equal to the bit' if found['equal'] else 'DIFFERENT'}")
    print(f"  first losses differ by {found['furthest_loss']:.1e} at most")
    if "limit" in found:
        print("  physical limit {:.1f} ms: {}".format(*found["limit"].values()), flush=True)


def _memory(facts: dict[str, Any]) -> str:
    text = f"  resident +{facts['peak_rss_bytes'] / 2**20:.0f} MiB" if "peak_rss_bytes" in facts else ""
    if facts.get("peak_group_bytes") is not None:
        text += f", with page cache {facts['peak_group_bytes'] / 2**20:.0f} MiB"
    if facts.get("predicted_peak_bytes"):
        text += f", predicted +{facts['predicted_peak_bytes'] / 2**20:.0f} MiB"
    if facts.get("predicted_s"):
        text += f", in {facts['predicted_s'] * 1e3:.0f} ms"
    if facts.get("num_regions"):
        text += f"; {facts['num_regions']} calls of {facts['num_compiled']} compiled regions"
    return text


def keep(file: Path, case: Case, found: dict[str, Any]) -> None:
    """Put a case among the results of this host.

    Raises:
        ConfigError: the results there are of another host or torch.
    """
    here = {
        "host": host_id(), "torch": torch.__version__, "lading": __version__, "python": platform.python_version(),
    }  # fmt: skip
    results = json.loads(file.read_text()) if file.is_file() else {**here, "cases": {}}
    there = {k: results.get(k) for k in here}
    if there != here:
        raise ConfigError(f"{file} holds results of {there}, this is {here}; give another --json")
    results["cases"][str(case)] = found
    file.write_text(json.dumps(results, indent=1) + "\n")


def options_of() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--show", type=Path, help="print the tables of a results file")
    parser.add_argument("--cases", nargs="*", help="names of cases; all by default")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="of the default cases")
    parser.add_argument("--only", choices=["probe", "plan", "measure"], help="one of the three parts of the work")
    parser.add_argument("--folder", type=Path, help="for machine files, plans and swap files; keep it between parts")
    parser.add_argument("--seconds", type=float, default=50.0, help="of interleaved steps, per case")
    parser.add_argument("--rounds", type=int, default=60, help="at most so many, per case")
    parser.add_argument("--json", type=Path, help="results; cases are added to those there")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases asked for.

    Raises:
        ConfigError: one has no such name.
    """
    if not options.cases:
        return cases(options.threads)
    found: list[Case] = []
    for name in options.cases:
        model, _, rest = name.partition(" ")
        kind, _, threads = rest.partition(" ")
        if model not in MODELS or not threads.isdigit() or (kind not in _CASES and not kind.endswith("%")):
            raise ConfigError(f"expected a case such as 'gpt fits 2', found {name!r}; --list prints them")
        found.append(Case(model, kind, int(threads)))
    return found


def main() -> None:
    """Parse the command line and compare."""
    options = options_of()
    if options.show:
        for name, found in json.loads(options.show.read_text())["cases"].items():
            show(name, found)
        return
    picked = chosen(options)
    if options.list:
        print(*picked, sep="\n")
        return
    if options.folder is None:
        raise SystemExit("expected --folder, for machine files, plans and swap files")
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    for threads in sorted({case.threads for case in picked}):
        if options.only in (None, "probe") and not machine_file(folder, threads).is_file():
            measured = probe(folder=folder, threads=threads, seconds=20, device="cpu")
            save_machine(measured, machine_file(folder, threads))
    for case in picked:
        if options.only in (None, "plan"):
            prepare(case, folder)
        if options.only in (None, "measure"):
            found = measure(case, folder, seconds=options.seconds, rounds=options.rounds)
            show(str(case), found)
            if options.json:
                keep(options.json, case, found)


if __name__ == "__main__":
    main()
