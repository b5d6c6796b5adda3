"""``lading probe``: this host as a machine file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from lading.cli.options import check_targets
from lading.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ProbeCommand:
    """Measure this host in about a minute, in three with --ranks: matrix products, memory and disk.

    The file it writes is what --machine and the machine of a run file take. Under torchrun it also has how fast the
    ranks of the job exchange tensors, over whatever joins them.
    """

    out: Annotated[Path, arg(metavar="FILE", help="File to write the machine to.")] = Path("machine.toml")
    folder: Annotated[Path, arg(metavar="FOLDER", help="A folder on the disk to measure.")] = Path()
    ranks: Annotated[
        int, arg(metavar="N", help="Also measure ranks: up to so many processes, and what they share.")
    ] = 1

    def run(self) -> None:
        """Measure and write the machine file."""
        check_targets(out=self.out)
        if self.ranks < 1:
            raise ConfigError(f"--ranks: expected at least 1, got {self.ranks}")
        if not self.folder.is_dir():
            raise ConfigError(f"--folder: expected a folder to measure the disk in, got {str(self.folder)!r}")
        from lading.alone import rank_number
        from lading.hosts import probe_to

        probe_to(self.out, self.folder, ranks=self.ranks)
        if rank_number() == 0:
            print(f"wrote {self.out}")
