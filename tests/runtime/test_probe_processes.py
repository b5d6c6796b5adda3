"""Processes that measure together: what was measured survives how they end."""

from __future__ import annotations

import os

import pytest

from lading.errors import ConfigError
from lading.runtime.probe_processes import group_of, in_processes, write_measured, write_refused


def _aborts_at_its_end(rank: int, ranks: int, folder: str, text: str) -> None:
    with group_of(rank, ranks, folder):
        write_measured(folder, text)
        if rank == 0:
            os.abort()  # as gloo does at times while it closes its connections


def _aborts_before(rank: int, ranks: int, folder: str) -> None:
    with group_of(rank, ranks, folder):
        os.abort()


def _refuses(rank: int, ranks: int, folder: str) -> None:
    with group_of(rank, ranks, folder):
        write_refused(folder, rank, f"no rank {rank} here")
        raise ConfigError("refused")


@pytest.mark.long
def test_a_rank_that_aborts_behind_its_measurement_loses_nothing() -> None:
    assert in_processes(_aborts_at_its_end, 2, "7 ms", advice="probe again") == "7 ms"


@pytest.mark.long
def test_what_ends_a_process_before_it_has_measured_is_told() -> None:
    with pytest.raises(ConfigError, match=r"a process ended before that .*SIGABRT.*; probe again"):
        in_processes(_aborts_before, 1, advice="probe again")
    with pytest.raises(ConfigError, match="no rank 0 here"):
        in_processes(_refuses, 1, advice="probe again")
