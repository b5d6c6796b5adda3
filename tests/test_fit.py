"""Whether a run fits a machine: the table adds up, and what does not fit says so."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lading.catalog.load import save_machine
from lading.cli.main import main
from lading.config import RunConfig, load_run
from lading.errors import ConfigError
from lading.fit import FitResult, Hardware, fit_run, precision_for, with_sizes
from tests.machines import small_machine
from tests.runs import write_run

SMALL = ("model.sizes.dropout=0.0",)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run(tmp_path)


@pytest.fixture
def run(run_file: Path) -> RunConfig:
    return load_run(run_file, SMALL)


def machine(folder: Path, memory_bytes: int, *, disk: bool = True) -> str:
    """A machine file with so much device memory and no process overhead."""
    made = small_machine(disk=disk)
    path = folder / f"machine-{memory_bytes}-{disk}.toml"
    save_machine(dataclasses.replace(made, device=dataclasses.replace(made.device, memory_bytes=memory_bytes)), path)
    return str(path)


def sums(result: FitResult) -> dict[str, int]:
    return {tier: sum(row.get(tier, 0) for row in result.needs.rows.values()) for tier in result.allowed}


def test_a_gpu_of_the_catalog(run: RunConfig) -> None:
    result = fit_run(run, Hardware(machine="rtx4090"))
    assert result.error is None
    assert result.changes == ()
    # One layer of 64 with two embeddings and the head, in fp32; AdamW's two states.
    parameters = 4 * (256 * 64 + 256 * 64 + 12 * 64 * 64 + 13 * 64 + 2 * 64)
    rows, device = result.needs.rows, "device"
    assert parameters * 0.9 < rows["parameters"][device] < parameters * 1.5
    assert rows["optimizer state"][device] == pytest.approx(2 * rows["parameters"][device], rel=0.1)
    assert rows["workspace"][device] >= 1_300_000_000
    assert rows["logits and loss"][device] >= 2 * 32 * 256 * 4
    assert sums(result) == result.needs.step
    assert result.allowed.keys() == {"device", "host", "disk"}
    assert any("scratch memory" in text for text in result.assumptions)
    assert str(result).splitlines()[-1].startswith("FITS rtx4090, predicted step ")


def test_checkpoints_count(run: RunConfig) -> None:
    result = fit_run(run, Hardware(machine="rtx4090"))
    states = 3 * result.needs.rows["parameters"]["device"]  # with one's two moments; kept: 2, and one being written
    assert result.needs.save["disk"] == pytest.approx(3 * states, rel=0.1)
    assert result.needs.resume["disk"] == pytest.approx(2 * states, rel=0.1)
    assert result.needs.total["disk"] == result.needs.save["disk"]
    assert result.needs.resume["host"] == 256 * 64 * 4  # the largest tensor
    never = fit_run(with_sizes(run, keep=0), Hardware(machine="rtx4090"))
    assert never.needs.save == {}
    assert never.needs.resume["disk"] == 0


@pytest.mark.long
def test_what_does_not_fit_shows_what_would(run: RunConfig, tmp_path: Path) -> None:
    roomy = fit_run(run, Hardware(machine=machine(tmp_path, 1 << 30)))
    assert roomy.error is None
    tight = fit_run(run, Hardware(machine=machine(tmp_path, roomy.needs.total["device"] // 8)))
    assert tight.error is not None
    assert tight.error.missing_bytes > 0
    assert sums(tight)["device"] <= tight.error.smallest_budget_bytes < roomy.needs.total["device"]
    assert sums(tight)["disk"] > 0
    assert tight.step_s > roomy.step_s
    assert tight.time.exposed_s > 0
    assert tight.time.step_s == pytest.approx(tight.time.compute_s + tight.time.exposed_s)
    assert "DOES NOT FIT" in str(tight)
    assert [change.token_s for change in tight.changes] == sorted(change.token_s for change in tight.changes)


@pytest.mark.long
def test_a_change_that_is_named_does_make_it_fit(run_file: Path, tmp_path: Path) -> None:
    long = load_run(run_file, (*SMALL, "data.sequence_length=256", "data.batch_size=16", "checkpoint.every_steps=0"))
    least = fit_run(long, Hardware(machine=machine(tmp_path, 1 << 20)), quick=True)
    assert least.error is not None
    assert any("--quick" in text for text in least.assumptions)
    device = least.error.smallest_budget_bytes * 85 // 100
    result = fit_run(long, Hardware(machine=machine(tmp_path, device)), quick=True)
    assert result.error is not None
    texts = [change.text for change in result.changes]
    assert any(" of device instead of " in text for text in texts)
    assert "sequences of 128 tokens" in texts
    assert "micro-batches of 8 with accumulation 2" in texts
    smaller = with_sizes(long, batch=8, accumulation=2)
    again = fit_run(smaller, Hardware(machine=machine(tmp_path, device)), quick=True)
    assert again.error is None
    assert again.step_s == pytest.approx(next(c.step_s for c in result.changes if c.text.startswith("micro-batches")))


def test_a_disk_that_checkpoints_overflow(run: RunConfig, tmp_path: Path) -> None:
    path = machine(tmp_path, 1 << 30)
    whole = fit_run(run, Hardware(machine=path))
    small = fit_run(run, Hardware(machine=path, disk=str(whole.needs.save["disk"] - 1)))
    assert small.error is not None
    assert str(small.error).startswith("disk needs ")
    assert "for saving or resuming" in str(small.error)
    texts = [change.text for change in small.changes]
    assert any(text.startswith("checkpoints on another disk, of ") for text in texts)
    larger = next(text for text in texts if "of disk instead of" in text)
    size = "".join(larger.split()[:2])
    assert fit_run(run, Hardware(machine=path, disk=size)).error is None


def test_a_host_that_is_given_keeps_some_for_the_system(run: RunConfig) -> None:
    result = fit_run(run, Hardware(machine="rtx4090", host="64GB"))
    assert result.allowed["host"] == 64_000_000_000
    assert result.needs.rows["workspace"]["host"] == 4_000_000_000
    assert any("left to the system" in text for text in result.assumptions)
    with pytest.raises(ConfigError, match="--host: expected more than"):
        fit_run(run, Hardware(machine="rtx4090", host="2GB"))
    with pytest.raises(ConfigError, match="--host: cpu has no such tier \\(it has device, disk\\)"):
        fit_run(run, Hardware(machine="cpu", host="64GB"))


def test_a_machine_without_lower_tiers(run: RunConfig, tmp_path: Path) -> None:
    result = fit_run(run, Hardware(machine=machine(tmp_path, 1 << 30, disk=False)))
    assert result.error is None
    assert result.allowed.keys() == {"device"}
    head = str(result).splitlines()[1]
    assert head.split() == ["device"]
    small = fit_run(run, Hardware(machine=machine(tmp_path, 1 << 19, disk=False)))
    assert small.error is not None


def test_the_command(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(run_file), *SMALL, "--quick", "--machine", machine(tmp_path, 1 << 19)]) == 3
    shown = capsys.readouterr()
    assert "DOES NOT FIT test" in shown.out
    assert shown.err.startswith("error: no plan fits a device budget of 512.00 KiB")
    assert "The smallest budget a plan was found for is" in shown.err
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_the_budget_of_the_file_is_kept(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Though the machine has room for much more; the command line may name another."""
    assert main(["fit", str(run_file), *SMALL]) == 0
    said = capsys.readouterr().out
    assert "FITS test" in said
    assert "planned within a device budget of 99%" in said
    assert main(["fit", str(run_file), *SMALL, "memory.budget=2MB", "--quick"]) == 3
    shown = capsys.readouterr()
    assert shown.err.startswith("error: no plan fits a device budget of 1.91 MiB")
    assert re.search(r"cheapest change that fits: a device budget of \d+ MB instead of 2MB", shown.out)
    assert main(["fit", str(run_file), *SMALL, "memory.budget=2MB", "--budget", "100%", "--quick"]) == 0


@pytest.mark.long
def test_the_disk_budget_of_the_file_is_kept(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tight = ["fit", str(run_file), *SMALL, "memory.budget=69MiB"]
    assert main(tight) == 0
    assert "planned within a disk budget of 50% (memory.disk_budget)" in capsys.readouterr().out
    assert main([*tight, "memory.disk_budget=100KB"]) == 2  # and no plan of another budget is shown for it
    shown = capsys.readouterr()
    assert "on disk, its budget is 97.66 KiB (a run's is half of what is free); raise that" in " ".join(
        shown.err.split()
    )
    assert "FITS" not in shown.out
    assert main([*tight, "memory.disk_budget=0", "--quick"]) == 3
    assert "no plan fits a device budget of 69.00 MiB" in capsys.readouterr().err


@pytest.mark.long
def test_a_model_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--model", "gpt2", "--seq", "64", "--batch", "2", "--machine", "rtx4090"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("gpt2: 124 million parameters, 2 x 64 tokens, bf16, saved, 1 older kept")
    assert "FITS rtx4090" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "expected RUN.toml or --model NAME, got neither"),
        (("x.toml", "--model", "gpt2"), "expected RUN.toml or --model NAME, got both"),
        (("--model", "gpt22"), "did you mean 'gpt2'"),
        (("--model", "gpt2", "--seq", "4000"), "gpt2: expected a sequence of at most 1024 tokens, got 4000"),
        (("--model", "gpt2", "--batch", "0"), "batch_size: expected an integer >= 1, got 0"),
        (("--model", "gpt2", "--machine", "rtx4009"), "did you mean 'rtx4090'"),
        (("--model", "gpt2", "--machine", "l4", "--device", "24XB"), "expected a size such as '256MB'"),
    ],
)
def test_a_wrong_question(arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_precision_is_what_the_device_multiplies() -> None:
    assert precision_for("rtx4090") == "bf16"
    assert precision_for("v100-32gb") == "fp32"
    assert precision_for("cpu") == "fp32"
