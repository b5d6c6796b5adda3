"""Software of one's own, profiled: steps of models that were not in the profile, with and without it, beside measured.

    pip install deepspeed==0.19.8 in an environment that has Lading, for the third
    python benchmarks/simulator/profiled.py --out benchmarks/simulator/results/profiled_NAME_YYYYMM \
        [--deepspeed /path/to/its/python] [--ranks 1 2 4] [--only eager]

Each software is a script of ten lines (``software/*.py``). It is profiled as a user does it, with ``lading probe
--software``, then other models train in it: other widths, lengths, vocabularies and numbers of blocks, and a Llama
where the profile was of GPT blocks. Each is predicted twice: with the switches that the script begins with, and with
its profile.

Each trains in processes of its own, ``ROUNDS`` times, of which the median counts: two runs of one program here differ
by 10% and more. What others on the host took of the processors meanwhile is measured; beside others a model trains
again, and the quietest counts. A host is faster now and slower then all the same. So a model of the profile trains
before them, and the table says how long it took beside its time in the profile: the last column is the error at that
speed. The host is probed first unless ``--machine`` names its file; 20 minutes for all on a quiet host. What is done is
kept in OUT.json and beside it: started again, the command goes on where it stopped. ``--ranks`` without a number makes
profiles only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tools.batches import random_batch

from lading.catalog.load import load_machine
from lading.catalog.stacks import stack_by_name
from lading.ir.layout import parse_layout
from lading.ir.request import Architecture, StepRequest
from lading.ir.stack import Stack
from lading.models.reference import build_model, model_class
from lading.runtime.probe_processes import write_measured
from lading.runtime.probe_software import (
    ProbeModel,
    ScriptTraining,
    Timing,
    UserSoftware,
    batch_of,
    cases,
    in_group,
    in_training_processes,
    quietest,
    timing_of,
)
from lading.sim.simulate import simulate
from lading.tracing.tabulate import module_table

_FOLDER = Path(__file__).parent / "software"
#: Scripts, and the switches that each begins with.
LIKE = {
    "eager": "torch-eager-cpu",
    "compiled": "torch-eager-cpu,fusion=compiled",
    "on_deepspeed": "torch-eager-cpu",
}
#: Seconds that a command may take.
_LONGEST_S = 1200
#: ProfileCase of the profile that trains beside the models.
_CONTROL = "middle"
#: How often each model trains.
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Unprobed:
    """Model that is in no profile: a reference model, sequences of a rank's batch, tokens of one."""

    name: str
    sizes: dict[str, Any]
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.name} {self.sizes['num_layers']} x {self.sizes['dim']}, {self.rows} x {self.tokens}"


def _gpt(layers: int, width: int, vocabulary: int) -> dict[str, Any]:
    sizes = {"num_layers": layers, "dim": width, "num_heads": width // 64, "vocab_size": vocabulary}
    return {**sizes, "max_seq_len": 256, "tied": False}


_LLAMA = {"num_layers": 3, "dim": 448, "num_heads": 7, "num_kv_heads": 7, "hidden_dim": 1216, "vocab_size": 2048}
MODELS = (
    Unprobed(name="gpt", sizes=_gpt(8, 128, 512), rows=2, tokens=48),
    Unprobed(name="gpt", sizes=_gpt(4, 384, 4096), rows=2, tokens=192),
    Unprobed(name="llama", sizes={**_LLAMA, "max_seq_len": 256}, rows=3, tokens=128),
)


def _made(model: Unprobed) -> Any:
    torch.manual_seed(0)
    return build_model(model.name, **model.sizes)


def _batch(model: Unprobed, seed: int) -> dict[str, torch.Tensor]:
    return random_batch(model.name, model.sizes, rows=model.rows, tokens=model.tokens, seed=seed)


def train(script: Path, ranks: int, seconds: float) -> list[list[tuple[float, float]]]:
    """Train the control and each model, each in processes of its own, in rounds.

    Returns:
        Seconds of a step, and the share of the processors that others took, by the control and each model, by round.
    """
    order = (None, *range(len(MODELS)))
    share = seconds / len(order) / ROUNDS

    def timed(number: int | None) -> tuple[float, float]:
        timing = Timing(**json.loads(in_training_processes(_rank, ranks, str(script), number, share)))
        return timing.step_s, timing.others

    rounds = [[quietest(partial(timed, number), lambda found: found[1]) for number in order] for _ in range(ROUNDS)]
    return [[one[place] for one in rounds] for place in range(len(order))]


def _rank(rank: int, ranks: int, folder: str, script: str, number: int | None, seconds: float) -> None:
    """Train one model, the control where it has no number."""
    torch.set_num_threads(1)
    with in_group(rank, ranks, folder):
        software = UserSoftware(Path(script))
        torch.manual_seed(0)
        if number is None:
            control = next(case for case in cases(software.widths) if case.name == _CONTROL)
            model, batch = ProbeModel(control, software.block), batch_of(control, rank)
        else:
            model, batch = _made(MODELS[number]), _batch(MODELS[number], rank)
        timing = timing_of(ScriptTraining(software, model, batch, software.loss), seconds)
        write_measured(folder, json.dumps(asdict(timing)))


def predicted(model: Unprobed, ranks: int, machine: Path, stack: Stack) -> float:
    """Seconds of a step of a model under software, from its table and the machine file alone."""
    batch, loss = _batch(model, 0), model_class(model.name).loss
    table = module_table(_made(model), batch, loss, model.name, tokens=model.tokens, whole=False)
    blocks = (("block", int(model.sizes["num_layers"])),)
    request = StepRequest(
        name=str(model),
        model=Architecture(family=model.name, symbols={}, blocks=blocks),
        seq_len=model.tokens,
        machine=str(machine),
        layout=parse_layout(f"fp32,dp{ranks},mb{model.rows},gb{ranks * model.rows}"),
        stack=stack,
    )
    return simulate(request, table).step.step_s


def _run(python: str, *arguments: str) -> str:
    """Run a command with one thread; its output.

    Raises:
        RuntimeError: it failed; its last words are in the message.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [python, "-W", "ignore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST_S, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stdout[-500:]}{done.stderr[-2000:]}")
    return done.stdout


def _lading(python: str, *arguments: str) -> str:
    return _run(python, "-m", "lading.cli.main", *arguments)


def profiled(name: str, python: str, machine: Path, out: Path) -> dict[str, Any]:
    """Profile a software as a user does, on ranks too; what was printed, and seconds of the control by ranks."""
    script, profile = _FOLDER / f"{name}.py", out.with_name(f"{out.name}_{name}.toml")
    asked = ("--machine", str(machine), "--ranks", "4", "--out", str(profile))
    said = _lading(python, "probe", "--software", str(script), *asked).replace(f"{_FOLDER}/", "")
    control = [line.split() for line in said.splitlines() if line.startswith(_CONTROL)]
    return {"profile": profile.name, "said": said, "control_s": {words[1]: float(words[2]) / 1e3 for words in control}}


def trained(name: str, ranks: int, python: str, seconds: float) -> list[list[tuple[float, float]]]:
    """Measure steps of the control and of all models on so many ranks, as ``train`` gives them."""
    said = _run(python, __file__, "--train", str(_FOLDER / f"{name}.py"), str(ranks), str(seconds))
    return json.loads(said.splitlines()[-1])


@dataclass(frozen=True)
class ModelRow:
    """One model under one software: seconds predicted without and with the profile, and measured.

    Attributes:
        spread: Longest round over the shortest, less 1.
        others: Largest share of the processors that others took in a round.
        speed: Seconds of the profile's own model beside it over those in the profile; None where there are none.
    """

    software: str
    ranks: int
    model: str
    before_s: float
    after_s: float
    measured_s: float
    spread: float
    others: float
    speed: float | None

    @property
    def errors(self) -> tuple[float, float, float]:
        """Errors without the profile, with it, and with it at the speed that the host had."""
        steady = self.after_s * (self.speed or 1.0)
        before, after, at_speed = (s / self.measured_s - 1 for s in (self.before_s, self.after_s, steady))
        return before, after, at_speed

    def __str__(self) -> str:
        before, after, steady = self.errors
        return (
            f"{self.software:13}{self.ranks:5}  {self.model:27}{self.measured_s * 1e3:11.1f}{self.spread:8.0%}"
            f"{self.others:8.0%}{before:+12.1%}{after:+12.1%}{self.speed or 1.0:10.2f}{steady:+12.1%}"
        )


HEAD = (
    f"{'software':13}{'ranks':>5}  {'model not in the profile':27}{'measured ms':>11}{'spread':>8}{'others':>8}"
    f"{'without':>12}{'profile':>12}{'speed':>10}{'at speed':>12}"
)


def rows_of(name: str, ranks: int, found: dict[str, Any], machine: Path, out: Path) -> list[ModelRow]:
    """Predict what was measured."""
    after = stack_by_name(str(out.with_name(found["profile"])))
    before = stack_by_name(LIKE[name])
    control, *models = found["rounds"][str(ranks)]
    in_profile_s = found["control_s"].get(str(ranks))
    speed = median(step_s for step_s, _ in control) / in_profile_s if in_profile_s else None
    rows: list[ModelRow] = []
    for model, rounds in zip(MODELS, models, strict=True):
        before_s, after_s = (predicted(model, ranks, machine, stack) for stack in (before, after))
        steps_s, others = zip(*rounds, strict=True)
        spread = max(steps_s) / min(steps_s) - 1
        rows.append(ModelRow(name, ranks, str(model), before_s, after_s, median(steps_s), spread, max(others), speed))
    return rows


def verdict(rows: list[ModelRow]) -> str:
    """Say how many steps are within 10%."""
    said: list[str] = []
    for place, what in enumerate(("without a profile", "with it", "with it at the speed of the host beside")):
        errors = [abs(row.errors[place]) for row in rows]
        near = sum(error <= 0.1 for error in errors)
        said.append(f"{what}: {near} of {len(rows)}, median {median(errors):.1%}, worst {max(errors):.1%}")
    return "steps within 10% " + "; ".join(said)


def main() -> None:
    """Probe, profile, train, predict, print and write; or train one software."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--machine", type=Path, help="a file of lading probe --ranks 4 for this host")
    parser.add_argument("--deepspeed", help="a Python that has DeepSpeed and Lading")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=LIKE, default=list(LIKE))
    parser.add_argument("--seconds", type=float, default=24.0, help="training time of all models of a software")
    parser.add_argument("--train", nargs=3, metavar=("SCRIPT", "RANKS", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        script, ranks, seconds = options.train
        print(json.dumps(train(Path(script), int(ranks), float(seconds))))
        return
    if options.out is None:
        parser.error("expected --out")
    started = time.perf_counter()
    kept = options.out.with_suffix(".json")
    done: dict[str, Any] = json.loads(kept.read_text())["measured"] if kept.is_file() else {}
    machine_file = options.machine or options.out.with_suffix(".toml")
    if not machine_file.is_file():
        _lading(sys.executable, "probe", "--ranks", "4", "--out", str(machine_file))
    pythons = dict.fromkeys(LIKE, sys.executable) | {"on_deepspeed": options.deepspeed}
    rows: list[ModelRow] = []
    for name in (name for name in options.only if pythons[name]):
        found = done.setdefault(name, {})
        if "profile" not in found:
            found |= profiled(name, pythons[name], machine_file, options.out)
            found.setdefault("rounds", {})
            kept.write_text(json.dumps({"measured": done}, indent=1) + "\n")
        for ranks in options.ranks:
            if str(ranks) not in found["rounds"]:
                found["rounds"][str(ranks)] = trained(name, ranks, pythons[name], options.seconds)
                kept.write_text(json.dumps({"measured": done}, indent=1) + "\n")
            rows += rows_of(name, ranks, found, machine_file, options.out)
    if not rows:
        print(
            f"profiles are made, {time.perf_counter() - started:.0f} s in all; none trained, as --ranks gave no number"
        )
        return
    machine = load_machine(machine_file)
    about = f"{machine.host_id}, a thread a rank, torch {torch.__version__}, gloo; machine probed {machine.date}"
    text = "\n".join([about, HEAD, *map(str, rows), verdict(rows)])
    print(text)
    options.out.with_suffix(".txt").write_text(text + "\n")
    kept.write_text(json.dumps({"measured": done, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
