"""``lading fit``: whether a run fits a machine, and what would make it fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import FlagCreatePairsOff, arg

from lading.cli.options import MODEL_HELP, Overrides, RunFile, Trust, flag, optional
from lading.config import load_run
from lading.errors import ConfigError
from lading.report.lines import fitted


@dataclass(frozen=True, kw_only=True)
class FitCommand:
    """Say whether a run fits a machine, what it needs, and what would make it fit.

    Give a run file, or a model by name.

    A size has a unit: 24GB is 24 times 10^9 bytes, 24GiB is 24 times 2^30.
    """

    run_file: RunFile = None
    overrides: Overrides = ()
    model: Annotated[str | None, optional("NAME", MODEL_HELP.format("llama3-70b, gpt2"))] = None
    machine: Annotated[
        str | None,
        arg(
            metavar="NAME|FILE",
            help="Machine: a name of the catalog (rtx4090, h100, cpu), or a file that lading probe wrote.",
            help_behavior_hint="(default: the run's, else this host)",
        ),
    ] = None
    device: Annotated[
        str | None, optional("SIZE", "Memory of the device (the GPU, or the CPU), if not the machine's.")
    ] = None
    host: Annotated[str | None, optional("SIZE", "Memory of the host behind a GPU, if not the machine's.")] = None
    disk: Annotated[str | None, optional("SIZE", "Space on the disk, if not the machine's.")] = None
    budget: Annotated[
        str | None,
        optional("SIZE", "Device memory that a step may use; or a share such as 50% of what keeping everything needs."),
    ] = None
    batch: Annotated[int | None, optional("N", "Sequences that are computed at once: a micro-batch.")] = None
    seq: Annotated[int | None, optional("N", "Tokens of a sequence.")] = None
    accumulation: Annotated[int | None, optional("N", "Micro-batches whose gradients are added up for one step.")] = (
        None
    )
    precision: Annotated[
        Literal["fp32", "bf16"] | None,
        optional("fp32|bf16", "Number format. With --model, bf16 where the device has it."),
    ] = None
    keep: Annotated[
        int | None, optional("N", "Checkpoints that stay on disk while another is written. 0 saves none.")
    ] = None
    quick: Annotated[
        FlagCreatePairsOff[bool], flag("Answer in seconds, by a plan that was not searched for: its step may be slow.")
    ] = False
    trust: Trust = False

    def run(self) -> None:
        """Print the fit table."""
        from lading.fit import Hardware, fit_run, precision_for, run_of_model, with_sizes
        from lading.report.progress import planning_progress

        if (self.run_file is None) == (self.model is None):
            description = "neither" if self.model is None else "both"
            raise ConfigError(f"expected RUN.toml or --model NAME, got {description}")
        precision = self.precision
        if self.model is not None:
            if self.overrides:
                raise ConfigError(f"settings replace those of a RUN.toml, got {self.overrides[0]!r} next to --model")
            run = run_of_model(self.model, self.seq)
            precision = precision or precision_for(self.machine or run.machine)
        else:
            run = load_run(self.run_file or Path(), self.overrides)
        run = with_sizes(
            run,
            batch=self.batch,
            seq=self.seq,
            accumulation=self.accumulation,
            precision=precision,
            keep=self.keep,
        )
        hardware = Hardware(
            machine=self.machine or run.machine,
            device=self.device,
            host=self.host,
            disk=self.disk,
            budget=self.budget or (None if self.model is not None else run.memory.budget),
            tiers=None if self.model is not None else run.memory,
        )
        with planning_progress() as progress:
            result = fit_run(run, hardware, self.model or "", quick=self.quick, progress=progress)
        print(fitted(str(result)), flush=True)
        if result.error is not None:
            raise result.error
