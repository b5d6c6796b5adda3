"""What recipes of Megatron do to a step: layers in 16 bits, 8-bit gathers, the host's time for modules and tensors."""

from __future__ import annotations

import dataclasses

import pytest

from lading.catalog.stacks import stack_by_name
from lading.ir.layout import parse_layout
from lading.ir.request import Architecture, StepRequest
from lading.ir.stack import Stack
from lading.sim.simulate import machine_of, priced, prices_of, simulate, table_of

DENSE = {"h": 4096, "n": 32, "k": 8, "d": 128, "f": 14336, "v": 32000}
EXPERTS = {"h": 2048, "n": 16, "k": 4, "d": 128, "v": 32000, "e": 32, "a": 4, "g": 768}
STACK = dataclasses.replace(stack_by_name("megatron-bridge"), in_situ={})


def _request(layout: str, family: str = "llama-fused", stack: Stack = STACK, **more: int) -> StepRequest:
    symbols = EXPERTS if family == "moe" else DENSE
    blocks = (("moe" if family == "moe" else "block", 8),)
    model = Architecture(family=family, symbols=symbols, blocks=blocks)
    return StepRequest(
        name="t", model=model, seq_len=4096, machine="b200", layout=parse_layout(layout), stack=stack, **more
    )


def test_layers_in_16_bits_stand_apart_and_take_longer() -> None:
    plain, kept = _request("dp8,zero1,gb8,mxfp8"), _request("dp8,zero1,gb8,mxfp8", high_precision_layers=3)
    table = table_of(kept)
    assert [(s.precise, n) for s, n in zip(table.segments, table.counts, strict=True)][1:-1] == [
        (True, 1),
        (False, 5),
        (True, 2),
    ]
    steps = [simulate(request).step for request in (plain, kept)]
    shares = [step.shares_s for step in steps]
    assert steps[1].step_s > steps[0].step_s
    assert shares[1]["low-precision products"] == pytest.approx(shares[0]["low-precision products"] * 5 / 8, rel=0.01)
    assert steps[0].flops == pytest.approx(steps[1].flops, rel=1e-9)
    bf16 = dataclasses.replace(kept, layout=parse_layout("dp8,zero1,gb8"))
    assert len(table_of(bf16).segments) == 3


def test_low_products_gather_their_inputs_in_8_bits() -> None:
    shares = [
        simulate(_request(f"tp8,sp,dp1,gb1{precision}")).step.shares_s["tp communication"]
        for precision in ("", ",mxfp8")
    ]
    assert 0.6 < shares[1] / shares[0] < 0.9  # gathers halve, scatters stay


def test_each_experts_weight_is_a_tensor_for_the_host() -> None:
    request = _request("dp8,ep8,etp1,zero1,gb8", family="moe")
    parts = priced(request)
    stage = simulate(request, parts=parts).step.stages[0]
    assert stage.parameters == 8 * (4 * 2 + 5) + 3  # four experts beside qkv, out, two norms and the router
    slow = dataclasses.replace(request, stack=dataclasses.replace(STACK, parameter_s=1.0))
    none = dataclasses.replace(request, stack=dataclasses.replace(STACK, parameter_s=0.0))
    assert simulate(none).step.shares_s["host"] == STACK.step_s
    prices = prices_of(request, machine_of(request), table_of(request))
    expected = STACK.step_s + stage.parameters - prices.optimizer_s(stage.trained)
    assert simulate(slow).step.shares_s["host"] == pytest.approx(expected)
