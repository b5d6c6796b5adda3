"""Steps that Muon takes to AdamW's final loss on a byte-level Llama: best learning rate each, several seeds.

    python benchmarks/optimizers/convergence.py [--steps 300] [--out FILE.json]

The model is small (2 blocks, 64 wide), the text is the standard library's source. Muon moves the blocks' matrices and
AdamW the rest, at the learning rate of the AdamW run. Rates rise for 20 steps and fall to nothing over the last third.
The loss is that of 16 held-out batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

from lading.config import DataConfig
from lading.matrices import Muon
from lading.models.llama import Llama, LlamaConfig
from lading.models.loss import next_byte_loss
from lading.optim.adamw import AdamW
from lading.runtime.data import TextDataset

RATES = (1e-3, 2e-3, 4e-3, 1e-2, 2e-2, 3e-2)
SEEDS = (0, 1, 2)
EVERY = 10
HELD_OUT = 1_000_000


def _optimizer(name: str, model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    matrices = [(n, p) for n, p in model.named_parameters() if n.startswith("layers") and p.ndim == 2]
    chosen = {n for n, _ in matrices}
    rest = [(n, p) for n, p in model.named_parameters() if n not in chosen]
    rule = AdamW(lr=rate, weight_decay=0.1)
    scale = {"dtype": "float32", "scale": "match-rms-adamw"}
    return Muon([{"params": matrices}, {"params": rest, "rule": rule}], lr=rate, **scale)


def _rate(step: int, steps: int) -> float:
    """Share of the peak."""
    return min((step + 1) / 20, 1.0, (steps - step) / (steps / 3))


def _curve(name: str, rate: float, seed: int, steps: int, data: TextDataset) -> list[float]:
    """Held-out loss every so many steps, the last included."""
    torch.manual_seed(seed)
    model = Llama(LlamaConfig(dim=64, num_layers=2, num_heads=4, max_seq_len=64))
    optimizer = _optimizer(name, model, rate)
    peaks = [group["lr"] for group in optimizer.param_groups]
    found: list[float] = []
    for step in range(steps):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * _rate(step, steps)
        next_byte_loss(model, data.batch(seed * steps + step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            with torch.no_grad():
                held = [float(next_byte_loss(model, data.batch(HELD_OUT + i, 0))) for i in range(16)]
            found.append(statistics.mean(held))
    return found


def _steps_to(curve: list[float], loss: float) -> float:
    """Steps until the curve is at ``loss``, between points by a line; infinity if it never is."""
    before = None
    for number, value in enumerate(curve, 1):
        if value <= loss:
            share = 1.0 if before is None else (before - loss) / (before - value)
            return EVERY * (number - 1 + share)
        before = value
    return float("inf")


def main() -> None:
    """Print the best final loss of each, and Muon's share of the steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = TextDataset(DataConfig(sequence_length=64, batch_size=16), Path(folder), seed=7)
        for seed in SEEDS:
            best: dict[str, tuple[float, list[float]]] = {}
            for name in ("adamw", "muon"):
                curves = {rate: _curve(name, rate, seed, args.steps, data) for rate in RATES}
                best[name] = min(curves.items(), key=lambda row: row[1][-1])
            taken = _steps_to(best["muon"][1], best["adamw"][1][-1])
            rows.append({"seed": seed, "best": best, "steps": taken, "share": taken / args.steps})
            finals = ", ".join(f"{name} {curve[-1]:.3f} at {rate:g}" for name, (rate, curve) in best.items())
            print(f"seed {seed}: {finals}; Muon is at AdamW's after {taken:.0f} of {args.steps}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"torch": torch.__version__, "steps": args.steps, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
