"""``lading report``: what a run did beside what was predicted, for the browser."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from lading.cli.options import Trust
from lading.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Write report.html: what a run did beside what was predicted."""

    folder: Annotated[Positional[Path], arg(metavar="FOLDER", help="The run's out folder, such as out/llama.")]
    trust: Trust = False

    def run(self) -> None:
        """Write report.html into the folder."""
        if not self.folder.is_dir():
            raise ConfigError(f"expected the out folder of a run, got {str(self.folder)!r}, which is no folder")
        from lading.stragglers import slow_step_s
        from lading.summary import write_run_report

        print(f"wrote {write_run_report(self.folder, slow_step_s)}")
