"""Fields: every usual way to write a setting is understood, what is not is told, and what is not modelled refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tools.validate.document import predictions_of
from tools.validate.requests import request_of
from tools.validate.rows import read_rows
from tools.validate.scoring import Simulator, outcomes_of, reported_bytes

from lading.errors import ConfigError
from lading.ir.request import Prediction, StepRequest
from lading.sim.simulate import machine_of, simulate
from tests.validate.test_rows import changed


def asked(tmp_path: Path, **parts: Any) -> StepRequest:
    file = tmp_path / "rows.jsonl"
    file.write_text(changed(**{"measured": {"tokens_per_s_per_gpu": None}, **parts}))
    return request_of(read_rows([file])[0][0])


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"cp_comm": "Ulysses"}, {"cp_comm": "all_to_all"}),
        ({"cp_comm": "all-gather"}, {"cp_comm": "all_gather"}),
        ({"cp_comm": "p2p"}, {"cp_comm": "ring"}),
        ({"dp": 1, "pp": 2, "vpp": 2, "pp_schedule": "ZBV"}, {"schedule": "zbv"}),
        ({"dp": 1, "pp": 2, "pp_schedule": "GPipe"}, {"schedule": "gpipe"}),
        ({"dp": 1, "pp": 2, "vpp": 2, "pp_schedule": "Interleaved1F1B"}, {"schedule": "interleaved"}),
        ({"offload": "optimizer->NVMe"}, {"offload": ("optimizer",), "offload_to": "disk"}),
        ({"offload": "optimizer states to CPU"}, {"offload": ("optimizer",), "offload_to": ""}),
        ({"offload": "no"}, {"offload": ()}),
        ({"offload": "params+optimizer CPU", "zero_stage": 3}, {"offload": ("parameters",)}),
        ({"activation_checkpointing": "Gradient checkpointing"}, {"recompute": "full", "recompute_layers": -1}),
        ({"activation_checkpointing": "off"}, {"recompute": "none"}),
        ({"activation_checkpointing": "every layer"}, {"recompute": "full"}),
        ({"activation_checkpointing": "full", "ac_detail": "2 of 4 layers"}, {"recompute_layers": 2}),
        ({"activation_checkpointing": "selective", "ac_detail": "every other layer"}, {"recompute_layers": 2}),
        ({"activation_checkpointing": "selective", "ac_detail": "50% of layers"}, {"recompute": "full"}),
        (
            {"activation_checkpointing": "selective", "ac_detail": "layernorm, mlp"},
            {"recompute": "selective", "recompute_modules": ("layernorm", "mlp")},
        ),
        ({"sharding": "FSDP"}, {"zero": 3}),
    ],
)
def test_usual_wordings_are_understood(tmp_path: Path, layout: dict[str, Any], expected: dict[str, Any]) -> None:
    request = asked(tmp_path, layout=layout)
    assert {name: getattr(request.layout, name) for name in expected} == expected
    assert request.unread == ()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"layout": {"cp_comm": "tree"}}, "layout.cp_comm 'tree'"),
        ({"layout": {"dp": 1, "pp": 2, "pp_schedule": "hanayo"}}, "layout.pp_schedule 'hanayo'"),
        ({"layout": {"precision": "posit8"}}, "layout.precision 'posit8'"),
        ({"layout": {"task": "reward model"}}, "layout.task 'reward model'"),
        ({"layout": {"optimizer": "schedule-free"}}, "layout.optimizer"),
        ({"layout": {"activation_checkpointing": "some"}}, "layout.activation_checkpointing 'some'"),
        ({"layout": {"offload": "moonward"}}, "layout.offload 'moonward'"),
        ({"layout": {"sequence_packing": True}}, "field layout.sequence_packing: True"),
        ({"model": {"attention": "GQA, differential"}}, "'differential'"),
        ({"model": {"kind": "vision"}}, "model.kind 'vision'"),
        ({"hardware": {"gpu": "H100 SXM 80GB, capped at 450 W"}}, "its power limit"),
        ({"hardware": {"intra_node_link": "string and cups"}}, "links of a node"),
        ({"hardware": {"gpus_per_node": 1, "inter_node_link": "8x 200 Gb/s avian carriers"}}, "avian carriers"),
    ],
)
def test_what_is_not_understood_is_printed_and_widens_the_interval(
    tmp_path: Path, parts: dict[str, Any], words: str
) -> None:
    request = asked(tmp_path, **parts)
    assert any(words in text for text in request.unread), request.unread
    assert any(f"not understood: {text}" in request.assumed for text in request.unread)
    told, sure = (simulate(r).prediction for r in (request, dataclasses.replace(request, unread=())))
    assert told.high_s / told.step_s > sure.high_s / sure.step_s


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"offload": "optimizer (ZenFlow)"}, "every few steps"),
        ({"offload": "Twin-Flow 40% of optimizer"}, "stays on the device"),
        ({"optimizer": "1-bit Adam"}, "compressed"),
        ({"framework": "DiLoCo on OpenDiLoCo"}, "every few steps only"),
        ({"optimizer": "GaLore AdamW"}, "projected"),
    ],
)
def test_methods_that_are_not_modelled_are_refused_by_name(tmp_path: Path, layout: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asked(tmp_path, layout=layout)


def test_links_of_a_node_are_read(tmp_path: Path) -> None:
    def nearest(**hardware: Any) -> tuple[str, int, float]:
        link = machine_of(asked(tmp_path, hardware={"gpu": "A100 SXM 80GB", **hardware})).links[0]
        return link.name, link.ranks, link.bandwidth_bytes_per_s / 1e9

    assert nearest(intra_node_link="NVLink3/NVSwitch 600GB/s") == ("nvlink", 8, 300)
    assert nearest(intra_node_link="NVLink 300 GB/s per direction") == ("nvlink", 8, 300)
    assert nearest(intra_node_link="NVLink 400 GB/s") == ("nvlink", 8, 200)
    assert nearest(intra_node_link="PCIe 4.0 x16") == ("pcie", 8, 31.5)
    assert nearest(intra_node_link="PCIe Gen3 x8") == ("pcie", 8, 7.875)
    assert nearest(gpus_per_node=4) == ("nvlink", 4, 300)
    assert nearest(gpu="GB200", gpus_per_node=4)[1] == 72
    assert nearest(gpu="GB200", intra_node_link="NVLink5, NVL36")[1] == 36


def test_windows_and_latent_attention_in_their_usual_wording(tmp_path: Path) -> None:
    def model(**fields: Any) -> Any:
        return asked(tmp_path, model={"layers": 6, **fields}).model

    assert model(window=64).blocks == (("window", 6),)
    assert model(attention="sliding_window=64").symbols["window"] == 64
    assert model(attention="local 64 : global, 5:1").blocks == (("window", 5), ("full", 1))
    experts = {"experts": 4, "topk": 2, "moe_ffn_hidden": 128, "shared_expert_ffn": 128, "first_dense_layers": 1}
    words = "MLA (q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim 32, qk_rope_head_dim 16, v_head_dim 32)"
    latent = model(attention=words, **experts)
    assert latent.family == "mla-moe"
    assert [latent.symbols[name] for name in ("qr", "kr", "dn", "dr", "dv")] == [96, 64, 32, 16, 32]
    assert model(attention="MLA", **experts).symbols["kr"] == 512
    with pytest.raises(ConfigError, match="linear attention"):
        model(attention="linear attention")


def test_states_without_masters_and_in_fewer_bits(tmp_path: Path) -> None:
    source = "a fork of Megatron, 2025"
    assert asked(tmp_path, source=source, layout={"optimizer": "AdamW"}).stack.master_weights
    detail = {"precision": "bf16", "precision_detail": "pure bf16, no master weights"}
    bare = asked(tmp_path, source=source, layout=detail).stack
    assert not bare.master_weights
    assert asked(tmp_path, layout={"optimizer": "AdamW 8bit"}).stack.moments_dtype == "uint8"
    assert asked(tmp_path, layout={"optimizer": "SGD"}).stack.moments == 0
    assert asked(tmp_path, layout={"optimizer": "Lion"}).stack.moments == 1


def test_kernels_of_attention_that_words_name(tmp_path: Path) -> None:
    def kernel(words: str, **parts: Any) -> str:
        return asked(tmp_path, model={"attention": words}, **parts).stack.attention

    assert kernel("GQA, eager") == "unfused"
    assert kernel("FA2, causal") == "flash2"
    assert kernel("flash attention", source="Megatron-LM 2022") == "flash2", "the software's own is not fused"


def test_a_fraction_of_a_count_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layout.vpp: expected a whole number, got 1.5"):
        asked(tmp_path, layout={"vpp": 1.5})


def test_memory_of_one_rank_of_a_pipeline_is_laid_beside_that_rank(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    prediction = Prediction(step_s=1.0, low_s=1.0, high_s=1.0, peak_bytes=9, rank_bytes=(9, 5, 7, 6))

    def told(words: str) -> int:
        file.write_text(changed(measured={"memory_kind": words, "peak_memory_gib": 1.0}))
        return reported_bytes(read_rows([file])[0][0], prediction, 8)

    assert [told(f"max allocated, {words}") for words in ("rank 0", "rank 7", "last stage", "rank 3")] == [9, 6, 6, 5]
    assert told("max_memory_allocated, max over ranks") == 9
    assert told("mean over ranks, allocated") == 7


def test_what_was_understood_stands_with_each_prediction(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(changed(hardware={"gpus_per_node": 1, "inter_node_link": "50 GB/s RoCE per GPU"}))
    (line,) = predictions_of(outcomes_of(read_rows([file])[0], Simulator()))
    said = line["understood"]
    assert "1 x 50 GB/s (400 Gb/s) ethernet for 1 devices" in said["links"]
    assert {"software", "switches", "number formats", "recompute", "sequences", "groups"} <= said.keys()
