"""Reference models as models of transformers: the same architecture under transformers' names, where it has it.

A Llama is a LlamaForCausalLM, with norms of queries and keys a Qwen3ForCausalLM; an MoE is a MixtralForCausalLM; a GPT
is a GPT2LMHeadModel, whose products keep their weights turned. A diffusion transformer has no twin there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lading.models.gpt import GPT, GptConfig
from lading.models.llama import Llama, LlamaConfig, RotaryDecoder
from lading.models.moe import MoE, MoeConfig

#: Names of one layer here -> in transformers' files, before ".weight" or ".bias".
_ROTARY = {
    "attn_norm": "input_layernorm", "attn.wq": "self_attn.q_proj", "attn.wk": "self_attn.k_proj",
    "attn.wv": "self_attn.v_proj", "attn.wo": "self_attn.o_proj", "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm", "mlp_norm": "post_attention_layernorm", "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj", "mlp.router": "block_sparse_moe.gate",
}  # fmt: skip
_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}
_GPT = {
    "attn_norm": "ln_1", "qkv": "attn.c_attn", "attn_out": "attn.c_proj", "mlp_norm": "ln_2", "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}  # fmt: skip
_TOP = {"tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_GPT_TOP = {"tokens": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"}
_TURNED = ("qkv.weight", "attn_out.weight", "mlp_in.weight", "mlp_out.weight")


@dataclass(frozen=True)
class Twin:
    """A model of transformers that computes the same as a reference model.

    Attributes:
        config: Entries of its config.json, without version and dtype.
        names: Name of each tensor there, by its name here.
        turned: Names here of the weights of which transformers keeps the transpose.
    """

    config: dict[str, Any]
    names: Mapping[str, str]
    turned: frozenset[str] = frozenset()


def twin_of(module: nn.Module) -> Twin | None:
    """Find the model of transformers that computes what a reference model does; None if there is none."""
    names = list(module.state_dict())
    if isinstance(module, GPT):
        if module.config.head_dim * module.config.num_heads != module.config.dim:
            return None  # transformers takes the width of a head from the others
        turned = frozenset(name for name in names if name.endswith(_TURNED))
        return Twin(_gpt_config(module.config), {name: _gpt_name(name) for name in names}, turned)
    if isinstance(module, Llama | MoE):
        if isinstance(module, MoE) and module.config.qk_norm:
            return None
        return Twin(_rotary_config(module), {name: _rotary_name(name) for name in names})
    return None


def _gpt_config(config: GptConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_embd": config.dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.mlp_dim,
        "activation_function": "gelu",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _rotary_config(module: RotaryDecoder) -> dict[str, Any]:
    config: LlamaConfig = module.config
    kind = "mixtral" if isinstance(config, MoeConfig) else "qwen3" if config.qk_norm else "llama"
    experts: dict[str, Any] = {}
    if isinstance(config, MoeConfig):
        experts = {"num_local_experts": config.num_experts, "num_experts_per_tok": config.num_active}
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.dim,
        "intermediate_size": config.mlp_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": False,
        "sliding_window": None,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        **experts,
    }


def _gpt_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _GPT_TOP:
        return f"{_GPT_TOP[module]}.{kind}"
    _, layer, inner = module.split(".", 2)
    return f"transformer.h.{layer}.{_GPT[inner]}.{kind}"


def _rotary_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{kind}"
    _, layer, inner = module.split(".", 2)
    if inner.startswith("mlp.experts."):
        *_, expert, part = inner.split(".")
        return f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{_EXPERT[part]}.{kind}"
    return f"model.layers.{layer}.{_ROTARY[inner]}.{kind}"
