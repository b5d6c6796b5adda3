"""The models of the planner's zoo: captured only, so their size costs nothing but operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lading.ir.graph import StepGraph
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.tracing.initial import defer
from lading.tracing.trace import capture

Build = Callable[[], torch.nn.Module]
Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A model with a batch's shape and a loss."""

    name: str
    build: Build
    batch: Callable[[], dict[str, torch.Tensor]]
    loss: Loss

    def graph(self) -> StepGraph:
        """One micro-batch, captured."""
        return capture(defer(self.build).model, self.batch(), self.loss)


def cases() -> tuple[Case, ...]:
    """Own models, and one of each kind from transformers, all at sizes people train."""
    return (*_lading_cases(), *_hugging_face())


def _lading_cases() -> list[Case]:
    sizes: dict[str, tuple[str, dict[str, Any], int, int]] = {
        "gpt-124m": ("gpt", {"dim": 768, "num_layers": 12, "num_heads": 12, "vocab_size": 50304}, 4, 1024),
        "llama-1b-6-layers": (
            "llama",
            {"dim": 2048, "num_layers": 6, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 128256},
            1,
            2048,
        ),
        "moe-8-experts": ("moe", {"dim": 512, "num_layers": 6, "num_heads": 8, "vocab_size": 32000}, 4, 512),
    }
    return [
        Case(
            name,
            lambda kind=kind, settings=settings, length=length: build_model(kind, max_seq_len=length, **settings),
            lambda batch=batch, length=length: {"tokens": torch.zeros(batch, length + 1, dtype=torch.int64)},
            next_byte_loss,
        )
        for name, (kind, settings, batch, length) in sizes.items()
    ]


def _hugging_face() -> list[Case]:
    import transformers as hf

    def text(batch: int, length: int) -> Callable[[], dict[str, torch.Tensor]]:
        ids = {"input_ids": (batch, length), "labels": (batch, length)}
        return lambda: {name: torch.zeros(shape, dtype=torch.int64) for name, shape in ids.items()}

    llama = hf.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True,
    )  # fmt: skip
    mixtral = hf.MixtralConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=4, num_local_experts=8, vocab_size=32000, experts_implementation="grouped_mm",
    )  # fmt: skip
    gpt2 = hf.GPT2Config(n_embd=1024, n_layer=24, n_head=16)
    bert = hf.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return [
        Case("hf-gpt2-medium", lambda: hf.GPT2LMHeadModel(gpt2), text(2, 1024), _own_loss),
        Case("hf-llama-1b-4-layers", lambda: hf.LlamaForCausalLM(llama), text(1, 2048), _own_loss),
        Case("hf-mixtral-4-layers", lambda: hf.MixtralForCausalLM(mixtral), text(2, 1024), _own_loss),
        Case("hf-bert-large", lambda: hf.BertForMaskedLM(bert), text(8, 512), _own_loss),
        Case(
            "hf-t5-base",
            lambda: hf.T5ForConditionalGeneration(hf.T5Config.from_dict(_T5_BASE)),
            text(4, 512),
            _own_loss,
        ),
    ]


_T5_BASE = {
    "d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12,
    "vocab_size": 32128, "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip


def _own_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss a model of transformers computes from its labels."""
    return model(**batch).loss
