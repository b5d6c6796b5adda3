"""``lading probe``: this host as a machine file, or software of your own as a set of switches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from lading.cli.options import check_targets, optional
from lading.errors import ConfigError

#: Seconds in which software is measured at the longest: two minutes are usual, ten where four ranks start slowly.
_LIMIT_S = 1200.0


@dataclass(frozen=True, kw_only=True)
class ProbeCommand:
    """Measure this host in about a minute, in three with --ranks: matrix products, memory and disk.

    The file it writes is what --machine and the machine of a run file take. Under torchrun it also has how fast the
    ranks of the job exchange tensors, over whatever joins them.

    With --software it measures software of your own instead, and writes what --stack takes. The script is a Python
    file with a function block(width) that makes one block of your model.
    """

    out: Annotated[
        Path | None, optional("FILE", "File to write to. If not given, machine.toml; with --software its own name.")
    ] = None
    folder: Annotated[Path, arg(metavar="FOLDER", help="A folder on the disk to measure.")] = Path()
    ranks: Annotated[
        int, arg(metavar="N", help="Also measure ranks: up to so many processes, and what they share.")
    ] = 1
    software: Annotated[
        Path | None, optional("SCRIPT.py", "Measure this software, on processors; it is run, and needs --machine.")
    ] = None
    machine: Annotated[
        Path | None, optional("FILE", "What lading probe wrote for this host, to measure --software against.")
    ] = None

    limit: Annotated[
        float | None,
        optional("SECONDS", "Longest that --software may take, when the script is ended. If not given, 1200."),
    ] = None

    def run(self) -> None:
        """Measure and write the file."""
        out = self.out or (Path("machine.toml") if self.software is None else Path(f"{self.software.stem}.toml"))
        check_targets(out=out)
        if self.ranks < 1:
            raise ConfigError(f"--ranks: expected at least 1, got {self.ranks}")
        if not self.folder.is_dir():
            raise ConfigError(f"--folder: expected a folder to measure the disk in, got {str(self.folder)!r}")
        from lading.alone import num_ranks, rank_number

        if self.software is not None:
            if self.folder != Path():
                raise ConfigError("--folder is a disk to measure, which --software does not; leave it out")
            if num_ranks()[0] > 1:
                raise ConfigError("--software starts its own ranks: expected --ranks N without torchrun")
            _measure_software(
                self.software, self.machine, out, self.ranks, _LIMIT_S if self.limit is None else self.limit
            )
            return
        if self.limit is not None:
            raise ConfigError(f"--limit belongs to --software, got it alone: {self.limit:g}; leave it out")
        if self.machine is not None:
            raise ConfigError(f"--machine belongs to --software, got it alone: {self.machine}; leave it out")
        from lading.hosts import probe_to

        probe_to(out, self.folder, ranks=self.ranks)
        if rank_number() == 0:
            print(f"wrote {out}")


def _measure_software(script: Path, machine: Path | None, out: Path, ranks: int, limit_s: float) -> None:
    """Measure software and print how well its switches tell the steps that they were made from."""
    if machine is None:
        raise ConfigError(
            "expected --machine FILE next to --software: software is measured against this host's own rates; measure "
            "them first: lading probe --ranks 2 --out machine.toml"
        )
    if not 0 < limit_s < float("inf"):
        raise ConfigError(f"--limit: expected seconds above 0, got {limit_s:g}")
    from lading.software_profile import HEAD, profile_within

    profile = profile_within(limit_s, out, script, machine, ranks=ranks)
    print(HEAD)
    for row in profile.rows:
        print(row)
    print(f"wrote {out}; predict with it: lading simulate --model NAME --machine {machine} --stack {out}")
