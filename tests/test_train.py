"""The loop: a user's own model in a Trainer, and whole runs that go wrong."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lading.capture.trace import capture
from lading.checkpoint.store import latest_checkpoint, open_checkpoint
from lading.cli.main import main
from lading.config import AdamW, load_run
from lading.errors import ConfigError, StorageError
from lading.ir.graph import StepGraph
from lading.ir.plan import Plan
from lading.prepare import plan, plan_run
from lading.report.metrics import read_metrics
from lading.runtime.resident import PeakMeter
from lading.train import Trainer, train_run
from tests.machines import small_machine
from tests.runs import num_lines, start, wait_until, write_run

B, F = 64, 96


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Net(torch.nn.Module):
    """What a user may write: a tied weight, a buffer written in place, dropout."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.up = torch.nn.Linear(F, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.deep = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Dropout(0.2))
        self.down = torch.nn.Linear(width, F)
        self.again = torch.nn.Linear(F, width)
        self.again.weight = self.up.weight

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.down(self.deep(self.norm(self.up(x_BF))) + self.again(x_BF))


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])


def net(width: int = 128) -> Net:
    torch.manual_seed(0)
    return Net(width)


def batch(step: int, size: int = B) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(size, F, generator=generator), "y": torch.randn(size, F, generator=generator)}


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, StepGraph]:
    graph = capture(net(), batch(0), loss_fn)
    return plan(graph, small_machine(), budget="60%"), graph


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_loop_of_ones_own(planned: tuple[Plan, StepGraph], tmp_path: Path) -> None:
    reference = net()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    wanted: list[float] = []
    for step in range(10):
        loss = loss_fn(reference, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())

    made, graph = planned
    assert made.choices
    model = net()
    with Trainer(made, graph, model, optimizer=AdamW(lr=1e-2), folder=tmp_path) as trainer:
        assert sum(p.numel() for p in model.parameters()) == 0  # their memory is the trainer's now
        losses = [trainer.step(batch(step)) for step in range(10)]
        assert torch.equal(trainer.value("down.weight"), reference.down.weight)
        assert torch.equal(trainer.value("again.weight"), trainer.value("up.weight"))
        state = optimizer.state[reference.down.bias]
        assert torch.equal(trainer.value("down.bias.exp_avg"), state["exp_avg"])
    assert losses == wanted
    assert same(values(model), values(reference))
    assert model.again.weight is model.up.weight
    model.eval()
    reference.eval()
    assert torch.equal(model(batch(99)["x"]), reference(batch(99)["x"]))
    model.train()
    loss_fn(model, batch(0)).backward()  # it is an ordinary module again
    assert model.up.weight.grad is not None
    assert not list(tmp_path.iterdir())


def every_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Losses whose kernels first want room for every element."""
    found, wanted = model(batch["x"]), batch["y"]
    functional = torch.nn.functional
    losses = [
        functional.mse_loss(found, wanted),
        functional.smooth_l1_loss(found, wanted),
        functional.huber_loss(found, wanted, reduction="sum"),
        functional.l1_loss(found, wanted),
        functional.soft_margin_loss(found, wanted.sign()),
        functional.binary_cross_entropy(found.sigmoid(), wanted.sigmoid()),
        functional.binary_cross_entropy_with_logits(found, wanted.sigmoid()),
        functional.mse_loss(found, wanted, reduction="none").mean(),
    ]
    return torch.stack(losses).sum()


def test_every_loss(tmp_path: Path) -> None:
    model, reference = torch.nn.Linear(F, F), torch.nn.Linear(F, F)
    reference.load_state_dict(model.state_dict())
    graph = capture(model, batch(0), every_loss)
    with Trainer(plan(graph, small_machine(), budget="100%"), graph, model, folder=tmp_path) as trainer:
        assert trainer.step(batch(0)) == every_loss(reference, batch(0)).item()


def test_another_graph_model_or_batch(planned: tuple[Plan, StepGraph], tmp_path: Path) -> None:
    made, graph = planned
    other = capture(net(96), batch(0), loss_fn)
    with pytest.raises(ConfigError, match="the plan was made for another model"):
        Trainer(made, other, net(96), folder=tmp_path)
    model = net(96)
    before = values(model)
    with pytest.raises(ConfigError, match=r"expected the model that was captured.*again\.bias \(expected .*128.*96"):
        Trainer(made, graph, model, folder=tmp_path)
    assert same(values(model), before)
    model = net()
    model.extra = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"extra\.bias \(expected none"):
        Trainer(made, graph, model, folder=tmp_path)

    with (
        Trainer(made, graph, net(), folder=tmp_path) as trainer,
        Trainer(made, graph, net(), folder=tmp_path / "b") as b,
    ):
        for wrong in (
            batch(0, B + 1),
            {"x": batch(0)["x"]},
            [batch(0), batch(1)],
            {**batch(0), "x": batch(0)["x"].double()},
        ):
            with pytest.raises(ConfigError):
                trainer.step(wrong)
        assert trainer.steps == 0
        torch.manual_seed(1)
        first = trainer.step(batch(0))
        torch.manual_seed(1)
        assert b.step(batch(0)) == first
    assert not (tmp_path / "lading.lock").exists()


def test_an_error_in_the_block_leaves_the_values_of_the_last_step(
    planned: tuple[Plan, StepGraph], tmp_path: Path
) -> None:
    model = net()
    trainer = Trainer(*planned, model, folder=tmp_path)
    trainer.step(batch(0))
    after = trainer.value("down.weight")
    with pytest.raises(ZeroDivisionError), trainer:
        _ = 1 / 0
    assert torch.equal(model.down.weight, after)
    assert loss_fn(model, batch(0)).item() > 0
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="closed"):
        trainer.step(batch(0))
    trainer.close()
    assert torch.equal(model.down.weight, after)


def test_a_step_that_fails_half_way(
    planned: tuple[Plan, StepGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    folder = tmp_path / "swap"
    with Trainer(*planned, model, folder=folder) as trainer:
        trainer.step(batch(0))
        saved = trainer.save(tmp_path / "saved")
        after = trainer.value("down.weight")
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", failing(os.pwritev, 3, errno.EIO))
            with pytest.raises(StorageError, match=r"action \d+ MOVE disk_write .* failed"):
                trainer.step(batch(1))
        for use in (lambda: trainer.step(batch(1)), lambda: trainer.save(tmp_path / "saved")):
            with pytest.raises(ConfigError, match="half-way"):
                use()
    assert sum(p.numel() for p in model.parameters()) == 0  # half of a step is never passed off as a result
    assert not list(folder.iterdir())
    with Trainer(*planned, None, folder=folder) as trainer:
        trainer.load(saved)
        assert torch.equal(trainer.value("down.weight"), after)


def failing(function: Callable[..., Any], calls: int, code: int) -> Callable[..., Any]:
    """``function``, whose call number ``calls`` and all later ones fail."""
    count = 0

    def call(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count >= calls:
            raise OSError(code, os.strerror(code))
        return function(*args)

    return call


def test_values(planned: tuple[Plan, StepGraph], tmp_path: Path) -> None:
    model = net()
    with Trainer(*planned, model, folder=tmp_path) as trainer:
        for name in ("deep.0.weight", "norm.running_mean", "down.weight.exp_avg_sq", "norm.num_batches_tracked"):
            value = trainer.value(name)
            trainer.set_value(name, value + 1)
            assert torch.equal(trainer.value(name), value + 1)
            value.zero_()  # a copy
            assert not torch.equal(trainer.value(name), value)
        trainer.set_value("again.weight", torch.ones(128, F))
        assert torch.equal(trainer.value("up.weight"), torch.ones(128, F))
        with pytest.raises(ConfigError, match=r"got 'deep\.0\.wieght'; did you mean 'deep\.0\.weight'"):
            trainer.value("deep.0.wieght")
        with pytest.raises(ConfigError, match=r"expected 'deep\.0\.weight' as float32"):
            trainer.set_value("deep.0.weight", torch.ones(3))
    assert torch.equal(model.up.weight, torch.ones(128, F))
    assert model.norm.num_batches_tracked == 1


def test_a_checkpoint_goes_on_to_the_bit(planned: tuple[Plan, StepGraph], tmp_path: Path) -> None:
    with Trainer(*planned, net(), folder=tmp_path) as trainer:
        torch.manual_seed(1)
        for step in range(3):
            trainer.step(batch(step))
        saved = trainer.save(tmp_path / "saved", meta={"note": "here"})
        wanted = [trainer.step(batch(step)) for step in range(3, 7)]
        weight = trainer.value("up.weight")
    torch.manual_seed(2)
    model = net()
    everything = plan(planned[1], small_machine(), budget="100%")
    with Trainer(everything, planned[1], model, folder=tmp_path) as trainer:
        assert trainer.load(saved) == {"note": "here"}
        assert trainer.steps == 3
        assert [trainer.step(batch(step)) for step in range(3, 7)] == wanted
    assert torch.equal(model.up.weight, weight)


def test_a_checkpoint_of_another_model(planned: tuple[Plan, StepGraph], tmp_path: Path) -> None:
    with Trainer(*planned, net(), folder=tmp_path) as trainer:
        saved = trainer.save(tmp_path / "saved")
    graph = capture(net(96), batch(0), loss_fn)
    model = net(96)
    before = values(model)
    with Trainer(plan(graph, small_machine(), budget="100%"), graph, model, folder=tmp_path) as trainer:
        with pytest.raises(StorageError, match=r"expected a checkpoint of this model.*again\.bias.*96.*128"):
            trainer.load(saved)
        trainer.load(trainer.save(tmp_path / "saved_96"))
    assert same(values(model), before)


def test_an_interrupt_while_the_streams_start(
    planned: tuple[Plan, StepGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other streams are already waiting for the compute stream, which never comes."""
    trainer = Trainer(*planned, net(), folder=tmp_path)
    workers = trainer._executor._workers
    begin = workers.start

    def interrupted(streams: list[str]) -> None:
        begin(streams)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.step(batch(0))
    closing = threading.Thread(target=trainer.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert not list(tmp_path.iterdir())


# -- whole runs


#: A shorter and smaller run, with room for about two thirds of its tensors.
SHORT = (
    "model.sizes.num_layers=1",
    "optimization.steps=12",
    "optimization.accumulation=1",
    "memory.budget=99%",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan]:
    """(RUN.toml, plan of the short run)."""
    path = write_run(tmp_path_factory.mktemp("short"))
    threads = torch.get_num_threads()
    result = plan_run(load_run(path, SHORT)).plan
    torch.set_num_threads(threads)
    return path, result


def saved_plan(made: Plan, out: Path, **changes: Any) -> Path:
    """The plan for the run in ``out``, as a file; ``changes`` are of its optimization or, by name, its checkpoint."""
    run = json.loads(json.dumps(made.run))
    run["out"] = str(out)
    for key, value in changes.items():
        run["checkpoint" if key in run["checkpoint"] else "optimization"][key] = value
    path = out.parent / f"{out.name}.json"
    dataclasses.replace(made, run=run).save(path)
    return path


def losses(out: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(out / "metrics.jsonl")]


def failure(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main(argv)
    return code, capsys.readouterr().err.splitlines()[-1]


def test_an_out_folder_with_checkpoints(
    made: tuple[Path, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plan_made = made
    out = tmp_path / "out"
    result = train_run(Plan.load(saved_plan(plan_made, out)))
    assert list(result.losses) == losses(out)
    assert [p.name for p in sorted((out / "checkpoints").iterdir())] == ["step-00000010", "step-00000012"]
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    code, message = failure(capsys, "train", str(path), *SHORT, f"out={out}")
    assert code == 2
    assert "holds checkpoints of an earlier run (newest step-00000012); give --resume, or another out" in message
    for change, expected in {
        "seed=4": "seed (was 3, is 4)",
        "optimization.clip_norm=0.5": "optimization.clip_norm (was 1.0, is 0.5)",
        "model.sizes.dim=96": "model.sizes.dim (was 64, is 96)",
        "optimization.steps=20": "optimization.steps (was 12, is 20)",  # the cosine ends elsewhere
        "threads=2": "threads (was 1, is 2)",
    }.items():
        code, message = failure(capsys, "train", str(path), *SHORT, f"out={out}", change, "--resume")
        assert (code, expected in message) == (2, True), message
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_a_longer_run_at_a_constant_rate_goes_on(made: tuple[Path, Plan], tmp_path: Path) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    settings: dict[str, Any] = {"schedule": "constant", "warmup_steps": 2}
    train_run(Plan.load(saved_plan(made[1], out, steps=3, **settings)))
    result = train_run(Plan.load(saved_plan(made[1], out, steps=6, **settings)), resume=True)
    train_run(Plan.load(saved_plan(made[1], whole, steps=6, **settings)))
    assert losses(out) == losses(whole)
    assert list(result.losses) == losses(out)[3:]


def test_another_text_is_another_run(
    made: tuple[Path, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("a text of one's own " * 100)
    arguments = ["train", str(made[0]), *SHORT, f"out={out}", f"data.source={text}", "optimization.warmup_steps=0"]
    assert main([*arguments, "optimization.steps=2"]) == 0
    text.write_text("another text of one's own " * 100)
    code, message = failure(capsys, *arguments, "optimization.steps=2", "--resume")
    assert code == 2
    assert "data.source (was 'text " in message


def test_a_plan_is_run_as_it_is(
    made: tuple[Path, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import lading.train

    plan_made = made[1]
    run_at: list[str] = []
    executor = lading.train.Executor

    def recording(program: Any, **kwargs: Any) -> Any:
        run_at.append(program.fingerprint)
        return executor(program, **kwargs)

    monkeypatch.setattr(lading.train, "Executor", recording)
    assert plan_made.choices
    file = saved_plan(plan_made, tmp_path / "out", steps=4)
    assert main(["train", "--plan", str(file)]) == 0
    assert run_at == [plan_made.program_fingerprint]
    assert Plan.load(tmp_path / "out" / "plan.json") == Plan.load(file)

    data = json.loads(file.read_text())
    edits: dict[str, Callable[[dict[str, Any]], object]] = {
        "the plan was made for the host 'another'": lambda d: d.update(host_id="another"),
        "the plan was made for another model": lambda d: d["run"]["model"]["sizes"].update(dim=96),
        "the plan was made for another machine": lambda d: d["machine"]["device"].update(memory_bytes=1 << 30),
        "expected a machine that computes on its CPU": cuda,
        "the plan records no run": lambda d: d.update(run=None),
    }
    capsys.readouterr()
    for expected, edit in edits.items():
        edited = json.loads(json.dumps(data))
        edit(edited)
        (tmp_path / "edited.json").write_text(json.dumps(edited))
        code, message = failure(capsys, "train", "--plan", str(tmp_path / "edited.json"))
        assert code == 2
        assert expected in message
    assert len(run_at) == 1


def cuda(data: dict[str, Any]) -> None:
    """Replace a plan by one for a GPU."""
    run = {**data["run"], "machine": "rtx4090", "out": data["run"]["out"] + "-gpu"}
    made = plan_run(load_run_dict(run)).plan
    made.save(Path(run["out"] + ".json"))
    data.clear()
    data.update(json.loads(Path(run["out"] + ".json").read_text()))


def load_run_dict(run: dict[str, Any]) -> Any:
    from lading.config import run_from_dict

    return run_from_dict({**run, "memory": {"budget": "100%"}})


def test_a_broken_budget_is_reported_and_saved(
    made: tuple[Path, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(PeakMeter, "peak_bytes", lambda _: 1 << 40)
    code, message = failure(capsys, "train", "--plan", str(saved_plan(made[1], out, steps=4)))
    assert code == 4
    assert "measured peak 102" in message
    assert "above the budget" in message
    newest = latest_checkpoint(out / "checkpoints")
    assert newest is not None
    assert open_checkpoint(newest).step == 4
    assert (out / "report.html").stat().st_size > 0
    code, _ = failure(capsys, "train", "--plan", str(out / "plan.json"), "--resume")
    assert code == 4  # asked again, it says so again


def test_a_full_disk(
    made: tuple[Path, Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, whole = tmp_path / "out", tmp_path / "whole"
    file = str(saved_plan(made[1], out, every_steps=2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing(os.posix_fallocate, 1, errno.ENOSPC))
        code, message = failure(capsys, "train", "--plan", file)
        assert (code, "No space left on device" in message) == (2, True), message
    with monkeypatch.context() as patch:
        # Each save waits for the disk four times: the fifth one does not fit.
        patch.setattr("lading.checkpoint.state.os.fsync", failing(os.fsync, 20, errno.ENOSPC))
        code, message = failure(capsys, "train", "--plan", file)
        assert (code, "the disk is full: checkpoint" in message) == (2, True), message
    newest = latest_checkpoint(out / "checkpoints")
    assert newest is not None
    open_checkpoint(newest).verify()
    assert str(newest) in message
    assert not list((out / "checkpoints").glob("*.tmp-*"))
    assert not list(out.glob("lading*"))
    assert main(["train", "--plan", file, "--resume"]) == 0
    train_run(Plan.load(saved_plan(made[1], whole)))
    assert losses(out) == losses(whole)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_and_a_second_run(
    made: tuple[Path, Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    file = str(saved_plan(made[1], out, steps=100_000, schedule="constant"))
    process = start(log, "train", "--plan", file)
    assert wait_until(lambda: num_lines(out / "metrics.jsonl") > 6, process), log.read_text()
    assert process.pid is not None
    if number == signal.SIGTERM:
        found, message = failure(capsys, "train", "--plan", file, "--resume")
        assert found == 2
        assert f"expected {out} to be free, found process {process.pid} training there" in message
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == code
    assert log.read_text().splitlines()[-1] == {143: "terminated", 130: "interrupted"}[code]
    assert not list(out.glob("lading*"))
    steps = [record["step"] for record in read_metrics(out / "metrics.jsonl")]
    assert steps == list(range(len(steps)))
    newest = latest_checkpoint(out / "checkpoints")
    assert newest is not None
    open_checkpoint(newest).verify()
    assert open_checkpoint(newest).step == len(steps) // 5 * 5
