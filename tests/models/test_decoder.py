"""A decoder of parts: equal to the reference models where they say the same."""

from __future__ import annotations

import pytest
import torch
from tools.models.decoder import DispatchedExperts, PartsConfig, PartsDecoder

from lading.errors import ConfigError
from lading.models.llama import Llama, LlamaConfig
from lading.models.moe import MoE, MoeConfig

_SIZES = {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 12, "hidden_dim": 24}


def _fused(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of a Llama under the names of a decoder of parts."""
    made = {k: v for k, v in state.items() if ".attn.w" not in k and ".mlp." not in k}
    for block in ("layers.0", "layers.1"):
        made[f"{block}.attn.qkv.weight"] = torch.cat([state[f"{block}.attn.w{x}.weight"] for x in "qkv"])
        made[f"{block}.attn.out.weight"] = state[f"{block}.attn.wo.weight"]
        if f"{block}.mlp.gate.weight" in state:
            made[f"{block}.mlp.up.weight"] = torch.cat([state[f"{block}.mlp.{x}.weight"] for x in ("gate", "up")])
            made[f"{block}.mlp.down.weight"] = state[f"{block}.mlp.down.weight"]
    return made


def test_it_is_llama_with_fewer_products() -> None:
    torch.manual_seed(0)
    whole, parts = Llama(LlamaConfig(**_SIZES, qk_norm=True)), PartsDecoder(PartsConfig(**_SIZES, qk_norm=True))
    parts.load_state_dict(_fused(whole.state_dict()))
    tokens = torch.randint(256, (3, 11))
    torch.testing.assert_close(parts(tokens), whole(tokens), rtol=1e-4, atol=1e-5)


def test_dispatching_gives_what_every_expert_on_every_token_gives() -> None:
    torch.manual_seed(0)
    every = MoE(MoeConfig(**_SIZES, num_experts=5, num_active=2))
    parts = PartsDecoder(
        PartsConfig(**_SIZES, parts=("attention", "experts"), num_experts=5, num_active=2, expert_dim=24)
    )
    state = _fused(every.state_dict())
    for key in [k for k in state if ".mlp_norm" in k]:
        state[key.replace("mlp_norm", "experts_norm")] = state.pop(key)
    before = every.state_dict()
    for block in ("layers.0", "layers.1"):
        parts_of = ("gate", "up", "down")
        named = {x: [before[f"{block}.mlp.experts.{e}.{x}.weight"].T for e in range(5)] for x in parts_of}
        state[f"{block}.experts.router.weight"] = before[f"{block}.mlp.router.weight"]
        gates = [torch.cat(pair, dim=1) for pair in zip(named["gate"], named["up"], strict=True)]
        state[f"{block}.experts.up_EDG"] = torch.stack(gates)
        state[f"{block}.experts.down_EGD"] = torch.stack(named["down"])
    parts.load_state_dict(state)
    tokens = torch.randint(256, (3, 11))
    torch.testing.assert_close(parts(tokens), every(tokens), rtol=1e-4, atol=1e-5)


def test_a_shared_expert_adds_to_every_token_and_sigmoid_weights_sum_to_one() -> None:
    torch.manual_seed(0)
    sizes = {**_SIZES, "parts": ("experts",), "num_experts": 5, "num_active": 3, "expert_dim": 24, "shared_dim": 16}
    experts = PartsDecoder(PartsConfig(**sizes, sigmoid_router=True)).layers[0].experts
    assert isinstance(experts, DispatchedExperts)
    x = torch.randn(2, 7, 32)
    weights, chosen = experts.route(x.flatten(0, 1))
    torch.testing.assert_close(weights.sum(-1), torch.ones(14))
    assert chosen.shape == (14, 3)
    shared, experts.shared = experts.shared, None
    assert shared is not None
    without = experts(x)
    experts.shared = shared
    torch.testing.assert_close(experts(x), without + shared(x))


def test_experts_may_work_in_another_width() -> None:
    torch.manual_seed(0)
    sizes = {**_SIZES, "parts": ("experts",), "num_experts": 3, "num_active": 3, "expert_dim": 24, "mlp": "relu2"}
    experts = PartsDecoder(PartsConfig(**sizes, experts_dim=12)).layers[0].experts
    assert isinstance(experts, DispatchedExperts)
    x = torch.randn(1, 5, 32)
    low, (weights, chosen) = experts.into(x[0]), experts.route(x[0])
    parts = [(low @ up).relu().square() @ down for up, down in zip(experts.up_EDG, experts.down_EGD, strict=True)]
    picked = torch.stack(parts, 1).gather(1, chosen[..., None].expand(-1, -1, 12))
    expected = experts.back((picked * weights[..., None]).sum(1))
    torch.testing.assert_close(experts(x)[0], expected)


def test_latent_attention_is_causal_and_its_heads_have_three_widths() -> None:
    torch.manual_seed(0)
    latent = {"query_rank": 6, "latent_rank": 10, "nope_size": 4, "rope_size": 2, "value_size": 5}
    model = PartsDecoder(PartsConfig(**_SIZES, **latent))
    assert model.layers[0].attn.kv_up.weight.shape == (4 * (4 + 5), 10)
    tokens = torch.randint(256, (2, 12))
    later = tokens.clone()
    later[:, 8:] = (later[:, 8:] + 1) % 256
    before, after = model(tokens), model(later)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.allclose(before[:, 8:], after[:, 8:])


def test_blocks_ahead_see_one_token_further_each() -> None:
    torch.manual_seed(0)
    model = PartsDecoder(PartsConfig(**_SIZES, ahead=2))
    tokens = torch.randint(256, (1, 12))
    later = tokens.clone()
    later[:, 8] = (later[:, 8] + 1) % 256
    for seen, before, after in zip((8, 7, 6), model(tokens), model(later), strict=True):
        torch.testing.assert_close(before[:, :seen], after[:, :seen])
        assert not torch.allclose(before[:, seen], after[:, seen])
    assert model.ahead[1].tokens.weight is model.tokens.weight


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(ConfigError, match="experts"):
        PartsConfig(parts=("attention", "expert"))
    with pytest.raises(ConfigError, match="relu2"):
        PartsConfig(mlp="relu")
    with pytest.raises(ConfigError, match="active"):
        PartsConfig(parts=("experts",), num_experts=2, num_active=3)
