"""Fit the cost of Q-LoRA's kernels of small integers, and what Qwen's fine-tuning scripts cost the host.

    python -m benchmarks.calibrate.adapters benchmarks/validation/measurements.jsonl

Prints, to be put in by hand:

- bytes that an element counts for at least in AutoGPTQ's kernels (``lading.parallel.adapters``, ``ELEMENT_BYTES``): by
  the Q-LoRA rows of the file, least sum of absolute errors, so that one row at odds with its neighbors (7B with 1,024
  tokens takes half of 2,048, and little more than 256) does not count more than another;
- seconds of the host for each pass of a block (``block_s``) of the three stacks, so that steps of 256 tokens, which the
  host bounds, take what the same README prints for them. They are not among the rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path

import numpy as np
from tools.validate.requests import request_of
from tools.validate.rows import read_rows

from lading.ir.request import StepRequest
from lading.parallel import adapters
from lading.sim.simulate import simulate

#: Seconds of a step with 256 tokens: QwenLM/Qwen README.md @2df8e8ac, "Profiling of Memory and Speed", by the stack and
#: layers of the model; one decimal is printed.
SHORT_S = {
    "qwen-finetune": {24: 1.0, 32: 1.2},
    "qwen-finetune-zero2": {24: 1.4},
    "qwen-finetune-zero3": {24: 2.1},
}


def requests_of(path: Path) -> list[tuple[StepRequest, float]]:
    """Requests of Qwen's rows, with measured seconds."""
    rows, _ = read_rows([path])
    chosen = [row for row in rows if row.family == "qwen-finetune"]
    return [(request_of(row), row.measured["iteration_s"]) for row in chosen]


def element_bytes(rows: list[tuple[StepRequest, float]]) -> None:
    """Errors of the Q-LoRA rows by bytes of an element."""
    quantized = [(request, seconds) for request, seconds in rows if request.task == "qlora"]
    print("bytes of an element: sum of absolute errors, each row's error")
    kept = adapters.ELEMENT_BYTES
    for size in np.arange(4.0, 9.1, 0.5):
        adapters.ELEMENT_BYTES = float(size)
        errors = [simulate(request).step.step_s / seconds - 1 for request, seconds in quantized]
        print(f"{size:.1f}: {sum(map(abs, errors)):.3f}; " + ", ".join(f"{e:+.1%}" for e in errors))
    adapters.ELEMENT_BYTES = kept


def block_seconds(rows: list[tuple[StepRequest, float]]) -> None:
    """Seconds of the host for each pass of a block, by stack."""
    for name, measured in SHORT_S.items():
        found: list[float] = []
        for layers, seconds in measured.items():
            same = [r for r, _ in rows if r.stack.name == name and r.model.layers == layers and not r.trains_embeddings]
            short = dataclasses.replace(same[0], seq_len=256)
            tried = np.arange(2e-4, 4e-3, 5e-5)
            steps = [
                simulate(
                    dataclasses.replace(short, stack=dataclasses.replace(short.stack, block_s=float(t)))
                ).step.step_s
                for t in tried
            ]
            found.append(float(np.interp(seconds, steps, tried)))
        print(f"{name}: block_s {statistics.mean(found):.2e} ({', '.join(f'{f:.2e}' for f in found)})")


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="rows of measurements")
    rows = requests_of(parser.parse_args().file)
    element_bytes(rows)
    block_seconds(rows)


if __name__ == "__main__":
    main()
