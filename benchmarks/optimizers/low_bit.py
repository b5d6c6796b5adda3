"""States in fewer bits: what an update takes, how near it is to torchao's, and what it does to a small GPT's loss.

    python benchmarks/optimizers/low_bit.py speed        # ns of one core for an element, beside the fused kernel alone
    python benchmarks/optimizers/low_bit.py torchao      # codes, scales and 100 updates beside torchao's
    python benchmarks/optimizers/low_bit.py training     # 200 steps on the standard library's source, two seeds

Times are of the thread, so that other processes count less.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import torch

from lading.config import DataConfig
from lading.models.loss import next_byte_loss
from lading.models.reference import build_model
from lading.optim import low_bit
from lading.optim.adam import Adam
from lading.optim.adamw import AdamW
from lading.optim.moment_rule import BLOCK, MomentRule, StateFormat
from lading.runtime.data import TextDataset
from lading.runtime.resident import reuse_pages

ELEMENTS, STEPS, SEEDS = 1 << 22, 200, (0, 1)


def fresh(rule: MomentRule, elements: int) -> dict[str, torch.Tensor]:
    """States of a vector before the first update."""
    specs = rule.state_specs((elements,))
    return {
        name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype or "float32")) for name, spec in specs.items()
    }


def speed() -> Iterator[str]:
    """Shortest of 20 updates of each format, on one core."""
    reuse_pages()
    torch.set_num_threads(1)
    param, grad = torch.randn(ELEMENTS), torch.randn(ELEMENTS)
    for states in get_args(StateFormat):
        rule, step, taken = AdamW(states=states), torch.ones(()), list[float]()
        kept = fresh(rule, ELEMENTS)
        for _ in range(20):
            start = time.thread_time()
            rule.update(param, grad, kept, lr=1e-5, step=step.add_(1))
            taken.append(time.thread_time() - start)
        yield f"{states}: {1e9 * min(taken) / ELEMENTS:.2f} ns"


def torchao() -> Iterator[str]:
    """Compare with torchao 0.18: numbers of all sizes as codes, and updates of one vector."""
    quant_utils, subclass_8bit, adam = (  # a package that need not be there
        import_module(f"torchao.optim.{name}") for name in ("quant_utils", "subclass_8bit", "adam")
    )

    torch.manual_seed(0)
    for signed, name in ((True, "signed"), (False, "unsigned")):
        known = torch.tensor(getattr(subclass_8bit, f"get_qmap_{name}")())
        numbers = torch.randn(ELEMENTS) * 10 ** torch.empty(ELEMENTS).uniform_(-7, 0)
        numbers = numbers if signed else numbers.abs()
        scaled, scales = quant_utils.scale_tensor(numbers, BLOCK)
        codes = quant_utils.quantize_8bit_with_qmap(scaled, known) ^ (127 if signed else 0)
        ours, our_scales = torch.empty_like(codes), torch.empty_like(scales)
        spare = torch.empty(ELEMENTS, dtype=torch.int32), torch.empty(ELEMENTS, dtype=torch.int32)
        low_bit.quantize(numbers.clone(), ours, our_scales, signed=signed, spare=spare)
        same = torch.equal(ours, codes) and torch.equal(our_scales, scales)
        yield f"{name}: levels {torch.equal(known, low_bit.levels(signed=signed))}, codes and scales {same}"
    for rule in (AdamW(lr=1e-3, weight_decay=0.1, states="8bit"), Adam(weight_decay=0.1, states="8bit")):
        ours, count = torch.randn(1 << 16), 1 << 16
        theirs, kept = ours.clone(), fresh(rule, count)
        moments: list[Any] = [
            subclass_8bit.OptimState8bit.zeros((count,), s, dtype=torch.float32) for s in (True, False)
        ]
        for number in range(1, 101):
            step, grad = torch.tensor(float(number)), torch.randn(count) * torch.linspace(1e-3, 1, count) + 0.01 * ours
            rule.update(ours, grad, kept, lr=rule.lr, step=step)
            adam.single_param_adam(
                theirs, grad, step, *moments, None, torch.tensor(rule.lr), rule.beta1, rule.beta2, rule.weight_decay,
                rule.eps, isinstance(rule, AdamW), False,
            )  # fmt: skip
        yield f"{type(rule).__name__}: after 100 updates {((ours - theirs).norm() / theirs.norm()).item():.1e} apart"


def training() -> Iterator[str]:
    """Mean loss of the last 20 of 200 steps, and of held-out batches."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = TextDataset(DataConfig(sequence_length=128, batch_size=8), Path(folder), seed=0)
        yield from _losses(data)


def _losses(data: TextDataset) -> Iterator[str]:
    for seed in SEEDS:
        for states in ("fp32", "bf16", "8bit"):
            torch.manual_seed(seed)
            model = build_model("gpt", vocab_size=256, max_seq_len=128, dim=128, num_heads=4, num_layers=2)
            optimizer, losses = AdamW(lr=1e-3, states=states).plain(model.parameters()), list[float]()
            for step in range(STEPS):
                optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 20)
                loss = next_byte_loss(model, data.batch(seed * STEPS + step, 0))
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                held = [next_byte_loss(model, data.batch(1_000_000 + number, 0)).item() for number in range(16)]
            yield f"seed {seed}, {states}: {sum(losses[-20:]) / 20:.4f}, held out {sum(held) / len(held):.4f}"


if __name__ == "__main__":
    for line in {"speed": speed, "torchao": torchao, "training": training}[sys.argv[1]]():
        print(line, flush=True)
