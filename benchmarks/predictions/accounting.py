"""The bytes that the planner counts against the bytes that eager PyTorch allocates, model by model.

Eager runs forward and backward; the profiler's memory events give the peak of what is allocated beside parameters,
buffers and batch. The captured graph gives the peak of what is alive in program order, each storage from the operation
that makes it to the last that reads it, gradients to the end, and the scratch of the operation that runs.

    python benchmarks/predictions/accounting.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from lading.config import ModelConfig
from lading.ir.graph import PERSISTENT, Role, StepGraph
from lading.memory.lifetime import lifetimes
from lading.models.reference import model_class
from lading.run import build
from lading.runtime.scratch import inner_bytes
from lading.tracing.trace import capture
from lading.units import MiB

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
Case = tuple[str, torch.nn.Module, Any, Loss]

OWN = {
    "gpt": {"num_layers": 4, "dim": 256, "num_heads": 4, "dropout": 0.1},
    "llama": {"num_layers": 4, "dim": 256, "num_heads": 4, "num_kv_heads": 2},
    "moe": {"num_layers": 2, "dim": 128, "num_heads": 4},
    "dit": {"num_layers": 4, "dim": 128, "num_heads": 4},
}
_SMALL = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 256, "vocab_size": 512, "max_position_embeddings": 256, "head_dim": 32,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
DECODERS = (
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "phi3", "olmo2", "stablelm", "starcoder2", "gpt_neox",
    "gpt2", "opt", "bloom", "mixtral", "qwen3_moe",
)  # fmt: skip
ENCODERS = ("bert", "roberta", "electra", "deberta-v2", "modernbert")


def cases() -> Iterator[Case]:
    """The reference models and small random models of families of transformers."""
    for name, sizes in OWN.items():
        torch.manual_seed(0)
        model = build(ModelConfig(name=name, sizes=sizes))
        batch: dict[str, torch.Tensor] = {"tokens": torch.randint(0, 256, (4, 129))}
        if name == "dit":
            config = model_class("dit").Config(**sizes)
            shape = (8, config.channels, config.image_size, config.image_size)
            batch = {"latents": torch.randn(shape), "labels": torch.randint(0, 10, (8,))}
        yield f"own {name}", model, batch, model_class(name).loss
    for names, auto in (
        (DECODERS, transformers.AutoModelForCausalLM),
        (ENCODERS, transformers.AutoModelForMaskedLM),
    ):
        for name in names:
            config = transformers.AutoConfig.for_model(name, **_SMALL)
            tokens = torch.randint(1, 512, (4, 128))
            yield name, auto.from_config(config).train(), {"input_ids": tokens, "labels": tokens}, _loss


def _loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def eager_bytes(model: torch.nn.Module, batch: Any, loss: Loss) -> int:
    """Peak of the allocator over forward and backward, the second time they run."""
    peak = 0
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            loss(model, batch).backward()
        profiler: Any = record.profiler
        events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
        now = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def graph_bytes(graph: StepGraph) -> int:
    """Peak of what is alive in program order, with the scratch of the functional kernels that eager runs."""
    lives, end = lifetimes(graph), len(graph.ops)
    kept = {graph.storage_of(p.gradient) for p in graph.parameters if p.gradient is not None}
    kept |= {graph.storage_of(t) for t in graph.losses}
    change = [0] * (end + 1)
    for index, storage in enumerate(graph.storages):
        made = lives.producer[index]
        if made is None or storage.role in PERSISTENT or storage.role is Role.INPUT:
            continue
        change[made] += storage.size_bytes
        change[end if index in kept else lives.uses[index][-1] + 1] -= storage.size_bytes
    alive = peak = 0
    for position, op in enumerate(graph.ops):
        alive += change[position]
        peak = max(peak, alive + _scratch(graph, op.name, op.inputs, op.outputs))
    return peak


def _scratch(graph: StepGraph, name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> int:
    def meta(tensor: int) -> torch.Tensor:
        t = graph.tensors[tensor]
        return torch.empty_strided(t.shape, t.stride, dtype=getattr(torch, t.dtype), device="meta")

    label = name.split(".")[1]
    known = label.startswith(("_scaled_dot_product", "native_layer_norm", "convolution"))
    return inner_bytes(label, list(map(meta, inputs)), list(map(meta, outputs))) if known else 0


def main() -> None:
    """Compare every model and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{'model':16}{'graph MiB':>11}{'eager MiB':>11}{'error':>8}")
    for name, model, batch, loss in cases():
        predicted, measured = graph_bytes(capture(model, batch, loss)), eager_bytes(model, batch, loss)
        rows.append({"name": name, "predicted_bytes": predicted, "measured_bytes": measured})
        print(f"{name:16}{predicted / MiB:11.2f}{measured / MiB:11.2f}{predicted / measured - 1:+8.1%}", flush=True)
    errors = [abs(row["predicted_bytes"] / row["measured_bytes"] - 1) for row in rows]
    print(f"within 5%: {sum(error <= 0.05 for error in errors)} of {len(rows)}, worst {max(errors):.1%}")
    if options.json:
        about = {"torch": torch.__version__, "transformers": transformers.__version__}
        options.json.write_text(json.dumps({**about, "models": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
