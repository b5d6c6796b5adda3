"""Lading against PyTorch, step by step in turn: everything fits; compiled; half and a quarter of the memory.

    python benchmarks/executor/run.py            about eight minutes on two quiet cores
    python benchmarks/executor/run.py --quick    about three, wide intervals

Each side is a process of its own, as a user would run it; one steps while the others wait, in turns that rotate.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from math import comb
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from sides import Side, serve

from lading import __version__
from lading.catalog.load import save_machine
from lading.runtime.host import host_id
from lading.runtime.probe import probe

MODELS: dict[str, dict[str, Any]] = {
    "llama-10M": {
        "model": "llama", "batch": 4, "tokens": 256,
        "sizes": {"num_layers": 8, "dim": 320, "num_heads": 5, "num_kv_heads": 5, "vocab_size": 256},
    },
    "gpt-29M": {
        "model": "gpt", "batch": 2, "tokens": 256,
        "sizes": {"num_layers": 8, "dim": 512, "num_heads": 8, "vocab_size": 8192},
    },
    "llama-19M": {
        "model": "llama", "batch": 4, "tokens": 256,
        "sizes": {"num_layers": 24, "dim": 256, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 256},
    },
}  # fmt: skip
_WARM_UP = 3
_TIMEOUT_S = 400


@dataclass
class Running:
    """A side in its process, with what its steps took."""

    side: Side
    process: Any
    connection: Connection
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def receive(self) -> dict[str, Any] | None:
        """What the side sends; None if it has died or takes too long."""
        try:
            if self.connection.poll(_TIMEOUT_S):
                return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(10)  # it has died
        return None

    def end(self) -> str:
        """End the process; says how it ended."""
        late = self.process.is_alive()
        self.process.kill()
        self.process.join()
        if late:
            return f"no answer in {_TIMEOUT_S} s"
        killed = self.process.exitcode == -signal.SIGKILL
        return "killed: out of memory" if killed else f"died with exit code {self.process.exitcode}"


def start(sides: dict[str, Side]) -> tuple[dict[str, Running], dict[str, str]]:
    """Every side in a process of its own; those that cannot start, and why."""
    context = multiprocessing.get_context("spawn")
    running: dict[str, Running] = {}
    failed: dict[str, str] = {}
    for name, side in sides.items():
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(side, theirs), daemon=True)
        process.start()
        theirs.close()
        running[name] = Running(side, process, ours)
        facts = running[name].receive()
        if facts is None or "error" in facts:
            failed[name] = facts["error"] if facts else running[name].end()
            del running[name]
        else:
            running[name].facts = facts
    return running, failed


def interleave(running: dict[str, Running], failed: dict[str, str], seconds: float, rounds: int) -> None:
    """Steps in turn, for so many seconds after the warm-up or so many rounds, five at least."""
    started = time.perf_counter()
    for turn in range(_WARM_UP + rounds):
        names = [*running]
        shift = turn % len(names) if names else 0
        for name in names[shift:] + names[:shift]:
            one = running[name]
            one.connection.send(turn)
            answer = one.receive()
            if answer is None:
                failed[name] = f"{one.end()} in step {turn}"
                del running[name]
                continue
            one.losses.append(answer["loss"])
            if turn >= _WARM_UP:
                one.seconds.append(answer["seconds"])
                one.cpu.append(answer["cpu"])
        if turn + 1 == _WARM_UP:
            started = time.perf_counter()
        if turn >= _WARM_UP + 4 and time.perf_counter() - started > seconds:
            return


def finish(running: dict[str, Running]) -> None:
    """End every side; its facts get the memory it took."""
    for one in running.values():
        one.connection.send(None)
        one.facts |= one.receive() or {}
        one.process.join()


def interval(values: list[float]) -> tuple[float, float, float]:
    """(median, low, high): an interval that holds the true median with 95% by order statistics."""
    ordered, n = sorted(values), len(values)
    tail, low = 0.0, 0
    while low < n // 2 and (tail := tail + comb(n, low) / 2**n) <= 0.025:
        low += 1
    low = max(0, low - 1)
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def against(one: list[float], other: list[float]) -> tuple[float, float, float]:
    """Interval of the ratio of two sides, round by round."""
    return interval([a / b for a, b in zip(one, other, strict=False)])


def group(
    title: str, sides: dict[str, Side], pairs: list[tuple[str, str]], options: argparse.Namespace
) -> dict[str, Any]:
    """Run some sides against each other; prints the table and returns its figures."""
    print(f"\n{title}", flush=True)
    running, failed = start(sides)
    interleave(running, failed, options.seconds, options.rounds)
    finish(running)
    rows: dict[str, Any] = {}
    for name, one in running.items():
        middle, low, high = interval(one.seconds)
        rows[name] = {
            "median_s": middle, "low_s": low, "high_s": high, "cpu_s": statistics.median(one.cpu),
            "steps": len(one.seconds), "last_loss": one.losses[-1], **one.facts,
        }  # fmt: skip
        print(f"  {name:34}{middle * 1e3:9.1f} ms [{low * 1e3:.1f}, {high * 1e3:.1f}]{_memory(one.facts)}")
    for name, why in failed.items():
        print(f"  {name:34}{why}")
    ratios: dict[str, Any] = {}
    for name, base in pairs:
        if name in running and base in running:
            wall = against(running[name].seconds, running[base].seconds)
            cpu = against(running[name].cpu, running[base].cpu)
            ratios[f"{name} / {base}"] = {"wall": wall, "cpu": cpu}
            print(f"  {name} / {base}: {wall[0]:.3f} [{wall[1]:.3f}, {wall[2]:.3f}], processor time {cpu[0]:.3f}")
    same = {n: one.losses for n, one in running.items() if "compiled" not in n}
    equal = all(losses[: len(first)] == first[: len(losses)] for losses in same.values() for first in same.values())
    print(f"  losses of all sides that do not compile: {'equal to the bit' if equal else 'DIFFERENT'}", flush=True)
    return {"sides": rows, "failed": failed, "ratios": ratios, "equal": equal}


def _memory(facts: dict[str, Any]) -> str:
    text = f"  resident +{facts['peak_rss_bytes'] / 2**20:.0f} MiB" if "peak_rss_bytes" in facts else ""
    if facts.get("peak_group_bytes") is not None:
        text += f", with page cache {facts['peak_group_bytes'] / 2**20:.0f} MiB"
    return text


def fits(name: str, side: Side, options: argparse.Namespace) -> dict[str, Any]:
    """Everything in memory: eager and, with ``compile``, compiled."""
    sides = {"PyTorch eager": replace(side, kind="plain"), "Lading": side}
    pairs = [("Lading", "PyTorch eager")]
    if side.threads in options.compile_threads:
        sides |= {
            "torch.compile (compiled)": replace(side, kind="plain-compiled"),
            "Lading, compiled regions": replace(side, kind="lading-compiled"),
        }
        pairs += [
            ("Lading, compiled regions", "torch.compile (compiled)"),
            ("Lading, compiled regions", "PyTorch eager"),
            ("torch.compile (compiled)", "PyTorch eager"),
        ]
    return group(f"{name}, everything fits, {side.threads} thread(s)", sides, pairs, options)


def squeezed(name: str, side: Side, share: str, limit: int, options: argparse.Namespace) -> dict[str, Any]:
    """A share of what keeping everything needs, for Lading and for two ways by hand."""
    side = replace(side, budget=share, limit_bytes=limit)
    sides = {
        "by hand": replace(side, kind="by-hand"),
        "by hand, updates in backward": replace(side, kind="by-hand-in-backward"),
        "Lading": side,
    }
    pairs = [("Lading", "by hand"), ("Lading", "by hand, updates in backward")]
    found = group(f"{name}, {share} ({limit / 2**20:.0f} MiB), {side.threads} thread(s)", sides, pairs, options)
    if facts := found["sides"].get("Lading"):
        found["limit"] = physical_limit(facts)
        print("  physical limit {:.1f} ms: {}".format(*found["limit"].values()))
    return found


def physical_limit(facts: dict[str, Any]) -> dict[str, Any]:
    """What no program on this machine gets below: products at their peak, bytes without room from and to the disk."""
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


def options_of() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["llama-10M", "gpt-29M"], choices=MODELS)
    parser.add_argument("--squeezed", default="llama-19M", choices=[*MODELS, "none"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--compile-threads", nargs="*", type=int, default=[2], help="of these, compile too")
    parser.add_argument("--seconds", type=float, default=25.0, help="of interleaved steps, per table")
    parser.add_argument("--rounds", type=int, default=60, help="at most so many, per table")
    parser.add_argument("--machine", help="a machine file; without it this host is probed with all threads")
    parser.add_argument("--folder", type=Path, help="for swap files; a temporary one by default")
    parser.add_argument("--quick", action="store_true", help="one model, 8 s per table")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.models, options.seconds = options.models[:1], 8.0
    return options


def main() -> None:
    """Parse the command line and compare."""
    options = options_of()
    results: dict[str, Any] = {
        "host": host_id(), "torch": torch.__version__, "lading": __version__, "python": platform.python_version(),
        "options": {k: str(v) for k, v in vars(options).items()},
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        machine = options.machine or str(Path(folder) / "machine.toml")
        if not options.machine:
            threads = max(options.threads)
            save_machine(probe(folder=Path(folder), threads=threads, seconds=20, device="cpu"), Path(machine))
        for name in options.models:
            for threads in options.threads:
                side = Side(kind="lading", **MODELS[name], threads=threads, machine=machine, folder=folder)
                results[f"{name} fits {threads}"] = fits(name, side, options)
        if options.squeezed != "none":
            name, threads = options.squeezed, max(options.threads)
            side = Side(kind="lading", **MODELS[name], threads=threads, machine=machine, folder=folder)
            whole = whole_bytes(side)
            for share in ("50%", "25%"):
                limit = whole * int(share[:-1]) // 100
                results[f"{name} {share}"] = squeezed(name, side, share, limit, options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def whole_bytes(side: Side) -> int:
    """What keeping everything needs, as planned."""
    running, failed = start({"Lading": side})
    if failed:
        raise SystemExit(f"cannot plan: {failed}")
    finish(running)
    return int(running["Lading"].facts["keep_all_bytes"])


if __name__ == "__main__":
    main()
