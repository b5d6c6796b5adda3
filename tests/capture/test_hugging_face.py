"""Stock models of transformers, tiny and with random weights, captured without any change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.capture.parity import assert_equals_eager, ops_of
from torch import nn

from lading.ir.graph import OpKind, Phase
from lading.tracing.trace import capture

hf = pytest.importorskip("transformers")

LAYERS, ROWS, LENGTH, WIDTH, EXPERTS = 2, 2, 8, 16, 4
DECODER = {
    "vocab_size": 32,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": 32, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
BERT = {key: DECODER[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER | {"head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "bert": ("BertForMaskedLM", "BertConfig", BERT | {"num_attention_heads": 2}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", DECODER | {"num_local_experts": EXPERTS}),
}


def model_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def built(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model in training mode and a batch with labels."""
    model_name, config_name, sizes = CASES[name]
    torch.manual_seed(0)
    model = getattr(hf, model_name)(getattr(hf, config_name)(**sizes)).train()
    ids = torch.randint(32, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    return model, batch | ({"attention_mask": torch.ones_like(ids)} if name == "bert" else {})


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str) -> None:
    graph = assert_equals_eager(*built(name), model_loss)
    assert [(b.phase, len(b.starts)) for b in graph.blocks] == [(Phase.FORWARD, LAYERS), (Phase.BACKWARD, LAYERS)]
    assert any(op.random for op in graph.ops) == (name in ("gpt2", "bert"))  # the two with dropout
    assert graph.flops > 0


@pytest.mark.parametrize("mask", ["none", "ones", "padded"])
def test_attention_takes_the_kernel_of_eager(mask: str) -> None:
    model, batch = built("llama")
    config: Any = model.config
    config.use_cache = False
    if mask != "none":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if mask == "padded":
        batch["attention_mask"][1, -3:] = 0
    graph = assert_equals_eager(model, batch, model_loss)
    attention = [op for op in ops_of(graph, Phase.FORWARD) if "scaled_dot_product" in op.name]
    assert len(attention) == LAYERS
    assert [len(op.inputs) for op in attention] == LAYERS * [4 if mask == "padded" else 3]


def test_experts_are_grouped_products() -> None:
    graph = capture(*built("mixtral"), model_loss)
    experts = [op for op in ops_of(graph, Phase.FORWARD) if "grouped_mm" in op.name]
    assert len(experts) == 2 * LAYERS
    tokens = ROWS * LENGTH * 2  # each token goes to two experts
    assert [op.flops for op in experts] == LAYERS * [2 * tokens * WIDTH * 48, 2 * tokens * 24 * WIDTH]
    assert {op.kind for op in experts} == {OpKind.MATMUL}
