"""``lading import``: weights that other tools have saved become the first checkpoint of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from lading.cli.options import Overrides, RunOptions, Trust, check_paths
from lading.config import load_run
from lading.report.lines import fitted


@dataclass(frozen=True, kw_only=True)
class ImportCommand:
    """Make the first checkpoint of a run from safetensors, to train from there."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="Folder of model.safetensors, or of its shards.")]
    run_file: Annotated[Positional[Path], arg(metavar="RUN.toml", help="Run file, such as examples/llama.toml.")]
    overrides: Overrides = ()
    trust: Trust = False
    with_run: Annotated[RunOptions, OmitArgPrefixes, arg(name="run")] = field(default_factory=RunOptions)

    def run(self) -> None:
        """Import, and say how to train."""
        run_config = load_run(self.run_file, self.overrides)
        from lading.alone import launcher, num_ranks, rank_number
        from lading.importing import import_run

        check_paths(run_config)
        path = import_run(run_config, self.folder, cache=not self.with_run.no_cache)
        if rank_number() == 0:
            arguments = " ".join([str(self.run_file), *self.overrides])
            print(fitted(f"wrote {path}"))
            print(fitted(f"train from there with: {launcher(num_ranks()[0])}lading train {arguments} --resume"))
