"""Ranks of a job that are killed at random instants go on with the numbers of one process, in any layout."""

from __future__ import annotations

import os
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lading.checkpoint.store import latest_checkpoint, open_checkpoint
from lading.cli.main import main
from lading.config import load_run
from lading.report.metrics import read_metrics
from lading.runtime import job
from lading.runtime.data import TextDataset
from lading.train import train_run
from tests.runs import num_lines, set_up
from tests.test_train_ranks import written

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 24
SETTINGS = (
    "model.sizes={dim=64, num_layers=2, num_heads=2}",
    "memory={policy='keep-all', budget='100%'}",
    "checkpoint={every_steps=3}",
)


def asked(path: Path, layout: str, ranks: int, out: Path, micro: int = 2) -> list[str]:
    """Arguments of ``lading`` that train the run, on ``micro`` micro-batches a step whatever the layout."""
    accumulation = micro // (1 if layout.startswith("pp") else ranks)
    moved = f"optimization={{steps={STEPS}, accumulation={accumulation}}}"
    return ["train", str(path), "--no-cache", *SETTINGS, moved, f"layout='{layout}'", f"out={out}"]


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """The run's file; torchrun leaves handlers of signals behind, which are put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    before |= {number: signal.getsignal(number) for number in (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)}
    yield written(tmp_path)
    for number, handler in before.items():
        signal.signal(number, handler)


def _work(log: Path, argv: list[str]) -> None:
    set_up(log)
    log.with_name(f"pid {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['RANK']}").write_text(str(os.getpid()))
    if code := main(argv):
        sys.exit(code)


def run_job(
    log: Path,
    argv: list[str],
    ranks: int,
    restarts: int,
    disturb: Callable[[int], None],
    work: Callable[[Path, list[str]], None] = _work,
) -> bool:
    """Train on ranks that torchrun starts, while ``disturb(start)`` goes on beside it for each start of the job.

    Args:
        work: What each rank does.

    Returns:
        Whether it ended well.
    """
    for old in log.parent.glob("pid *"):
        old.unlink()

    def beside() -> None:
        for number in range(restarts + 1):
            disturb(number)

    thread = threading.Thread(target=beside, daemon=True)
    thread.start()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id="faults",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.05,
        start_method="forkserver",
    )
    try:
        elastic_launch(config, work)(log, argv)
    except ChildFailedError:
        return False
    finally:
        thread.join(60)
    return True


def until(done: Callable[[], object], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not done() and time.monotonic() < end:
        time.sleep(1e-3)


def kill_one(log: Path, out: Path, number: int, ranks: int, chance: random.Random) -> None:
    """SIGKILL a rank of a start of the job while it trains, while it saves, or at any time."""
    victim, kind = log.with_name(f"pid {number} {chance.randrange(ranks)}"), chance.choice(("train", "save", "any"))
    before = num_lines(out / "metrics.jsonl")
    until(victim.exists)
    if kind == "any":
        time.sleep(chance.uniform(0, 2))
    elif kind == "train":
        until(lambda: num_lines(out / "metrics.jsonl") != before)
        time.sleep(chance.uniform(0, 0.2))
    else:
        until(lambda: any((out / "checkpoints").glob("*.tmp-*")), 10)
        time.sleep(chance.uniform(0, 3e-3))
    with suppress(ProcessLookupError):  # it had ended
        os.kill(int(victim.read_text()), signal.SIGKILL)


def curve(out: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in read_metrics(out / "metrics.jsonl")]


def reference(path: Path, micro: int) -> list[tuple[int, float]]:
    """The curve of one process to which nothing happens."""
    out = path.parent / "whole"
    train_run(load_run(path, asked(path, "", 1, out, micro)[3:]))
    return curve(out)


def assert_went_on(out: Path, path: Path, micro: int = 2, rel: float = 0.0) -> None:
    newest = latest_checkpoint(out / "checkpoints")
    assert newest is not None
    assert open_checkpoint(newest).step == STEPS
    open_checkpoint(newest).verify()
    assert not list((out / "checkpoints").glob("*.tmp-*"))
    whole = reference(path, micro)
    assert [step for step, _ in curve(out)] == [step for step, _ in whole]
    assert [loss for _, loss in curve(out)] == pytest.approx([loss for _, loss in whole], rel=rel, abs=0.0)


@pytest.mark.slow
def test_ranks_killed_at_random_are_started_again_by_torchrun(path: Path, tmp_path: Path) -> None:
    out, log, chance = tmp_path / "out", tmp_path / "log", random.Random(1)

    def disturb(number: int) -> None:
        if number < 2:
            kill_one(log, out, number, 2, chance)

    assert run_job(log, asked(path, "dp2,zero3", 2, out), 2, 2, disturb), log.read_text()
    assert_went_on(out, path)


#: Layouts in which a run goes on, one after another, with their ranks; the micro-batches of a step; and how far losses
#: may be off where four ranks add in another order: a rounding of float32 a step, and what becomes of it.
WAYS = [
    pytest.param([("dp2,zero3", 2), ("", 1)], 2, 0.0, id="one kill"),
    pytest.param([("dp2,zero3", 2), ("pp2", 2), ("", 1)], 2, 0.0, id="two ranks", marks=pytest.mark.slow),
    pytest.param([("dp4,zero3", 4), ("pp2", 2), ("", 1)], 4, 1e-5, id="four ranks", marks=pytest.mark.slow),
    pytest.param([("pp4", 4), ("dp2", 2), ("dp4", 4), ("", 1)], 4, 1e-5, id="more", marks=pytest.mark.slow),
]


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize(("ways", "micro", "rel"), WAYS)
def test_killed_and_resumed_in_another_layout(
    path: Path, tmp_path: Path, ways: list[tuple[str, int]], micro: int, rel: float, seed: int
) -> None:
    out, log, chance = tmp_path / "out", tmp_path / "log", random.Random(seed)
    for layout, ranks in ways[:-1]:
        argv = [*asked(path, layout, ranks, out, micro), "--resume"]
        run_job(log, argv, ranks, 0, lambda number, ranks=ranks: kill_one(log, out, number, ranks, chance))
    train_run(load_run(path, asked(path, "", 1, out, micro)[3:]), resume=True)
    assert_went_on(out, path, micro, rel)


KILLS = ["dp2,zero3", "pp2", "dp2", "dp2,zero1"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_twenty_kills_at_random_instants(path: Path, tmp_path: Path, seed: int) -> None:
    """Every other job is started again by torchrun, the others go on as one process."""
    out, log, chance = tmp_path / "out", tmp_path / "log", random.Random(seed)
    print(f"seed {seed}")
    again, layout = seed % 2, KILLS[seed // 2 % len(KILLS)]

    def disturb(number: int) -> None:
        if not number:
            kill_one(log, out, number, 2, chance)

    ended = run_job(log, asked(path, layout, 2, out), 2, again, disturb)
    assert ended or not again, log.read_text()
    train_run(load_run(path, asked(path, "", 1, out)[3:]), resume=True)
    assert_went_on(out, path)


LARGER = "model.sizes={dim=256, num_layers=2, num_heads=2}"
#: Settings of a job that lasts some seconds, and trains alike on one rank and on two.
ELASTIC = (
    LARGER,
    "data.sequence_length=128",
    "memory={policy='keep-all', budget='100%'}",
    "checkpoint={every_steps=3}",
    "optimization={steps=240, micro_batches=2}",
)


def _with_little_disk(log: Path, argv: list[str]) -> None:
    """Rank 1 may write files of 64 KiB, as on a disk that is nearly full."""
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
    _work(log, argv)


def _with_little_memory(log: Path, argv: list[str]) -> None:
    """Rank 1 gets 40 MiB more than it has when its data are open, less than its plan takes."""
    begin = TextDataset.__init__

    def limited(self: TextDataset, *args: Any, **settings: Any) -> None:
        begin(self, *args, **settings)
        if os.environ["RANK"] == "1":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), used + (40 << 20)))

    TextDataset.__init__ = limited
    _work(log, argv)


def _stopped(log: Path, argv: list[str]) -> None:
    """Rank 1 stops in its third step, as a process that swaps or hangs; others wait for 8 seconds."""
    job.Replicas.__init__.__defaults__ = (8.0,)
    batch = TextDataset.batch

    def stopping(self: TextDataset, step: int, micro: int) -> Any:
        if os.environ["RANK"] == "1" and step == 2:
            log.with_name("stopped").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return batch(self, step, micro)

    TextDataset.batch = stopping
    _work(log, argv)


def errors_of(log: Path) -> list[str]:
    """Errors that the ranks of a job said."""
    return [line for line in log.read_text().splitlines() if line.startswith("error: ")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "memory", "said"),
    [
        (_with_little_disk, "memory={budget='99%'}", "rank-1"),
        (_with_little_memory, "memory={policy='keep-all', budget='100%'}", "on rank 1 .* memory"),
    ],
    ids=["disk", "memory"],
)
def test_a_rank_without_disk_or_memory_ends_all_with_one_error(
    path: Path, tmp_path: Path, work: Callable[[Path, list[str]], None], memory: str, said: str
) -> None:
    log, out, started = tmp_path / "log", tmp_path / "out", time.monotonic()
    argv = [*asked(path, "dp2", 2, out), LARGER, memory]
    assert not run_job(log, argv, 2, 0, lambda _: None, work)
    assert time.monotonic() - started < 30
    errors = errors_of(log)
    assert len(errors) == 1, log.read_text()
    assert re.search(said, errors[0])


@pytest.mark.slow
def test_a_rank_that_stops_is_named(path: Path, tmp_path: Path) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    said = list[float]()

    def disturb(_: int) -> None:
        until(lambda: log.is_file() and errors_of(log), 60)
        said.append(time.monotonic())
        with suppress(ProcessLookupError):
            os.kill(int(log.with_name("pid 0 1").read_text()), signal.SIGCONT)

    assert not run_job(log, asked(path, "dp2", 2, out), 2, 0, disturb, _stopped)
    assert "rank 1" in errors_of(log)[0], log.read_text()
    assert said[0] - float(log.with_name("stopped").read_text()) < 12


@pytest.mark.slow
def test_a_full_disk_of_a_rank_ends_all_with_one_error(path: Path, tmp_path: Path) -> None:
    """The swap file of rank 1 is on a disk of 64 KiB."""
    out, disk = tmp_path / "out", tmp_path / "out" / "rank-1"
    disk.mkdir(parents=True)
    mounted = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=64k none {shlex.quote(str(disk))}"
    if (
        shutil.which("unshare") is None
        or subprocess.run([*mounted, mount], check=False, capture_output=True).returncode
    ):
        pytest.skip("file systems cannot be mounted here")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lading"]
    command += [
        *asked(path, "dp2", 2, out),
        "model.sizes={dim=256, num_layers=2, num_heads=2}",
        "memory={budget='99%'}",
    ]
    started = time.monotonic()
    done = subprocess.run(
        [*mounted, f"{mount} && exec {shlex.join(command)}"], capture_output=True, text=True, check=False
    )
    assert done.returncode, done.stdout
    assert time.monotonic() - started < 30
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "rank-1" in errors[0]


@pytest.mark.slow
def test_ctrl_c_stops_all_ranks_and_leaves_a_checkpoint(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lading"]
    command += ["train", str(path), "--no-cache", *ELASTIC, "checkpoint={every_steps=0}", f"out={out}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as launched:
        until(lambda: num_lines(out / "metrics.jsonl") >= 5)
        os.killpg(launched.pid, signal.SIGINT)  # as a terminal does
        _, said = launched.communicate(timeout=60)
    newest = latest_checkpoint(out / "checkpoints")
    assert newest is not None, said
    assert open_checkpoint(newest).step == num_lines(out / "metrics.jsonl") < 240
    train_run(load_run(path, [*ELASTIC, "checkpoint={every_steps=0}", f"out={out}"]), resume=True)
    assert [step for step, _ in curve(out)] == list(range(240))


@pytest.mark.slow
def test_ranks_join_and_leave_a_job(path: Path, tmp_path: Path) -> None:
    """One agent of torchrun trains; another joins, and is killed with its rank; the first goes on alone."""
    out = tmp_path / "out"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    patience = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", patience]
    command += ["--max-restarts", "3", "--monitor-interval", "0.1", "-m", "lading", "train", str(path), "--no-cache"]
    asked = [*ELASTIC, "optimization.steps=4000", "layout=zero3"]  # as many replicas as there are ranks

    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else torch 2.13 lets no rank join

    def agent(log: Path) -> subprocess.Popen[str]:
        with log.open("w") as said:
            return subprocess.Popen(
                [*command, *asked, f"out={out}"], env=env, stdout=said, stderr=said, text=True, start_new_session=True
            )

    def said(words: str) -> bool:
        return any(words in " ".join(log.read_text().split()) for log in logs if log.is_file())

    def went_on() -> None:
        before = num_lines(out / "metrics.jsonl")
        until(lambda: num_lines(out / "metrics.jsonl") >= before + 5)

    logs = [tmp_path / "first", tmp_path / "second"]
    with agent(logs[0]) as first:
        went_on()
        with agent(logs[1]) as second:
            until(lambda: said("ranks (was 1, is 2)"))
            went_on()
            ranks = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
            for process in (second.pid, *map(int, ranks)):
                os.kill(process, signal.SIGKILL)
        until(lambda: said("ranks (was 2, is 1)"))
        went_on()
        os.killpg(first.pid, signal.SIGINT)
    assert said("ranks (was 2, is 1)"), [log.read_text() for log in logs]
    losses = curve(out)
    assert [step for step, _ in losses] == list(range(len(losses)))
    steps = f"optimization.steps={len(losses)}"
    train_run(load_run(path, [*ELASTIC, steps, f"out={tmp_path / 'whole'}"]))
    assert losses == curve(tmp_path / "whole")
