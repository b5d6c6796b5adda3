"""What the README, the page of commands and the examples say works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from lading.catalog.fleets import lists_devices, load_fleet
from lading.catalog.load import load_machine, save_machine
from lading.cli.main import main, parse
from lading.config import load_run
from tests.machines import small_machine, unsourced
from tests.runs import start_script

ROOT = Path(__file__).parent.parent


def test_the_five_lines_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64))
    before = [p.detach().clone() for p in model.parameters()]
    save_machine(small_machine(), tmp_path / "machine.toml")
    monkeypatch.chdir(tmp_path)
    batch = {"x": torch.randn(256, 64), "y": torch.randn(256, 64)}

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])

    names = {"model": model, "batch": batch, "loss": loss, "batches": [batch] * 5}
    exec(block.replace('"25%"', '"90%"'), names)
    losses = names["losses"]
    assert isinstance(losses, list)
    assert losses[-1] < losses[0]
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def written() -> str:
    """Text of the README and of the pages on commands and clusters."""
    return "".join((ROOT / name).read_text() for name in ("README.md", "docs/commands.md", "docs/clusters.md"))


def commands() -> list[str]:
    """Every command that they write out."""
    text = written()
    spans = re.findall(r"`(lading [^`]+)`", text.replace("\\|plan.json", ""))
    return sorted({span for span in spans if "..." not in span and not span.endswith("--model")})


@pytest.mark.parametrize("command", commands())
def test_every_command_can_be_given(command: str) -> None:
    assert parse(shlex.split(command)[1:]) is not None


def test_every_option_exists() -> None:
    known = set((ROOT / "tests" / "cli" / "help.txt").read_text().split())
    spans = re.findall(r"`[^`]*`", written().replace("```", ""))
    assert {word for span in spans for word in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span)} <= known


def test_the_largest_example_fits(capsys: pytest.CaptureFixture[str]) -> None:
    (command,) = [command for command in commands() if command.startswith("lading simulate --model llama3-405b")]
    assert main(command.split()[1:]) == 0
    said = capsys.readouterr().out
    assert "FITS: up to" in said
    assert "DOES NOT" not in said


EXAMPLES = sorted((ROOT / "examples").iterdir())


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.suffix == ".toml"], ids=lambda p: p.name)
def test_examples_load(path: Path) -> None:
    if path.name == "own_machine.toml":
        assert unsourced(load_machine(path)) == ()
    elif lists_devices(path):
        assert load_fleet(path).network().devices
    else:
        assert load_run(path).optimization.steps > 0


#: Examples whose page is run by tests/test_docs.py, too.
ON_PAGES = ("own_loop.py",)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.name, marks=[pytest.mark.slow] if path.name in ON_PAGES else [])
        for path in EXAMPLES
        if path.name.startswith("own_") and path.suffix == ".py"
    ],
)
def test_own_parts(path: Path, tmp_path: Path) -> None:
    """Each says what it did, and checks it."""
    process = start_script(tmp_path / "log", path)
    process.join(100)
    said = (tmp_path / "log").read_text()
    assert process.exitcode == 0, said
    assert "loss" in said


@pytest.mark.long
def test_own_machine(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "examples" / "own_machine.toml")
    run = str(ROOT / "examples" / "llama.toml")
    assert main(["fit", run, "--machine", path, "model.sizes.num_layers=1"]) == 0
    assert "FITS desk" in capsys.readouterr().out
