"""The zoo: is any model captured, and does its capture compute what eager computes, to the bit?

    python benchmarks/capture/zoo.py --out epyc-2core_202611   # all, a process each; writes results/zoo_*.json and .md
    python benchmarks/capture/zoo.py --only bert t5            # the rows whose name has one of these words

``FAMILIES`` is the list; ``examine`` does one row.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from benchmarks.capture.diffusion import DIFFUSION
from benchmarks.capture.family import Family
from benchmarks.capture.own import OWN
from benchmarks.capture.signals import SIGNALS
from benchmarks.capture.text import TEXT
from tools.replay import Replay

from lading.errors import CaptureError
from lading.tracing.batches import input_leaves
from lading.tracing.trace import capture

FAMILIES: dict[str, Family] = {family.name: family for family in (*OWN, *TEXT, *SIGNALS, *DIFFUSION)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """Result of one family.

    Attributes:
        verdict: "exact"; "refused" (a CaptureError, which names the cause); "WRONG" (captured, other numbers);
            "crashed" (any other error); "eager fails" (the family's own step does not run).
        detail: The error, or the first value that differs.
        capture_s: Processor seconds, which a busy machine does not change.
    """

    name: str
    kind: str
    verdict: str
    detail: str = ""
    parameters: int = 0
    ops: int = 0
    capture_s: float = 0.0


def examine(family: Family) -> Row:
    """Capture one family and replay it next to eager."""
    torch.manual_seed(0)
    row: dict[str, Any] = {"name": family.name, "kind": family.kind}
    try:
        model, batch = family.build(), family.batch()
        before, eager = _values(model), copy.deepcopy(model)
        torch.manual_seed(7)
        wanted = family.loss(eager, batch)
        wanted.backward()
        after, grads = _values(eager), {n: p.grad for n, p in eager.named_parameters(remove_duplicate=False)}
    except Exception as error:  # a broken row of the list, which must not end it
        return Row(**row, verdict="eager fails", detail=_brief(error))
    parameters = sum(p.numel() for p in model.parameters())
    try:
        start = time.process_time()
        graph = capture(model, batch, family.loss)
        seconds = time.process_time() - start
        replay = Replay(graph, before, dict(input_leaves(batch)))
        torch.manual_seed(7)
        got = replay.run()
    except CaptureError as error:
        return Row(**row, verdict="refused", detail=_brief(error), parameters=parameters)
    except Exception as error:  # the row says so
        return Row(**row, verdict="crashed", detail=_brief(error), parameters=parameters)
    found = {n: None if p.gradient is None else replay.tensor(p.gradient) for p in graph.parameters for n in p.names}
    buffers = {name: replay.tensor(tensor) for name, tensor in graph.buffers}
    differing = [] if torch.equal(got, wanted.detach()) else [f"loss {got.item()} for {wanted.item()}"]
    differing += [f"gradient of {n}" for n in grads if not _same(found.get(n), grads[n])]
    differing += [
        f"buffer {n}" for n, _ in model.named_buffers(remove_duplicate=False) if not _same(buffers[n], after[n])
    ]
    verdict = "WRONG" if differing else "exact"
    return Row(
        **row,
        verdict=verdict,
        detail="; ".join(differing[:3]),
        parameters=parameters,
        ops=len(graph.ops),
        capture_s=seconds,
    )


def _values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach().clone() for name, tensor in named}


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Equal to the bit, and both not a number where one is."""
    if a is None or b is None:
        return a is b
    return a.dtype is b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def _brief(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({Path(last.filename).name}:{last.lineno})"


def _one(name: str) -> Row:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return examine(FAMILIES[name])


def examine_all(names: Iterable[str], seconds: float = 300.0, workers: int = 1) -> list[Row]:
    """Each family in a process of its own, forked from one that has imported everything; a crash costs one row."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "transformers", "diffusers"])
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(lambda name: _in_a_process(name, context, seconds), names))


def _in_a_process(name: str, context: Any, seconds: float) -> Row:
    pool = ProcessPoolExecutor(1, mp_context=context)
    try:
        row = pool.submit(_one, name).result(timeout=seconds)
    except Exception as error:  # the process died or takes too long
        row = Row(name=name, kind=FAMILIES[name].kind, verdict="crashed", detail=_brief(error))
    for process in list(pool._processes.values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)
    cells = f"{row.kind:16} {row.name:36} {row.verdict:8} {row.capture_s:6.2f} s {row.ops:6} ops"
    print(f"{cells}  {row.detail}", flush=True)
    return row


def report(rows: list[Row]) -> str:
    """The table, sorted by kind, with the counts first."""
    valid = [row for row in rows if row.verdict != "eager fails"]
    exact = sum(row.verdict == "exact" for row in valid)
    counts = ", ".join(f"{sum(r.verdict == v for r in valid)} {v}" for v in ("refused", "WRONG", "crashed"))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "diffusers"))
    lines = [
        f"{exact} of {len(valid)} exact ({100 * exact / len(valid):.1f}%), {counts}. {versions}, fp32, one thread.",
        "",
        "| kind | family | verdict | operations | capture s | |",
        "|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row.kind):
        detail = row.detail.replace("|", "\\|")
        lines.append(f"| {row.kind} | {row.name} | {row.verdict} | {row.ops or ''} | {row.capture_s:.2f} | {detail} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="words that a family's name may contain")
    parser.add_argument("--out", default="", help="hardware and month: the name of the result files")
    parser.add_argument("--workers", type=int, default=2, help="families at a time")
    options = parser.parse_args()
    names = [n for n in FAMILIES if not options.only or any(word in n for word in options.only)]
    rows = examine_all(names, workers=options.workers)
    text = report(rows)
    print(text.splitlines()[0])
    if options.out:
        results = Path(__file__).parent / "results"
        results.mkdir(exist_ok=True)
        (results / f"zoo_{options.out}.md").write_text(text)
        (results / f"zoo_{options.out}.json").write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    if any(row.verdict in ("WRONG", "crashed") for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
