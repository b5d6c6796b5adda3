"""What ranks issue, when pipelines run, and how parameters are gathered: of models small enough to be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

from tests.sim.sequence import Issued, sequence_of
from tools.pipelines import pipeline_of

from lading.catalog.tables import family_table
from lading.clusters import step_of
from lading.ir.layout import parse_layout
from lading.ir.plan import UnitResidency
from lading.ir.request import Architecture, Request, StepRequest
from lading.ir.stack import Stack
from lading.ir.table import ModelTable
from lading.ir.work import Attention, Product
from lading.planner.unshard import Chosen, choose_groups, neighbor_peaks
from lading.planner.unshardwalk import walked_step
from lading.sim.buckets import Costs
from lading.sim.simulate import simulate

SIZES: Mapping[str, Mapping[str, int]] = {
    "gpt": {"h": 64, "n": 8, "v": 256},
    "llama": {"h": 64, "n": 8, "v": 256, "k": 4, "f": 192, "d": 8},
    "moe": {"h": 64, "n": 8, "v": 256, "k": 4, "d": 8, "e": 8, "a": 2, "g": 96},
}
SEQ_LEN = 64
#: PyTorch in eager mode: parameters in fp32, gathered in bf16, reduced in fp32.
STACK = Stack(
    name="torch",
    title="PyTorch in eager mode",
    fusion="eager",
    parameters_dtype="float32",
    gradient_dtype="float32",
    master_weights=False,
    early_stop=True,
    regathers=False,
    fp32_rings=True,
)
MEGATRON = Stack(name="megatron", title="Megatron", megatron_order=True)


@dataclasses.dataclass(frozen=True)
class Case:
    """What one rank issues under a layout."""

    family: str
    layout: str
    layers: int = 2
    rank: int = 0
    keep: UnitResidency = UnitResidency.RELEASE
    stack: Stack = STACK

    def text(self) -> str:
        """One line an item."""
        model = Architecture(family=self.family, symbols=SIZES[self.family], blocks=(("block", self.layers),))
        request = StepRequest(
            name="golden",
            model=model,
            seq_len=SEQ_LEN,
            machine="h100",
            layout=parse_layout(self.layout),
            stack=self.stack,
        )
        table = family_table(self.family, layers=self.layers, **SIZES[self.family])
        issued = sequence_of(request, table, rank=self.rank, keep=self.keep)
        return "".join(f"{_line(one)}\n" for one in issued)


SEQUENCES = {
    "replicas": Case("llama", "dp4,mb2,gb16"),
    "zero1": Case("gpt", "dp4,zero1,mb2,gb16"),
    "zero2": Case("llama", "dp4,zero2,mb2,gb16", layers=1),
    "zero3": Case("llama", "dp4,zero3,mb2"),
    "zero3-keep-backward": Case("llama", "dp4,zero3,mb2,gb16", layers=1, keep=UnitResidency.BACKWARD),
    "zero3-keep-step": Case("llama", "dp4,zero3,mb2,gb16", layers=1, keep=UnitResidency.STEP),
    "hybrid-shard": Case("gpt", "dp4,shard2,zero3,mb2,gb16", layers=1),
    "tp-sp-zero3": Case("llama", "dp2,tp2,sp,zero3,mb2"),
    "tp-recompute": Case("llama", "dp2,tp2,zero3,mb2,recompute=full"),
    "cp-ring": Case("llama", "dp2,cp2,zero3,mb2", layers=1),
    "cp-all-gather": Case("llama", "dp2,cp2,cp_comm=all_gather,zero3,mb2", layers=1),
    "experts": Case("moe", "dp4,ep2,zero3,mb2"),
    "1f1b": Case("gpt", "pp3,1f1b,mb2,gb8", layers=3, rank=1),
    "interleaved": Case("gpt", "pp2,vpp2,interleaved,mb2,gb8", layers=4, rank=1),
    "interleaved-megatron": Case("gpt", "pp2,vpp2,interleaved,mb2,gb8", layers=4, rank=0, stack=MEGATRON),
    "zero-bubble": Case("gpt", "pp2,zero-bubble,mb2,gb8", rank=0),
    "dualpipe-v-zero3": Case("gpt", "dp2,pp2,vpp2,dualpipe-v,zero3,mb2,gb16", layers=4, rank=0),
}


def _line(issued: Issued) -> str:
    where = f"u{issued.unit} m{issued.micro_batch}"
    if issued.releases:
        return f"{where} release"
    words = [where]
    if issued.kernel is not None:
        kernel = issued.kernel
        words += [str(kernel.stage), kernel.name, kernel.module or "-", str(kernel.bytes_read + kernel.bytes_written)]
        if isinstance(kernel.detail, Product | Attention):
            words.append("x".join(str(value) for value in dataclasses.astuple(kernel.detail)))
    if issued.collective is not None:
        words += [issued.collective.op, issued.collective.axis, str(issued.collective.size_bytes)]
    if issued.peer >= 0:
        words.append(f"peer {issued.peer}")
    return " ".join(words)


#: Layouts of few micro-batches whose pipelines' runs are stored.
PIPELINES = (
    "pp2,gpipe,gb3", "dp2,pp3,1f1b,gb10,zero1", "pp2,vpp2,interleaved,gb4", "pp2,zero-bubble,gb4", "pp2,vpp2,zbv,gb4",
    "pp2,vpp2,dualpipe-v,gb4",
)  # fmt: skip


def pipeline(layout: str) -> dict[str, Any]:
    """Start and end of each action of each rank of a pipeline of a GPT of twelve blocks, in seconds."""
    asked = Request(model="gpt2", machine="h100", layout=layout, seq_len=512, stack="torchtitan-eager")
    request, table = step_of(asked)
    run = pipeline_of(simulate(request, table).step)
    return {
        "makespan_s": run.makespan_s,
        "orders": ["".join(f" {'FBIW'[work]}{chunk}.{micro}" for work, chunk, micro, _ in order.tolist())
                   for order in run.schedule.orders],
        "start_s": [start.tolist() for start in run.start_s],
        "end_s": [end.tolist() for end in run.end_s],
    }  # fmt: skip


#: Models whose parameters are gathered in groups: a share of the bytes between ZeRO-3's and ZeRO-2's is the budget.
UNSHARDED = {
    "gpt2 half a budget": (Request(model="gpt2", machine="h100", devices=64, layout="zero3", seq_len=4096), 12, 0.4),
    "micro-batches": (
        Request(
            model="llama3.2-1b", machine="h100", devices=64, layout="zero3,gb256", seq_len=4096,
            stack="torchtitan-compile",
        ), 5, 0.3,
    ),
    "experts": (
        Request(model="qwen3-30b-a3b", machine="h100", devices=64, layout="zero3,ep8", seq_len=4096), 3, 0.5
    ),
    "recomputed": (
        Request(
            model="llama3.2-3b", machine="h100", devices=512, layout="zero3,recompute=full", seq_len=4096,
            stack="torchtitan-compile",
        ), 6, 0.3,
    ),
}  # fmt: skip


@cache
def chosen(name: str) -> Chosen:
    """The groups of a case."""
    question, layers, share = UNSHARDED[name]
    request, table = step_of(question)
    table = _shallow(table, layers)
    low, high = neighbor_peaks(request, table)
    return choose_groups(request, table, int(low + share * (high - low)))


def _shallow(table: ModelTable, layers: int) -> ModelTable:
    return dataclasses.replace(table, counts=tuple(min(count, layers) for count in table.counts))


def gathered(name: str) -> dict[str, Any]:
    """What each policy comes to, and the groups of the one that was searched for."""
    found = chosen(name)
    step = found.gathered
    return {
        "budget_bytes": found.budget_bytes,
        "bound_s": found.bound_s,
        "policies": {
            row.policy: [row.step_s, row.exposed_s, row.peak_bytes, *row.gathers, row.buckets] for row in found.rows
        },
        "network_s": step.network_s,
        "waits_s": list(walked_step(Costs(found.modules), found.buckets).waits_s),
        "peak": {
            "micro_batch": step.peak.micro_batch,
            "place": step.peak.place,
            "is_backward": step.peak.is_backward,
            "gathered": sum(step.peak.gathered.values()),
            "coming": sum(step.peak.coming.values()),
            "gradients": sum(step.peak.gradients.values()),
            "reduced": sum(step.peak.reduced.values()),
            "activations": step.peak.activation_bytes,
            "states": step.peak.state_bytes,
        },
        "groups": [
            f"{unit.modules[0]}..{unit.modules[-1]} {bucket.keep} ahead {unit.prefetch_forward} "
            f"{unit.prefetch_backward} {unit.unsharded_bytes}"
            for unit, bucket in zip(found.units, found.buckets, strict=True)
        ],
    }
