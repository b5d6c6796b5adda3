"""Calculon (github.com/calculon-ai/calculon, Apache-2.0) as a predictor of requests; its code is not kept here.

It knows dense models of one kind (an MLP without gate, as many key as query heads), data, tensor and pipeline parallel,
ZeRO-1 at most, full or attention recompute. Its own files for the A100 and the H100 are used as they are, but for the
memory: whether a layout fits is not what is asked here.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lading.errors import ConfigError
from lading.ir.request import Prediction, StepRequest

_SYSTEMS = {"a100": "a100_80g.json", "h100": "h100_80g_nvl8.json"}
_DTYPES = {"fp16": "float16", "bf16": "float16", "fp8": "float8"}
_RECOMPUTES = {"none": "none", "selective": "attn_only", "full": "full"}


@dataclass(frozen=True)
class Calculon:
    """Calculon from a checkout of its repository."""

    folder: Path

    def predict(self, request: StepRequest) -> Prediction:
        """Seconds of a step.

        Raises:
            ConfigError: Calculon cannot express the request, or refuses it.
        """
        _expressible(request)
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
        llm: Any = importlib.import_module("calculon.llm.llm").Llm
        system: Any = importlib.import_module("calculon.system").System
        config = json.loads((self.folder / "systems" / _SYSTEMS[request.machine]).read_text())
        config["mem1"]["GiB"] = 1e6
        if request.layout.tp < 8:
            config["networks"][0]["must_be_filled"] = False
        try:
            run: Any = llm(llm.Application(_application(request)), logging.getLogger("calculon"))
            machine = system(config)
            run.compile(machine, llm.Execution.from_json(_execution(request)))
            run.run(machine)
        except (llm.Error, AssertionError) as error:
            raise ConfigError(f"Calculon refuses it: {error or 'an assertion'}") from error
        step_s = float(run.get_stats_json(False)["total_time"])
        return Prediction(step_s=step_s, low_s=step_s, high_s=step_s)


def _expressible(request: StepRequest) -> None:
    layout = request.layout
    checks = {
        f"a system file for {request.machine}": request.machine in _SYSTEMS,
        f"models of family {request.model.family}": request.model.family == "gpt",
        "sharded parameters": layout.zero < 2,
        "context parallel": layout.cp == 1,
        f"the precision {layout.precision} on {request.machine}": layout.precision in _DTYPES
        and (layout.precision != "fp8" or request.machine == "h100"),
        f"the schedule {layout.schedule}": layout.schedule in ("1f1b", "interleaved"),
        "recompute of some layers or modules": layout.recompute_layers < 0 and not layout.recompute_modules,
        f"the task {request.task}": request.task == "pretrain",
        "layers that do not divide": request.model.layers % (layout.pp * layout.vpp) == 0,
    }
    missing = [name for name, known in checks.items() if not known]
    if missing:
        raise ConfigError(f"Calculon does not express {'; '.join(missing)}")


def _application(request: StepRequest) -> dict[str, int]:
    sizes = request.model.symbols
    return {
        "hidden": sizes["h"],
        "feedforward": sizes["f"],
        "seq_size": request.seq_len,
        "attn_heads": sizes["n"],
        "attn_size": sizes["d"],
        "num_blocks": request.model.layers,
    }


def _execution(request: StepRequest) -> dict[str, Any]:
    layout = request.layout
    far = 0 if layout.devices <= 8 else 1
    return {
        "num_procs": layout.devices,
        "tensor_par": layout.tp,
        "pipeline_par": layout.pp,
        "data_par": layout.dp,
        "tensor_par_net": 0,
        "pipeline_par_net": far,
        "data_par_net": far,
        "batch_size": layout.global_batch,
        "microbatch_size": layout.micro_batch,
        "datatype": _DTYPES[layout.precision],
        "fused_activation": False,
        "attention_type": "multihead",
        "activation_recompute": _RECOMPUTES[layout.recompute],
        "pipeline_interleaving": layout.vpp,
        "optimizer_sharding": layout.zero > 0 and layout.dp > 1,
        "tensor_par_comm_type": "rs_ag" if layout.sp else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": layout.sp and layout.recompute != "full",
        "data_par_overlap": request.stack.overlap_grad_reduce and layout.dp > 1,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }
