"""Threads of gloo wait for a processor instead of interrupting what runs there."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from tests.ranks import run_ranks

from lading.ir.layout import parse_layout
from lading.runtime.batch_threads import batch_threads
from lading.runtime.job import Replicas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems schedule by other classes")


def test_threads_that_are_started_within_are_batch_work_and_no_others() -> None:
    policies: dict[str, int] = {}

    def start(name: str) -> None:
        thread = threading.Thread(target=lambda: policies.update({name: os.sched_getscheduler(0)}))
        thread.start()
        thread.join()

    with batch_threads():
        start("within")
    start("after")
    assert policies == {"within": os.SCHED_BATCH, "after": os.SCHED_OTHER}


def _policies(rank: int, folder: str) -> None:
    replicas = Replicas(parse_layout("dp2"), {})
    names = {thread.name: (thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()}
    of_gloo = [int(thread) for thread, name in names.items() if "gloo" in name]
    batch = [os.sched_getscheduler(thread) == os.SCHED_BATCH for thread in of_gloo]
    (Path(folder) / f"{rank}").write_text(f"{len(batch)} {sum(batch)} {os.sched_getscheduler(0) == os.SCHED_OTHER}")
    replicas.close()


def test_the_threads_of_a_jobs_groups_are_batch_work(tmp_path: Path) -> None:
    run_ranks(_policies, 2, str(tmp_path))
    for rank in range(2):
        threads, batch, computes_as_before = (tmp_path / f"{rank}").read_text().split()
        assert int(batch) >= 3, threads  # the loop of its connections, and two that do the work
        assert computes_as_before == "True"
