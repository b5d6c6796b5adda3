"""Operation names and their cost classes."""

from __future__ import annotations

import pytest
import torch

from lading.ir import opkinds
from lading.ir.graph import OpKind
from lading.ir.opkinds import kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten.addmm.default", OpKind.MATMUL),
        ("aten._grouped_mm.default", OpKind.MATMUL),
        ("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", OpKind.ATTENTION),
        ("aten.mul_.Tensor", OpKind.ELEMENTWISE),
        ("aten._foreach_add_.List", OpKind.ELEMENTWISE),
        ("aten.silu_backward.default", OpKind.TRANSCENDENTAL),
        ("aten.linalg_vector_norm.default", OpKind.REDUCTION),
        ("aten.nll_loss_forward.default", OpKind.SOFTMAX),
        ("aten._fused_rms_norm_backward.default", OpKind.NORM),
        ("aten.embedding.default", OpKind.GATHER),
        ("aten.embedding_dense_backward.default", OpKind.SCATTER),
        ("aten._to_copy.default", OpKind.COPY),
        ("aten.empty.memory_format", OpKind.COPY),
        ("aten.new_empty_strided.default", OpKind.COPY),
        ("aten.topk.default", OpKind.SORT),
        ("aten.native_dropout.default", OpKind.RANDOM),
        ("lading.adamw", OpKind.STEP),
        ("aten.no_such_thing.default", None),
    ],
)
def test_kind_of(name: str, kind: OpKind | None) -> None:
    assert kind_of(name) is kind


def test_no_operation_is_in_two_classes_and_every_class_has_one() -> None:
    names = [name.rstrip("_") for text in opkinds._NAMES.values() for name in text.split()]
    assert len(names) == len(set(names))
    assert set(opkinds._NAMES) == set(OpKind) - {OpKind.VIEW, OpKind.COLLECTIVE}


def test_the_names_are_operations_of_torch() -> None:
    names = {name for text in opkinds._NAMES.values() for name in text.split()} - {"adamw"}
    missing = {name for name in names if not hasattr(torch.ops.aten, name)}
    assert not missing
