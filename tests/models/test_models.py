"""What every reference model must do, and what each does alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lading.errors import ConfigError
from lading.models.gpt import GPT, GptConfig
from lading.models.llama import LlamaAttention, LlamaConfig, Rope
from lading.models.loss import next_byte_loss
from lading.models.moe import MoeConfig, RoutedExperts
from lading.models.reference import build_model

SMALL: dict[str, Any] = {"vocab_size": 32, "max_seq_len": 16, "num_layers": 2, "dim": 24, "num_heads": 4}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {}),
    ("gpt", {"tied": False}),
    ("llama", {}),
    ("llama", {"num_kv_heads": 2}),
    ("llama", {"num_kv_heads": 1, "hidden_dim": 20}),
    ("llama", {"num_kv_heads": 2, "head_size": 8, "qk_norm": True, "tied": True}),
    ("moe", {"num_kv_heads": 2, "hidden_dim": 16}),
    ("moe", {"num_experts": 3, "num_active": 1}),
]
every_model = pytest.mark.parametrize(("name", "sizes"), VARIANTS, ids=[f"{n}-{s}" for n, s in VARIANTS])


def small(name: str, sizes: dict[str, Any], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(name, **SMALL | sizes)


def some_tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


@every_model
def test_logits_have_the_shape_of_the_tokens_and_the_vocabulary(name: str, sizes: dict[str, Any]) -> None:
    logits = small(name, sizes)(some_tokens())
    assert logits.shape == (2, 12, 32)
    assert logits.dtype == torch.float32


@every_model
def test_a_future_token_does_not_change_the_past(name: str, sizes: dict[str, Any]) -> None:
    model, tokens = small(name, sizes), some_tokens()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 32
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7], rtol=0, atol=1e-6)
    assert (after[:, 7:] - before[:, 7:]).abs().amax(dim=(0, 2)).min() > 1e-5  # and every later one sees it


@every_model
def test_loss_is_near_uniform_at_the_start_and_reaches_every_parameter(name: str, sizes: dict[str, Any]) -> None:
    model = small(name, sizes)
    loss = next_byte_loss(model, {"tokens": some_tokens(length=13)})
    assert loss.item() == pytest.approx(torch.tensor(32.0).log().item(), rel=0.05)
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        if "experts" not in key and "router" not in key:
            assert parameter.grad.abs().max() > 0, key


@every_model
def test_the_seed_decides_the_weights(name: str, sizes: dict[str, Any]) -> None:
    first, again, other = small(name, sizes), small(name, sizes), small(name, sizes, seed=1)
    states = [model.state_dict() for model in (first, again, other)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(states[0]["tokens.weight"], states[2]["tokens.weight"])


@every_model
def test_weights_of_a_model_built_without_memory_are_the_same_after_init(name: str, sizes: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = build_model(name, **SMALL | sizes)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.init_weights()  # pyright: ignore[reportCallIssue]
    logits = model(some_tokens())
    reference = small(name, sizes)
    torch.manual_seed(3)
    reference.init_weights()  # pyright: ignore[reportCallIssue]
    assert torch.equal(logits, reference(some_tokens()))


@pytest.mark.long
@every_model
def test_a_training_step_traces_on_fake_tensors(name: str, sizes: dict[str, Any]) -> None:
    with FakeTensorMode():
        model = build_model(name, **SMALL | sizes)
        loss = next_byte_loss(model, {"tokens": torch.zeros(2, 9, dtype=torch.int64)})
        loss.backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@every_model
def test_a_few_steps_lower_the_loss(name: str, sizes: dict[str, Any]) -> None:
    model, batch = small(name, sizes), {"tokens": some_tokens(length=13)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(12):
        loss = next_byte_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_residual_projections_start_smaller_with_depth() -> None:
    torch.manual_seed(0)
    model = build_model("llama", dim=128, num_layers=8)
    state = model.state_dict()
    assert state["layers.0.attn.wq.weight"].std() == pytest.approx(0.02, rel=0.05)
    assert state["layers.0.attn.wo.weight"].std() == pytest.approx(0.02 / 4, rel=0.05)
    assert state["layers.7.mlp.down.weight"].std() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(state["norm.weight"], torch.ones(128))


def test_a_tied_head_is_one_parameter_and_an_untied_one_two() -> None:
    tied, untied = small("gpt", {"tied": True}), small("gpt", {"tied": False})
    assert tied.head.weight is tied.tokens.weight  # pyright: ignore[reportAttributeAccessIssue]
    assert sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters()) == 32 * 24


def test_dropout_acts_in_training_only() -> None:
    model, tokens = GPT(GptConfig(**SMALL, dropout=0.3)), some_tokens()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_gpt_attention_equals_the_formula() -> None:
    torch.manual_seed(0)
    block = GPT(GptConfig(**SMALL)).layers[0].double()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    q, k, v = (part.view(2, 5, 4, 6).transpose(1, 2) for part in block.qkv(x).split(24, dim=2))
    scores = (q @ k.transpose(2, 3) / 6**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    expected = block.attn_out((scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 24))
    torch.testing.assert_close(block.attention(x), expected, rtol=1e-12, atol=1e-12)


def test_grouped_attention_equals_repeated_heads() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, num_kv_heads=2)
    grouped, full = LlamaAttention(config).double(), LlamaAttention(LlamaConfig(**SMALL)).double()
    rope, x = Rope(config).double(), torch.randn(2, 7, 24, dtype=torch.float64)
    for name in ("wq", "wo"):
        getattr(full, name).weight = getattr(grouped, name).weight
    for name in ("wk", "wv"):
        repeated = getattr(grouped, name).weight.view(2, 6, 24).repeat_interleave(2, dim=0).reshape(24, 24)
        getattr(full, name).weight = nn.Parameter(repeated)
    torch.testing.assert_close(grouped(x, rope), full(x, rope), rtol=1e-12, atol=1e-12)


def test_rope_is_multiplication_by_a_complex_number() -> None:
    rope, x = Rope(LlamaConfig(**SMALL)).double(), torch.randn(1, 1, 9, 6, dtype=torch.float64)
    frequencies = 10_000.0 ** -(torch.arange(0, 6, 2, dtype=torch.float64) / 6)
    angles = torch.outer(torch.arange(9, dtype=torch.float64), frequencies)
    turned = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rope(x), torch.cat((turned.real, turned.imag), dim=-1), rtol=0, atol=1e-6)


def routed_by_hand(layer: RoutedExperts, x_BTD: torch.Tensor) -> torch.Tensor:
    """Token by token: score the experts, keep the best, weigh them by their softmax."""
    y_BTD = torch.zeros_like(x_BTD)
    for b in range(x_BTD.shape[0]):
        for t in range(x_BTD.shape[1]):
            scores = layer.router.weight @ x_BTD[b, t]
            chosen = sorted(range(len(scores)), key=lambda e: -scores[e].item())[: layer.num_active]
            for e in chosen:
                expert = layer.experts[e]
                hidden = F.silu(expert.gate.weight @ x_BTD[b, t]) * (expert.up.weight @ x_BTD[b, t])
                weight = scores[e].exp() / scores[chosen].exp().sum()
                y_BTD[b, t] += weight * (expert.down.weight @ hidden)
    return y_BTD


@settings(max_examples=10)
@given(num_experts=st.integers(1, 5), data=st.data())
def test_routed_experts_equal_a_loop_over_tokens(num_experts: int, data: st.DataObject) -> None:
    num_active = data.draw(st.integers(1, num_experts))
    torch.manual_seed(num_experts)
    config = MoeConfig(**SMALL, hidden_dim=8, num_experts=num_experts, num_active=num_active)
    layer, x = RoutedExperts(config).double(), torch.randn(2, 6, 24, dtype=torch.float64, requires_grad=True)
    actual, expected = layer(x), routed_by_hand(layer, x)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    names, weights = zip(*layer.named_parameters(), strict=True)
    for name, ours, theirs in zip(
        ("input", *names),
        torch.autograd.grad(actual.square().sum(), (x, *weights)),
        torch.autograd.grad(expected.square().sum(), (x, *weights), materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("gpt", {"dim": 30}, "dim must be a multiple of num_heads, got 30 and 4"),
        ("gpt", {"num_layers": 0}, "num_layers must be a positive integer, got 0"),
        ("gpt", {"num_layers": 10**9}, r"num_layers: expected at most 10,000, got 1e\+09"),
        ("moe", {"num_experts": 10**9}, "num_experts: expected at most 10,000"),
        ("gpt", {"num_layers": 2.0}, "num_layers must be a positive integer, got 2.0"),
        ("gpt", {"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ("llama", {"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ("llama", {"num_kv_heads": 0}, "num_kv_heads must be a positive integer"),
        ("llama", {"hidden_dim": -8}, "hidden_dim must be a positive integer"),
        ("llama", {"dim": 20}, "must be even for rotary positions, got 5"),
        ("llama", {"norm_eps": 0.0}, "rope_theta and norm_eps must be positive"),
        ("moe", {"num_active": 5}, "num_active must be at most num_experts=4, got 5"),
        ("moe", {"num_experts": 0}, "num_experts must be a positive integer"),
        ("lama", {}, "expected a model among dit, gpt, llama, moe; got 'lama'; did you mean 'llama'"),
        ("llama", {"n_layers": 2}, "got 'n_layers'; did you mean 'num_layers'"),
        ("gpt", {"num_experts": 2}, "expected a size of 'gpt' among vocab_size, .*; got 'num_experts'"),
    ],
)
def test_what_means_nothing_is_refused(name: str, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model(name, **SMALL | sizes)


@pytest.mark.parametrize("name", ["gpt", "llama", "moe"])
def test_a_batch_of_the_wrong_shape_is_refused(name: str) -> None:
    model = small(name, {})
    with pytest.raises(ConfigError, match="17 tokens exceed max_seq_len=16"):
        model(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"shape \(batch, tokens\), got \(3,\)"):
        model(torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(("batch", "found"), [({"text": torch.zeros(1)}, "text"), ({"tokens": torch.zeros(2, 1)}, "1")])
def test_a_batch_without_targets_is_refused(batch: dict[str, torch.Tensor], found: str) -> None:
    with pytest.raises(ConfigError, match=f"'tokens' of shape .* got .*{found}"):
        next_byte_loss(small("gpt", {}), batch)


def test_the_loss_is_that_of_the_next_byte() -> None:
    tokens = some_tokens(batch=3, length=6)
    logits = F.one_hot(tokens[:, 1:], 32).float() * 50  # a model that knows the answer

    class Oracle(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            assert torch.equal(inputs, tokens[:, :-1])
            return logits

    assert next_byte_loss(Oracle(), {"tokens": tokens}).item() < 1e-6
