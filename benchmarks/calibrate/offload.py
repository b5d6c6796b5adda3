"""Share of what a host's memory allows that optimizers on the host reach, from published steps.

    python benchmarks/calibrate/offload.py

Each row has a step with the optimizer on the host and what of it is not the update: where both were published the step
without, else the forward and backward. The share is what ``lading.cost.hosting.update_s``, which predicts such steps,
says for an update as fast as the host's memory allows, over what was measured; the ranks of a row that are on a host
have all of it between them. The median of the usual launches is the share of "cpu-adam"
(``lading.cost.hosting``); rows that bind threads and fuse are shown beside it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from statistics import median

from lading.catalog.load import load_machine
from lading.catalog.stacks import DEFAULT, stack_by_name
from lading.cost.hosting import update_s


@dataclass(frozen=True)
class Row:
    """A published update.

    Attributes:
        machine: Machine of the catalog whose host is alike.
        elements: Elements that each rank updates.
        ranks: Ranks of a host.
        seconds: Seconds of the update.
        tuned: Threads are bound to their memory and the update is one fused kernel.
    """

    name: str
    source: str
    machine: str
    elements: float
    ranks: int
    seconds: float
    tuned: bool = False

    @property
    def share(self) -> float:
        """Share of what the host's memory allows that the update reaches."""
        machine = load_machine(self.machine).with_job(self.ranks)
        fastest = dataclasses.replace(stack_by_name(DEFAULT), host_optimizer=1.0)
        return update_s(self.elements, 0.0, machine, machine.host_tier, fastest) / self.seconds


ROWS = (
    Row("LLaMA-7B, ZeRO-3 on 8 A800", "gist chenyaofo/d4cd6a20: 64 sequences at 2.05/s, 4.45/s without",
        "a800", 6.74e9 / 8, 8, 64 / 2.05 - 64 / 4.45),
    Row("Qwen-72B, ZeRO-3 on 4 x 8 A100", "deepspeedai/DeepSpeed issue 6834: step of 10 s against 0.2 s",
        "a100", 72.7e9 / 32, 8, 10.0),
    Row("Llama-2-7B on 4 A100", "ZenFlow (arXiv 2505.12242): 7 s with ZeRO-Offload against 0.5 s",
        "a100", 6.74e9 / 4, 4, 6.5),
    Row("Qwen2.5-3B on 2 A100", "deepspeedai/DeepSpeed pull 7474: 3.08 s a step, about 0.9 s not the update",
        "a100-40gb", 3.09e9 / 2, 2, 2.2),
    Row("GLM-4.5-Air 106B on 4 x 8 H100", "THUDM/slime issue 1139: 9.6 s in CPU Adam, profiled; Megatron-Core",
        "h100", 106e9 / 32, 8, 9.6),
    Row("Qwen3.5-35B-A3B on 2 x 8 H100", "ISEEKYAN/Megatron-LM issue 188: 15.5 s, two processors for eight ranks",
        "h100", 35e9 / 16, 8, 15.5),
    Row("Qwen3-30B-A3B on 8 H200", "PrimeIntellect-ai/prime-rl pull 3234: 3.96 s a step, the update beside backward",
        "h200", 30.5e9 / 8, 8, 3.4, tuned=True),
)  # fmt: skip


def main() -> None:
    for row in ROWS:
        print(f"{row.share:6.3f}  {'tuned' if row.tuned else '':6} {row.name}: {row.source}")
    print(f"median of the usual launches: {median(row.share for row in ROWS if not row.tuned):.3f}")


if __name__ == "__main__":
    main()
