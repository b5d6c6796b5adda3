"""What published recipes set that the tables made with them do not print, each with its evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lading.ir.layout import Layout
from lading.ir.request import Architecture

_BRIDGE = "NVIDIA-NeMo/Megatron-Bridge scripts/performance/configs/llama/llama3_workload_base_configs.py"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a request that hold where all that is given here does.

    Attributes:
        stack, machine, precision, zero: Of the request.
        hidden, layers: Of the model.
        settings: Fields of Request and of Layout.
        evidence: Where the settings are written.
    """

    stack: str
    machine: str
    precision: str
    zero: int
    hidden: int
    layers: int
    settings: dict[str, Any]
    evidence: str


def _offloads(machine: str, precision: str, layers: int) -> Recipe:
    return Recipe(
        stack="megatron-bridge",
        machine=machine,
        precision=precision,
        zero=3,
        hidden=8192,
        layers=80,
        settings={"offload": "activations", "offload_layers": layers},
        evidence=f"activations of {layers} layers go to the host ({_BRIDGE}: cpu_offloading_num_layers)",
    )


RECIPES: tuple[Recipe, ...] = (
    _offloads("gb300", "bf16", 30),
    _offloads("gb300", "fp8", 20),
    _offloads("gb200", "bf16", 20),
    _offloads("gb200", "fp8", 40),
    _offloads("b200", "fp8", 5),
    Recipe(
        stack="megatron-bridge",
        machine="h100",
        precision="fp8",
        zero=3,
        hidden=4096,
        layers=32,
        settings={"recompute": "full", "recompute_layers": 5},
        evidence=f"5 of 32 layers are recomputed ({_BRIDGE}: recompute_num_layers)",
    ),
)


def recipe_of(stack: str, machine: str, model: Architecture, layout: Layout) -> Recipe | None:
    """The published recipe that a request is made with, if it is one of these."""
    return next(
        (
            recipe
            for recipe in RECIPES
            if (recipe.stack, recipe.machine, recipe.precision) == (stack, machine, layout.precision)
            and (recipe.zero, recipe.hidden, recipe.layers) == (layout.zero, model.symbols["h"], model.layers)
        ),
        None,
    )


def stack_settings(stack: str, precision: str) -> dict[str, Any]:
    """Settings of a stack that follow from the precision.

    Megatron-Bridge's fp8 recipes gather parameters in fp8, but NVFP4's in 16 bits
    (src/megatron/bridge/training/mixed_precision.py: fp8_param_gather, fp4_param).
    """
    if stack == "megatron-bridge" and precision in ("fp8", "mxfp8"):
        return {"gather_dtype": "float8_e4m3fn"}
    return {}


def high_precision_layers(stack: str, precision: str, scaling: str) -> int:
    """Layers that a recipe keeps in 16 bits.

    Current scaling of Megatron-Bridge: the first and the last
    (src/megatron/bridge/training/mixed_precision.py: bf16_with_fp8_current_scaling_mixed).
    """
    return 2 if stack == "megatron-bridge" and precision == "fp8" and scaling in ("", "tensorwise") else 0
