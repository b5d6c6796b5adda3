"""Models that were not written with cutting in mind: the same rules, on captures in the sizes of the batch."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lading.ir.layout import parse_layout
from lading.ir.work import Collective, Product, RankSegment, Stage
from lading.parallel.ranks import rank_segment
from lading.tracing.tabulate import module_table

transformers = pytest.importorskip("transformers")
B, S = 2, 32
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 96, "pad_token_id": 0}
NAMED = {
    "Phi3Config": {"num_key_value_heads": 4, "intermediate_size": 192},
    "GPTNeoXConfig": {"intermediate_size": 256},
    "MixtralConfig": {"num_key_value_heads": 4, "intermediate_size": 96, "num_local_experts": 8},
    "LlamaConfig": {"num_key_value_heads": 4, "intermediate_size": 192},
}


def loss(model: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["tokens"], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch["targets"].flatten())


def layer(config: str, layouts: tuple[str, ...]) -> list[RankSegment]:
    made: Any = getattr(transformers, config)(**SIZES, **NAMED[config], bos_token_id=1, eos_token_id=2)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    batch = {name: torch.zeros(B, S, dtype=torch.int64) for name in ("tokens", "targets")}
    table = module_table(model, batch, loss)
    return [rank_segment(table.segments[1], {"s": S, "b": B}, parse_layout(layout)) for layout in layouts]


def flops(segment: RankSegment) -> int:
    found = [k.detail for k in segment.kernels if isinstance(k.detail, Product)]
    return sum(2 * p.m * p.n * p.k * p.groups for p in found)


def forward(segment: RankSegment) -> Counter[str]:
    found = [k.detail for k in segment.kernels if k.stage is Stage.FORWARD]
    return Counter(c.op for c in found if isinstance(c, Collective))


@pytest.mark.slow
@pytest.mark.parametrize("config", sorted(NAMED))
def test_a_layer_is_cut_in_full(config: str):
    """Fused projections sliced apart, MLPs beside attention, tables of positions handed from layer to layer."""
    whole, cut, sp = layer(config, ("dp1", "tp4", "tp4,sp"))
    router = 3 * 2 * B * S * 64 * 8 if config == "MixtralConfig" else 0
    assert (flops(cut) - router) * 4 == flops(whole) - router
    assert flops(sp) * 4 == flops(whole)
    reduces = 1 if config == "GPTNeoXConfig" else 2  # both parts of a block are one sum
    assert forward(cut) == {"all_reduce": reduces}
    assert forward(sp) == {"all_gather": 2, "reduce_scatter": reduces}
