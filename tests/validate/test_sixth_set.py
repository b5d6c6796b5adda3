"""Words of the sixth set that was predicted before anything was changed for it, and what they mean."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tools.validate.requests import request_of
from tools.validate.rows import Row, read_rows
from tools.validate.words import machine_of

from lading.catalog.load import load_machine
from lading.errors import ConfigError
from lading.sim.simulate import simulate
from tests.validate.test_fifth_set import asked

_FOLDER = Path(__file__).parents[2] / "benchmarks" / "validation"
_NODE_RATE = "'800 Gb/s RDMA' is the rate of a whole node, not of each NIC"


@pytest.fixture(scope="module", name="rows")
def fixture_rows() -> dict[str, Row]:
    rows, notes = read_rows([_FOLDER / "blind_frameworks_6.jsonl"])
    assert (len(rows), notes) == (117, [])
    return {row.id: row for row in rows}


def test_every_word_of_the_sixth_set_is_read_but_what_no_table_has(rows: dict[str, Row]) -> None:
    """Boards of before tensor cores are refused; a part of one block that moves to the host is unread."""
    unread: dict[str, tuple[str, ...]] = {}
    refused: list[str] = []
    for row in rows.values():
        try:
            unread[row.id] = tuple(word for word in request_of(row).unread if word != _NODE_RATE)
        except ConfigError as error:
            refused.append(f"{row.id}: {error}")
    assert [told.split(":")[0] for told in refused] == ["languini-p100-small-16", "languini-x-small-8"]
    assert all("expected a GPU of the catalog's machines" in told for told in refused)
    left = {name: words for name, words in unread.items() if words}
    assert set(left) == {"kwai-7b-h800-ours", "kwai-65b-64-ours"}


@pytest.mark.parametrize("words", ["in parts (einsum, masked_fill, softmax)", "unfused, softmax in parts", "bmm"])
def test_attention_in_operations_is_no_kernel_of_its_own(rows: dict[str, Row], words: str) -> None:
    request = asked(rows["languini-a100-small-64"], model={"attention": words})
    assert (request.stack.attention, request.unread) == ("unfused", ())


def test_an_activation_function_and_norms_are_recomputed_alone(rows: dict[str, Row]) -> None:
    """They were taken for attention's core."""
    row = rows["kwai-65b-128-ours"]
    assert set(asked(row).layout.recompute_modules) == {"act", "layernorm"}
    moe = asked(row, layout={"ac_detail": "moe_act, layernorm"})
    assert moe.layout.recompute_modules == ("moe_act", "layernorm")


@pytest.mark.parametrize(
    ("words", "vpp", "kinds", "moved"),
    [
        ("activations to CPU, 16% of them", 5, (), 0),  # of two blocks in a chunk, less than half of one
        ("activations to CPU, 50% of them", 5, ("activations",), 1),
        ("activations to CPU, 30% of them", 1, ("activations",), 3),
        ("activations to CPU, 100% of them", 1, ("activations",), 10),
        ("activations to CPU", 5, ("activations",), 0),
    ],
)
def test_a_share_of_activations_is_of_each_chunk_of_a_rank(
    rows: dict[str, Row], words: str, vpp: int, kinds: tuple[str, ...], moved: int
) -> None:
    """16% of 80 layers were 13 of the two blocks that a chunk has, so all of them moved."""
    request = asked(rows["kwai-65b-64-ours"], layout={"offload": words, "vpp": vpp})
    assert (request.layout.offload, request.layout.offload_layers) == (kinds, moved)
    assert bool(request.unread) == (not kinds)


@pytest.mark.parametrize(
    ("row", "framework", "attention"),
    [
        ("nemo22-gpt-5b-8", "NeMo Megatron 22.08", "unfused"),
        ("nemo22-gpt-5b-8", "NeMo 23.08", "flash2"),
        ("nemo23-bert-4b", "NeMo Megatron 23.05", "unfused"),
        ("nemo-issue-8059", "NeMo 23.08", "flash2"),
    ],
)
def test_nemo_has_no_kernel_of_attention_before_23_03(
    rows: dict[str, Row], row: str, framework: str, attention: str
) -> None:
    source = rows[row].source if row != "nemo22-gpt-5b-8" or "22" in framework else "a table, 2023-09"
    stack = request_of(
        dataclasses.replace(rows[row], source=source, layout={**rows[row].layout, "framework": framework})
    ).stack
    assert stack.attention == attention
    assert stack.framework == ("" if "22." in framework else "NeMo")


def test_libai_is_in_the_manner_of_megatron_whatever_is_cut(rows: dict[str, Row]) -> None:
    whole, cut = (asked(rows[f"libai-libai-{name}"]).stack for name in ("gpt-1x1x1", "gpt-1x8x1"))
    assert {whole.name, cut.name} == {"megatron-like-2022"}
    row = rows["libai-megatron-gpt-1x1x1"]
    assert not any("runtime" in what for what in asked(row).unstated), "Megatron-LM runs on PyTorch, whoever ran it"
    assert any("runtime" in what for what in asked(rows["libai-libai-gpt-1x1x1"]).unstated)


def test_adapters_of_pefts_default_are_on_queries_and_values(rows: dict[str, Row]) -> None:
    row = rows["vectorlm-lora-1-2048"]
    default, listed = asked(row), asked(row, layout={"task": "LoRA r8, all-linear"})
    assert (default.stack.adapter_modules, listed.stack.adapter_modules) == (("wq", "wv", "qkv"), ())
    assert simulate(default).step.step_s < 0.85 * simulate(listed).step.step_s
    tuned = asked(row, layout={"framework": "LLaMA-Factory"})
    assert tuned.stack.adapter_modules == ()


def test_another_dropout_of_attention_is_unread(rows: dict[str, Row]) -> None:
    for notes in ("attention dropout 0, hidden dropout 0.1", "hidden dropout 0.1; attention_dropout 0"):
        request = asked(rows["lambda-neox-13b-8"], notes=notes)
        assert request.dropout == 0.1
        assert "attention's dropout of 0: that of all is taken as 0.1" in request.unread
    request = asked(rows["lambda-neox-13b-8"], notes="attention dropout 0.1")
    assert (request.dropout, [words for words in request.unread if "dropout" in words]) == (0.1, [])


@pytest.mark.parametrize(
    ("notes", "dropout"),
    [
        ("hidden and attention dropout 0", 0.0),
        ("no dropout", 0.0),
        ("hidden_dropout 0.1", 0.1),
        ("dropout=0.05", 0.05),
        ("lora_dropout 0.05", 0.1),
        ("LoRA dropout 0.05", 0.1),
        ("adapter dropout 0.05", 0.1),
        ("Dropout 0", 0.0),
        ("", 0.1),
    ],
)
def test_dropout_that_is_denied_is_none(rows: dict[str, Row], notes: str, dropout: float) -> None:
    """Zero and "no" were taken for the 0.1 that Megatron has by itself."""
    assert asked(rows["lambda-neox-13b-8"], notes=notes).dropout == dropout


def test_a_repository_named_after_a_kernel_says_nothing_of_the_kernel(rows: dict[str, Row]) -> None:
    row = rows["lambda-gpt2.7b-a100-1-hf"]
    assert asked(row).stack.attention == "unfused"
    assert asked(row, notes=f"{row.notes}; flash-attention 2").stack.attention == "flash2"


def test_pure_fp16_keeps_moments_and_gradients_in_it(rows: dict[str, Row]) -> None:
    stack = asked(rows["mi350x-gpt-7b"]).stack
    assert (stack.gradient_dtype, stack.moments_dtype, stack.master_weights) == ("float16", "float16", False)


def test_ethernet_without_a_rate_is_not_stated(rows: dict[str, Row]) -> None:
    """It had eight InfiniBand NICs; the interval holds one NIC of 100 Gb/s a node too."""
    row = rows["lambda-neox-20b-24"]
    named = asked(row, hardware={"inter_node_link": "Ethernet, 100 Gb/s a node"})
    assert "the network between nodes" in asked(row).unstated
    assert "the network between nodes" not in named.unstated
    slow, assumed = simulate(named).prediction, simulate(asked(row)).prediction
    assert asked(row).otherwise == pytest.approx(slow.step_s / assumed.step_s)
    assert asked(row).otherwise > 1.1
    assert assumed.high_s > slow.step_s
    assert named.otherwise == 1.0


def test_a_default_is_no_elastic_fabric(rows: dict[str, Row]) -> None:
    """ "default" has the letters of EFA, whose rate is known."""
    row = rows["lambda-neox-20b-24"]
    for words, told in (("the machine's default", False), ("Elastic Fabric Adapter", True), ("EFA", True)):
        unstated = asked(row, hardware={"inter_node_link": words}).unstated
        assert ("the network between nodes" in unstated) != told


def test_the_name_of_a_model_attaches_no_adapters(rows: dict[str, Row]) -> None:
    """Qwen's own scripts list every product; PEFT's default of Qwen2 is queries and values."""
    row = rows["vectorlm-lora-1-2048"]
    assert asked(row, notes=f"{row.notes}; Qwen2.5").stack.adapter_modules == ("wq", "wv", "qkv")


@pytest.mark.parametrize(
    ("stages", "error"),
    [
        ((4, 0, 4, 4, 4, 6, 6, 4), "at least 1 each"),
        ((-1, 5, 5, 5, 5, 5, 5, 3), "at least 1 each"),
        ((4.5, 3.5, 4, 4, 4, 4, 4, 4), "whole numbers"),
        ((True, 5, 5, 5, 5, 5, 5, 1), "whole numbers"),
        ("44444444", "whole numbers"),
        ((4, 4, 4, 4, 4, 5, 5, 3), "add up to the model's 32"),
    ],
)
def test_counts_of_blocks_that_no_pipeline_has_are_refused(rows: dict[str, Row], stages: Any, error: str) -> None:
    request = request_of(rows["vocab-redis-2048-128k"])
    with pytest.raises(ConfigError, match=error):
        dataclasses.replace(request, stage_layers=stages)


def test_stages_are_divided_in_one_way(rows: dict[str, Row]) -> None:
    request = request_of(rows["vocab-redis-2048-128k"])
    for other in ({"edge_layers_fewer": 1}, {"embedding_is_layer": True}):
        with pytest.raises(ConfigError, match="stage_layers alone"):
            dataclasses.replace(request, **other)
    with pytest.raises(ConfigError, match="expected 7 counts"):
        simulate(dataclasses.replace(request, layout=dataclasses.replace(request.layout, pp=7)))
    assert dataclasses.replace(request, stage_layers=[*request.stage_layers]) == request


def test_a_pipeline_has_the_layers_that_are_listed(rows: dict[str, Row]) -> None:
    """Of a vocabulary of 128,000 the last stage has the head, and two layers instead of four."""
    listed, even = (request_of(rows[f"vocab-{name}-2048-128k"]) for name in ("redis", "baseline"))
    assert (listed.stage_layers, even.stage_layers) == ((4, 4, 4, 4, 4, 5, 5, 2), ())
    measured = [rows[f"vocab-{name}-2048-128k"].measured["iteration_s"] for name in ("redis", "baseline")]
    times = [simulate(request).step.step_s for request in (listed, even)]
    assert times[0] / times[1] == pytest.approx(measured[0] / measured[1], rel=0.08)


def test_gradients_that_are_not_reduced_beside_backward_in_the_words_of_apex(rows: dict[str, Row]) -> None:
    row = rows["nemo23-bert-4b"]
    beside = asked(row, layout={"optimizer": "distributed_fused_adam"})
    assert (asked(row).stack.overlap_grad_reduce, beside.stack.overlap_grad_reduce) == (False, True)


@pytest.mark.parametrize(("version", "attention"), [("1.1", "flash2"), ("1.10", "cudnn"), ("2.3", "cudnn")])
def test_transformer_engine_before_1_6_attends_no_faster_than_flash_attention(
    rows: dict[str, Row], version: str, attention: str
) -> None:
    notes = f"--use-mcore-models; dropout 0, Transformer Engine {version}"
    assert asked(rows["kwai-7b-h800-megatron"], notes=notes).stack.attention == attention


def test_an_mi350x_is_a_board_of_its_own() -> None:
    assert machine_of("AMD Instinct MI350X")[0] == "mi350x"
    board, larger = load_machine("mi350x").device, load_machine("mi355x").device
    assert board.memory_bytes == larger.memory_bytes
    assert board.peak_flops_per_s["bfloat16"] < 0.92 * larger.peak_flops_per_s["bfloat16"]
