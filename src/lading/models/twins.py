"""Twins of the reference models: models of transformers that compute the same, their configuration and their names.

A Llama is a LlamaForCausalLM, with norms of queries and keys a Qwen3ForCausalLM; an MoE is a MixtralForCausalLM; a GPT
is a GPT2LMHeadModel, whose products keep their weights turned. A diffusion transformer has no twin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lading.config import ModelConfig
from lading.errors import ConfigError
from lading.models.gpt import GPT, GptConfig
from lading.models.hugging_face import check_found, read_config, tied_names
from lading.models.llama import Llama, LlamaConfig, RotaryDecoder
from lading.models.moe import MoE, MoeConfig
from lading.models.weight_files import FileTensor, WeightFiles, equal_numbers

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


def check_same_model(twin: Twin, found: Any, where: Path) -> None:
    """Refuse the configuration of a model that does not compute what a reference model does.

    Args:
        found: Configuration of transformers.
        where: Its file.

    Raises:
        ConfigError: it is another kind of model, or a setting differs; names the first.
    """
    from transformers import AutoConfig

    kind, expected = found.model_type, AutoConfig.for_model(**twin.config).to_dict()
    found_config = {**found.to_dict(), "model_type": kind}
    for config in (expected, found_config):
        if "n_embd" in config and config.get("n_inner") is None:
            config["n_inner"] = 4 * config["n_embd"]
        if config.get("head_dim") is None and "num_attention_heads" in config:
            config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    for key in ("model_type", *sorted(expected.keys() | found_config.keys())):
        want, actual = expected.get(key), found_config.get(key)
        is_longer = key == "max_position_embeddings" and isinstance(actual, int) and actual >= twin.config[key]
        if actual == want or is_longer or _NOT_COMPUTED.match(key):
            continue
        raise ConfigError(
            f"{where}: expected {key} {want!r}, as the run's model computes, found {actual!r}; set model.sizes "
            "alike if it is one of them, or name the folder itself as model.name: its own class is trained then"
        )


#: Settings of transformers that change no result of a trained model.
_NOT_COMPUTED = re.compile(
    r"(architectures|.*_pdrop|attention_dropout|.*token_id|(torch_)?dtype|(transformers|lading)_version|use_cache|id2label"
    r"|initializer_range|summary_.*|output_.*|return_dict|_?name_or_path|label2id|problem_type|task_specific_params"
    r"|chunk_size_feed_forward|is_encoder_decoder|pretraining_tp|router_(aux_loss_coef|jitter_noise)|max_window_layers"
    r"|_attn_implementation.*|_experts_implementation.*)\Z"
)


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
    special: dict[str, Any] = {"attention_bias": False}
    if isinstance(config, MoeConfig):  # transformers' has no setting for biases, and none of them
        special = {"num_local_experts": config.num_experts, "num_experts_per_tok": config.num_active}
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
        "sliding_window": None,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        **special,
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


def load_named(
    folder: Path,
    module: nn.Module,
    sink: Callable[[str, torch.Tensor], None],
    fill: Callable[[str, FileTensor], None] | None,
) -> None:
    """Hand the weights of a folder on for a model that is not transformers': a twin's, or tensors of the model's names.

    Args:
        module: The model, which may be fake.
        sink: Called with the first name of a parameter or buffer and its value, which it must copy.
        fill: Called instead with what reads a value, where the files have it in its own order; None reads it whole.

    Raises:
        ConfigError: the files are of another model; names what is missing, not expected, of another shape, or two
            values of one parameter, before anything is handed on.
        StorageError: a file is damaged.
    """
    files, twin = WeightFiles(folder), twin_of(module)
    if twin is not None and not (folder / "config.json").is_file():
        raise ConfigError(
            f"expected config.json beside the weights in {folder}, as they do not say what is computed with them, "
            "found none"
        )
    if twin is not None:
        check_same_model(twin, read_config(ModelConfig(name=str(folder))), folder / "config.json")
    keys = _keys_of(module, twin, files)
    _check_keys(module, twin, files, keys)
    for name, tensor in module.state_dict().items():
        if name not in keys:  # another name of a tensor that was handed on, or will be
            continue
        numbers = FileTensor(files, keys[name][0], (tensor.dtype,))
        if twin is not None and name in twin.turned:
            sink(name, files.read(keys[name][0]).t().to(tensor.dtype))
        elif fill is None:
            sink(name, files.read(keys[name][0]).to(tensor.dtype))
        else:
            fill(name, numbers)


def _keys_of(module: nn.Module, twin: Twin | None, files: WeightFiles) -> dict[str, list[str]]:
    """List the keys in the files of each parameter and buffer that the model saves, by its first name."""
    groups, present = tied_names(module), set(files.names())
    keys: dict[str, list[str]] = {}
    for name in module.state_dict():
        candidates = [name]
        if twin is not None:  # the inner model may have been saved alone
            candidates = [
                twin.names[name],
                *(twin.names[name].removeprefix(f"{prefix}.") for prefix in ("model", "transformer")),
            ]
        keys.setdefault(groups[name][0], []).extend(key for key in dict.fromkeys(candidates) if key in present)
    return keys


#: Tables in files of older versions of transformers that its classes compute.
_COMPUTED = re.compile(r"(.*\.)?(attn\.(bias|masked_bias)|rotary_emb\.inv_freq)\Z")


def _check_keys(module: nn.Module, twin: Twin | None, files: WeightFiles, keys: Mapping[str, list[str]]) -> None:
    """Refuse files that are not the model's; raises as ``load_named``."""
    targets, used = module.state_dict(), {key for keys_of_name in keys.values() for key in keys_of_name}
    strangers = [key for key in files.names() if key not in used and not _COMPUTED.match(key)]
    missing, misshapen = [name for name, keys_of_name in keys.items() if not keys_of_name], list[str]()
    for name, saved_keys in keys.items():
        shape = tuple(targets[name].shape)
        expected = shape[::-1] if twin is not None and name in twin.turned else shape
        misshapen += [
            f"{key} (expected {expected}, found {files.shape(key)})"
            for key in saved_keys
            if files.shape(key) != expected
        ]
    advice = "set model.name and model.sizes to the model that they are of, or name the folder itself as model.name"
    check_found(f"{files.folder}: expected the weights of the run's model", strangers, misshapen, missing, advice)
    for name, saved_keys in keys.items():
        first, *others = (FileTensor(files, key, (targets[name].dtype,)) for key in saved_keys)
        if unlike := next((tensor.key for tensor in others if not equal_numbers(first, tensor)), None):
            raise ConfigError(
                f"{files.folder}: {first.key!r} and {unlike!r} are one parameter of the run's model and differ in the "
                "files; set model.sizes.tied = false"
            )
