"""The budget as a promise: kernels measured where they run, freed scratch given back, and what to say if it breaks."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from pathlib import Path

import pytest
import torch

from lading.errors import BudgetWarning, ConfigError
from lading.ir.expand import expand
from lading.ir.graph import StepGraph
from lading.ir.machine import Curve, Machine
from lading.memory.restore import program_of
from lading.optim.torch_update import rule_of_optimizer
from lading.prepare import plan
from lading.runtime import kernel_memory as measuring
from lading.runtime import resident
from lading.runtime.executor import Executor
from lading.runtime.host import host_id
from lading.runtime.kernel_memory import KernelMemory, kernel_memory
from lading.tracing.trace import capture
from lading.trainer import Trainer
from lading.units import GiB, MiB, format_bytes
from tests.machines import small_machine

_WIDTH = 256


class Net(torch.nn.Module):
    """A convolution, whose kernel has no form for a given result, and products."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.Conv1d(_WIDTH, _WIDTH, 3, padding=1)
        self.out = torch.nn.Linear(512, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mix(x))


def _batch(step: int = 0) -> torch.Tensor:
    return torch.rand(4, _WIDTH, 512, generator=torch.Generator().manual_seed(step))


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    return capture(Net(), _batch(), lambda model, x: model(x).square().mean())


def _here(overhead_bytes: int = 0) -> Machine:
    return dataclasses.replace(small_machine(overhead_bytes=overhead_bytes), host_id=host_id())


def test_what_reducing_threads_may_keep_counts_in_the_budget_and_a_quarter_in_the_prediction(
    graph: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = KernelMemory((0,) * len(expand(graph).ops), MiB, ())
    monkeypatch.setattr("lading.kernel_scratch.kernel_memory", lambda *_, **__: measured)
    curve = Curve(size=(1e3, 1e6), rate=(1e8, 1e9))
    here = dataclasses.replace(_here(), collectives={"all_reduce.2": curve, "send.2": curve})
    made = plan(graph, here, budget="100%", cache=False, layout="dp2")
    program = program_of(made, graph)
    largest = max(program.graph.ops[index].bytes_read for index in program.graph.collectives)
    assert program.reducing_bytes == min(8 * MiB, 2 * largest) > 0
    assert program.overhead_bytes > program.reducing_bytes + MiB
    assert program.predicted_bytes == program.peak_bytes - program.reducing_bytes * 3 // 4 == made.peak_bytes["device"]
    assert program.peak_bytes <= made.budgets["device"]


@pytest.mark.long
def test_kernels_are_run_once_in_a_process_of_their_own(graph: StepGraph, tmp_path: Path) -> None:
    step = expand(graph)
    measured = kernel_memory(step, 1, cache=tmp_path)
    scratch = dict(zip((op.name for op in step.ops), measured.scratch_bytes, strict=True))
    result_bytes = 4 * _batch().numel()
    # The kernel makes its own result, and the executor copies it; the libraries may lay tensors out anew besides.
    assert result_bytes <= scratch["aten.convolution.default"] <= 8 * result_bytes
    assert scratch["lading.adamw"] < MiB / 4
    assert MiB < measured.kept_bytes < 64 * MiB
    assert not measured.unmeasured
    (file,) = tmp_path.iterdir()
    assert kernel_memory(step, 1, cache=tmp_path) == measured
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "kept_bytes": 7}))
    assert kernel_memory(step, 1, cache=tmp_path).kept_bytes == 7  # recalled, not measured again


@pytest.mark.parametrize(
    "damage", ["", "{}", "[1]", '{"scratch_bytes": [1], "kept_bytes": 1, "unmeasured": [], "threads": 1}']
)
def test_a_damaged_file_of_measurements_is_measured_again(
    graph: StepGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    measured = KernelMemory((1,) * len(graph.ops), 2)
    monkeypatch.setattr(measuring, "_measured_apart", lambda *_: measured)
    kernel_memory(graph, 1, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(damage)
    assert kernel_memory(graph, 1, cache=tmp_path) == measured
    assert json.loads(file.read_text())["kept_bytes"] == 2


def test_where_nothing_can_be_measured_a_plan_says_so(graph: StepGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process can be started: the plan is made from what is worked out, and that is among its assumptions."""
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    made = plan(graph, _here(), budget="100%", cache=False)
    elsewhere = plan(graph, small_machine(), budget="100%", cache=False)
    assert program_of(made, graph).overhead_bytes == program_of(elsewhere, graph).overhead_bytes
    assert any("not measured: cannot measure" in said for said in made.assumptions)


@pytest.mark.long
def test_operations_that_cannot_run_alone_are_named(tmp_path: Path) -> None:
    """Zeros are no divisors, and only this process knows an operation of its own."""

    @torch.library.custom_op("lading_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    twice.register_autograd(lambda _, grad: 2 * grad)

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
            self.register_buffer("period", torch.full((8,), 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return twice(self.linear(x)) * (torch.arange(8) % self.period)

    batch = torch.rand(4, 8)
    captured = capture(Odd(), batch, lambda model, x: model(x).sum())
    measured = kernel_memory(expand(captured), 1, cache=tmp_path)
    assert {"lading_tests.twice.default", "aten.remainder.Tensor"} <= set(measured.unmeasured)
    assert all(size >= 0 for size in measured.scratch_bytes)
    assert not list(tmp_path.iterdir())  # may be measured another time


@pytest.mark.long
def test_what_making_an_optimizer_of_torch_loads_is_not_the_steps() -> None:
    """It is in the process before the Trainer is, so a budget does not count it."""
    model = torch.nn.Linear(8, 8)
    rule = rule_of_optimizer(torch.optim.AdamW(model.parameters()))
    step = expand(capture(model, torch.ones(2, 8), lambda model, x: model(x).sum()), optimizer=rule)
    assert kernel_memory(step, 1, cache=None).kept_bytes < 30 * MiB  # 79 with torch's compiler


def test_memory_that_the_caller_takes_between_steps_is_the_callers(graph: StepGraph, tmp_path: Path) -> None:
    made = plan(graph, small_machine(overhead_bytes=64 * MiB), budget="100%", cache=False)
    with warnings.catch_warnings(), Trainer(made, graph, Net(), folder=tmp_path, threads=1) as trainer:
        warnings.simplefilter("error", BudgetWarning)
        trainer.step(_batch())
        theirs = torch.ones(96 * MiB, dtype=torch.uint8)
        trainer.step(_batch(1))
        assert trainer.excess == []
        del theirs
        trainer.save(tmp_path / "saved")
        trainer.step(_batch(2))
        assert trainer.peak_bytes < made.budgets["device"]


def test_a_plan_for_this_host_counts_what_was_measured_and_is_lowered_without_measuring(
    graph: StepGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = [3 * MiB] * (len(expand(graph).ops) - 1)
    measured = KernelMemory((9 * MiB, *scratch), 21 * MiB, ("some.operation",))
    monkeypatch.setattr("lading.kernel_scratch.kernel_memory", lambda *_, **__: measured)
    made = plan(graph, _here(), budget="100%", cache=False)
    assert any("some.operation" in said for said in made.assumptions)
    monkeypatch.setattr("lading.kernel_scratch.kernel_memory", None)
    program = program_of(made, graph)
    assert program.workspace_bytes == measured.workspace_bytes > 9 * MiB
    assert program.spare_bytes == measured.spare_bytes > MiB
    assert program.predicted_bytes == program.peak_bytes - measured.spare_bytes * 3 // 4 == made.peak_bytes["device"]
    assert program.peak_bytes <= made.budgets["device"]
    assert 21 * MiB < program.overhead_bytes < 22 * MiB  # and the executor's calls
    elsewhere = program_of(plan(graph, small_machine(), budget="100%", cache=False), graph)
    assert elsewhere.overhead_bytes < 9 * MiB


def test_scratch_of_several_sizes_has_room_in_the_heap() -> None:
    assert KernelMemory((MiB // 4, MiB // 4), 0).heap_bytes == MiB  # at least
    assert KernelMemory((3 * MiB, MiB, MiB), 0).heap_bytes == 4 * MiB  # the largest stays beside the others
    assert KernelMemory((3 * MiB, 2 * MiB, 2 * MiB + 1, 2 * MiB + 2), 0).heap_bytes == 5 * MiB  # at most
    assert KernelMemory((3 * MiB, 9 * MiB, 8 * MiB), 0).heap_bytes == 3 * MiB  # larger ones go back at once
    assert KernelMemory((MiB, MiB), 0).workspace_bytes < 2.2 * MiB
    assert KernelMemory((20 * MiB, MiB), 0).workspace_bytes >= 22 * MiB
    two = KernelMemory((MiB, MiB), 0, threads=2)
    assert two.workspace_bytes > KernelMemory((MiB, MiB), 0).workspace_bytes


def test_a_prediction_has_half_of_what_equal_runs_vary_by() -> None:
    one, two = KernelMemory((MiB, MiB), 0), KernelMemory((MiB, MiB), 0, threads=2)
    assert 0 < one.spare_bytes < 1.2 * MiB < two.spare_bytes < two.workspace_bytes
    large = KernelMemory((20 * MiB, MiB), 0)
    assert large.workspace_bytes - large.spare_bytes == 20 * MiB


def test_freed_memory_is_given_back_where_its_room_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, times = [100 * MiB], list[int]()

    def give_back() -> None:
        times.append(now[0])
        now[0] = 90 * MiB

    monkeypatch.setattr(resident, "give_back", give_back)
    is_first_step = True
    ceiling = resident.Ceiling(lambda: now[0], 105 * MiB + resident.UNSEEN_BYTES, lambda: is_first_step)
    ceiling.make_room(5 * MiB)
    assert not times
    ceiling.make_room(6 * MiB)
    assert times == [100 * MiB]
    ceiling.make_room(15 * MiB)
    assert len(times) == 1
    ceiling.make_room(16 * MiB)  # nothing has come since
    assert len(times) == 1
    now[0] = 100 * MiB
    ceiling.make_room(1 * MiB, 5 * MiB)  # of results whose pages nothing has touched
    assert len(times) == 2
    now[0], is_first_step = 100 * MiB, False
    ceiling.make_room(1 * MiB, 5 * MiB)
    assert len(times) == 2


def test_the_executor_makes_room_before_large_operations(
    graph: StepGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(resident.Ceiling, "make_room", lambda self, size, written=0: asked.append(size))
    made = plan(graph, small_machine(overhead_bytes=64 * MiB), budget="100%", cache=False)
    with Trainer(made, graph, Net(), folder=tmp_path, threads=1) as trainer:
        trainer.step(_batch())
        assert max(asked) == trainer.program.workspace_bytes > 0


def test_a_broken_budget_is_told_at_its_step_and_its_cause_at_the_next(graph: StepGraph, tmp_path: Path) -> None:
    made = plan(graph, small_machine(), budget="100%", cache=False)  # of a machine on which processes take nothing
    request = dataclasses.replace(made.request, budgets={**made.budgets, "device": MiB})
    promised = dataclasses.replace(made, request=request)
    with Trainer(promised, graph, Net(), folder=tmp_path, threads=1, program=program_of(made, graph)) as trainer:
        with pytest.warns(BudgetWarning, match=r"step 1 took .* above the budget of .* \(predicted"):
            trainer.step(_batch())
        with pytest.warns(BudgetWarning, match=r"what was not predicted: .+"):
            trainer.step(_batch(1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.step(_batch(2))  # said once
        assert len(trainer.excess) == 2


def test_a_device_with_memory_beside_tensors_says_how_much_and_looks_for_no_cause(
    graph: StepGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the context counts and operations are not looked at one by one."""
    monkeypatch.setattr(Executor, "beside_bytes", property(lambda _: 3 * GiB))
    monkeypatch.setattr(Executor, "excess_cause", lambda _: "")
    made = plan(graph, small_machine(overhead_bytes=256 * MiB), budget="100%", cache=False)
    with Trainer(made, graph, Net(), folder=tmp_path, threads=1) as trainer:
        predicted = re.escape(format_bytes(trainer.program.overhead_bytes))
        with pytest.warns(BudgetWarning, match=rf"; 3\.00 GiB beside tensors \({predicted} predicted\)$"):
            trainer.step(_batch())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.step(_batch(1))
        assert len(trainer.excess) == 1


def test_a_kept_budget_warns_of_nothing(graph: StepGraph, tmp_path: Path) -> None:
    made = plan(graph, small_machine(overhead_bytes=256 * MiB), budget="100%", cache=False)
    with warnings.catch_warnings(), Trainer(made, graph, Net(), folder=tmp_path, threads=1) as trainer:
        warnings.simplefilter("error")
        trainer.step(_batch())
        assert trainer.excess == []


def test_values_are_set_within_the_budget(graph: StepGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making initial values leaves freed memory behind, before any step has begun."""
    made = plan(graph, small_machine(overhead_bytes=64 * MiB), budget="100%", cache=False)
    with Trainer(made, graph, None, folder=tmp_path, threads=1) as trainer:
        asked: list[int] = []
        monkeypatch.setattr(resident.Ceiling, "make_room", lambda self, size, written=0: asked.append(size))
        weight = torch.zeros(64, 512)
        trainer.set_value("out.weight", weight)
        assert asked == [weight.nbytes]


def test_a_checkpoint_is_loaded_in_small_pieces(tmp_path: Path) -> None:
    """Beside values that are all there, the largest must not come in whole once more."""
    rows, width = 6144, 512

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(rows, width)
            self.turned = torch.nn.Parameter(torch.rand(8, width).t())  # lies otherwise than a checkpoint has it

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x) @ self.turned

    batch = torch.arange(8)
    captured = capture(Table(), batch, lambda model, x: model(x).square().mean())
    made = plan(captured, small_machine(overhead_bytes=64 * MiB), budget="100%", cache=False)
    with Trainer(made, captured, Table(), folder=tmp_path, threads=1) as trainer:
        trainer.step(batch)
        values = {name: trainer.value(name) for name in ("table.weight", "table.weight.exp_avg", "turned")}
        saved = trainer.save(tmp_path / "saved")
        trainer.step(batch)
        resident.give_back()
        meter = resident.PeakMeter()
        before = meter.now_bytes()
        trainer.load(saved)
        assert meter.peak_bytes() - before < values["table.weight"].nbytes / 2
        meter.close()
        assert all(torch.equal(trainer.value(name), value) for name, value in values.items())


def test_bytes_of_a_value_are_written_as_they_come(graph: StepGraph, tmp_path: Path) -> None:
    made = plan(graph, small_machine(overhead_bytes=64 * MiB), budget="100%", cache=False)
    with Trainer(made, graph, None, folder=tmp_path, threads=1) as trainer:
        storage, weight = trainer._values["out.weight"].storages[0], torch.rand(64, 512)
        data = weight.view(torch.uint8).numpy().data.cast("B")
        trainer._executor.write_chunks([storage], [data[:3], data[3:70_001], data[70_001:]])
        assert torch.equal(trainer.value("out.weight"), weight)
        for wrong in ([data[:-1]], [data, data[:1]]):
            with pytest.raises(ConfigError, match=r"expected (1 more bytes|the bytes of a value to end)"):
                trainer._executor.write_chunks([storage], wrong)
