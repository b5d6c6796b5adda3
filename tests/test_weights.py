"""The values of a user's model while a Trainer has them, and on every way out."""

from __future__ import annotations

import atexit
import copy
import errno
import gc
import io
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lading.checkpoint.store import Checkpoint
from lading.errors import ConfigError, ProgramError, StorageError
from lading.ir.action import ActionKind
from lading.ir.graph import StepGraph
from lading.ir.plan import Plan
from lading.optim.adamw import AdamW
from lading.prepare import plan
from lading.runtime.executor import Executor
from lading.runtime.interrupts import HeldInterrupts
from lading.tracing.trace import capture
from lading.trainer import Trainer
from tests.machines import small_machine

B, T, V, F = 4, 8, 16, 8
Values = dict[str, torch.Tensor]


class Net(torch.nn.Module):
    """Tokens, dropout, a buffer that the forward changes, one that no state dict has, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(V, F)
        self.norm = torch.nn.BatchNorm1d(T)
        self.drop = torch.nn.Dropout(0.2)
        self.middle = torch.nn.Linear(F, F)
        self.head = torch.nn.Linear(F, V, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("scale", torch.tensor(1.0), persistent=False)

    def forward(self, x_BT: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.middle(self.norm(self.tokens(x_BT)))) * self.scale)


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randint(0, V, (B, T), generator=generator) for name in "xy"}


def bad(name: str) -> dict[str, torch.Tensor]:
    """A token, or a label, that there is none of."""
    wrong = batch(1)
    wrong[name][0, 0] = V
    return wrong


@pytest.fixture(scope="module")
def planned() -> tuple[Plan, StepGraph]:
    graph = capture(net(), batch(0), loss_fn)
    return plan(graph, small_machine(), budget="100%"), graph


@pytest.fixture
def trainer(planned: tuple[Plan, StepGraph], tmp_path: Path) -> Iterator[Trainer]:
    """Of a model that is ``trainer.model``, after one step."""
    model = net()
    with Trainer(*planned, model, optimizer=AdamW(lr=1e-2), folder=tmp_path) as made:
        torch.manual_seed(1)
        made.step(batch(0))
        made.model = model  # type: ignore[attr-defined]
        yield made


def values(model: torch.nn.Module) -> Values:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(left: Any, right: Any) -> bool:
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


def reference(steps: int) -> Values:
    """Plain PyTorch after some steps."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    torch.manual_seed(1)
    for step in range(steps):
        loss_fn(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


def at_update(executor: Executor, what: Callable[[], object], monkeypatch: pytest.MonkeyPatch, number: int = 0) -> None:
    """Call ``what`` in the next step, before its update ``number``."""
    entries = {e.action: e for queue in executor._bound.entries for e in queue}
    chosen = [a.id for a in executor.program.actions if a.kind is ActionKind.STEP][number]
    run = entries[chosen].run

    def before() -> None:
        what()
        run()

    monkeypatch.setattr(entries[chosen], "run", before)


@pytest.mark.parametrize("wrong", ["x", "y"])
def test_a_bad_batch_is_a_step_that_did_not_happen(trainer: Trainer, wrong: str) -> None:
    with pytest.raises(ProgramError, match=r"failed: .*(out of range|out of bounds)") as caught:
        trainer.step(bad(wrong))
    assert "this step has not happened: all values are those after step 1" in caught.value.__notes__[0]
    assert ("norm.running_mean" in caught.value.__notes__[0]) == (wrong == "y")
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        trainer.set_value(name, reference(1)[name])  # plain PyTorch's forward changes them too
    assert trainer.steps == 1
    trainer.step(batch(1))
    assert same(trainer.state_dict(), reference(2))
    trainer.close()
    assert same(values(trainer.model), reference(2))


def test_a_step_that_had_begun_to_update_says_which_values_are_whose(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = trainer.save(tmp_path / "saved")

    def fail() -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        at_update(trainer._executor, fail, patch, number=1)
        with pytest.raises(ProgramError) as caught:
            trainer.step(batch(1))
    note = caught.value.__notes__[0]
    assert "of step 1" in note
    assert "of step 2" in note
    assert str(saved) in note
    after, before, unfinished = reference(2), reference(1), trainer.unfinished
    assert {"lost", "step 2"} <= set(unfinished.values())
    for name in before:
        what = unfinished.get(name.replace("head", "tokens"), "step 1")
        if what == "lost":
            with pytest.raises(StorageError, match="lost"):
                trainer.value(name)
        else:
            assert torch.equal(trainer.value(name), (after if what == "step 2" else before)[name])
    for use in (lambda: trainer.step(batch(1)), lambda: trainer.save(tmp_path / "other")):
        with pytest.raises(ConfigError, match=r"failed half-way.*load a checkpoint"):
            use()
    trainer.load(saved)
    assert trainer.unfinished == {}
    trainer.step(batch(1))
    assert same(trainer.state_dict(), after)


def test_what_is_lost_is_refused_not_made_up(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    at_update(trainer._executor, fail, monkeypatch)
    with pytest.raises(ProgramError):
        trainer.step(batch(1))
    (lost,) = [
        name for name, what in trainer.unfinished.items() if what == "lost" and name in dict(trainer._first_name)
    ]
    with pytest.warns(UserWarning, match=f"1 are lost .{lost}"), pytest.raises(StorageError, match=f"are lost .{lost}"):
        trainer.close()
    model = trainer.model
    with pytest.raises(ConfigError, match=f"{lost}.*its value is lost"):
        model.state_dict()
    whole = {name: p for name, p in model.named_parameters() if name != lost}
    assert all(torch.equal(p, reference(1)[name]) for name, p in whole.items())


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_values_that_there_is_no_memory_for_are_not_lost(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    read, number = trainer._executor.read_storage, [0]

    def short(storage: int) -> torch.Tensor:
        number[0] += 1
        if number[0] > 2:
            raise error
        return read(storage)

    model = trainer.model
    with monkeypatch.context() as patch:
        patch.setattr(trainer._executor, "read_storage", short)
        with pytest.raises(StorageError, match=r"nothing is lost: free memory and close the trainer again"):
            trainer.close()
    assert all(p.untyped_storage().nbytes() <= 8 for p in vars_of(model))  # what was written back makes room again
    for use in (model.state_dict, lambda: loss_fn(model, batch(0))):
        with pytest.raises(ConfigError, match=r"are with a lading\.Trainer"):
            use()
    trainer.save(tmp_path / "saved")
    trainer.step(batch(1))
    trainer.close()
    assert same(values(model), reference(2))


def vars_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, without the class that refuses to be asked."""
    with torch._C.DisableTorchFunctionSubclass():
        return [t.data for t in (*model.parameters(), *model.buffers())]


def test_a_model_whose_weights_are_no_longer_tied_is_refused(planned: tuple[Plan, StepGraph], tmp_path: Path) -> None:
    model = net()
    model.head.weight = torch.nn.Parameter(model.tokens.weight.detach().clone())
    with pytest.raises(ConfigError, match=r"expected tokens\.weight and head\.weight as one parameter"):
        Trainer(*planned, model, folder=tmp_path)
    loss_fn(model, batch(0))


@pytest.mark.parametrize("still_there", [False, True])
def test_weights_in_mapped_files_count_as_freed_when_the_files_are_unmapped(
    planned: tuple[Plan, StepGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, still_there: bool
) -> None:
    """Another tensor of the file keeps all of its pages in memory."""
    weights, pages = {**net().state_dict(), "other": torch.zeros(4096, 512)}, 4096 * 512 * 4
    torch.save(weights, tmp_path / "weights.pt")
    mapped = torch.load(tmp_path / "weights.pt", mmap=True)
    other = mapped.pop("other")
    assert other.sum() == 0  # now its pages are in memory
    model = net()
    model.load_state_dict(mapped, assign=True)
    model.head.weight = model.tokens.weight
    mapped.clear()
    if not still_there:
        del other
    freed: list[int] = []
    monkeypatch.setattr(Executor, "given_back", lambda _, size: freed.append(size))
    with Trainer(*planned, model, folder=tmp_path):
        # Only the scale is not in the file: a state dict does not have it.
        assert (freed[0] <= model.scale.nbytes) if still_there else (abs(freed[0] - pages) < 64 << 10)


def test_small_tensors_that_somebody_else_has_too_are_not_freed(
    planned: tuple[Plan, StepGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []
    monkeypatch.setattr(Executor, "given_back", lambda _, size: freed.append(size))
    model = net()
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    with Trainer(*planned, model, folder=tmp_path):
        assert freed == [size]
    also = model.middle.weight.data
    with Trainer(*planned, model, folder=tmp_path):
        assert freed[1] == size - also.nbytes


def interrupt(times: int) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_waits_for_the_end_of_the_step(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    at_update(trainer._executor, lambda: interrupt(1), monkeypatch, number=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.step(batch(1))
    assert trainer.steps == 2
    assert trainer.unfinished == {}
    trainer.close()
    assert same(values(trainer.model), reference(2))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_the_step_between_two_operations(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_update(trainer._executor, lambda: interrupt(2), monkeypatch)
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.step(batch(1))
    assert "of step 2" in caught.value.__notes__[0]
    assert set(trainer.unfinished.values()) == {"step 2"}  # nothing is lost
    with pytest.warns(UserWarning, match="of step 2"):
        trainer.close()
    after, before = reference(2), reference(1)
    for name, value in values(trainer.model).items():
        assert torch.equal(value, before[name]) or torch.equal(value, after[name])


def test_handlers_that_raise_nothing_are_called_at_once(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        at_update(trainer._executor, lambda: (interrupt(3), seen.append(0)), monkeypatch)
        trainer.step(batch(1))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen[-1] == 0
    assert len(seen) > 1
    assert trainer.steps == 2


def test_held_interrupts_lie_in_each_other() -> None:
    order: list[str] = []

    def nested() -> None:
        with HeldInterrupts():
            with HeldInterrupts():
                interrupt(1)
                order.append("inner")
            order.append("outer")
            interrupt(1)
            order.append("end")

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert order == ["inner", "outer", "end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    thread = threading.Thread(target=lambda: HeldInterrupts().__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGUSR1, signal.SIGRTMIN])
def test_what_any_handler_raises_waits(number: signal.Signals) -> None:
    """A timeout, or a job that is to make room; and they do not make the first Ctrl-C a second one."""
    stopped: list[BaseException] = []

    def late(*_: object) -> None:
        raise TimeoutError

    def block() -> None:
        with HeldInterrupts(stopped.append):
            signal.raise_signal(number)
            signal.raise_signal(number)
            interrupt(1)
            ended.append(True)

    ended: list[bool] = []
    before = signal.signal(number, late)
    try:
        with pytest.raises(TimeoutError):
            block()
        assert signal.getsignal(number) is late
    finally:
        signal.signal(number, before)
    assert ended
    assert not stopped


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, ZeroDivisionError])
def test_any_exception_of_the_loop(planned: tuple[Plan, StepGraph], tmp_path: Path, error: type[BaseException]) -> None:
    model = net()

    def loop() -> None:
        with Trainer(*planned, model, optimizer=AdamW(lr=1e-2), folder=tmp_path) as trainer:
            torch.manual_seed(1)
            trainer.step(batch(0))
            raise error

    with pytest.raises(error):
        loop()
    assert same(values(model), reference(1))


def test_ctrl_c_while_values_are_written_back(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    read = trainer._executor.read_storage

    def slow(storage: int) -> torch.Tensor:
        interrupt(1)
        return read(storage)

    monkeypatch.setattr(trainer._executor, "read_storage", slow)
    with pytest.raises(KeyboardInterrupt):
        trainer.close()
    assert same(values(trainer.model), reference(1))


def test_a_trainer_that_nobody_closed(planned: tuple[Plan, StepGraph], tmp_path: Path) -> None:
    model = net()
    trainer = Trainer(*planned, model, optimizer=AdamW(lr=1e-2), folder=tmp_path)
    torch.manual_seed(1)
    trainer.step(batch(0))
    with torch.inference_mode():  # wherever it happens to be collected
        del trainer
        gc.collect()
    assert same(values(model), reference(1))
    loss_fn(model, batch(0)).backward()
    assert not list(tmp_path.iterdir())
    assert not [t for t in threading.enumerate() if t.name.startswith("lading")]


def in_a_child(work: Callable[[], bool]) -> bool:
    """Whether ``work`` is true in a forked process, on one thread: the others of OpenMP's are not there any more."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def test_the_end_of_the_process(planned: tuple[Plan, StepGraph], tmp_path: Path) -> None:
    """What was registered before, to run behind it, finds the values."""

    def ends() -> bool:
        atexit._clear()
        model, found = net(), list[bool]()
        atexit.register(lambda: found.append(same(values(model), reference(1))))
        trainer = Trainer(*planned, model, optimizer=AdamW(lr=1e-2), folder=tmp_path)
        torch.manual_seed(1)
        trainer.step(batch(0))
        atexit._run_exitfuncs()
        return found == [True]

    assert in_a_child(ends)


def test_a_forked_process_leaves_the_values_alone(trainer: Trainer) -> None:
    """A worker of a loader ends as any process does, and has none of the threads."""
    finalizer = trainer._finalizer
    assert in_a_child(lambda: finalizer() is None)
    trainer.step(batch(1))
    trainer.close()
    assert same(values(trainer.model), reference(2))


def test_a_model_without_its_values_refuses_to_be_used(trainer: Trainer) -> None:
    model = trainer.model
    weight = model.middle.weight
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in net().parameters())
    assert (weight.shape, weight.dtype, weight.requires_grad) == ((F, F), torch.float32, True)
    assert isinstance(weight, torch.nn.Parameter)
    assert "middle.weight" in repr(weight)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    uses: dict[str, Callable[[], object]] = {
        "state_dict": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "of a part": model.middle.state_dict,
        "keep_vars": lambda: torch.save(model.state_dict(keep_vars=True), io.BytesIO()),
        "forward": lambda: model(batch(0)["x"]),
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.dumps(model),
        "optimizer": optimizer.step,
        "zero_grad": model.zero_grad,
        "ema": lambda: torch.zeros(F, F).lerp_(weight, 0.5),
        "averaged": lambda: torch.optim.swa_utils.AveragedModel(model),
        "to": model.half,
        "numpy": lambda: weight.detach().numpy(),
        "data": lambda: weight.data,
        "stack": lambda: torch.stack([weight, weight]),
        "capture": lambda: capture(model, batch(0), loss_fn),
    }
    for name, use in uses.items():
        with pytest.raises(ConfigError, match=r"values are with a lading\.Trainer: .* change one with .*\.set_value"):
            print(name, use())
    with pytest.raises(RuntimeError, match=r"its values are with a lading\.Trainer"):
        model.load_state_dict(net().state_dict())
    trainer.close()
    assert type(weight) is torch.nn.Parameter
    assert vars(weight) == {}
    assert same(values(model), reference(1))


def test_a_second_trainer_of_a_model(trainer: Trainer, planned: tuple[Plan, StepGraph], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"another Trainer has them \(.*\); close that one first"):
        Trainer(*planned, trainer.model, folder=tmp_path / "other")
    trainer.close()
    Trainer(*planned, trainer.model, folder=tmp_path / "other").close()
    assert same(values(trainer.model), reference(1))


def test_a_state_dict_reads_one_value_at_a_time(
    trainer: Trainer, planned: tuple[Plan, StepGraph], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = trainer.state_dict()
    assert list(state) == list(net().state_dict())
    assert same(state, reference(1))
    with pytest.raises(ConfigError, match=r"dict\(trainer.state_dict\(\)\)"):
        torch.save(state, io.BytesIO())
    file = io.BytesIO()
    torch.save(dict(state), file)
    file.seek(0)
    assert same(torch.load(file), reference(1))
    with Trainer(*planned, None, folder=tmp_path / "other") as other:
        assert set(other.state_dict()) == {*net().state_dict(), "scale"}


def test_a_load_that_fails_half_way(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = trainer.save(tmp_path / "saved")
    chunks, count = Checkpoint.chunks, iter(range(100))

    def failing(checkpoint: Checkpoint, name: str, *others: Any) -> Any:
        if checkpoint.tensors[name].shape and next(count) == 3:  # numbers are read before anything changes
            raise StorageError("cannot read")
        return chunks(checkpoint, name, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "chunks", failing)
        with pytest.raises(StorageError):
            trainer.load(saved)
    with pytest.raises(ConfigError, match=r"loading .*step-00000001 failed half-way.*load a checkpoint"):
        trainer.step(batch(1))
    trainer.load(saved)
    trainer.step(batch(1))
    assert same(trainer.state_dict(), reference(2))


def test_closing_inside_of_a_step_is_refused(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a handler of a signal, say; another thread waits."""
    refused: list[str] = []

    def close() -> None:
        with pytest.raises(ConfigError, match="inside of it"):
            trainer.close()
        with pytest.raises(ConfigError, match="under way"):
            trainer.value("middle.weight")
        closing.start()
        refused.append("yes")

    closing = threading.Thread(target=trainer.close)
    at_update(trainer._executor, close, monkeypatch)
    trainer.step(batch(1))
    closing.join()
    assert refused
    assert same(values(trainer.model), reference(2))
