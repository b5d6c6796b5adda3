"""States in fewer bits: the numbers of plain PyTorch at any budget, the bytes predicted, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lading
from lading.checkpoint.store import open_checkpoint
from lading.config import DataConfig, load_run
from lading.errors import ConfigError, StorageError
from lading.ir.action import ActionKind
from lading.ir.graph import DTYPE_BYTES, Role, StepGraph
from lading.ir.program import COMPUTE_STREAM, PAGE_BYTES, Program
from lading.memory.restore import program_of
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.optim.adam import Adam
from lading.optim.adamw import AdamW
from lading.optim.moment_rule import MomentRule
from lading.runtime.data import TextDataset
from lading.train import train_plain, train_run
from tests.captured import shared_capture
from tests.machines import small_machine
from tests.ranks import run_ranks
from tests.runs import write_run
from tests.test_pipelines import connected
from tests.test_saved_plan import states_on_disk

pytestmark = pytest.mark.usefixtures("one_thread")

#: A table whose last block is short.
SIZES: dict[str, Any] = {"vocab_size": 97, "max_seq_len": 32, "dim": 64, "num_heads": 2, "num_layers": 1}
STORED = (AdamW(lr=1e-2, states="bf16"), AdamW(lr=1e-2, states="8bit"), Adam(lr=1e-2, states="8bit"))
STEPS = 4


def build() -> nn.Module:
    torch.manual_seed(0)
    return build_model("gpt", **SIZES)


def batch(step: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(0, 96, (4, 33), generator=torch.Generator().manual_seed(step))}


@cache
def captured(accumulation: int = 1) -> StepGraph:
    def make() -> StepGraph:
        return lading.capture(build(), batch(0), next_byte_loss, accumulation=accumulation)

    return shared_capture(make, "states", accumulation)


def planned(rule: MomentRule, budget: str | int = "100%", **asked: Any) -> lading.Plan:
    return lading.plan(captured(), small_machine(), budget=budget, optimizer=rule, cache=False, **asked)


def trained(made: lading.Plan, folder: Path, steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    with lading.Trainer(made, captured(), build(), folder=folder) as trainer:
        losses = [trainer.step(batch(step)) for step in range(steps)]
        return losses, {name: trainer.value(name) for name in trainer._values}


def plain(rule: MomentRule) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, weights and states of plain PyTorch."""
    model = build()
    optimizer, losses = rule.plain(model.parameters()), list[float]()
    for step in range(STEPS):
        loss = next_byte_loss(model, batch(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    values = {name: p.detach() for name, p in model.named_parameters()}
    states = {f"{n}.{key}": value for n, p in model.named_parameters() for key, value in optimizer.state[p].items()}
    return losses, {**values, **states}


def moved_bytes(program: Program) -> Counter[str]:
    """Bytes that a step moves by stream, in whole pages."""
    moved: Counter[str] = Counter()
    for action in program.actions:
        if action.kind is ActionKind.MOVE and action.stream != COMPUTE_STREAM and action.storage is not None:
            pages = -(-program.graph.storages[action.storage].size_bytes // PAGE_BYTES)
            moved[action.stream] += pages * PAGE_BYTES
    return moved


def asked_of_system() -> tuple[int, int]:
    """Bytes that this process has read and written by system calls so far."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["wchar"])


@pytest.mark.long
@pytest.mark.parametrize("rule", STORED, ids=str)
def test_every_budget_and_a_disk_give_the_numbers_of_plain_pytorch(rule: MomentRule, tmp_path: Path) -> None:
    losses, values = plain(rule)
    everything = planned(rule)
    arena = program_of(everything, captured()).arena_bytes
    tight = planned(rule, everything.peak_bytes["device"] - arena // 2)
    on_disk = planned(rule, policy=states_on_disk)
    assert tight.choices.gaps
    assert moved_bytes(program_of(on_disk, captured()))
    for made in (everything, tight, on_disk):
        found, ours = trained(made, tmp_path)
        assert found == losses
        assert ours.keys() == values.keys() | {name for name, _ in captured().buffers}
        assert [name for name, value in values.items() if not torch.equal(ours[name], value)] == []


@pytest.mark.parametrize("states", ["auto", "fp32", "bf16", "8bit"])
def test_states_are_counted_as_they_are(states: Any, tmp_path: Path) -> None:
    """In the step, in the peak, in a checkpoint, and on the disk, where they are read and written once a step."""
    rule = AdamW(states=states)
    made = planned(rule, policy=states_on_disk)
    program = program_of(made, captured())
    parameters = {p.names[0]: prod(captured().tensors[p.tensor].shape) for p in captured().parameters}
    each = {"auto": 8, "fp32": 8, "bf16": 4}
    wanted = {
        name: each[states] * count
        if states in each
        else 2 * (count + 4 * -(-count // 256) if count >= 4096 else 4 * count)
        for name, count in parameters.items()
    }
    stored = [s for s in program.graph.storages if s.role is Role.OPTIMIZER_STATE]
    assert sum(s.size_bytes for s in stored) == sum(wanted.values()) + 4 * len(parameters)  # and numbers of updates
    with lading.Trainer(made, captured(), build(), folder=tmp_path) as trainer:
        for step in (0, 1):  # the code of what a step does is read as well
            trainer.step(batch(step))
        before = asked_of_system()
        for step in (2, 3, 4):
            trainer.step(batch(step))
        read, written = (now - then for now, then in zip(asked_of_system(), before, strict=True))
        saved = open_checkpoint(trainer.save(tmp_path / "saved"))
    moved = moved_bytes(program)
    assert 0 <= read - 3 * moved["disk_read"] < 4 * PAGE_BYTES  # memory and these counters are read from files
    assert 0 <= written - 3 * moved["disk_write"] < 16  # and the mark of the most memory is set back
    once = sum(s.size_bytes for s in stored if s.size_bytes >= PAGE_BYTES)
    assert moved["disk_read"] == moved["disk_write"] >= once
    kept = {n: prod(t.shape) * DTYPE_BYTES[t.dtype] for n, t in saved.tensors.items() if ".exp_avg" in n}
    assert sum(kept.values()) == sum(wanted.values())
    if states != "auto":
        assert any(f"states of adamw take {sum(wanted.values()) / sum(parameters.values()):.2f} bytes" in said
                   for said in made.assumptions)  # fmt: skip


def test_fewer_bits_lower_the_peak_by_what_they_save() -> None:
    """Of tensors; what an update widens at once comes on top, and would not show in a larger model."""
    programs = {s: program_of(planned(AdamW(states=s)), captured()) for s in ("auto", "bf16", "8bit")}
    arenas = {states: program.arena_bytes for states, program in programs.items()}
    sizes = {states: sum(s.size_bytes for s in program.graph.storages) for states, program in programs.items()}
    for states in ("bf16", "8bit"):
        assert arenas["auto"] - arenas[states] == pytest.approx(sizes["auto"] - sizes[states], rel=0.05)


@pytest.mark.long
@pytest.mark.parametrize("rule", STORED[:2], ids=str)
def test_a_run_goes_on_from_a_checkpoint_under_another_budget(rule: MomentRule, tmp_path: Path) -> None:
    losses, values = trained(planned(rule), tmp_path)
    with lading.Trainer(planned(rule), captured(), build(), folder=tmp_path) as trainer:
        found = [trainer.step(batch(step)) for step in range(2)]
        saved = trainer.save(tmp_path / "saved")
    with lading.Trainer(planned(rule, policy=states_on_disk), captured(), build(), folder=tmp_path) as trainer:
        trainer.load(saved)
        found += [trainer.step(batch(step)) for step in range(2, STEPS)]
        assert [name for name, value in values.items() if not torch.equal(trainer.value(name), value)] == []
    assert found == losses


@pytest.mark.slow
def test_a_model_learns_as_well_with_states_in_fewer_bits(tmp_path: Path) -> None:
    """Within 1% of the loss with float32 states after 200 steps on real text."""
    data = TextDataset(DataConfig(sequence_length=64, batch_size=8), tmp_path, seed=0)

    def reached(states: Any) -> float:
        torch.manual_seed(0)
        model = build_model("gpt", vocab_size=256, max_seq_len=64, dim=96, num_heads=4, num_layers=2)
        optimizer, losses = AdamW(lr=1e-3, states=states).plain(model.parameters()), list[float]()
        for step in range(200):
            loss = next_byte_loss(model, data.batch(step, 0))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0] > 5
        return sum(losses[-20:]) / 20

    usual = reached("auto")
    assert usual < 3
    for states in ("bf16", "8bit"):
        assert reached(states) == pytest.approx(usual, rel=0.01)


def test_another_format_is_refused_by_its_name(tmp_path: Path) -> None:
    """By a Trainer whose plan is for another, and by a plan for whose states a checkpoint has others."""
    made = planned(AdamW(states="8bit"))
    with pytest.raises(ConfigError, match=r"expected states '8bit' of adamw, as was planned, got 'auto'; plan again"):
        lading.Trainer(made, captured(), build(), folder=tmp_path, optimizer=AdamW())
    with pytest.raises(ConfigError, match=r"expected states 'fp32' of adamw, as was planned, got '8bit'"):
        lading.Trainer(
            planned(AdamW(states="fp32")), captured(), build(), folder=tmp_path, optimizer=AdamW(states="8bit")
        )
    with lading.Trainer(made, captured(), build(), folder=tmp_path) as trainer:
        trainer.step(batch(0))
        saved = trainer.save(tmp_path / "saved")
    with (
        lading.Trainer(planned(AdamW()), captured(), build(), folder=tmp_path) as trainer,
        pytest.raises(StorageError, match=r"in uint8, this plan keeps it in float32; load it with .* states="),
    ):
        trainer.load(saved)


def test_a_file_asks_for_a_format_and_a_run_does_not_change_it(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    settings = ("optimization.steps=4", "optimization.warmup_steps=0", "checkpoint.every_steps=2", "memory.budget=100%")
    eight = (*settings, 'optimization.optimizer={ rule = "adamw", lr = 1e-3, states = "8bit" }')
    run = load_run(path, eight)
    assert run.optimization.optimizer == AdamW(lr=1e-3, states="8bit")
    done = train_run(run)
    assert done.losses == train_plain(run, tmp_path).losses
    made = lading.Plan.load(tmp_path / "out" / "plan.json")
    assert made.request.optimizer_settings["states"] == "8bit"
    with pytest.raises(ConfigError, match=r"saved with another optimization.optimizer.states \(was '8bit', is 'auto'"):
        train_run(load_run(path, settings), resume=True)
    with pytest.raises(ConfigError, match=r"optimizer\.states: expected 'auto' or 'fp32' or 'bf16' or '8bit', got"):
        load_run(path, [*settings, 'optimization.optimizer.states="int8"'])
    with pytest.raises(ConfigError, match=r"unknown key 'optimization\.optimizer\.states'"):
        load_run(path, [*settings, 'optimization.optimizer={ rule = "lion", states = "8bit" }'])


def alone(rule: MomentRule, folder: Path, start: Path | None = None) -> dict[str, torch.Tensor]:
    """Values after three steps of two micro-batches in one process, or after the third from a checkpoint."""
    made = lading.plan(captured(2), connected(), budget="100%", optimizer=rule, cache=False, layout="dp1")
    with lading.Trainer(made, captured(2), build(), folder=folder) as trainer:
        if start is not None:
            trainer.load(start)
        for step in range(trainer.steps, 3):
            trainer.step([batch(2 * step), batch(2 * step + 1)])
        return {name: trainer.value(name) for name in trainer._values}


#: Layouts of two ranks, of which those of a pipeline are given the same micro-batches, by the rule's number.
QUICK = ((1, "dp2,zero1,bucket_bytes=20000"), (1, "dp2,zero3"), (0, "dp2,zero3"))
EVERY = (*QUICK, (0, "dp2,zero1,bucket_bytes=20000"), *((n, layout) for n in (0, 1) for layout in ("dp2", "pp2")))


def _two(rank: int, out: str, ways: Sequence[tuple[int, str]]) -> None:
    for number, layout in ways:
        graph = captured(2 if layout == "pp2" else 1)
        folder = Path(out) / f"{number} {layout} {rank}"
        folder.mkdir()
        rule = STORED[number]
        made = lading.plan(graph, connected(), budget="100%", optimizer=rule, cache=False, layout=layout)

        def train(trainer: lading.Trainer, step: int, layout: str = layout) -> None:
            both = [batch(2 * step), batch(2 * step + 1)]
            trainer.step(both if layout == "pp2" else both[rank])

        with lading.Trainer(made, graph, build(), folder=folder) as trainer:
            train(trainer, 0)
            train(trainer, 1)
            saved = trainer.save(Path(out) / f"saved {number} {layout}")
        with lading.Trainer(made, graph, build(), folder=folder) as trainer:
            trainer.load(saved)
            train(trainer, 2)
            values = {name: trainer.value(name) for name in trainer._values}
        torch.save(values, folder / "values")


def _check_ranks(folder: Path, ways: Sequence[tuple[int, str]]) -> None:
    run_ranks(_two, 2, str(folder), ways)
    whole = {number: alone(STORED[number], folder) for number in {number for number, _ in ways}}
    for number, layout in ways:
        gone_on = alone(STORED[number], folder, folder / f"saved {number} {layout}" / "step-00000002")
        ranks = [torch.load(folder / f"{number} {layout} {rank}" / "values") for rank in range(2)]
        for values in (gone_on, *ranks):
            assert values.keys() == whole[number].keys()
            differing = [n for n, value in whole[number].items() if not torch.equal(values[n], value)]
            assert differing == [], (number, layout)


@pytest.mark.long
def test_two_ranks_with_shards_have_the_numbers_of_one_process(tmp_path: Path) -> None:
    """Whose blocks are those of the whole; saved on the way, and gone on from there by both and by one process."""
    _check_ranks(tmp_path, QUICK)


@pytest.mark.slow
def test_two_ranks_have_the_numbers_of_one_process_in_every_layout(tmp_path: Path) -> None:
    _check_ranks(tmp_path, EVERY)


@pytest.mark.parametrize("layout", ["tp2", "dp2,tp2,zero3"])
def test_blocks_that_ranks_would_cut_are_refused(layout: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"layout: .* got adamw with states = \"8bit\", of which each block of elements has .*\"dp[24]\"",
    ):
        planned(AdamW(states="8bit"), layout=layout)
