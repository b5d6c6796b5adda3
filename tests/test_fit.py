"""Whether a run fits a machine: the table adds up, and what does not fit says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lading.catalog.load import save_machine
from lading.cli.main import main
from lading.config import RunConfig, load_run
from lading.errors import ConfigError
from lading.fit import FitResult, fit_run
from tests.machines import small_machine
from tests.runs import write_run

SMALL = ("model.sizes.num_layers=1", "optimization.accumulation=1")


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


def together(result: FitResult, tier: str) -> int:
    return sum(row.get(tier, 0) for row in result.rows.values())


def test_a_gpu_of_the_catalog(run: RunConfig) -> None:
    result = fit_run(run, "rtx4090")
    assert result.error is None
    # One layer of 64 with two embeddings and the head, in fp32; AdamW's two states.
    parameters = 4 * (256 * 64 + 256 * 64 + 12 * 64 * 64 + 13 * 64 + 2 * 64)
    assert parameters * 0.9 < result.rows["parameters"]["device"] < parameters * 1.5
    assert result.rows["optimizer state"]["device"] == pytest.approx(2 * result.rows["parameters"]["device"], rel=0.1)
    assert result.rows["process overhead"]["device"] >= 1_300_000_000
    assert result.allowed.keys() == {"device", "host", "disk"}
    assert any("scratch memory" in text for text in result.assumptions)
    assert str(result).splitlines()[-1].startswith("FITS rtx4090, predicted step ")


def test_what_does_not_fit_shows_what_would(run: RunConfig, tmp_path: Path) -> None:
    roomy = fit_run(run, machine(tmp_path, 1 << 30))
    assert roomy.error is None
    tight = fit_run(run, machine(tmp_path, together(roomy, "device") // 8))
    assert tight.error is not None
    assert tight.error.missing_bytes > 0
    assert together(tight, "device") <= tight.error.smallest_budget_bytes < together(roomy, "device")
    assert together(tight, "disk") > 0
    assert tight.step_s > roomy.step_s
    assert "DOES NOT FIT" in str(tight).splitlines()[-1]
    assert fit_run(run, machine(tmp_path, tight.error.smallest_budget_bytes)).error is None


def test_a_machine_without_lower_tiers(run: RunConfig, tmp_path: Path) -> None:
    result = fit_run(run, machine(tmp_path, 1 << 30, disk=False))
    assert result.error is None
    assert result.allowed.keys() == {"device"}
    rows = [line for line in str(result).splitlines() if line.startswith(("parameters", "together", "allowed"))]
    assert all(line.split()[-2:] == ["-", "-"] for line in rows)
    small = fit_run(run, machine(tmp_path, 1 << 19, disk=False))
    assert small.error is not None


def test_the_command(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(run_file), *SMALL]) == 0
    assert "FITS test" in capsys.readouterr().out
    assert main(["fit", str(run_file), *SMALL, "--machine", machine(tmp_path, 1 << 19)]) == 3
    shown = capsys.readouterr()
    assert "DOES NOT FIT test" in shown.out
    assert shown.err.startswith("error: no plan fits a device budget of 512.00 KiB")
    assert "The smallest budget a plan was found for is" in shown.err
    assert not (tmp_path / "out").exists()


def test_an_unknown_machine(run: RunConfig) -> None:
    with pytest.raises(ConfigError, match="did you mean 'rtx4090'"):
        fit_run(run, "rtx4009")
