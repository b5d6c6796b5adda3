"""``lading checkpoint``: which checkpoints a run has, and whether their bytes are those that were saved."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from lading.errors import StorageError
from lading.report.lines import fitted
from lading.units import format_bytes

#: Most places that are named of one checkpoint.
_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class CheckpointCommand:
    """List the checkpoints of a run, or verify every byte of them."""

    action: Annotated[
        Positional[Literal["list", "verify"]],
        arg(metavar="list|verify", help="list: step, size, time, and when verified. verify: read and check all bytes."),
    ]
    folder: Annotated[
        Positional[Path],
        arg(metavar="FOLDER", help="A run's out folder, a folder of checkpoints, or one checkpoint."),
    ]

    def run(self) -> None:
        """Print a row for each checkpoint; verifying raises StorageError where one is damaged."""
        from lading.checkpoint.listing import find_checkpoints

        paths = find_checkpoints(self.folder)
        (_list if self.action == "list" else _verify)(paths)


def _list(paths: list[Path]) -> None:
    from lading.checkpoint.listing import list_checkpoint, set_aside_bytes, unfinished_bytes

    for folder, group in groupby(paths, key=lambda path: path.parent):
        print(f"{folder}\n      step       size  saved             verified")
        for path in group:
            if (row := list_checkpoint(path)) is None:
                print(f"deleted    {path}, by a save meanwhile")
                continue
            step = f"{row.step}" if row.step >= 0 else path.name
            verified = "no" if row.verified_s is None else _time(row.verified_s)
            saved = "unknown" if row.saved_s is None else _time(row.saved_s)
            state = f"damaged: {row.damage}" if row.damage else verified
            print(fitted(f"{step:>10} {format_bytes(row.size_bytes):>10}  {saved:16}  {state}"))
        if unfinished := unfinished_bytes(folder):
            print(f"unfinished {format_bytes(unfinished):>10}  goes with the next save, but for one under way")
        if aside := set_aside_bytes(folder):
            print(f" set aside {format_bytes(aside):>10}  of a run that went on from an earlier one; delete by hand")


def _verify(paths: list[Path]) -> None:
    from lading.checkpoint.listing import verify_checkpoint
    from lading.checkpoint.store import described_checkpoint

    damaged = 0
    for path in paths:
        count = 0
        for count, words in enumerate(verify_checkpoint(path), 1):
            if count <= _SHOWN:
                print(fitted(f"damaged  {words}"))
        if count > _SHOWN:
            print(f"         and {count - _SHOWN} more places of {path}")
        if not os.path.lexists(path):
            print(f"deleted  {path}, by a save meanwhile")
        elif not count:
            unchecked = described_checkpoint(path).unchecked()
            some = f", but {unchecked} tensors have no checksums yet: nothing says what they were" if unchecked else ""
            print(fitted(f"whole    {path}{some}"))
        damaged += bool(count)
    if damaged:
        raise StorageError(
            f"{damaged} of {len(paths)} checkpoints {'is' if damaged == 1 else 'are'} damaged; load another, and look "
            "at the disk (dmesg)"
        )


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
