"""``lading demo``: probe this host, plan, train inside the budget, and hold the run against plain PyTorch."""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from lading.config import (
    CheckpointConfig,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    Optimization,
    RunConfig,
    run_from_dict,
    run_to_dict,
)
from lading.errors import BudgetExceeded, ConfigError, LadingError
from lading.files import make_folder, remove_file
from lading.grouping import Matrices
from lading.ir.plan import Plan
from lading.optim import registry
from lading.report.lines import fitted, line_columns
from lading.report.promises import container_words, relative_error
from lading.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lading.run import Prepared
    from lading.summary import RunResult

_PROBE_SECONDS = 20.0
_FEWEST_STEPS, _MOST_STEPS = 12, 300


@dataclass(frozen=True, kw_only=True)
class DemoCommand:
    """Measure this host, plan, train and compare a small model, with no download."""

    out: Annotated[Path, arg(metavar="FOLDER", help="Folder that everything is written to.")] = Path("out/demo")
    budget: Annotated[
        str,
        arg(
            metavar="SIZE",
            help="Memory to train in: a size such as 256MB, or a share of what keeping everything needs.",
        ),
    ] = "50%"
    seconds: Annotated[float, arg(metavar="SECONDS", help="Train for about so long.")] = 60.0
    optimizer: Annotated[
        str,
        arg(metavar="NAME", help="Optimizer, as of lading simulate; one of the weight matrices has AdamW beside it."),
    ] = registry.DEFAULT

    def run(self) -> None:
        """Run the demonstration and print its verdict."""
        MemoryConfig(budget=self.budget)
        if not 0 < self.seconds < 1e6:
            raise ConfigError(f"--seconds: expected a time above 0, got {self.seconds}")
        registry.rule_class(self.optimizer)  # a name that is none is refused before this host is measured
        print(fitted(str(demo(self.out, self.budget, self.seconds, self.optimizer))))


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """The planned run's result beside the plain one's."""

    out: str
    keep_all_bytes: int
    planned: RunResult
    plain: RunResult
    identical: bool

    def __str__(self) -> str:
        planned, plain = self.planned, self.plain
        verdict = "identical to the bit" if self.identical else "NOT IDENTICAL"
        time_error = relative_error(planned.predicted_step_s, planned.step_s)
        peak_error = relative_error(planned.predicted_peak_bytes, planned.peak_bytes)
        lines = [
            "",
            f"{'':14}{'plain PyTorch':>16}{'lading':>16}{'predicted':>16}",
            f"{'peak memory':14}{format_bytes(plain.peak_bytes):>16}{format_bytes(planned.peak_bytes):>16}"
            f"{format_bytes(planned.predicted_peak_bytes):>16}  ({peak_error:+.1%})",
            f"{'step time':14}{format_seconds(plain.step_s):>16}{format_seconds(planned.step_s):>16}"
            f"{format_seconds(planned.predicted_step_s):>16}  ({time_error:+.1%})",
            f"{'last loss':14}{plain.losses[-1]:>16.6f}{planned.losses[-1]:>16.6f}",
            "",
            f"all {len(plain.losses)} losses are {verdict}",
            f"promise kept: never above {format_bytes(planned.budget_bytes)}, where plain PyTorch took "
            f"{format_bytes(plain.peak_bytes)}",
            container_words(planned.base_bytes, planned.peak_bytes, planned.budget_bytes),
            f"open {self.out}/report.html; {self.out}/timeline.pftrace opens in ui.perfetto.dev",
        ]
        return "\n".join(lines)


def demo(out: Path, budget: str, seconds: float, optimizer: str = registry.DEFAULT) -> DemoResult:
    """Run the demonstration into ``out``, replacing what an earlier one left there.

    Args:
        budget: Device memory, a size or a share of what keeping everything needs.
        seconds: About how long both trainings together may take.
        optimizer: Name of a rule; one for matrices has AdamW beside it.

    Raises:
        BudgetExceeded: the memory promise broke.
        LadingError: the losses differ from plain PyTorch's.
    """
    from lading.hosts import probe_to
    from lading.summary import write_run_report

    make_folder(out)
    for name in ("metrics.jsonl", "plain.jsonl", "measured.json", "report.html"):
        remove_file(out / name)
    print("[1/4] measuring this machine")
    probe_to(out / "machine.toml", out, seconds=_PROBE_SECONDS, device="cpu")
    print("[2/4] planning")
    prepared = _planned(_run(out, budget, optimizer), seconds)
    _show(prepared)
    print(f"[3/4] training in plain PyTorch, {prepared.run.optimization.steps} steps", flush=True)
    plain = _in_a_process(_plain, run_to_dict(prepared.run))
    limit = format_bytes(prepared.plan.budgets["device"])
    print(f"[4/4] training the same inside {limit}", flush=True)
    planned = _in_a_process(_train, str(out / "plan.json"))
    if isinstance(planned, str):
        raise BudgetExceeded(planned)
    write_run_report(out)
    identical = planned.losses == plain.losses
    result = DemoResult(
        out=str(out),
        keep_all_bytes=prepared.plan.predictions.keep_all_bytes,
        planned=planned,
        plain=plain,
        identical=identical,
    )
    if not identical:
        raise LadingError(f"the planned run's losses differ from plain PyTorch's\n{result}")
    return result


def _run(out: Path, budget: str, optimizer: str) -> RunConfig:
    """Configure a Llama on the standard library's source, whose activations and optimizer states both matter."""
    matrices, usual = None, optimizer
    if registry.is_for_matrices(optimizer):
        matrices, usual = Matrices(rule=optimizer, lr=registry.matrix_rule(optimizer).usual_lr), registry.DEFAULT
    rule = registry.optimizer(usual, lr=1e-3) if usual == registry.DEFAULT else registry.optimizer(usual)
    sizes: dict[str, int | float | bool] = {
        "vocab_size": 256,
        "dim": 320,
        "num_layers": 8,
        "num_heads": 5,
        "num_kv_heads": 5,
        "max_seq_len": 256,
    }
    return RunConfig(
        model=ModelConfig(name="llama", sizes=sizes),
        data=DataConfig(sequence_length=256, batch_size=4),
        optimization=Optimization(
            steps=_FEWEST_STEPS,
            optimizer=rule,
            matrices=matrices,
            schedule="cosine",
            warmup_steps=10,
        ),
        memory=MemoryConfig(budget=budget),
        checkpoint=CheckpointConfig(at_end=False),
        machine=str(out / "machine.toml"),
        out=str(out),
    )


def _planned(run: RunConfig, seconds: float) -> Prepared:
    """Plan the run, with as many steps as fit the time; saves the plan."""
    from lading.prepare import plan_run

    prepared = plan_run(run)
    step_s = 2 * prepared.plan.step_s
    steps = max(_FEWEST_STEPS, min(_MOST_STEPS, int(seconds / step_s)))
    run = dataclasses.replace(run, optimization=dataclasses.replace(run.optimization, steps=steps))
    plan = prepared.plan.of_run(run_to_dict(run))
    plan.save(Path(run.out) / "plan.json")
    return dataclasses.replace(prepared, run=run, plan=plan)


def _show(prepared: Prepared) -> None:
    from rich.console import Console

    from lading.report.plan_table import print_plan

    print_plan(prepared.plan, prepared.program.graph, Console(width=line_columns()))


def _in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a fresh process, so that what is measured is that run's alone."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def _plain(run: dict[str, Any]) -> RunResult:
    from lading.train import train_plain

    config = run_from_dict(run, "the demo's run")
    return train_plain(config, Path(config.out))


def _train(plan: str) -> RunResult | str:
    from lading.train import train_run

    try:
        return train_run(Plan.load(Path(plan)))
    except BudgetExceeded as error:
        return str(error)
