"""Runs whose matrices Muon, Shampoo or SOAP move: the numbers of plain PyTorch, to the bit, at any budget."""

from __future__ import annotations

import dataclasses
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lading.catalog.load import save_machine
from lading.checkpoint.store import latest_checkpoint, open_checkpoint
from lading.config import load_run
from lading.errors import ConfigError, StorageError
from lading.grouping import Matrices
from lading.ir.graph import OpKind, Role
from lading.ir.plan import Plan
from lading.memory.restore import program_of
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.optim.adamw import AdamW
from lading.optim.master import MasterWeights
from lading.optim.muon import Muon, MuonRule
from lading.optim.rule import fresh, update_matrix
from lading.optim.shampoo import Shampoo, ShampooRule
from lading.optim.soap import SOAPRule
from lading.prepare import plan, plan_run
from lading.report.metrics import read_metrics
from lading.tracing.trace import capture
from lading.train import train_plain, train_run
from lading.trainer import Trainer
from tests.machines import small_machine
from tests.runs import OVERHEAD_BYTES, num_lines, saved_plan, start, wait_until, write_run

MUON = Matrices(rule="muon", lr=0.02)


class Experts(nn.Module):
    """A stack of fused matrices between a table and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(256, 32), nn.Linear(32, 256)
        self.up_EDG = nn.Parameter(torch.randn(4, 32, 96) / 6)
        self.down_EGD = nn.Parameter(torch.randn(4, 48, 32) / 6)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_ETD = self.tokens(tokens_BT).flatten(0, 1).unflatten(0, (4, -1))
        gate_ETG, up_ETG = torch.bmm(x_ETD, self.up_EDG).chunk(2, -1)
        y_ETD = x_ETD + torch.bmm(torch.tanh(gate_ETG) * up_ETG, self.down_EGD)
        return self.head(y_ETD.flatten(0, 1)).unflatten(0, tokens_BT.shape)


@dataclass(frozen=True)
class Case:
    """A run of a few steps; ``parts``: rows of the matrices that one parameter holds, by the end of its name."""

    matrices: Matrices
    model: str = "gpt"
    accumulation: int = 1
    clip_norm: float = 0.5
    precision: str = "fp32"
    steps: int = 4
    shares: tuple[float, ...] = (1.0, 0.5, 0.25)
    num_layers: int = 1
    dim: int = 32
    parts: dict[str, tuple[int, ...]] = field(default_factory=lambda: {})

    def __str__(self) -> str:
        return f"{self.matrices.rule}-{self.model}-{self.precision}-{self.accumulation}-{self.num_layers}"


def _matrices(rule: Any, **parameters: int | str) -> Matrices:
    settings = {"soap": {"frequency": 2}, "shampoo": {"frequency": 2, "eps": 1e-6}}.get(rule, {})
    return Matrices(rule=rule, lr=0.01, settings=settings, parameters={f"*{k}": v for k, v in parameters.items()})


CASES = [
    Case(MUON, shares=(1.0, 0.5)),
    Case(_matrices("muon", up_EDG=2), "experts", 2, precision="bf16", shares=(0.7,), parts={"up_EDG": (16, 16)}),
    Case(_matrices("soap", down_EGD="16 32"), "experts", shares=(0.8,), parts={"down_EGD": (16, 32)}),
    Case(_matrices("shampoo"), "experts", shares=(0.8,)),
]
SLOW = [
    Case(MUON, accumulation=2, steps=12, clip_norm=0.0, num_layers=3, dim=64),
    Case(MUON, steps=12, num_layers=3, dim=64),
    Case(MUON, precision="bf16", steps=12, num_layers=3, dim=64),
    Case(
        _matrices("muon", **{"qkv.weight": 3}),
        steps=8,
        shares=(1.0, 0.5),
        num_layers=2,
        parts={"qkv.weight": (32, 32, 32)},
    ),
    Case(_matrices("soap"), precision="bf16", accumulation=2, steps=8, shares=(0.6,), num_layers=2, dim=64),
    Case(
        _matrices("shampoo", **{"qkv.weight": "32 64"}),
        steps=8,
        shares=(0.6,),
        num_layers=2,
        parts={"qkv.weight": (32, 64)},
    ),
]


pytestmark = pytest.mark.usefixtures("one_thread")


def _model(case: Case) -> nn.Module:
    torch.manual_seed(0)
    if case.model == "experts":
        model: nn.Module = Experts()
    else:
        model = build_model("gpt", dim=case.dim, num_layers=case.num_layers, num_heads=2, dropout=0.1)
    return model.to(torch.bfloat16) if case.precision == "bf16" else model


def _batches(case: Case, step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [{"tokens": torch.randint(0, 256, (4, 33), generator=generator)} for _ in range(case.accumulation)]


def _is_matrix(name: str, param: torch.Tensor, case: Case) -> bool:
    if case.model == "experts":
        return param.dim() == 3
    return name.startswith("layers.") and param.dim() == 2


def _views(param: torch.Tensor, rows: tuple[int, ...]) -> list[torch.Tensor]:
    """The matrices of a parameter or its gradient."""
    stack = param if param.dim() == 3 else param.unsqueeze(0)
    return [part for matrix in stack for part in matrix.split(list(rows) or [matrix.shape[0]])]


class _Reference:
    """torch's Muon, or ``update_matrix`` of another rule, on every matrix of some parameters."""

    def __init__(self, case: Case, named: list[tuple[str, torch.Tensor]]) -> None:
        self.params = [(p, next((r for key, r in case.parts.items() if name.endswith(key)), ())) for name, p in named]
        self.leaves = [nn.Parameter(view) for p, rows in self.params for view in _views(p.detach(), rows)]
        self.lr, self.update, rule = case.matrices.lr, 0, case.matrices.made()
        self.rule = (
            None if isinstance(rule, Muon) else ShampooRule(rule) if isinstance(rule, Shampoo) else SOAPRule(rule)
        )
        self.muon = torch.optim.Muon(self.leaves, lr=self.lr)
        shapes = [(leaf.shape[0], leaf.shape[1]) for leaf in self.leaves]
        self.states = [] if self.rule is None else [fresh(self.rule, shape, torch.float32) for shape in shapes]

    @torch.no_grad()
    def step(self) -> None:
        self.update += 1
        gradients = [view for p, rows in self.params if p.grad is not None for view in _views(p.grad, rows)]
        for leaf, gradient in zip(self.leaves, gradients, strict=True):
            leaf.grad = gradient.contiguous()
        if self.rule is None:
            self.muon.step()
            return
        for leaf, (held, whole) in zip(self.leaves, self.states, strict=True):
            assert leaf.grad is not None
            update_matrix(self.rule, leaf.data, leaf.grad, held, whole, lr=self.lr, update=self.update)


def _plain(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _model(case)
    masters = MasterWeights(model)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    pairs = list(zip(names, masters.parameters, strict=True))
    matrices = [(n, p) for n, p in pairs if _is_matrix(n, p, case)]
    rest = [p for n, p in pairs if not _is_matrix(n, p, case)]
    adamw = torch.optim.AdamW(rest, lr=1e-3, fused=True)
    moving = _Reference(case, matrices)
    losses: list[float] = []
    for step in range(case.steps):
        total = 0.0
        for batch in _batches(case, step):
            loss = next_byte_loss(model, batch)
            loss = loss / case.accumulation if case.accumulation > 1 else loss
            loss.backward()
            masters.add_gradients()
            total += loss.item()
        losses.append(total)
        if case.clip_norm:
            torch.nn.utils.clip_grad_norm_(masters.parameters, case.clip_norm)
        moving.step()
        adamw.step()
        masters.write_back()
        for p in masters.parameters:
            p.grad = None
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def _planned(case: Case, share: float, folder: Path) -> tuple[list[float], dict[str, torch.Tensor], Plan]:
    """Train with ``share`` of the tensor bytes that keeping all needs."""
    model = _model(case)
    graph = capture(model, _batches(case, 0)[0], next_byte_loss, accumulation=case.accumulation)
    settings: dict[str, Any] = {"clip_norm": case.clip_norm, "master_weights": case.precision == "bf16"}
    settings["matrices"] = case.matrices
    made = plan(graph, small_machine(), budget="100%", **settings)
    if share < 1:
        budget = made.peak_bytes["device"] - int((1 - share) * program_of(made, graph).arena_bytes)
        made = plan(graph, small_machine(), budget=budget, **settings)
    with Trainer(made, graph, model, optimizer=AdamW(lr=1e-3), folder=folder) as trainer:
        losses = [trainer.step(_batches(case, step)) for step in range(case.steps)]
    return losses, {name: p.detach() for name, p in model.named_parameters()}, made


@pytest.mark.long
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_planned_equals_plain_to_the_bit(case: Case, tmp_path: Path) -> None:
    losses, weights = _plain(case)
    for share in case.shares:
        got, values, made = _planned(case, share, tmp_path)
        assert got == losses, f"{case} at {share}"
        assert values.keys() == weights.keys()
        assert all(torch.equal(values[key], weights[key]) for key in weights), f"{case} at {share}"
        assert (len(made.choices.gaps) > 0) == (share < 1)
        assert made.assumptions[0].startswith(f"{case.matrices.rule} moves")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_are_those_of_the_rule(case: Case) -> None:
    graph = capture(_model(case), _batches(case, 0)[0], next_byte_loss)
    masters = case.precision == "bf16"
    made = plan(graph, small_machine(), budget="100%", matrices=case.matrices, master_weights=masters)
    step = program_of(made, graph).graph
    moved = {n: p for n, p in _model(case).named_parameters() if _is_matrix(n, p, case)}
    wanted = 0
    for name, param in moved.items():
        rows = next((r for key, r in case.parts.items() if name.endswith(key)), ())
        for view in _views(param, rows):
            held, whole = fresh(_rule(case), (view.shape[0], view.shape[1]), torch.float32)
            wanted += sum(4 * t.numel() for t in (*held.values(), *whole.values()))
        wanted += 4 * (case.matrices.rule != "muon") + 4 * param.numel() * masters
    rest = [p for n, p in _model(case).named_parameters() if n not in moved]
    wanted += sum(4 * (2 + masters) * p.numel() + 4 for p in rest)
    assert step.bytes_of_role(Role.OPTIMIZER_STATE) == wanted
    updates = [op for op in step.ops if op.kind is OpKind.STEP and op.name == f"lading.{case.matrices.rule}"]
    assert sum(op.flops for op in updates) > 0
    assert len(updates) == len(moved) + _extra(case, moved)


def _rule(case: Case) -> Any:
    rule = case.matrices.made()
    return (
        MuonRule(rule) if isinstance(rule, Muon) else ShampooRule(rule) if isinstance(rule, Shampoo) else SOAPRule(rule)
    )


def _extra(case: Case, moved: dict[str, torch.Tensor]) -> int:
    """Updates more than parameters, as some hold several matrices."""
    return sum(len(rows) - 1 for name in moved for key, rows in case.parts.items() if name.endswith(key))


def test_saved_and_resumed_under_another_budget(tmp_path: Path) -> None:
    case = dataclasses.replace(CASES[3], matrices=MUON, clip_norm=0.0)
    graph = capture(_model(case), _batches(case, 0)[0], next_byte_loss)
    made = plan(graph, small_machine(), budget="100%", matrices=MUON)
    with Trainer(made, graph, _model(case), folder=tmp_path) as trainer:
        for step in range(2):
            trainer.step(_batches(case, step), lr=1e-3, matrix_lr=0.01)
        saved = trainer.save(tmp_path / "saved")
        wanted = [trainer.step(_batches(case, step), lr=1e-3, matrix_lr=0.01) for step in (2, 3)]
    small = made.peak_bytes["device"] - program_of(made, graph).arena_bytes // 5
    tight = plan(graph, small_machine(), budget=small, matrices=MUON)
    with Trainer(tight, graph, None, folder=tmp_path) as trainer:
        trainer.load(saved)
        assert [trainer.step(_batches(case, step), lr=1e-3, matrix_lr=0.01) for step in (2, 3)] == wanted
        with pytest.raises(ConfigError, match="lr and matrix_lr, or neither, as muon"):
            trainer.step(_batches(case, 4), lr=1e-3)
    adamw = plan(graph, small_machine(), budget="100%")
    with Trainer(adamw, graph, _model(case), folder=tmp_path) as trainer:
        with pytest.raises(StorageError, match="written by muon and adamw, this plan moves parameters by adamw"):
            trainer.load(saved)
        assert trainer.step(_batches(case, 0)) > 0  # nothing was touched
        with pytest.raises(ConfigError, match="no matrix_lr"):
            trainer.step(_batches(case, 1), matrix_lr=0.1)
        with pytest.raises(ConfigError, match="no matrix_lr"):
            trainer.step(_batches(case, 1), lr=1e-3, matrix_lr=0.1)


def test_the_example_trains_as_plain_pytorch_does(tmp_path: Path) -> None:
    """Two steps of a smaller one, from the file to the checkpoint; then it is refused to go on with AdamW."""
    save_machine(small_machine(overhead_bytes=OVERHEAD_BYTES), tmp_path / "machine.toml")
    smaller = [
        "model.sizes.dim=32",
        "model.sizes.num_layers=1",
        "model.sizes.num_heads=2",
        "optimization.steps=2",
        "optimization.warmup_steps=1",
    ]
    here = [f"out={tmp_path / 'out'}", f"machine={tmp_path / 'machine.toml'}", "threads=1", "memory.budget=99%"]
    run = load_run(Path(__file__).parent.parent / "examples" / "muon.toml", [*smaller, *here])
    planned = train_run(run)
    assert planned.losses == train_plain(run, tmp_path).losses
    assert planned.peak_bytes <= planned.budget_bytes
    other = dataclasses.replace(run, optimization=dataclasses.replace(run.optimization, matrices=None))
    with pytest.raises(ConfigError, match=r"saved with another .*matrices.rule \(was 'muon', is None\)"):
        train_run(other, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["muon", "soap"])
def test_killed_at_random_instants(rule: str, tmp_path: Path) -> None:
    path = write_run(tmp_path)
    text = path.read_text().replace("steps = 40", f'steps = 40, matrices = {{ rule = "{rule}", lr = 0.01 }}')
    path.write_text(text)
    made = plan_run(load_run(path)).plan
    chance, saved = random.Random(0), {}
    for name in ("reference", "killed"):
        out, log = tmp_path / name, tmp_path / f"{name}.log"
        argv = ["train", "--plan", str(saved_plan(made, out)), "--resume"]
        kills = 0
        while name == "killed" and kills < 4:
            process, before = start(log, *argv), num_lines(out / "metrics.jsonl")
            wait_until(lambda out=out, before=before: num_lines(out / "metrics.jsonl") > before + 5, process)
            time.sleep(chance.uniform(0, 0.05))
            process.kill()
            process.join()
            assert process.exitcode == -9
            kills += 1
        process = start(log, *argv)
        process.join(200)
        assert process.exitcode == 0, log.read_text()
        newest = latest_checkpoint(out / "checkpoints")
        assert newest is not None
        losses = [record["loss"] for record in read_metrics(out / "metrics.jsonl")]
        saved[name] = (open_checkpoint(newest).step, (newest / "state.safetensors").read_bytes(), losses)
    assert saved["killed"] == saved["reference"]
    assert saved["killed"][0] == len(saved["killed"][2]) == 40
