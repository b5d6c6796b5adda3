"""``lading train``: train a run inside its memory budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from lading.cli.options import Overrides, RunOptions, Trust, check_paths, flag, load_plan, optional, refuse_run_options
from lading.config import load_run
from lading.errors import ConfigError
from lading.report.lines import fitted


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a run: plan it first, or follow a plan that was made before."""

    run_file: Annotated[
        Positional[Path | None], optional("[RUN.toml]", "Run file, such as examples/llama.toml; or give --plan.")
    ] = None
    overrides: Overrides = ()
    plan: Annotated[Path | None, optional("FILE", "Train as this plan of lading plan says.")] = None
    resume: Annotated[FlagCreatePairsOff[bool], flag("Go on from the newest checkpoint in the run's out folder.")] = (
        False
    )
    resume_from: Annotated[
        Path | None, optional("FOLDER", "Go on from this checkpoint of the run; later ones are set aside.")
    ] = None
    trust: Trust = False
    with_run: Annotated[RunOptions, OmitArgPrefixes, arg(name="run")] = field(default_factory=RunOptions)

    def run(self) -> None:
        """Train and print what happened."""
        is_setting = self.run_file is not None and "=" in str(self.run_file)  # "--plan plan.json out=elsewhere"
        if self.plan is not None and (self.run_file is None or is_setting):
            refuse_run_options(self.with_run, (), "--plan")
            run_or_plan = load_plan(self.plan, (str(self.run_file), *self.overrides) if is_setting else ())
        elif self.run_file is not None and self.plan is None:
            run_or_plan = load_run(self.run_file, self.overrides)
        else:
            description = "neither" if self.plan is None else "both"
            raise ConfigError(f"expected RUN.toml or --plan PLAN.json, got {description}")
        from lading.alone import rank_number
        from lading.train import train_run

        check_paths(run_or_plan)
        cache, back = not self.with_run.no_cache, self.resume_from or ""
        result = train_run(run_or_plan, resume=self.resume, resume_from=back, cache=cache)
        if rank_number() == 0:
            print(fitted(str(result)))
