"""Collectives over some axes of a job: among the ranks along these alone, by their numbers in the job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from lading.errors import ConfigError
from lading.ir.layout import AXES, parse_layout
from lading.runtime.job import Replicas

#: Layout of four ranks, and what a collective along tp goes over; this rank is the first of the second pair.
LAYOUT = parse_layout("dp2,tp2")
OVER = cast("str", dict(LAYOUT.across("tp"))["over"])
RANK, PAIR = 2, (2, 3)


@pytest.fixture
def replicas() -> Replicas:
    """One of four ranks, whose groups are known; what it does with them is for the test to say."""
    made = object.__new__(Replicas)
    made.ranks, made.rank = LAYOUT.devices, RANK
    assert LAYOUT.group(RANK, OVER) == PAIR
    made._groups = {OVER: (cast("dist.ProcessGroup", "the pair"), PAIR)}
    return made


def test_a_mean_is_over_the_ranks_that_it_joins(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that have the same: their mean is what each has."""
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: values.mul_(2))
    values = torch.tensor([3.0, 5.0])
    replicas.mean_(values, OVER)
    assert values.tolist() == [3.0, 5.0]


def test_what_is_sent_goes_to_the_peers_number_in_the_job(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(dist, "send", lambda values, to, group, tag: asked.append(("send", to)))
    monkeypatch.setattr(dist, "irecv", lambda values, source, group, tag: asked.append(("receive", source)) or "work")
    replicas.send(torch.ones(1), 1, 0, OVER)
    replicas.expect(torch.ones(1), 1, 0, OVER)
    assert asked == [("send", 3), ("receive", 3)]


def test_ranks_of_unlike_collectives_are_told_before_any_runs(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = cast("str", dict(LAYOUT.across(*AXES))["over"])
    told = [{every: "same"}, {every: "same"}, {every: "another"}, {every: "same"}]

    def gathered(into: list[dict[str, str]], mine: dict[str, str], group: Any) -> None:
        into[:] = told

    monkeypatch.setattr(dist, "all_gather_object", gathered)
    replicas._layout, replicas._all, replicas._timeout_s, replicas._group = LAYOUT, every, 1.0, None
    with pytest.raises(ConfigError, match="rank 2 has others than rank 0"):
        replicas._join(told[RANK])


#: A rank whose job's store is kept by the first one, as where mpirun or srun starts ranks.
RANK_OF_JOB = """
import os, sys, time
from lading.errors import ConfigError
from lading.runtime.job import by_first_rank, start_job

if start_job(2):
    time.sleep(1.0)
elif sys.argv[1] == "fails":
    os._exit(1)
try:
    print(by_first_rank("test", lambda: "made"))
except ConfigError as error:
    print(error)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "told"),
    [
        pytest.param("ends", "made", id="ends"),
        pytest.param("fails", "test: lost the process group's store while", id="fails", marks=pytest.mark.slow),
    ],
)
def test_the_rank_that_keeps_the_store_waits_for_the_others_at_its_end(how: str, told: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free.getsockname()[1]}"}
    here = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")} | job
    command = [sys.executable, "-c", RANK_OF_JOB, how]
    ranks = [
        subprocess.Popen(command, env={**here, "RANK": f"{rank}"}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert ranks[1].communicate(timeout=60)[0].startswith(told)
    ranks[0].communicate(timeout=60)
