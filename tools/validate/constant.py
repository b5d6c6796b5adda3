"""Constant efficiency, a reference to beat: a step's FLOP at one share of the peak, and the pipeline's bubble.

An estimate on the back of an envelope gives as much: it has no costs of kernels and no memory. On the leaderboard it
says what all the rest is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from lading.catalog.load import load_machine
from lading.errors import ConfigError
from lading.ir.request import Architecture, Prediction, StepRequest

_DTYPES = {"fp8": "float8_e4m3fn", "mxfp8": "float8_e4m3fn", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class ConstantEfficiency:
    """Predicts by one share of the peak for all; the intervals are as wide as such estimates miss by.

    Attributes:
        share: Share of the dense peak that products reach.
        spread: The interval reaches from ``1 / (1 + spread)`` to ``1 + spread`` of the prediction.
    """

    share: float = 0.45
    spread: float = 0.5

    def predict(self, request: StepRequest) -> Prediction:
        """Predict the seconds of a step.

        Raises:
            ConfigError: the machine has no peak for the precision.
        """
        layout = request.layout
        peaks = _peaks(request.machine)
        dtype = _DTYPES.get(layout.precision, layout.precision)
        if dtype not in peaks:
            raise ConfigError(f"expected a peak of {request.machine} for {dtype}, got only {', '.join(peaks)}")
        passes = {"pretrain": 3.0, "sft": 3.0}.get(request.task, 2.0)
        if layout.recompute == "full":
            layers = request.model.layers if layout.recompute_layers < 0 else layout.recompute_layers
            passes += layers / request.model.layers
        flop = passes * forward_flop_of_token(request.model, request.seq_len) * request.tokens
        bubble = (layout.pp - 1) / (layout.micro_batches * layout.vpp)
        step_s = flop / (layout.devices * self.share * peaks[dtype]) * (1 + bubble)
        return Prediction(step_s=step_s, low_s=step_s / (1 + self.spread), high_s=step_s * (1 + self.spread))


@cache
def _peaks(machine: str) -> dict[str, float]:
    return load_machine(machine).device.peak_flops_per_s


def forward_flop_of_token(model: Architecture, seq_len: int) -> float:
    """FLOP of one token's forward: products of active parameters, attention (half of it where causal) and the head."""
    sizes = model.symbols
    causal = model.family not in ("dit", "wan")
    products = sum(count * _parameters_of_block(model, kind) for kind, count in model.blocks)
    attentions = sum(
        count for kind, count in model.blocks if kind not in ("mamba", "mlp") and not _only_experts(model, kind)
    )
    seen = seq_len / 2 if causal else seq_len
    per_head = sizes["dn"] + sizes["dr"] + sizes["dv"] if "kr" in sizes else 2 * sizes["d"]
    head = sizes.get("v", 0) * sizes["h"]
    return 2 * (products + head) + 2 * attentions * sizes["n"] * per_head * seen


def _only_experts(model: Architecture, kind: str) -> bool:
    """Whether a kind of block in a hybrid has experts alone: each kind there is one half of a block elsewhere."""
    return model.family == "mamba2" and kind == "moe"


def _parameters_of_block(model: Architecture, kind: str) -> float:
    """Number of the active parameters of a block of this kind."""
    sizes, width = model.symbols, model.symbols["h"]
    if kind == "mamba":
        inner = sizes["mh"] * sizes["md"]
        return width * (2 * inner + 2 * sizes["mg"] * sizes["ms"] + sizes["mh"]) + inner * width
    matrices = 2 if model.family in ("gpt", "nemotron", "dit", "wan", "mamba2") else 3
    mlp = matrices * width * sizes["f"]
    experts = 0.0
    if "e" in sizes:
        inside = sizes.get("latent", width)
        experts = matrices * (sizes["a"] * inside * sizes["g"] + width * sizes["fs"]) + width * sizes["e"]
    if model.family == "mamba2":
        return {"attention": _attention_parameters(model), "mlp": mlp, "moe": experts}[kind]
    return _attention_parameters(model) + (experts if experts and kind != "dense" else mlp)


def _attention_parameters(model: Architecture) -> float:
    sizes, width, heads = model.symbols, model.symbols["h"], model.symbols["n"]
    if "kr" not in sizes:
        cross = 2 if model.family == "wan" else 1
        return cross * (2 * width * heads * sizes["d"] + 2 * width * sizes["k"] * sizes["d"])
    query = heads * (sizes["dn"] + sizes["dr"])
    queries = width * sizes["qr"] + sizes["qr"] * query if sizes["qr"] else width * query
    values = width * (sizes["kr"] + sizes["dr"]) + sizes["kr"] * heads * (sizes["dn"] + sizes["dv"])
    return queries + values + heads * sizes["dv"] * width
