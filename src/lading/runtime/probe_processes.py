"""Processes that measure together: started, over gloo, and ended without what they measured being lost."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from lading.errors import ConfigError
from lading.runtime.batch_threads import batch_threads

#: Files of a folder that processes share: what the first one measured, and what one of them refused.
_MEASURED, _REFUSED, _MEETING = "measured", "refused", "meet"
#: What to do where a process of a probe ends.
PROBE_AGAIN = "probe again, and without --ranks if it comes again"


def in_processes(run: Callable[..., None], ranks: int, *given: object, advice: str, method: str = "spawn") -> str:
    """Run a function in fresh processes; returns the text that the first of them gave to ``write_measured``.

    Args:
        run: Called with a rank, the number of ranks, a folder of theirs, and ``given``.
        advice: What to change where a process ends before it has measured.
        method: How processes start, a word of ``multiprocessing``.
    Raises:
        ConfigError: a process refused what it was given (``write_refused``), or ended without a word.
    """
    with tempfile.TemporaryDirectory() as folder:
        ended: Exception | None = None
        try:
            start_processes(run, (ranks, folder, *given), nprocs=ranks, start_method=method)
        except Exception as error:
            if refused := sorted(Path(folder).glob(f"{_REFUSED}*")):
                raise ConfigError(refused[0].read_text()) from error
            ended = error  # gloo may abort a rank that is done, at its end
        measured = Path(folder) / _MEASURED
        if not measured.exists():
            how = str(ended or "exit code 0").strip().splitlines()[-1][:300]  # of a traceback what was raised
            raise ConfigError(f"expected a measurement, but a process ended before that ({how}); {advice}") from ended
        return measured.read_text()


@contextmanager
def group_of(rank: int, ranks: int, folder: str) -> Iterator[None]:
    """Be one rank of a gloo group that meets in a folder."""
    with batch_threads():
        dist.init_process_group("gloo", init_method=f"file://{folder}/{_MEETING}", rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_measured(folder: str, text: str) -> None:
    """Hand on what the first rank measured; all ranks of a group call this last, and none ends before it is there."""
    if dist.get_rank() == 0:
        (Path(folder) / _MEASURED).write_text(text)
    dist.barrier()


def write_refused(folder: str, rank: int, text: str) -> None:
    """Hand on why a rank cannot measure."""
    (Path(folder) / f"{_REFUSED}{rank}").write_text(text)
