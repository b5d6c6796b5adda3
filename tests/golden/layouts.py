"""Layouts of clusters that stand for all that can be asked of a step: each by a name, with the figures it comes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lading.catalog.stacks import stack_by_name
from lading.clusters import step_of
from lading.ir.layout import parse_layout
from lading.ir.request import Architecture, Request, StepRequest
from lading.ir.table import ModelTable
from lading.memory.verify import verify
from lading.sim.simulate import simulate

#: A machine whose ranks share the processors of one host; made-up figures.
HOST = Path(__file__).parent / "host.toml"
#: Models that are in no catalog, by name.
MODELS: Mapping[str, Architecture] = {
    "nemotron-h": Architecture(
        family="mamba2",
        symbols={
            "h": 4096, "f": 21504, "n": 32, "k": 8, "d": 128, "v": 131072, "ms": 128, "mh": 128, "md": 64, "mg": 8,
        },
        blocks=(("mamba", 12), ("mlp", 12), ("attention", 2), ("mamba", 12), ("mlp", 12), ("attention", 2)),
    ),
    "hybrid-moe": Architecture(
        family="mamba2",
        symbols={
            "h": 2688, "n": 32, "k": 2, "d": 128, "v": 131072, "ms": 128, "mh": 64, "md": 64, "mg": 8, "e": 128, "a": 6,
            "g": 1856, "fs": 3712,
        },
        blocks=(("mamba", 12), ("moe", 12), ("attention", 3), ("mamba", 11), ("moe", 11), ("attention", 3)),
    ),
    "windows": Architecture(
        family="moe",
        symbols={"h": 2880, "n": 64, "k": 8, "d": 64, "v": 201088, "e": 32, "a": 4, "g": 2880, "window": 128},
        blocks=(("window", 1), ("full", 1)) * 4,
    ),
    "small-gpt": Architecture(family="gpt", symbols={"h": 256, "n": 4, "v": 1000}, blocks=(("block", 4),)),
    "tied-gpt": Architecture(
        family="gpt", symbols={"h": 1024, "n": 16, "v": 50304}, blocks=(("block", 24),), tied=True
    ),
    "alibi-gpt": Architecture(family="gpt", symbols={"h": 4096, "n": 32, "v": 50432}, blocks=(("block", 32),)),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout of a model on a machine under a software stack.

    Attributes:
        model: Of the catalog, or of ``MODELS``.
        asked: Fields of ``Request`` for a catalog's model, and of ``StepRequest`` (``lading.ir.request``).
        stack: Name in the catalog; ``switches`` are what differs from it.
    """

    model: str
    machine: str
    layout: str
    seq_len: int = 4096
    stack: str = "default"
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    switches: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        """All of the case in one line."""
        more = "".join(f" {key}={value}" for key, value in {**self.asked, **self.switches}.items())
        return f"{self.model} {self.machine} {self.layout} s{self.seq_len} {self.stack}{more}"

    def request(self) -> tuple[StepRequest, ModelTable | None]:
        """What is simulated; no table where the simulation makes it from the architecture."""
        asked = {**self.asked}
        machine = str(HOST) if self.machine == "host" else self.machine
        stack = dataclasses.replace(stack_by_name(self.stack), **self.switches)
        if self.model in MODELS:
            layout = parse_layout(self.layout)
            request = StepRequest(
                name=self.model,
                model=MODELS[self.model],
                seq_len=self.seq_len,
                machine=machine,
                layout=layout,
                stack=stack,
                **asked,
            )
            return request, None
        known = {field.name for field in dataclasses.fields(Request)}
        question = {key: asked.pop(key) for key in list(asked) if key in known}
        request, table = step_of(
            Request(model=self.model, machine=machine, layout=self.layout, seq_len=self.seq_len, **question)
        )
        return dataclasses.replace(request, stack=stack, **asked), table


def _cases() -> list[Case]:
    one = Case
    compiled, eager, megatron, deepspeed = "torchtitan-compile", "torchtitan-eager", "megatron-core", "deepspeed-zero3"
    return [
        # Replicas and what ZeRO cuts.
        one("llama3.2-1b", "h100", "dp8,gb16"),
        one("llama3.2-1b", "a100", "dp8,gb32,bucket_bytes=100000000", stack=megatron),
        one("llama3-8b", "h100", "dp8,zero1,gb32,recompute=selective", stack=megatron),
        one("llama3.2-3b", "a100", "dp16,zero2,gb64", stack="megatron-deepspeed"),
        one("llama3-8b", "h100", "dp8,zero3,gb8", stack=eager),
        one("llama3-8b", "h100", "dp64,zero3,gb256,recompute=full", stack=compiled),
        one("llama3-8b", "h100", "dp64,shard8,zero3,gb256", stack=compiled),
        one("llama2-7b", "a100", "dp32,shard16,zero2,gb128,mb2", stack=deepspeed),
        one("llama2-13b", "a100", "dp64,zero3,gb128,recompute=full", stack=deepspeed),
        one("llama2-7b", "v100-32gb", "dp16,zero3,gb32,fp16,recompute=full", stack="fsdp1"),
        one("gpt2-xl", "rtx4090", "dp2,gb8,recompute=full", seq_len=1024, stack="hf-transformers"),
        one("llama3.2-1b", "rtx4090", "dp4,zero3,gb16,recompute=full", seq_len=2048, stack="hf-transformers"),
        one("gpt2", "a100-40gb", "dp4,zero1,gb16,fp32", seq_len=1024, stack=eager),
        # Tensor and sequence parallel.
        one("llama3-70b", "h100", "dp8,tp8,sp,zero1,gb64", stack=megatron),
        one("llama3-70b", "h100", "dp16,tp8,zero3,gb32,recompute=full", stack=compiled),
        one("llama3-8b", "h100", "dp4,tp2,sp,zero3,gb16,recompute=selective", stack=eager),
        one("gpt3-175b", "a100", "dp4,tp8,pp16,gb128,recompute=full", seq_len=2048, stack="megatron-2021"),
        one("nemotron4-15b", "h100", "dp8,tp4,sp,zero1,gb64", stack="nemo"),
        # Context parallel.
        one("llama3-8b", "h100", "dp4,cp4,zero3,gb8,recompute=full", seq_len=32768, stack=compiled),
        one("llama3-8b", "h100", "dp2,cp4,cp_comm=all_gather,zero3,gb4,recompute=full", seq_len=32768, stack=compiled),
        one("llama3-8b", "h200", "dp2,cp8,tp2,sp,cp_comm=all_to_all,zero1,gb4", seq_len=65536, stack=megatron),
        # Pipelines.
        one("llama3-70b", "h100", "dp2,tp4,pp4,gpipe,gb32,sp,zero1", stack=megatron),
        one("llama3-70b", "h100", "dp2,tp4,pp8,gb64,sp,zero1", stack=megatron),
        one("llama3-70b", "h100", "dp2,tp4,pp4,vpp5,interleaved,gb32,sp,zero1", stack=megatron),
        one("llama3-70b", "h100", "dp2,tp4,pp4,zero-bubble,gb32,sp,zero1", stack=megatron),
        one("llama3-70b", "h100", "dp2,tp4,pp4,vpp2,zbv,gb32,sp,zero1", stack=megatron),
        one("llama3-70b", "h100", "dp2,tp4,pp4,vpp2,dualpipe-v,gb32,sp,zero1", stack=megatron),
        one("llama3-8b", "h100", "dp4,pp2,zero2,gb32", stack=eager),
        one("llama3-8b", "h100", "dp4,pp2,vpp2,interleaved,zero3,gb32,recompute=full", stack=compiled),
        one("llama3-8b", "h100", "pp2,vpp2,zbv,gb16,dp2", stack=eager),
        one("llama3-405b", "h100", "dp8,tp8,pp16,vpp7,interleaved,sp,zero1,gb128,recompute=selective", stack=megatron),
        one("gpt-1t", "a100", "dp2,tp8,pp64,sp,gb256,recompute=full,zero1", seq_len=2048, stack="megatron-2022"),
        one("llama3-405b", "h100", "dp16,tp8,pp2,zero1,sp,gb64,recompute=full,recompute_layers=20", stack=megatron),
        # Experts.
        one("mixtral-8x7b", "h100", "dp8,ep8,zero1,gb64", stack=megatron),
        one("mixtral-8x7b", "h100", "dp4,tp4,ep4,etp1,sp,zero1,gb32", stack=megatron),
        one("mixtral-8x7b", "h100", "dp4,tp2,ep4,etp2,sp,pp2,zero1,gb32", stack=megatron),
        one("qwen3-30b-a3b", "h100", "dp16,ep8,zero3,gb64,recompute=full", stack=eager),
        one("deepseek-v3", "h100", "dp64,tp2,pp4,ep32,etp1,sp,zero1,gb1024", stack=megatron),
        one("deepseek-v3", "h800", "dp32,pp8,vpp2,dualpipe-v,ep32,fp8,zero1,gb512", stack=megatron,
            switches={"dispatcher": "deepep"}),
        one("deepseek-v2", "h100", "dp64,ep16,zero3,gb128,recompute=full", stack=compiled),
        one("moonlight-16b", "h100", "dp8,ep8,zero1,gb32", stack=megatron, asked={"optimizer": "muon"}),
        one("qwen3-235b-a22b", "b200", "dp32,tp1,pp4,ep32,zero1,gb512,mxfp8", stack="megatron-bridge"),
        # What is recomputed.
        one("llama3-8b", "h100", "dp8,zero3,gb8,recompute=selective,recompute_modules=attn", seq_len=8192, stack=eager),
        one("qwen3-30b-a3b", "h100", "dp8,ep8,zero1,gb16,recompute=selective,recompute_modules=experts+act",
            stack=megatron),
        one("llama3-8b", "h100", "dp8,zero3,gb16,recompute=full,recompute_layers=8", seq_len=8192, stack=compiled),
        one("gpt3-6.7b", "a100", "dp8,tp8,gb64,recompute=full,recompute_layers=2,pp2", seq_len=2048,
            stack="megatron-2021"),
        # What lies behind the device.
        one("llama3-8b", "h100", "dp8,zero3,gb32,recompute=full,offload=optimizer", seq_len=8192),
        one("llama3-8b", "h100", "dp8,zero3,gb32,recompute=full,offload=parameters", seq_len=8192),
        one("llama3-8b", "h100", "dp8,zero3,gb32,recompute=full,offload=parameters,offload_to=disk", seq_len=8192),
        one("llama3-8b", "h100", "dp8,zero3,gb32,offload=activations,offload_layers=8", seq_len=8192),
        one("llama3-8b", "h100", "dp8,zero3,gb32,offload=activations", seq_len=8192),
        one("llama3-8b", "h100", "dp4,pp2,vpp2,gb16,offload=activations+optimizer", seq_len=8192),
        one("llama2-7b", "a100", "dp8,zero2,gb64,recompute=full,offload=optimizer", stack=deepspeed),
        # Adapters beside frozen weights.
        one("llama3-8b", "h100", "dp2,gb4,recompute=full", seq_len=2048, stack="qwen-finetune", asked={"lora": 16}),
        one("llama2-70b", "a100", "dp8,zero3,gb16,recompute=full", stack="qwen-finetune-zero3", asked={"lora": 64}),
        one("llama3-8b", "rtx4090", "gb4,recompute=full", seq_len=1024, stack="qwen-finetune", asked={"qlora": 16},
            switches={"quantizer": "nf4"}),
        one("llama3-70b", "h100", "dp2,tp4,pp2,gb16", stack=megatron, asked={"lora": 32}),
        # Other optimizers.
        one("qwen3-8b", "h100", "dp8,zero3,gb8", seq_len=2048, asked={"optimizer": "muon"}),
        one("qwen3-8b", "h100", "dp2,tp4,sp,zero1,gb4", seq_len=2048, asked={"optimizer": "soap"}),
        one("qwen3-8b", "h100", "dp4,tp2,pp4,zero1,gb32", seq_len=2048, asked={"optimizer": "shampoo"}),
        # Other families and blocks.
        one("nemotron-h", "h100", "dp8,tp2,sp,zero1,gb64", seq_len=8192, stack=megatron),
        one("hybrid-moe", "b200", "dp16,ep16,zero1,gb64,recompute=selective", seq_len=8192, stack="megatron-bridge"),
        one("windows", "h100", "dp8,ep4,zero3,gb16", stack=eager),
        one("dit-xl", "a100", "dp8,gb256,mb32", seq_len=256, stack=compiled),
        one("wan2.1-14b", "h100", "dp8,zero3,gb8,recompute=full", seq_len=32760, stack=eager),
        one("tied-gpt", "v100-32gb", "dp2,pp4,gb32,fp16", seq_len=1024, stack="megatron-2021"),
        one("tied-gpt", "a100", "dp8,zero3,gb32", seq_len=1024, stack=deepspeed),
        one("alibi-gpt", "a100", "dp8,tp4,zero1,gb32", seq_len=2048, stack="megatron-deepspeed-bigscience",
            asked={"alibi": True, "dropout": 0.1}),
        # Packed sequences, low precisions, other machines.
        one("llama3-8b", "h100", "dp8,zero3,gb16", seq_len=8192, stack=eager, asked={"packed_tokens": 1024}),
        one("llama3-8b", "h100", "dp8,zero3,gb16,fp8", seq_len=8192, stack=compiled,
            asked={"linear_dtype": "rowwise"}),
        one("llama3-70b", "h100", "dp4,tp4,pp4,vpp5,interleaved,sp,zero1,fp8,gb64", stack="megatron-bridge",
            asked={"linear_dtype": "delayed"}),
        one("llama3-405b", "gb200", "dp4,tp4,pp8,vpp4,interleaved,sp,zero1,nvfp4,gb64", seq_len=8192,
            stack="megatron-bridge", asked={"high_precision_layers": 6}),
        one("llama3-70b", "b200", "dp8,tp4,sp,zero3,mxfp8,gb32,recompute=full", stack=compiled),
        one("llama3-8b", "mi300x", "dp8,zero3,gb16", stack=eager),
        one("llama3.2-1b", "apple-m2", "gb4", seq_len=2048, stack=eager),
        one("mistral-7b", "l40s", "dp4,zero3,gb8,recompute=full", stack=eager, asked={"ranks_per_node": 4}),
        one("llama2-7b", "a100-pcie", "dp8,tp2,gb32,zero1", stack=megatron),
        one("llama3-8b", "h100", "dp512,zero3,gb1024", stack=compiled, switches={"collective_wait_s": 1e-4}),
        # Ranks that share the host's processors.
        one("small-gpt", "host", "mb1,gb1", seq_len=256, stack="torch-eager-cpu"),
        one("small-gpt", "host", "dp2,mb1,gb2", seq_len=256, stack="torch-eager-cpu"),
        one("small-gpt", "host", "dp2,zero3,mb1,gb4,recompute=full", seq_len=256, stack="torch-eager-cpu"),
        one("small-gpt", "host", "dp4,zero2,mb1,gb4", seq_len=256, stack="torch-eager-cpu"),
        one("small-gpt", "host", "tp2,dp2,mb1,gb2", seq_len=256, stack="torch-eager-cpu"),
        one("small-gpt", "host", "pp2,dp2,zero2,gpipe,mb1,gb8", seq_len=256, stack="torch-eager-cpu"),
        one("small-gpt", "host", "pp4,1f1b,mb1,gb8", seq_len=256, stack="torch-eager-cpu"),
    ]  # fmt: skip


CASES = {case.name: case for case in _cases()}


def figures(name: str) -> dict[str, Any]:
    """Seconds by cause, and bytes of each pipeline rank and of the fullest by role."""
    found = simulate(*CASES[name].request())
    verify(found.step.listed.program if found.step.listed else found.step.times.program)  # type: ignore[union-attr]
    totals = [sum(roles.values()) for roles in found.memory]
    behind = [sum(roles.values()) for roles in found.lower_tier_by_rank]
    fullest = totals.index(max(totals))
    answer: dict[str, Any] = {
        "step_s": found.step.step_s,
        "shares_s": found.step.shares_s,
        "peak_bytes": totals,
        "fullest": {str(role): size for role, size in found.memory[fullest].items()},
    }
    if any(behind):
        answer["behind_bytes"] = behind
    return answer
