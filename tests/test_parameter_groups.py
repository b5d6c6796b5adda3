"""A user's loop with an optimizer of torch: groups, schedulers, states; each step's bits are plain PyTorch's."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from lading.checkpoint.store import open_checkpoint
from lading.cost.compute import op_costs
from lading.errors import ConfigError
from lading.ir.machine import Machine
from lading.memory.restore import program_of, step_of
from lading.optim.registry import optimizer as rule_named
from lading.optim.rule import States
from lading.optim.sgd import SGD
from lading.optim.torch_update import rule_of_optimizer
from lading.prepare import plan
from lading.runtime.parameter_groups import GROUPS
from lading.staging_layout import saved_beside
from lading.tracing.trace import capture
from lading.trainer import Trainer
from tests.machines import small_machine
from tests.runs import OVERHEAD_BYTES, budget_for

MACHINE = small_machine(overhead_bytes=OVERHEAD_BYTES)
B, F, STEPS = 16, 96, 6


pytestmark = pytest.mark.usefixtures("one_thread")


class Net(torch.nn.Module):
    """Backbone with biases and a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(F, 128), torch.nn.LayerNorm(128), torch.nn.GELU())
        self.head = torch.nn.Linear(128, F)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x_BF))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(B, F, generator=generator), "y": torch.randn(B, F, generator=generator)}


def loss_fn(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])


def grouped(model: Net) -> list[dict[str, Any]]:
    """No decay on biases and norms, another rate for the head."""
    body, head = list(model.body.parameters()), list(model.head.parameters())
    return [
        {"params": [p for p in body if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in body if p.dim() < 2], "weight_decay": 0.0},
        {"params": head, "lr": 3e-3, "weight_decay": 0.1},
    ]


Make = Callable[[Net], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda m: torch.optim.AdamW(grouped(m), lr=1e-3),
    "adamw fused": lambda m: torch.optim.AdamW(grouped(m), lr=1e-3, fused=True),
    "amsgrad": lambda m: torch.optim.Adam(grouped(m), lr=1e-3, amsgrad=True, maximize=True),
    "nesterov": lambda m: torch.optim.SGD(grouped(m), lr=1e-2, momentum=0.9, nesterov=True),
    "dampened": lambda m: torch.optim.SGD(grouped(m), lr=1e-2, momentum=0.9, dampening=0.5),
    "sgd": lambda m: torch.optim.SGD(grouped(m), lr=1e-2),
    "nadam": lambda m: torch.optim.NAdam(grouped(m), lr=1e-3),
    "radam": lambda m: torch.optim.RAdam(grouped(m), lr=1e-3),
    "adamax": lambda m: torch.optim.Adamax(grouped(m), lr=1e-3),
    "adagrad": lambda m: torch.optim.Adagrad(grouped(m), lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(grouped(m), lr=1e-3, centered=True, momentum=0.5),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=1e-3),
    "asgd": lambda m: torch.optim.ASGD(grouped(m), lr=1e-2),
    "adadelta": lambda m: torch.optim.Adadelta(grouped(m), lr=1.0),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "none": lambda o: None,
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 4),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "cycle": lambda o: lr_scheduler.OneCycleLR(o, [1e-2, 1e-2, 3e-2], total_steps=STEPS),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


def advance(scheduler: Any, loss: float) -> None:
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        scheduler.step(loss)
    elif scheduler is not None:
        scheduler.step()


def plainly(model: Net, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range) -> list[float]:
    losses: list[float] = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_fn(model, batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        advance(scheduler, losses[-1])
    return losses


def within(
    model: Net, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range, share: float = 0.6
) -> list[float]:
    """The same loop in a Trainer, in a share of the memory that the step's tensors take."""
    graph = capture(model, batch(0), loss_fn)
    everything = program_of(plan(graph, MACHINE, budget="100%", optimizer=optimizer, policy="keep-all"), graph)
    made = plan(graph, MACHINE, budget=budget_for(everything, share), optimizer=optimizer)
    losses: list[float] = []
    with Trainer(made, graph, model, optimizer=optimizer) as trainer:
        for step in steps:
            losses.append(trainer.step(batch(step)))
            advance(scheduler, losses[-1])
    return losses


def assert_same(ours: Net, mine: torch.optim.Optimizer, theirs: Net, other: torch.optim.Optimizer) -> None:
    for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(p, q), name
        kept, wanted = mine.state[p], {key: value for key, value in other.state[q].items() if value is not None}
        assert kept.keys() == wanted.keys(), name
        assert all(torch.equal(torch.as_tensor(kept[key]), torch.as_tensor(value)) for key, value in wanted.items())


def compare(make: Make, schedule: Callable[[torch.optim.Optimizer], Any], share: float = 0.6) -> None:
    ours, theirs = net(), net()
    mine, other = make(ours), make(theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = within(ours, mine, schedule(mine), range(STEPS), share)
    assert got == plainly(theirs, other, schedule(other), range(STEPS))
    assert_same(ours, mine, theirs, other)
    assert got == sorted(got, reverse=True) or len(set(got)) == STEPS


#: Optimizers whose kinds of states and settings the others share; the others are slow tests.
QUICK = ("adamw fused", "amsgrad", "nesterov", "nadam", "rmsprop", "rprop", "asgd")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS if n not in QUICK)]
)
def test_any_elementwise_optimizer_gives_plain_pytorchs_bits(name: str) -> None:
    compare(OPTIMIZERS[name], SCHEDULERS["none"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["lambda", "cycle", "plateau", pytest.param("cosine", marks=pytest.mark.slow)])
def test_schedulers_of_torch_are_taken_as_they_are(name: str) -> None:
    compare(OPTIMIZERS["adamw"], SCHEDULERS[name])


def test_training_goes_on_in_plain_pytorch_and_back_with_the_states() -> None:
    """Ten steps of which the middle ones are plain; a layer is unfrozen, and planned for, on the way."""
    models, optimizers = (net(), net()), list[torch.optim.Optimizer]()
    for model in models:
        model.body.requires_grad_(requires_grad=False)
        optimizers.append(OPTIMIZERS["nadam"](model))
    losses: list[list[float]] = [[], []]
    for first, frozen in ((0, True), (3, False), (6, False)):
        for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model.body.requires_grad_(requires_grad=not frozen)
            run = plainly if place or first == 6 else within
            options = () if run is plainly else (1.0,)
            losses[place] += run(model, optimizer, None, range(first, first + 3), *options)
            model.zero_grad()
    assert losses[0] == losses[1]
    assert_same(models[0], optimizers[0], models[1], optimizers[1])


class Normed(torch.optim.SGD):
    """Divides each gradient by its norm, which no part of it has."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad / p.grad.norm()
        return super().step(closure)


def hooked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def patched(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda m: Normed(m.parameters(), lr=0.1), "gives a part of a parameter other numbers than the whole"),
        (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS failed on a vector"),
        (lambda m: torch.optim.Adafactor(m.parameters()), "keeps row_var, col_var"),
        (lambda m: torch.optim.SGD([{"params": m.body.parameters(), "momentum": 0.9}, {"params": m.head.parameters()}]),
         "every parameter group of SGD to keep the same states"),
        (lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1), betas=(torch.tensor(0.1), torch.tensor(0.9))),
         "expected numbers, texts and flags"),
        (lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.1)), "a learning rate .* that is a number"),
        (lambda m: hooked(torch.optim.SGD(m.parameters(), lr=0.1)), "expected no hooks of its step"),
        (lambda m: patched(torch.optim.SGD(m.parameters(), lr=0.1)), "found its own for step"),
        (lambda m: patched(lr_scheduler.LambdaLR(torch.optim.SGD(m.parameters(), lr=0.1), float).optimizer),
         "found its own for step"),
    ],
)  # fmt: skip
def test_an_optimizer_that_cannot_be_cut_is_refused_before_anything_is_taken(make: Make, why: str) -> None:
    model = net()
    graph = capture(model, batch(0), loss_fn)
    made = plan(graph, MACHINE, budget="100%")
    for refused in (
        lambda: plan(graph, MACHINE, budget="100%", optimizer=make(model)),
        lambda: Trainer(made, graph, model, optimizer=make(model)),
    ):
        with pytest.raises(ConfigError, match=why):
            refused()
    loss_fn(model, batch(0)).backward()  # it has its values


@pytest.mark.parametrize(
    ("make", "key", "value"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "momentum", 0.9),
        (lambda m: torch.optim.Adam(m.parameters(), lr=0.1), "amsgrad", True),
    ],
)
def test_a_number_by_which_other_states_are_kept_is_refused_before_the_step(make: Make, key: str, value: Any) -> None:
    model, expected = net(), net()
    optimizer = make(model)
    graph = capture(model, batch(0), loss_fn)
    with Trainer(
        plan(graph, MACHINE, budget="100%", optimizer=optimizer), graph, model, optimizer=optimizer
    ) as trainer:
        before, optimizer.param_groups[0][key] = optimizer.param_groups[0][key], value
        with pytest.raises(ConfigError, match="keeps the states that were planned"):
            trainer.step(batch(0))
        optimizer.param_groups[0][key] = before
        handle = optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(ConfigError, match="expected no hooks of its step"):
            trainer.step(batch(0))
        handle.remove()
        trainer.step(batch(0))
    plainly(expected, make(expected), None, range(1))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))


class Signed(torch.optim.Optimizer):
    """Moves by the sign of the gradient: its rate is all that it is made with, and has to be given."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


def test_a_parameter_without_elements_is_moved() -> None:
    models = [torch.nn.ParameterDict({"none": torch.zeros(0, 3), "one": torch.ones(())}) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model["none"].sum() + model["one"] * x).square().mean()  # type: ignore[index]

    graph = capture(models[0], torch.ones(2), loss)
    made = plan(graph, MACHINE, budget="100%", optimizer=optimizers[0])
    with Trainer(made, graph, models[0], optimizer=optimizers[0]) as trainer:
        trainer.step(torch.ones(2))
    loss(models[1], torch.ones(2)).backward()
    optimizers[1].step()
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True))


def test_an_optimizer_of_ones_own_with_nothing_but_a_rate_is_taken() -> None:
    assert rule_of_optimizer(Signed([torch.nn.Parameter(torch.zeros(2))], 0.1)).lr == 0.1
    compare(lambda model: Signed(model.parameters(), 1e-3), SCHEDULERS["none"])


class TwoCopies(Signed):
    """Has two tensors of a parameter's size at once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_((p.grad * 2) + 1, alpha=group["lr"])


class NormLater(Signed):
    """Looks at all elements from its second update on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                number = self.state[p].setdefault("step", torch.zeros(()))
                number += 1
                p.sub_(p.grad / (1.0 if number < 2 else p.grad.norm()), alpha=group["lr"])


class Attributed(Signed):
    """Keeps a number in an attribute, where no step on a part of a parameter finds it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.warmup = 10

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / self.warmup)


def test_an_optimizer_with_a_number_in_an_attribute_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"Attributed reads warmup of itself; put it into the parameter groups"):
        rule_of_optimizer(Attributed([torch.nn.Parameter(torch.zeros(2))], 0.1))


def test_what_an_update_allocates_is_counted_in_elements() -> None:
    assert rule_of_optimizer(TwoCopies([torch.nn.Parameter(torch.zeros(2))], 0.1)).temporaries == 2


def test_an_optimizer_that_looks_at_all_elements_later_is_refused() -> None:
    with pytest.raises(ConfigError, match="gives a part of a parameter other numbers than the whole"):
        rule_of_optimizer(NormLater([torch.nn.Parameter(torch.zeros(2))], 0.1))


class Meeting(torch.optim.SGD):
    """SGD whose steps wait for each other, once there is a barrier."""

    barrier: threading.Barrier | None = None

    def step(self, closure: Any = None) -> None:
        if self.barrier is not None:
            self.barrier.wait(timeout=30)
        super().step()


def test_updates_of_a_step_run_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device and on the host, by one group; or of two trainers on threads of their own."""
    rule = rule_of_optimizer(Meeting([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9))
    monkeypatch.setattr(Meeting, "barrier", threading.Barrier(2))
    moved = [torch.zeros(3) for _ in range(2)]

    def update(number: int) -> None:
        states = {"momentum_buffer": torch.ones(3)}
        with torch.no_grad():
            rule.update(moved[number], torch.ones(3), states, lr=float(number + 1), step=torch.tensor(2.0))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(update, range(2)))
    for number, tensor in enumerate(moved):
        torch.testing.assert_close(tensor, torch.full((3,), -1.9 * (number + 1)))


@pytest.mark.parametrize("name", ["adamw", "nadam", "adagrad"])
def test_an_update_by_itself_runs_by_the_numbers_of_its_class(name: str) -> None:
    """As where its memory is measured, in a process that has the operation alone."""
    rule = rule_of_optimizer(OPTIMIZERS[name](net()))
    alone = replace(rule, numbers="")
    param, states = torch.ones(4), {key: torch.zeros(spec.shape) for key, spec in rule.state_specs((4,)).items()}
    for number in (1.0, 2.0):
        alone.update(param, torch.ones(4), states, lr=0.1, step=torch.tensor(number))
    assert (param < 1).all()


def test_checkpoints_have_the_states_and_a_plan_the_optimizer(tmp_path: Path) -> None:
    """Saved after two steps, loaded into another trainer, whose next steps are those of the first."""
    got, saved = list[list[float]](), tmp_path
    for place in range(2):
        model = net()
        optimizer = OPTIMIZERS["nadam"](model)
        graph = capture(model, batch(0), loss_fn)
        made = plan(graph, MACHINE, budget="100%", optimizer=optimizer, policy="keep-all")
        with pytest.raises(ConfigError, match=r"expected the torch\.optim\.nadam:NAdam that"):
            Trainer(made, graph, model)
        with Trainer(made, graph, model, optimizer=optimizer, folder=tmp_path) as trainer:
            if place:
                trainer.load(saved)
            else:
                got.append([trainer.step(batch(step)) for step in range(2)])
                saved = trainer.save(tmp_path / "saved")
            got.append([trainer.step(batch(step)) for step in range(2, 4)])
    assert got[1] == got[2]


def test_a_float32_master_is_moved_by_the_optimizer_too() -> None:
    """Equal to float32 weights that a loop keeps beside, and rounds after each step."""

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch["x"].bfloat16()).float(), batch["y"])

    for name in ("nadam", "adagrad"):
        ours, theirs, masters = net().bfloat16(), net().bfloat16(), net().bfloat16().float()
        mine, other = OPTIMIZERS[name](ours), OPTIMIZERS[name](masters)
        graph = capture(ours, batch(0), loss)
        made = plan(graph, MACHINE, budget="100%", optimizer=mine, master_weights=True, policy="keep-all")
        with Trainer(made, graph, ours, optimizer=mine) as trainer:
            for step in range(3):
                trainer.step(batch(step))
        assert not any(mine.state.values())
        for step in range(3):
            loss(theirs, batch(step)).backward()
            for weight, master in zip(theirs.parameters(), masters.parameters(), strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
            other.step()
            theirs.load_state_dict(masters.state_dict())
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))


class OfTheNorm(SGD):
    """A rule of one's own that forgets to say that it is whole."""

    def update(self, param: torch.Tensor, grad: torch.Tensor, states: States, **others: Any) -> None:
        super().update(param, grad / grad.norm(), states, **others)


def test_a_rule_of_ones_own_is_tried_before_weights_are_taken() -> None:
    model = net()
    graph = capture(model, batch(0), loss_fn)
    with pytest.raises(ConfigError, match="OfTheNorm gives a part of a parameter other numbers"):
        plan(graph, MACHINE, budget="100%", optimizer=OfTheNorm())


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.ASGD])
def test_a_number_among_the_states_serves_every_part_of_a_large_parameter(make: Any) -> None:
    """Two parts of five pieces each."""
    models = [torch.nn.Linear(1024, 2048, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    mine, other = (make(model.parameters(), lr=1e-3) for model in models)

    def mean(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    x = torch.randn(2, 1024)
    graph = capture(models[0], x, mean)
    with Trainer(plan(graph, MACHINE, budget="100%", optimizer=mine), graph, models[0], optimizer=mine) as trainer:
        for _ in range(3):
            trainer.step(x)
    for _ in range(3):
        other.zero_grad()
        mean(models[1], x).backward()
        other.step()
    assert torch.equal(models[0].weight, models[1].weight)
    kept, wanted = mine.state[models[0].weight], other.state[models[1].weight]
    assert kept.keys() == wanted.keys()
    assert all(torch.equal(kept[key], wanted[key]) for key in wanted)


def test_a_trainer_says_what_it_cannot_take() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    graph = capture(model, batch(0), loss_fn)
    made = plan(graph, MACHINE, budget="100%", optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"body.0.weight, body.0.bias, body.1.weight, 1 more are in none"):
        Trainer(made, graph, model, optimizer=optimizer)
    optimizer.add_param_group({"params": list(model.body.parameters())})
    with Trainer(made, graph, model, optimizer=optimizer) as trainer:
        trainer.step(batch(0))
        with pytest.raises(ConfigError, match="parameter groups have the rates"):
            trainer.step(batch(0), lr=0.1)
        with pytest.raises(ConfigError, match="values are with a lading"):
            optimizer.step()
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
        with pytest.raises(ConfigError, match="found others; close it"):
            trainer.step(batch(1))


def test_states_refuse_to_be_saved_while_the_trainer_has_them(tmp_path: Any) -> None:
    model = net()
    optimizer = OPTIMIZERS["adamw"](model)
    graph = capture(model, batch(0), loss_fn)
    with Trainer(plan(graph, MACHINE, budget="100%", optimizer=optimizer), graph, model, optimizer=optimizer) as t:
        t.step(batch(0))
        with pytest.raises(ConfigError, match="values are with a lading"):
            torch.save(optimizer.state_dict(), tmp_path / "states.pt")
        with pytest.raises(ConfigError, match="values are with a lading"):
            copy.deepcopy(optimizer.state_dict())
    assert len(optimizer.state_dict()["state"]) == 6


def test_an_update_of_several_operations_is_timed_by_what_they_touch() -> None:
    """Beside one fused kernel: numbers again, as measured by benchmarks/optimizers/torch_updates.py, and calls."""
    parameter = [torch.nn.Parameter(torch.zeros(4))]
    fused, plain, late = (
        rule_of_optimizer(optimizer)
        for optimizer in (
            torch.optim.AdamW(parameter, fused=True),
            torch.optim.AdamW(parameter, foreach=True),
            torch.optim.RAdam(parameter),
        )
    )
    assert (fused.passes, fused.calls) == (0.0, 2)
    assert plain.passes == pytest.approx(0.65 * 14)
    assert plain.calls == 11
    assert late.passes > plain.passes  # from the sixth update on
    graph = capture(torch.nn.Linear(1024, 512), torch.ones(1, 1024), lambda model, x: model(x).sum())
    seconds: list[float] = []
    for rule in (fused, plain):
        step = step_of(graph, MACHINE, clip_norm=0.0, master_weights=False, optimizer=rule)
        seconds.append(
            max(s for op, s in zip(step.ops, op_costs(step, MACHINE.device), strict=True) if op.kind == "step")
        )
    assert seconds[1] / seconds[0] == pytest.approx(16.1 / 7, rel=0.1)


def test_states_that_the_optimizer_is_given_inside_of_the_block_are_refused(tmp_path: Path) -> None:
    """Loaded after the last step, they are the optimizer's, as in a loop without a Trainer."""
    model, other = net(), net()
    optimizer, earlier = OPTIMIZERS["adamw"](model), OPTIMIZERS["adamw"](other)
    plainly(other, earlier, None, range(2))
    graph = capture(model, batch(0), loss_fn)
    made = plan(graph, MACHINE, budget="100%", optimizer=optimizer, policy="keep-all")
    with Trainer(made, graph, model, optimizer=optimizer, folder=tmp_path) as trainer:
        trainer.step(batch(0))
        optimizer.load_state_dict(earlier.state_dict())
        with pytest.raises(ConfigError, match="expected the states that the Trainer has taken over"):
            trainer.step(batch(1))
        assert trainer.steps == 1
    mine, theirs = optimizer.state_dict()["state"], earlier.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for place, states in theirs.items():
        assert all(torch.equal(mine[place][key], value) for key, value in states.items())


def test_an_optimizer_without_states_has_none_afterwards(tmp_path: Path) -> None:
    model, expected = net(), net()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, expected)]
    graph = capture(model, batch(0), loss_fn)
    made = plan(graph, MACHINE, budget="100%", optimizer=optimizers[0], policy="keep-all")
    with Trainer(made, graph, model, optimizer=optimizers[0], folder=tmp_path) as trainer:
        trainer.step(batch(0))
    plainly(expected, optimizers[1], None, range(1))
    assert optimizers[0].state_dict() == optimizers[1].state_dict()


def test_a_checkpoint_has_the_numbers_of_the_groups(tmp_path: Path) -> None:
    """A schedule that goes on from the group's rate gives the bits of a loop that was not interrupted."""
    losses, saved = list[float](), tmp_path
    for steps in (range(3), range(3, STEPS)):
        model = net()
        optimizer = torch.optim.AdamW(grouped(model), lr=1e-3)
        schedule = lr_scheduler.StepLR(optimizer, 2, 0.5)
        graph = capture(model, batch(0), loss_fn)
        made = plan(graph, MACHINE, budget="100%", optimizer=optimizer, policy="keep-all")
        with Trainer(made, graph, model, optimizer=optimizer, folder=tmp_path) as trainer:
            if steps.start:
                schedule.load_state_dict(trainer.load(saved)["schedule"])
            for step in steps:
                losses.append(trainer.step(batch(step)))
                schedule.step()
                saved = trainer.save(tmp_path / "saved", meta={"schedule": schedule.state_dict()}, wait=bool(step % 2))
            trainer.wait_saved()
    reference = net()
    plain = torch.optim.AdamW(grouped(reference), lr=1e-3)
    assert losses == plainly(reference, plain, lr_scheduler.StepLR(plain, 2, 0.5), range(STEPS))
    assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]


def test_numbers_of_groups_with_other_parameters_stay_with_a_warning(tmp_path: Path) -> None:
    saved = tmp_path
    for groups in (grouped, lambda model: [{"params": [*model.parameters()], "lr": 7e-3}]):
        model = net()
        optimizer = torch.optim.AdamW(groups(model), lr=1e-3)
        graph = capture(model, batch(0), loss_fn)
        made = plan(graph, MACHINE, budget="100%", optimizer=optimizer, policy="keep-all")
        with Trainer(made, graph, model, optimizer=optimizer, folder=tmp_path) as trainer:
            if groups is grouped:
                trainer.step(batch(0))
                saved = trainer.save(tmp_path / "saved")
                continue
            with pytest.warns(UserWarning, match="parameter groups with other parameters"):
                trainer.load(saved)
            assert optimizer.param_groups[0]["lr"] == 7e-3


def test_a_plan_counts_what_a_checkpoint_has_of_the_groups(tmp_path: Path) -> None:
    model = net()
    graph = capture(model, batch(0), loss_fn)
    optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=1e-2)
    lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)  # which adds numbers
    made = plan(graph, MACHINE, budget="100%", optimizer=optimizer, policy="keep-all")
    counted = dict(saved_beside(graph, optimizer))
    assert counted.keys() - dict(saved_beside(graph)).keys() == {GROUPS}
    with Trainer(made, graph, model, optimizer=optimizer, folder=tmp_path) as trainer:
        trainer.step(batch(0))
        saved = open_checkpoint(trainer.save(tmp_path / "saved"))
        assert 0 < saved.tensors[GROUPS].size_bytes <= counted[GROUPS]


def test_updates_are_counted_in_the_dtype_of_torch() -> None:
    batches = [batch(step) for step in range(2)]
    models = net(), net()
    graph = capture(models[0], batches[0], loss_fn)
    torch.set_default_dtype(torch.float64)
    try:
        plain, planned = (torch.optim.AdamW(model.parameters()) for model in models)
        for each in batches:
            plain.zero_grad()
            loss_fn(models[0], each).backward()
            plain.step()
        made = plan(graph, MACHINE, budget="100%", optimizer=planned)
        with Trainer(made, graph, models[1], optimizer=planned) as trainer:
            for each in batches:
                trainer.step(each)
    finally:
        torch.set_default_dtype(torch.float32)
    states = [[*optimizer.state_dict()["state"].values()] for optimizer in (plain, planned)]
    assert all(state["step"].dtype is torch.float64 for of in states for state in of)
    assert all(torch.equal(one[key], other[key]) for one, other in zip(*states, strict=True) for key in one)


def test_a_group_with_a_tensor_is_refused_by_its_key() -> None:
    optimizer = torch.optim.AdamW(net().parameters(), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False)
    with pytest.raises(ConfigError, match=r"AdamW, got betas = \(tensor\(0\.9000\), tensor\(0\.9900\)\); tensors"):
        rule_of_optimizer(optimizer)


class Rotation(torch.nn.Module):
    """A complex matrix and a real bias; x_BF -> x_BF."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = torch.nn.Parameter(torch.randn(32, 32, dtype=torch.complex64) / 6)
        self.bias = torch.nn.Parameter(torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.turn).abs() + self.bias


def complex_machine() -> Machine:
    machine = small_machine()
    peaks = {**machine.device.peak_flops_per_s, "complex64": 1e10}
    return replace(machine, device=replace(machine.device, peak_flops_per_s=peaks))


@pytest.mark.parametrize("clip_norm", [0.0, 1e-2])
def test_complex_weights_move_and_are_clipped_as_in_plain_pytorch(clip_norm: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours, x = Rotation(), torch.randn(16, 32)
    theirs = copy.deepcopy(ours)
    mine, other = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (ours, theirs))

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    graph = capture(ours, x, loss)
    planned = plan(graph, complex_machine(), budget="1GB", optimizer=mine, clip_norm=clip_norm)
    with Trainer(planned, graph, ours, optimizer=mine, folder=tmp_path) as trainer:
        for _ in range(3):
            value = loss(theirs, x)
            value.backward()
            norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm or 1e9)
            other.step()
            other.zero_grad()
            assert trainer.step(x) == value.item()
            assert not clip_norm or trainer.gradient_norm == norm.item() > clip_norm
    assert all(torch.equal(*each) for each in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("rule", ["adamw", "adam", "lion", "adafactor"])
def test_rules_that_cannot_move_complex_weights_are_refused_when_planned(rule: str) -> None:
    graph = capture(Rotation(), torch.randn(16, 32), lambda model, x: model(x).square().mean())
    with pytest.raises(ConfigError, match=r"turn: expected weights that .* got complex64; .*an optimizer of torch"):
        plan(graph, complex_machine(), budget="1GB", optimizer=rule_named(rule, lr=1e-3))
