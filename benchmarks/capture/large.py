"""A Llama of 70 B parameters: from its constructor to the graph of a step, in seconds and bytes.

python benchmarks/capture/large.py own
python benchmarks/capture/large.py hugging-face --layers 1
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch
from torch import nn

from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.tracing.initial import defer
from lading.tracing.trace import capture

TOKENS, VOCABULARY = 4096, 128_256


def lading_llama(layers: int) -> nn.Module:
    """Lading's Llama."""
    return build_model(
        "llama", vocab_size=VOCABULARY, max_seq_len=TOKENS, num_layers=layers, dim=8192, num_heads=64, num_kv_heads=8,
        hidden_dim=28_672,
    )  # fmt: skip


def hugging_face(layers: int) -> nn.Module:
    """Build the model of transformers with so many layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=layers,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Next-token loss of either."""

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        out = model(tokens)
        return getattr(out, "logits", out)

    return next_byte_loss(logits, batch)  # pyright: ignore[reportArgumentType]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["own", "hugging-face"])
    parser.add_argument("--layers", type=int, default=80)
    options = parser.parse_args()
    build = {"own": lading_llama, "hugging-face": hugging_face}[options.model]
    torch.set_default_dtype(torch.bfloat16)
    torch.set_num_threads(1)
    if options.model == "hugging-face":
        from transformers import LlamaForCausalLM  # noqa: F401  # its import is not capture's
    start, cpu = time.perf_counter(), time.process_time()
    deferred = defer(lambda: build(options.layers))
    built, built_cpu = time.perf_counter(), time.process_time()
    graph = capture(deferred.model, {"tokens": torch.zeros(1, TOKENS + 1, dtype=torch.int64)}, loss)
    done, done_cpu = time.perf_counter(), time.process_time()
    parameters = sum(p.numel() for p in deferred.model.parameters())
    print(f"{options.model}, {options.layers} layers, {parameters / 1e9:.1f} B parameters, {len(graph.ops)} operations")
    print(f"constructor  {built - start:6.2f} s  (processor {built_cpu - cpu:6.2f} s)")
    print(f"capture      {done - built:6.2f} s  (processor {done_cpu - built_cpu:6.2f} s)")
    print(f"peak memory  {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:6.0f} MiB, the whole process")


if __name__ == "__main__":
    main()
