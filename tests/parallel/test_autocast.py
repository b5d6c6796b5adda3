"""Activations are in the number formats of autocast where fp32 parameters are whole, and nowhere else."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lading.catalog.stacks import stack_by_name
from lading.cost.fusion import launched
from lading.ir.graph import OpKind
from lading.ir.layout import parse_layout
from lading.ir.request import Architecture, StepRequest
from lading.ir.stack import Stack
from lading.ir.work import AUTOCAST, Kernel, Product, RankSegment, Stage
from lading.sim.simulate import segments_of, table_of

LLAMA = {"h": 1024, "f": 2816, "n": 16, "k": 4, "d": 64, "v": 32000}
GPT = {"h": 1024, "f": 4096, "n": 16, "d": 64, "v": 50304, "smax": 512}
TOKENS, HIDDEN = 512, 1024


def block(
    layout: str, family: str = "llama", number: int = 1, *, dropout: float = 0.0, **settings: object
) -> tuple[RankSegment, Stack]:
    stack = dataclasses.replace(stack_by_name("eager-torch"), **settings)
    model = Architecture(family=family, symbols=LLAMA if family == "llama" else GPT, blocks=(("block", 4),))
    request = StepRequest(
        name="autocast", model=model, seq_len=TOKENS, machine="a100", layout=parse_layout(layout), stack=stack,
        dropout=dropout,
    )  # fmt: skip
    return segments_of(request, table_of(request))[number], stack


def copies(segment: RankSegment, stage: Stage) -> list[str]:
    return [kernel.module for kernel in segment.kernels if kernel.name == AUTOCAST and kernel.stage is stage]


def moved(segment: RankSegment, kind: OpKind, stage: Stage) -> list[int]:
    return [k.bytes_read + k.bytes_written for k in segment.kernels if k.kind is kind and k.stage is stage]


def test_each_product_copies_its_own_operand_of_a_norm() -> None:
    found, _ = block("mb1,gb1")
    # Queries, keys, values, gate and up read norms, which are in fp32; attention and the gate's product give 16 bits.
    assert len(copies(found, Stage.FORWARD)) == 5
    for kernel in found.kernels:
        if isinstance(kernel.detail, Product):
            assert {found.tensors[t].dtype for t in kernel.inputs} == {"bfloat16"}
    assert {found.tensors[t].dtype for t in (*found.enters, *found.leaves)} == {"float32"}


def test_norms_and_the_residual_stream_move_twice_the_bytes() -> None:
    for stage in (Stage.FORWARD, Stage.BACKWARD_INPUT):
        wide = moved(block("mb1,gb1")[0], OpKind.NORM, stage)
        narrow = moved(block("mb1,gb1", autocast=False)[0], OpKind.NORM, stage)
        assert sum(wide) == pytest.approx(2 * sum(narrow), rel=0.01)


def test_backward_copies_gradients_both_ways() -> None:
    found, _ = block("mb1,gb1")
    # Each of five operands was copied to 16 bits, so its gradient is made fp32; two results were added to the residual
    # stream, whose gradient is made 16 bits for them.
    sizes = [
        k.bytes_written // (TOKENS * HIDDEN)
        for k in found.kernels
        if k.name == AUTOCAST and k.stage is Stage.BACKWARD_INPUT
    ]
    assert sorted(sizes) == [2, 2, 4, 4, 4, 4, 4]


def test_layer_norm_and_softmax_give_fp32_and_dropout_of_a_product_does_not() -> None:
    found, _ = block("mb1,gb1", "gpt", dropout=0.1, attention="unfused")
    made = {k.name: found.tensors[k.outputs[0]].dtype for k in found.kernels if k.outputs and k.stage is Stage.FORWARD}
    assert made["aten.native_layer_norm.default"] == made["aten._softmax.default"] == "float32"
    drops = [k for k in found.kernels if "native_dropout" in k.name and k.module.rpartition(".")[2] == "dropout"]
    assert drops
    assert {found.tensors[k.outputs[0]].dtype for k in drops} == {"bfloat16"}


def test_backward_finds_what_forward_kept() -> None:
    found, _ = block("mb1,gb1")
    made = {found.tensors[t].storage for k in found.kernels if k.stage is Stage.FORWARD for t in k.outputs}
    made |= {found.tensors[t].storage for t in found.enters}
    read = {found.tensors[t].storage for k in found.kernels if k.stage is not Stage.FORWARD for t in k.inputs}
    assert read & made <= {found.tensors[t].storage for t in found.saved}


def test_embeddings_and_their_gradients_are_those_of_fp32_weights() -> None:
    wide, narrow = (block("mb1,gb1", number=0, autocast=flag)[0] for flag in (True, False))
    (looked_up,), (before,) = ([k for k in found.kernels if k.kind is OpKind.GATHER] for found in (wide, narrow))
    assert (looked_up.bytes_read, looked_up.bytes_written) == (2 * before.bytes_read, 2 * before.bytes_written)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("dp2,zero3,mb1,gb2", {}),
        ("mb1,gb1", {"autocast": False}),
        ("mb1,gb1", {"parameters_dtype": "", "master_weights": True}),
        ("tp2,mb1,gb1", {}),
    ],
)
def test_activations_have_16_bits_elsewhere(layout: str, settings: dict[str, Any]) -> None:
    found, _ = block(layout, **settings)
    assert not copies(found, Stage.FORWARD)
    assert {found.tensors[t].dtype for t in found.enters} == {"bfloat16"}


def test_a_compiler_makes_copies_in_the_kernels_beside_them() -> None:
    found, stack = block("mb1,gb1", fusion="compiled")
    left = [k for k in launched(found, stack) if k.name == AUTOCAST and k.stage is Stage.FORWARD]
    assert not left


def gelus(kernels: tuple[Kernel, ...], stage: Stage) -> int:
    """Bytes moved for each element of a GELU."""
    elements = TOKENS * 4 * HIDDEN
    found = [k for k in kernels if k.stage is stage and ("gelu" in k.name)]
    return sum(k.bytes_read + k.bytes_written for k in found) // elements


def test_a_gelu_in_operations_of_pytorch_moves_what_each_of_them_does() -> None:
    plain, stack = block("mb1,gb1", "gpt", autocast=False)
    parts = dataclasses.replace(stack, unfused=("gelu",))
    # x^3, times a number, plus x, times a number, tanh, plus one; half of x; both multiplied.
    assert (gelus(launched(plain, stack), Stage.FORWARD), gelus(launched(plain, parts), Stage.FORWARD)) == (4, 36)
    wide, _ = block("mb1,gb1", "gpt")
    assert gelus(launched(wide, parts), Stage.FORWARD) > 2 * 36
    assert gelus(launched(wide, parts), Stage.BACKWARD_INPUT) > gelus(launched(plain, parts), Stage.BACKWARD_INPUT) > 48


def test_a_compiled_loss_keeps_logits_and_no_log_softmax() -> None:
    found, stack = block("mb1,gb1", number=-1, fusion="compiled", autocast=False)
    loss = [k for k in launched(found, stack) if "log_softmax" in k.name]
    logits = TOKENS * LLAMA["v"] * 2
    forward, backward = (
        sum(k.bytes_read + k.bytes_written for k in loss if (k.stage is Stage.FORWARD) is flag)
        for flag in (True, False)
    )
    assert forward == pytest.approx(logits, rel=0.01)
    assert backward == pytest.approx(2 * logits, rel=0.01)
