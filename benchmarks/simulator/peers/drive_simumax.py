"""SimuMax (github.com/MooreThreads/SimuMax, Apache-2.0) as a predictor of requests; its code is fetched, not kept here.

It has measured tables of one machine with NVLink, an 8-GPU B200 server, for bf16; that file is used as it is. Settings
are those of its own release table (tools/b200 of its repository): no stragglers, TE 2.11, fused cross-entropy.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lading.errors import ConfigError
from lading.ir.request import Prediction, StepRequest

_SYSTEMS = {"b200": "b200_bf16_ceperm.json"}
_FAMILIES = ("llama", "gpt", "moe", "mla-moe")


@dataclass(frozen=True)
class SimuMax:
    """SimuMax from a checkout of its repository."""

    folder: Path

    def predict(self, request: StepRequest) -> Prediction:
        """Seconds of a step, and bytes of the fullest device.

        Raises:
            ConfigError: SimuMax cannot express the request, or refuses it.
        """
        _expressible(request)
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
        config: Any = importlib.import_module("simumax.core.config")
        system = self.folder / "configs" / "system" / _SYSTEMS[request.machine]
        with _quiet():
            perf: Any = importlib.import_module("simumax.core.perf_llm").PerfLLM()
            try:
                perf.configure(
                    strategy_config=config.StrategyConfig.init_from_dict(_strategy(request)),
                    model_config=config.ModelConfig.init_from_dict(_model(request)),
                    system_config=config.SystemConfig.init_from_config_file(str(system.resolve())),
                )
                perf.run_estimate()
                step_s = _seconds(perf.analysis_cost().data["duration_time_per_iter"])
                peaks = perf.get_pp_stage_peak_mem(perf.analysis_mem(), "peak_mem", toG=False)
            except (AssertionError, ValueError, KeyError, NotImplementedError) as error:
                raise ConfigError(f"SimuMax refuses it: {type(error).__name__} {error}") from error
        peak = round(max(peaks.values()))
        return Prediction(step_s=step_s, low_s=step_s, high_s=step_s, peak_bytes=peak, low_bytes=peak, high_bytes=peak)


@contextlib.contextmanager
def _quiet() -> Generator[None, None, None]:
    """Without its prints, and with its files in a folder that goes away."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _seconds(value: object) -> float:
    number, _, unit = str(value).partition(" ")
    return float(number) * {"ms": 1e-3, "s": 1.0, "us": 1e-6}[unit or "ms"]


def _expressible(request: StepRequest) -> None:
    layout = request.layout
    checks = {
        f"a system file for {request.machine}": request.machine in _SYSTEMS,
        f"models of family {request.model.family}": request.model.family in _FAMILIES,
        f"the precision {layout.precision}": layout.precision == "bf16",
        "sharded parameters": layout.zero < 2,
        f"recompute {layout.recompute}": layout.recompute == "none",
        f"the schedule {layout.schedule}": layout.schedule == "1f1b",
        f"the task {request.task}": request.task == "pretrain",
        "several nodes": layout.devices <= 8,
    }
    missing = [name for name, known in checks.items() if not known]
    if missing:
        raise ConfigError(f"SimuMax does not express {'; '.join(missing)}")


def _model(request: StepRequest) -> dict[str, Any]:
    sizes = request.model.symbols
    found: dict[str, Any] = {
        "model_name": request.name,
        "model_type": "moe" if "e" in sizes else "dense",
        "hidden_size": sizes["h"],
        "head_num": sizes["n"],
        "kv_head_num": sizes["k"],
        "head_size": sizes.get("dn", sizes["d"]),
        "intermediate_size": sizes["f"],
        "layer_num": request.model.layers,
        "vocab_size": sizes["v"],
        "use_swiglu": request.model.family != "gpt",
    }
    if "e" in sizes:
        found |= {
            "expert_num": sizes["e"],
            "topk": sizes["a"],
            "moe_ffn_hidden_size": sizes["g"],
            "moe_shared_expert_intermediate_size": sizes["fs"],
            "dense_layers": sum(count for kind, count in request.model.blocks if kind == "dense"),
        }
    if "kr" in sizes:
        found |= {
            "attention_type": "mla",
            "q_lora_rank": sizes["qr"] or None,
            "kv_lora_rank": sizes["kr"],
            "qk_head_dim": sizes["dn"],
            "qk_pos_emb_head_dim": sizes["dr"],
            "v_head_dim": sizes["dv"],
        }
    return found


def _strategy(request: StepRequest) -> dict[str, Any]:
    layout = request.layout
    return {
        "seq_len": request.seq_len,
        "micro_batch_size": layout.micro_batch,
        "micro_batch_num": layout.micro_batches,
        "dtype": "bf16",
        "world_size": layout.devices,
        "tp_size": layout.tp,
        "cp_size": layout.cp,
        "pp_size": layout.pp,
        "ep_size": layout.ep,
        "etp_size": layout.expert_tp if layout.ep > 1 else 1,
        "enable_sequence_parallel": True,
        "interleaving_size": layout.vpp,
        "pp_comm_async": False,
        "zero_state": layout.zero,
        "use_fp32_accum_grad": request.stack.gradient_dtype == "float32",
        "enable_recompute": False,
        "enable_straggler_model": False,
        "overlap_grad_reduce": request.stack.overlap_grad_reduce,
        "cross_entropy_loss_fusion": True,
        "dispatch_probs": "e" in request.model.symbols,
        "te_version": "2.11.0",
        "moe_dispatcher_policy": "all2all",
        "mem_factor": 0.94,
    }
