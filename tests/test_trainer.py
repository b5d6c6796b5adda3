"""A user's own model and loop in a Trainer."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lading.checkpoint.store import open_checkpoint
from lading.errors import ConfigError, StorageError
from lading.ir.defer import updates
from lading.ir.graph import StepGraph
from lading.ir.plan import Plan
from lading.memory.restore import program_of
from lading.optim.adamw import AdamW
from lading.prepare import plan
from lading.tracing.trace import capture
from lading.trainer import Trainer
from tests.machines import small_machine
from tests.runs import OVERHEAD_BYTES, budget_for, failing

B, F = 64, 96


pytestmark = pytest.mark.usefixtures("one_thread")


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
    everything = program_of(plan(graph, small_machine(), budget="100%"), graph)
    return plan(graph, small_machine(), budget=budget_for(everything, 0.6)), graph


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.long
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
    assert made.choices.gaps
    model = net()
    with Trainer(made, graph, model, optimizer=AdamW(lr=1e-2), folder=tmp_path) as trainer:
        with pytest.raises(ConfigError, match=r"its values are with a lading\.Trainer"):
            model.state_dict()
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


@pytest.mark.parametrize("mode", [FakeTensorMode(), torch.device("meta")])
def test_a_model_without_values_is_refused(
    planned: tuple[Plan, StepGraph], mode: AbstractContextManager[object]
) -> None:
    made, graph = planned
    with mode:
        model = net()
    with pytest.raises(ConfigError, match=r"expected a model with values, found tensors without any \(up\.weight"):
        Trainer(made, graph, model)


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


def test_a_job_of_several_ranks_needs_a_word(
    planned: tuple[Plan, StepGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun starts it, with or without a process group."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"found one of 2 ranks \(its launcher set WORLD_SIZE\).*independent=True"):
        Trainer(*planned, net(), folder=tmp_path)
    with Trainer(*planned, net(), folder=tmp_path, independent=True) as trainer:
        trainer.step(batch(0))
    monkeypatch.setenv("WORLD_SIZE", "1")
    Trainer(*planned, net(), folder=tmp_path).close()


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


def test_a_step_in_which_the_disk_fails(
    planned: tuple[Plan, StepGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was updated by then: the step has not happened, and may be run again."""
    with Trainer(*planned, net(), folder=tmp_path / "other") as trainer:
        torch.manual_seed(1)
        wanted = [trainer.step(batch(step)) for step in range(3)]
        weight = trainer.value("down.weight")
    model = net()
    folder = tmp_path / "swap"
    with Trainer(*planned, model, folder=folder) as trainer:
        torch.manual_seed(1)
        found = [trainer.step(batch(0))]
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", failing(os.pwritev, 1, errno.EIO))
            with pytest.raises(StorageError, match=r"action \d+ MOVE disk_write .* failed") as caught:
                trainer.step(batch(1))
        assert "this step has not happened: all values are those after step 1" in caught.value.__notes__[0]
        found += [trainer.step(batch(step)) for step in (1, 2)]
    assert found == wanted
    assert torch.equal(model.down.weight, weight)
    assert not list(folder.iterdir())


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
        with pytest.raises(ConfigError, match=r"deep\.0\.weight: expected a tensor, got list"):
            trainer.set_value("deep.0.weight", [1.0])  # type: ignore[arg-type]
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


@pytest.mark.long
def test_saving_while_updates_wait_for_the_next_step(
    planned: tuple[Plan, StepGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All updates are deferred: a save runs them first, and what goes on from it does as if nothing was saved."""
    monkeypatch.setattr("lading.planner.orders._counts", lambda step: (len(updates(step.graph)),))
    made = plan(planned[1], small_machine(), budget=planned[0].budgets["device"], cache=False)
    assert made.choices.deferred == len(planned[1].parameters)
    reference, numbers = net(), AdamW(lr=1e-2)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    wanted: list[float] = []
    with Trainer(made, planned[1], net(), optimizer=numbers, folder=tmp_path) as trainer:
        torch.manual_seed(1)
        found = [trainer.step(batch(0)), trainer.step(batch(1))]
        assert trainer._executor._pending
        saved = trainer.save(tmp_path / "saved")
        assert not trainer._executor._pending
        found += [trainer.step(batch(2)), trainer.step(batch(3))]
        assert trainer._executor._pending
    torch.manual_seed(1)
    after = dict[str, torch.Tensor]()
    for step in range(4):
        loss = loss_fn(reference, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
        if step == 1:
            after = values(reference)
    assert found == wanted
    held = open_checkpoint(saved)
    assert all(torch.equal(held.read(name), after[name]) for name in ("up.weight", "down.bias", "norm.running_mean"))
    with Trainer(made, planned[1], None, optimizer=numbers, folder=tmp_path) as trainer:
        trainer.load(saved)
        assert [trainer.step(batch(2)), trainer.step(batch(3))] == wanted[2:]


def test_two_trainers_save_into_one_folder(planned: tuple[Plan, StepGraph], tmp_path: Path) -> None:
    """The second is refused while the first is open; what the first has saved stays."""
    with Trainer(*planned, net(), folder=tmp_path) as trainer:
        saved = trainer.save(tmp_path / "saved", keep=1, keep_every_steps=2)
        (tmp_path / "other").mkdir()
        with Trainer(*planned, net(), folder=tmp_path / "other") as other:
            other.load(saved)
            with pytest.raises(StorageError, match=rf"expected {tmp_path}/saved to be free, found another"):
                other.save(tmp_path / "saved")
            other.save(tmp_path / "others")
        for step in range(3):
            trainer.step(batch(step))
            trainer.save(tmp_path / "saved", keep=1, keep_every_steps=2)
    assert sorted(path.name for path in (tmp_path / "saved").glob("step-*")) == [
        f"step-{step:08d}" for step in (0, 2, 3)
    ]
    with Trainer(*planned, net(), folder=tmp_path) as again:  # the first is closed, and still somebody's
        again.save(tmp_path / "saved")
        again.pause()
        with (
            Trainer(*planned, net(), folder=tmp_path) as other,
            pytest.raises(StorageError, match=rf"expected {tmp_path}/saved to be free, found another"),
        ):
            other.save(tmp_path / "saved")
        again.resume(*planned)
        again.save(tmp_path / "saved")
    assert trainer.steps == 3


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


def test_several_losses_are_reported_by_name(tmp_path: Path) -> None:
    """Their values are those of plain PyTorch, and one of them may be a parameter itself."""

    def several(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        y = model(batch["x"])
        return {
            "fit": (y - batch["y"]).square().mean(),
            "size": y.abs().mean() * 0.1,
            "bias": model.get_parameter("down.bias")[0],
        }

    model, reference = net(), net()
    graph = capture(model, batch(0), several, accumulation=2)
    assert graph.loss_names == ("loss", "fit", "size", "bias")
    made = plan(graph, small_machine(), budget="100%")
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(1)
    got: list[dict[str, float]] = []
    with Trainer(made, graph, model, optimizer=AdamW(lr=1e-3), folder=tmp_path) as trainer:
        for step in range(3):
            total = trainer.step([batch(2 * step), batch(2 * step + 1)])
            got.append({"loss": total, **trainer.losses})
    torch.manual_seed(1)
    for found in got:
        step = got.index(found)
        terms = []
        for micro in range(2):
            terms.append(several(reference, batch(2 * step + micro)))
            (sum(terms[-1].values(), torch.zeros(())) / 2).backward()
        for name in ("fit", "size", "bias"):
            assert found[name] == (terms[0][name].item() + terms[1][name].item()) / 2
        assert found["loss"] == pytest.approx(sum(found[name] for name in ("fit", "size", "bias")))
        optimizer.step()
        optimizer.zero_grad()


def test_a_list_of_tensors_is_a_batch_where_one_was_captured(tmp_path: Path) -> None:
    """Also one of a single tensor, and in a list of micro-batches."""

    def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return model(batch[0]).square().mean() * len(batch)

    for leaves in (1, 2):
        made = [torch.ones(4, F)] * leaves
        for accumulation in (1, 2):
            model = torch.nn.Linear(F, F)
            graph = capture(model, made, loss, accumulation=accumulation)
            ready = plan(graph, small_machine(overhead_bytes=OVERHEAD_BYTES), budget="100%")
            with Trainer(ready, graph, model, folder=tmp_path) as trainer:
                assert trainer.step([made] * accumulation) > 0
                if accumulation == 1:
                    assert trainer.step(made) > 0
                with pytest.raises(ConfigError):
                    trainer.step([made] * 3)


def test_gradients_from_before_are_told(planned: tuple[Plan, StepGraph], tmp_path: Path) -> None:
    model = net()
    loss_fn(model, batch(0)).backward()
    with pytest.warns(UserWarning, match=r"gradients of a backward pass before are left as they are \(up\.weight, "):
        trainer = Trainer(*planned, model, folder=tmp_path)
    trainer.close()
