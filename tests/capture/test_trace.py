"""What a StepGraph says of a step, against eager PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.capture.parity import assert_equals_eager, latents, ops_of, own, squares, tokens, values
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lading
from lading.ir.graph import OpKind, Phase, Role, StepGraph
from lading.models.dit import noise_loss
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.tracing.trace import capture

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"dropout": 0.0}),
    ("gpt", {"dropout": 0.1}),
    ("gpt", {"dropout": 0.1, "tied": False}),
    ("llama", {"num_kv_heads": 1}),
    ("moe", {}),
]


class Norms(nn.Module):
    """Two batch norms, one of them evaluating."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3)
        self.moving = nn.BatchNorm1d(4)
        self.fixed = nn.BatchNorm1d(4).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fixed(self.moving(self.conv(x)).relu())


class InPlace(nn.Module):
    """Writes temporaries in place: whole, in part, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        z = torch.zeros(len(x), 8)
        z[:, :4] = y
        z[:, 4:].add_(y.detach()).mul_(2.0)
        z.mul_(3.0)
        z.t().relu_()
        return self.b(F.relu_(z[:, 2:6] + y)) * torch.tensor([1.0, 2.0, 3.0, 4.0])


class Checkpointed(nn.Module):
    """Recomputes part of itself."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.a(y).tanh(), self.dropout, self.dropout > 0)

        out = checkpoint(inner, x, use_reentrant=False)
        assert isinstance(out, torch.Tensor)
        return self.b(out)


@pytest.mark.parametrize(("name", "sizes"), MODELS)
def test_own_models_equal_eager(name: str, sizes: dict[str, Any]) -> None:
    graph = assert_equals_eager(own(name, **sizes), tokens(), next_byte_loss)
    random = [op for op in graph.ops if op.random]
    assert bool(random) == bool(sizes.get("dropout"))
    assert all(op.phase is Phase.FORWARD for op in random)


@pytest.mark.parametrize("mode", [True, False])
def test_a_diffusion_transformer_equals_eager(mode: bool) -> None:
    torch.manual_seed(0)
    model = build_model("dit", num_layers=2, dim=32, dropout=0.1).train(mode)
    for parameter in model.parameters():  # the identity of a fresh one would hide most gradients
        nn.init.normal_(parameter, std=0.1)
    graph = assert_equals_eager(model, latents(), noise_loss)
    drawn = {op.name.split(".")[1] for op in graph.ops if op.random}
    assert drawn == {"randint", "randn_like"} | ({"rand", "bernoulli_"} if mode else set())
    assert all(p.gradient is not None for p in graph.parameters)
    assert [len(b.starts) for b in graph.blocks] == [2, 2]


@pytest.mark.parametrize("module", [InPlace, Checkpointed])
def test_in_place_and_checkpointed_modules_equal_eager(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert_equals_eager(module(), {"x": torch.randn(3, 4)}, squares)


def test_batch_norm_updates_its_buffers() -> None:
    torch.manual_seed(0)
    model = Norms()
    before = values(model)
    graph = assert_equals_eager(model, {"x": torch.randn(5, 3, 6)}, squares)
    assert not torch.equal(before["moving.running_mean"], model.moving.running_mean)
    assert torch.equal(before["fixed.running_mean"], model.fixed.running_mean)
    written = {graph.storages[graph.storage_of(t)].name for op in graph.ops for t in op.mutates}
    assert written == {"moving.running_mean", "moving.running_var", "moving.num_batches_tracked"}


def test_tied_weights_are_one_parameter() -> None:
    graph = capture(own("gpt", tied=True), tokens(), next_byte_loss)
    tied = [p for p in graph.parameters if len(p.names) > 1]
    assert len(tied) == 1
    assert len(tied[0].names) == 2
    named = sum(s.size_bytes for s in graph.storages if s.role is Role.PARAMETER)
    assert named == 4 * sum(p.numel() for p in own("gpt", tied=True).parameters())


def test_frozen_and_unused_parameters_get_no_gradient() -> None:
    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = (nn.Linear(4, 4) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(self.frozen(x))

    graph = assert_equals_eager(Some(), {"x": torch.randn(3, 4)}, squares)
    trained = {p.names[0] for p in graph.parameters if p.gradient is not None}
    assert trained == {"used.weight", "used.bias"}
    assert not [op for op in ops_of(graph, Phase.BACKWARD) if op.module in ("frozen", "unused")]


def test_batches_are_trees_and_modules_take_keywords() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, *, x: torch.Tensor, scale: dict[str, Any]) -> dict[str, torch.Tensor]:
            return {"out": self.line(x) * scale["by"]}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        (x, target), options = batch
        return (model(x=x, scale=options)["out"] - target).abs().sum() * options["weight"]

    batch = ((torch.randn(3, 4), torch.randn(3, 4)), {"by": torch.randn(4), "weight": 0.5})
    graph = assert_equals_eager(Pair(), batch, loss)
    assert [name for name, _ in graph.inputs[0]] == ["0.0", "0.1", "1.by"]
    assert {graph.storages[graph.storage_of(t)].role for _, t in graph.inputs[0]} == {Role.INPUT}


def test_backward_operations_carry_the_path_of_their_module() -> None:
    graph = capture(own("llama", num_layers=3), tokens(), next_byte_loss)
    forward = {op.module for op in graph.ops if op.phase is Phase.FORWARD}
    for op in ops_of(graph, Phase.BACKWARD):
        assert op.module in forward | {""}, op
    order = [op.module for op in ops_of(graph, Phase.BACKWARD)]
    layers = [int(m.split(".")[1]) for m in order if m.startswith("layers.")]
    assert layers == sorted(layers, reverse=True)
    for layer in range(3):
        products = [op for op in ops_of(graph, Phase.BACKWARD, f"layers.{layer}") if op.kind is OpKind.MATMUL]
        ahead = [op for op in ops_of(graph, Phase.FORWARD, f"layers.{layer}") if op.kind is OpKind.MATMUL]
        assert [op.module for op in ahead] == [
            f"layers.{layer}.{name}" for name in _products(own("llama").get_submodule("layers.0"))
        ]
        assert sorted(op.module for op in products) == sorted(2 * [op.module for op in ahead])
    for parameter in graph.parameters:
        assert parameter.gradient is not None
        writers = [op for op in graph.ops if graph.storage_of(parameter.gradient) in graph.writes(op)]
        assert {op.module for op in writers} == {parameter.names[0].rpartition(".")[0]}


def _products(block: nn.Module) -> list[str]:
    return [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]


def test_phases_come_in_order_and_the_loss_is_its_own() -> None:
    graph = capture(own("gpt"), tokens(), next_byte_loss)
    phases = [op.phase for op in graph.ops]
    order = [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD]
    assert [p for i, p in enumerate(phases) if i == 0 or phases[i - 1] is not p] == order
    names = {op.name.split(".")[1] for op in ops_of(graph, Phase.LOSS)}
    assert {"_log_softmax", "nll_loss_forward"} <= names
    assert graph.storage_of(graph.losses[0]) in {s for op in ops_of(graph, Phase.LOSS) for s in graph.writes(op)}


def test_roles() -> None:
    model, batch = own("llama"), tokens()
    graph = capture(model, batch, next_byte_loss)
    assert graph.bytes_of_role(Role.PARAMETER) == 4 * sum(p.numel() for p in model.parameters())
    assert graph.bytes_of_role(Role.GRADIENT) == graph.bytes_of_role(Role.PARAMETER)
    assert graph.bytes_of_role(Role.BUFFER) == sum(b.nbytes for b in model.buffers())
    assert graph.bytes_of_role(Role.INPUT) == batch["tokens"].nbytes
    assert {s.name for s in graph.storages if s.role is Role.GRADIENT} == {
        f"{name}.grad" for name, _ in model.named_parameters()
    }


def test_flops_of_products_are_those_of_torch() -> None:
    model, batch = own("moe"), tokens()
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    for module, data, loss in ((mlp, {"x": torch.randn(5, 8)}, squares), (model, batch, next_byte_loss)):
        graph = capture(module, data, loss)
        with FlopCounterMode(display=False) as counter:
            loss(module, data).backward()
        products = sum(op.flops for op in graph.ops if op.kind is OpKind.MATMUL)
        assert products == sum(
            n for name, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(name)
        )
        assert products == graph.flops or module is model
        assert products > 0


def test_flops_of_attention() -> None:
    layers, rows, length, heads, width = 2, 2, 8, 2, 8
    graph = capture(own("llama", num_layers=layers), tokens(rows, length + 1), next_byte_loss)
    scores = rows * heads * length * length * width
    attention = {p: sum(op.flops for op in ops_of(graph, p) if op.kind is OpKind.ATTENTION) for p in Phase}
    assert attention[Phase.FORWARD] == layers * 2 * 2 * scores  # scores and values
    assert attention[Phase.BACKWARD] == layers * 5 * 2 * scores  # scores again, and both inputs of both products


def test_random_and_in_place_operations_are_marked() -> None:
    graph = capture(own("gpt", dropout=0.1), tokens(), next_byte_loss)
    random = [op for op in graph.ops if op.random]
    assert random
    assert {op.name.split(".")[1] for op in random} <= {"bernoulli_", "native_dropout"}
    assert not any(op.random for op in capture(own("gpt", dropout=0.1).eval(), tokens(), next_byte_loss).ops)
    writes = capture(InPlace(), {"x": torch.randn(3, 4)}, squares)
    partial = [op.name.split(".")[1] for op in writes.ops if op.mutates and op.phase is Phase.FORWARD]
    assert partial == ["copy_", "add_", "mul_"]  # what writes a whole temporary is out of place


def test_equal_layers_fold_into_blocks() -> None:
    graph = capture(own("llama", num_layers=4), tokens(), next_byte_loss)
    assert [(b.module, b.phase, len(b.starts)) for b in graph.blocks] == [
        ("layers", Phase.FORWARD, 4),
        ("layers", Phase.BACKWARD, 4),
    ]
    for block in graph.blocks:
        for start in block.starts:
            run = {".".join(op.module.split(".")[:2]) for op in graph.ops[start : start + block.num_ops]}
            assert len(run - {"rope"}) == 1  # a module that the layers share runs inside each


def test_unlike_layers_are_blocks_of_their_own() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 6), nn.Linear(6, 6))
    graph = capture(nn.Sequential(layers), {"x": torch.randn(3, 4)}, squares)
    forward = [b for b in graph.blocks if b.phase is Phase.FORWARD]
    assert sum(len(b.starts) for b in forward) == 1  # list item 0 of the outer list holds all the others
    graph = capture(layers, {"x": torch.randn(3, 4)}, squares)
    assert sorted(len(b.starts) for b in graph.blocks if b.phase is Phase.FORWARD) == [1, 1, 3]


def test_the_model_is_left_as_it_was() -> None:
    model = Norms().train()
    model.fixed.eval()
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    before, modes = values(model), {name: m.training for name, m in model.named_modules()}
    hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    state = torch.get_rng_state()
    capture(model, {"x": torch.ones(5, 3, 6)}, squares)
    assert torch.equal(torch.get_rng_state(), state)
    assert modes == {name: m.training for name, m in model.named_modules()}
    assert hooks == {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    after = values(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(model.conv.weight.grad, torch.ones_like(model.conv.weight))
    assert model.moving.weight.grad is None
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_the_loss_is_divided_by_accumulation() -> None:
    model, batch = own("gpt"), tokens()
    graph = capture(model, batch, next_byte_loss, accumulation=3)
    assert graph.accumulation == 3
    third = assert_equals_eager(model, batch, lambda m, b: next_byte_loss(m, b) / 3)
    assert [op.name for op in graph.ops] == [op.name for op in third.ops]


def _fingerprint(name: str, rows: int = 2, **sizes: Any) -> str:
    return capture(own(name, **sizes), tokens(rows), next_byte_loss).fingerprint


@pytest.mark.long
def test_fingerprints_are_of_structure() -> None:
    seen = _fingerprint("llama")
    torch.manual_seed(99)
    assert _fingerprint("llama") == seen
    others = [_fingerprint("llama", rows=3), _fingerprint("llama", dim=20), _fingerprint("llama", num_layers=3)]
    assert len({seen, *others}) == 4
    shared: StepGraph = capture(own("gpt", tied=True), tokens(), next_byte_loss)
    assert shared.fingerprint != capture(own("gpt", tied=False), tokens(), next_byte_loss).fingerprint


def test_the_folder_is_the_function() -> None:
    graph = lading.capture(nn.Linear(4, 4), {"x": torch.randn(3, 4)}, squares)
    assert isinstance(graph, StepGraph)
