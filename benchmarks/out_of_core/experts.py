"""Experts out of core: a mixture of experts that does not fit, with experts left out that got no token, and without.

    python benchmarks/out_of_core/run.py probe --folder F --threads 1           a minute, quiet
    python benchmarks/out_of_core/experts.py --folder F --routing skewed        minutes, quiet
    python benchmarks/out_of_core/experts.py --folder F --routing changing --json RESULTS.json
    python benchmarks/out_of_core/experts.py --folder F --routing uniform --json RESULTS.json
    python benchmarks/out_of_core/experts.py --folder F --machine rtx4090 --only-plan           of any machine
    python benchmarks/out_of_core/experts.py --folder F --machine rtx4090 --only-plan --few 4   and what its host does

Sides take turns, a step each, on the same batches: ``every`` is Lading's plan, which fetches every expert; ``fixed``
keeps the same experts of every layer in memory, as many as fit, and fetches all others; ``chosen`` leaves experts out
(``lading.plan(experts=)``), and is planned again after each ``--period`` steps from the counts of those. All have the
same budget, and the losses of plain PyTorch with everything in memory, which are compared to the bit.

Routing: ``skewed``, expert 0 is chosen in every step and the others in 50, 20, 10 and 5% of them; ``changing``,
likewise, but other experts are the frequent ones every ``--period`` steps; ``uniform``, all in every step.
Bytes are those of ``/proc/self/io`` around each step; that of the step behind a new plan counts, planning does not.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import lading
from lading.catalog.load import load_machine
from lading.errors import PlanInfeasible
from lading.ir.graph import Role, StepGraph
from lading.ir.machine import Machine
from lading.ir.plan import Option, Plan
from lading.memory.guards import find_guards, find_routers_alone
from lading.memory.lifetime import Lifetimes, gaps, is_movable
from lading.memory.restore import programs_of
from lading.planner.host_experts import HostChoice
from lading.planner.policies import Policy
from lading.planner.routing import expected_step_s
from lading.units import MiB

EXPERTS, VOCABULARY = 8, 64
_SHARES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.05, 0.05, 0.05)
_ALL = (1.0,) * EXPERTS
_SHIFT = 3


class Expert(nn.Module):
    """Two matrices around a SiLU. Shapes: x_BTD -> y_BTD."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Run the expert on every token."""
        return self.down(F.silu(self.up(x_BTD)))


class Mixture(nn.Module):
    """Layer whose tokens choose an expert by a table of scores, so that a batch decides who is chosen."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.scores = nn.Embedding(VOCABULARY, EXPERTS)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(EXPERTS))
        with torch.no_grad():
            self.scores.weight.mul_(0.1)
            for token in range(VOCABULARY):
                self.scores.weight[token, token % EXPERTS] += 8

    def forward(self, x_BTD: torch.Tensor, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Add the chosen expert's part to each token."""
        scores_BTE = self.scores(tokens_BT)
        top, chosen = scores_BTE.topk(1, dim=-1)
        weights_BTE = torch.zeros_like(scores_BTE).scatter(-1, chosen, top.sigmoid())
        for number, expert in enumerate(self.experts):
            x_BTD = x_BTD + weights_BTE[..., number : number + 1] * expert(x_BTD)
        return x_BTD


class Model(nn.Module):
    """Embedding, mixtures, head."""

    def __init__(self, layers: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Mixture(dim, hidden) for _ in range(layers))
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Scores of the next token: tokens_BT -> scores_BTV."""
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, tokens_BT)
        return self.head(x_BTD)


def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the next token."""
    tokens = batch["tokens"]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batches(routing: str, steps: int, period: int, shape: tuple[int, int]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches whose tokens choose experts as a routing says."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        drawn = torch.rand(EXPERTS, generator=generator)
        shift = step // period * _SHIFT if routing == "changing" else 0
        used = [(e + shift) % EXPERTS for e in range(EXPERTS) if routing == "uniform" or drawn[e] < _SHARES[e]]
        rows, columns = shape
        chosen = torch.tensor(used)[torch.randint(len(used), (rows, columns + 1), generator=generator)]
        if routing == "uniform":  # each for certain
            chosen[0, :EXPERTS] = torch.arange(EXPERTS)
        more = torch.randint(VOCABULARY // EXPERTS, (rows, columns + 1), generator=generator)
        yield {"tokens": chosen + EXPERTS * more}


def fixed_set(count: int) -> Policy:
    """Policy that keeps the first experts of every layer in memory, and fetches the values of all others."""

    def fixed(graph: StepGraph, lives: Lifetimes) -> dict[tuple[int, int], Option]:
        moved = {Role.PARAMETER, Role.OPTIMIZER_STATE}
        away = {
            number
            for number, storage in enumerate(graph.storages)
            for e in range(count, EXPERTS)
            if f".experts.{e}." in storage.name and storage.role in moved and is_movable(graph, number, 4096)
        }
        return {(gap.storage, gap.start): Option("disk") for gap in gaps(graph, lives) if gap.storage in away}

    return fixed


def fixed_plan(graph: StepGraph, machine: Machine, budget: str | float) -> tuple[Plan, int]:
    """Plan with as many fixed experts as fit, and their number."""
    for count in range(EXPERTS - 1, -1, -1):
        try:
            return lading.plan(graph, machine, budget=budget, policy=fixed_set(count)), count
        except PlanInfeasible:
            continue
    raise SystemExit("no fixed set fits this budget")


def _expected(graph: StepGraph, machine: Machine, args: argparse.Namespace) -> dict[str, object]:
    """Say what plans for routing expect of it: their words, and seconds of a step; of ``changing``, right after it did.

    The plan is then that for the shares of the last period.
    """
    moved = tuple(_SHARES[(expert - _SHIFT) % EXPERTS] for expert in range(EXPERTS))
    routings = {"skewed": (_SHARES, _SHARES), "changing": (_SHARES, moved), "uniform": (_ALL, _ALL)}
    result: dict[str, object] = {}
    for name, (planned, met) in routings.items():
        made = lading.plan(graph, machine, budget=args.budget, experts=_rows(args, planned))
        (program,) = programs_of(made, graph, ())
        guards = find_guards(program) if made.leaves_out_experts else find_routers_alone(program)
        words = [each for each in made.assumptions if " experts are " in each or "the host waits" in each]
        result[name] = {"seconds": expected_step_s(program, guards, machine, _rows(args, met)), "plan": words}
    return result


def _expected_of_few(graph: StepGraph, machine: Machine, args: argparse.Namespace) -> dict[str, object]:
    """Say what plans expect where each expert but the first gets ``--few`` tokens, without the host and with it."""
    few, result = float(args.few), dict[str, object]()
    tokens = (args.rows * args.columns - few * (EXPERTS - 1), *[few] * (EXPERTS - 1))
    for name, shares in (("skewed", _SHARES), ("uniform", _ALL)):
        loads = {router: [*zip(row, tokens, strict=True)] for router, row in _rows(args, shares).items()}
        for who, known in (("device", _rows(args, shares)), ("host", loads)):
            made = lading.plan(graph, machine, budget=args.budget, experts=known)
            (program,) = programs_of(made, graph, ())
            guards = find_guards(program) if made.leaves_out_experts else find_routers_alone(program)
            host = HostChoice(dict.fromkeys(loads, tokens), made.host_tokens) if made.host_tokens else None
            seconds = expected_step_s(program, guards, machine, _rows(args, shares), host)
            words = [each for each in made.assumptions if "on the host" in each]
            result[f"{name}, {who}"] = {"seconds": seconds, "host_tokens": made.host_tokens, "plan": words}
    return result


def _rows(args: argparse.Namespace, shares: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    return {f"layers.{layer}": shares for layer in range(args.layers)}


class Side:
    """Trainer of one side, with what its steps took."""

    def __init__(self, name: str, plan: Plan, graph: StepGraph, model: nn.Module, folder: Path) -> None:
        self.name, self.plan, self.graph = name, plan, graph
        self.seconds: list[float] = []
        self.read: list[int] = []
        self.written: list[int] = []
        self.planned_s: list[float] = []
        self.losses: list[float] = []
        folder.mkdir()
        self.trainer = lading.Trainer(plan, graph, model, folder=folder)

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        """Run a step, timed."""
        before, began = _io(), time.perf_counter()
        self.losses.append(self.trainer.step(batch))
        self.seconds.append(time.perf_counter() - began)
        after = _io()
        self.read.append(after["read_bytes"] - before["read_bytes"])
        self.written.append(after["write_bytes"] - before["write_bytes"])

    def plan_again(self, machine: Machine, budget: str | float) -> None:
        """Go on by a plan for what was counted since the last one."""
        counts = self.trainer.experts
        assert counts is not None
        shares, began = counts.shares(), time.perf_counter()
        self.trainer.pause()
        self.trainer.resume(lading.plan(self.graph, machine, budget=budget, experts=shares), self.graph)
        self.planned_s.append(time.perf_counter() - began)

    def row(self, period: int) -> dict[str, object]:
        """Results without the first period, in which counts are gathered and memory is touched first."""
        return {
            "side": self.name,
            "median_s": statistics.median(self.seconds[period:]),
            "mean_s": statistics.mean(self.seconds[period:]),
            "read_mib": statistics.mean(self.read[period:]) / MiB,
            "written_mib": statistics.mean(self.written[period:]) / MiB,
            "planned_again_s": self.planned_s,
            "predicted_s": self.plan.step_s,
        }


def _io() -> dict[str, int]:
    rows = (line.split(":") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(value) for name, value in rows}


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Run all sides in turns, and plain PyTorch behind each step."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    machine = load_machine(str(args.machine or args.folder / "machine.toml"))
    model = Model(args.layers, args.dim, args.hidden)
    shape = (args.rows, args.columns)
    graph = lading.capture(model, next(batches("uniform", 1, 1, shape)), loss)
    every = lading.plan(graph, machine, budget=args.budget)
    chosen = lading.plan(graph, machine, budget=args.budget, experts=True)
    if args.only_plan:
        few = _expected_of_few(graph, machine, args) if args.few else {}
        return {"every": every.step_s, "chosen": chosen.step_s, **_expected(graph, machine, args), **few}
    fixed, count = fixed_plan(graph, machine, args.budget)
    reference = copy.deepcopy(model)
    optimizer = lading.AdamW().plain(reference.parameters())
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        plans = {"every": every, f"fixed ({count} of {EXPERTS})": fixed, "chosen": chosen}
        sides = [Side(name, plan, graph, copy.deepcopy(model), Path(folder) / f"{n}")
                 for n, (name, plan) in enumerate(plans.items())]  # fmt: skip
        equal = _run(args, sides, reference, optimizer, machine, shape)
        for side in sides:
            side.trainer.close()
    rows = [side.row(args.period) for side in sides]
    sizes = {"layers": args.layers, "dim": args.dim, "hidden": args.hidden, "tokens": args.rows * args.columns}
    return {
        "routing": args.routing,
        "budget": args.budget,
        "period": args.period,
        **sizes,
        "equal": equal,
        "rows": rows,
    }


def _run(
    args: argparse.Namespace,
    sides: list[Side],
    reference: nn.Module,
    optimizer: torch.optim.Optimizer,
    machine: Machine,
    shape: tuple[int, int],
) -> str:
    """Let sides take turns; returns how many losses are plain PyTorch's to the bit."""
    equal = total = 0
    for number, batch in enumerate(batches(args.routing, args.steps, args.period, shape)):
        if number and number % args.period == 0:
            sides[-1].plan_again(machine, args.budget)
        for offset in range(len(sides)):  # each side is first as often as another
            sides[(number + offset) % len(sides)].step(batch)
        optimizer.zero_grad()
        plain = loss(reference, batch)
        plain.backward()
        optimizer.step()
        equal += sum(side.losses[-1] == plain.item() for side in sides)
        total += len(sides)
    return f"{equal} of {total}"


def main() -> None:
    """Measure one routing, print a table, and add it to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--routing", choices=("skewed", "changing", "uniform"), default="skewed")
    for name, default in (("layers", 4), ("dim", 256), ("hidden", 1024), ("rows", 4), ("columns", 64),
                          ("threads", 1), ("steps", 48), ("period", 12)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--budget", default="40%")
    parser.add_argument("--few", type=int, default=0, help="tokens of each expert but the first, with --only-plan")
    parser.add_argument("--only-plan", action="store_true", help="plan, into the cache, and measure nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = measure(args)
    print(json.dumps(result, indent=1))
    if args.json is not None and not args.only_plan:
        known = json.loads(args.json.read_text()) if args.json.is_file() else []
        args.json.write_text(json.dumps([*known, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
