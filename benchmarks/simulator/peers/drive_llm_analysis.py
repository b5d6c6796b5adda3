"""llm-analysis (PyPI, 0.2.2, Apache-2.0) as a predictor of requests; install it beside Lading, it is not kept here.

One share of the peak for all products, no bubble, no reduction of gradients. 0.5 is what its README suggests.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any

from lading.errors import ConfigError
from lading.ir.request import Prediction, StepRequest

_GPUS = {
    "a100": "a100-sxm-80gb",
    "a100-40gb": "a100-sxm-40gb",
    "a100-pcie": "a100-pcie-80gb",
    "h100": "h100-sxm-80gb",
    "h100-pcie": "h100-pcie-80gb",
    "v100-32gb": "v100-sxm-32gb",
    "v100-16gb": "v100-sxm-16gb",
}
_RECOMPUTES = {"none": 0, "selective": 1, "full": 2}


@dataclass(frozen=True)
class LlmAnalysis:
    """The installed package, with one share of the peak."""

    flops_efficiency: float

    def predict(self, request: StepRequest) -> Prediction:
        """Seconds of a step, and bytes of the fullest device.

        Raises:
            ConfigError: llm-analysis cannot express the request, or refuses it.
        """
        _expressible(request)
        analysis: Any = importlib.import_module("llm_analysis.analysis")
        config: Any = importlib.import_module("llm_analysis.config")
        analysis.logger.setLevel(logging.ERROR)
        layout, sizes = request.layout, request.model.symbols
        model = config.ModelConfig(
            name=request.name,
            num_layers=request.model.layers,
            n_head=sizes["n"],
            hidden_dim=sizes["h"],
            vocab_size=sizes["v"],
            max_seq_len=request.seq_len,
            num_key_value_heads=sizes["k"],
            ffn_embed_dim=sizes.get("g", sizes["f"]),
            expansion_ratio=sizes["f"] / sizes["h"],
            moe_num_experts=sizes.get("e", 1),
            moe_top_k=sizes.get("a", 1),
        )
        ways = config.ParallelismConfig(
            tp_size=layout.tp,
            pp_size=layout.pp,
            dp_size=layout.dp,
            ep_size=layout.ep,
            sp_size=layout.tp if layout.sp else 1,
        )
        try:
            gpu, dtype = (
                config.get_gpu_config_by_name(_GPUS[request.machine]),
                config.get_dtype_config_by_name("w16a16e16"),
            )
            run = analysis.LLMAnalysis(model, gpu, dtype, ways, flops_efficiency=self.flops_efficiency)
            found = run.training(
                batch_size_per_gpu=layout.micro_batch,
                gradient_accumulation_steps=layout.micro_batches,
                global_batch_size=layout.global_batch,
                seq_len=request.seq_len,
                activation_recomputation=analysis.ActivationRecomputation(_RECOMPUTES[layout.recompute]),
                ds_zero=analysis.DSZeRO(layout.zero),
                flash_attn=request.stack.attention != "unfused",
                mlp_gated_linear_units=request.model.family in ("llama", "moe"),
            )
        except (AssertionError, ZeroDivisionError) as error:
            raise ConfigError(f"llm-analysis refuses it: {error or 'an assertion'}") from error
        step_s = float(found["latency_per_iter"])
        return Prediction(step_s=step_s, low_s=step_s, high_s=step_s)


def _expressible(request: StepRequest) -> None:
    layout = request.layout
    checks = {
        f"the machine {request.machine}": request.machine in _GPUS,
        f"models of family {request.model.family}": request.model.family in ("gpt", "llama", "nemotron", "moe"),
        f"the precision {layout.precision}": layout.precision in ("fp16", "bf16"),
        "context parallel": layout.cp == 1,
        "shared experts, dense blocks among experts": "e" not in request.model.symbols
        or (not request.model.symbols["fs"] and request.model.blocks == (("moe", request.model.layers),)),
        "recompute of some layers or modules": layout.recompute_layers < 0 and not layout.recompute_modules,
        f"the task {request.task}": request.task in ("pretrain", "sft"),
    }
    missing = [name for name, known in checks.items() if not known]
    if missing:
        raise ConfigError(f"llm-analysis does not express {'; '.join(missing)}")
