"""Requests: what a row states is what is simulated, what it does not state is said."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tools.validate.requests import request_of
from tools.validate.rows import read_rows
from tools.validate.words import machine_of, stack_rule_of, unread_of_name

from lading.catalog.load import load_machine
from lading.errors import ConfigError
from lading.ir.request import StepRequest
from lading.sim.simulate import simulate
from tests.validate.test_rows import FILES, changed

ROWS = {row.id: row for row in read_rows(FILES)[0]}


def of(name: str) -> StepRequest:
    return request_of(ROWS[name])


@pytest.mark.long
def test_published_rows_are_requests() -> None:
    """All but those whose machine is not in the catalog, and they are few."""
    without = 0
    for row in ROWS.values():
        try:
            request = request_of(row)
        except ConfigError as error:
            assert "whose machine is in the catalog" in str(error)  # noqa: PT017
            without += 1
            continue
        assert request.layout.devices == row.hardware["gpus"]
        assert request.tokens == request.layout.global_batch * row.model["seq_len"]
        assert request.model.layers == row.model["layers"]
    assert without <= 0.03 * len(ROWS)


@pytest.mark.parametrize(
    ("row", "family", "stack", "machine"),
    [
        ("megatron-sc21-T1-1.7B", "gpt", "megatron-2021", "a100"),
        ("korthikanti22-T5-22B-full", "gpt", "megatron-2022", "a100"),
        ("tt2412-002", "llama", "torchtitan-compile", "h100-96gb"),
        ("tt2408-003", "llama", "torchtitan-eager", "a100"),
        ("mbridge26.08-pretrain-002", "mla-moe", "megatron-bridge-graphs", "gb200"),
        ("mbridge26.08-pretrain-016", "mamba2", "megatron-bridge", "gb200"),
        ("nemo2407-002", "gpt", "nemo", "h100"),
        ("dgxc2501-001", "moe", "nemo", "h100"),
        ("dgxc2505-031", "nemotron", "nemo", "h100"),
        ("bloom-001", "gpt", "megatron-deepspeed-bigscience", "a100"),
        ("vtrain-single-001", "gpt", "megatron-deepspeed-traced", "a100"),
        ("qwen-finetune-003", "llama", "qwen-finetune", "a100"),
        ("qwen-finetune-016", "llama", "qwen-finetune-zero2", "a100"),
        ("qwen-finetune-024", "llama", "qwen-finetune-zero3", "a100"),
        ("nemo-dit-001", "wan", "nemo", "h100"),
    ],
)
def test_structure_words_and_source_decide(row: str, family: str, stack: str, machine: str) -> None:
    request = of(row)
    assert (request.model.family, request.stack.name, request.machine) == (family, stack, machine)


def test_sizes_of_latent_attention_and_of_blocks() -> None:
    model = of("mbridge26.08-pretrain-002").model
    expected = {"qr": 1536, "kr": 512, "dn": 128, "dr": 64, "dv": 128, "e": 256, "a": 8, "g": 2048, "fs": 2048}
    assert {name: model.symbols[name] for name in expected} == expected
    assert model.blocks == (("dense", 3), ("moe", 58))
    assert model.predict_ahead == 1
    assert of("mbridge-skills-001").model.symbols["qr"] == 0
    sliding = of("mbridge26.08-pretrain-006").model
    assert sliding.symbols["window"] == 128
    assert sliding.blocks[:2] == (("window", 1), ("full", 1))
    assert of("dgxc2505-022").model.blocks[:2] == (("dense", 1), ("moe", 1))
    hybrid = of("mbridge26.08-pretrain-016").model
    assert hybrid.layers == 88
    assert {kind for kind, _ in hybrid.blocks} == {"mamba", "attention", "moe"}


def test_what_notes_say_of_recomputing() -> None:
    assert of("mbridge26.08-pretrain-002").layout.recompute_modules == ("mla_up_proj",)
    assert of("korthikanti22-T5-22B-full").layout.recompute == "full"
    assert of("tt2412-002").layout.recompute_modules == ("op",)
    share = of("fms-fsdp-004").layout
    assert (share.recompute, share.recompute_layers) == ("full", 8)


def test_what_notes_say_of_the_stack() -> None:
    assert of("mbridge26.08-pretrain-002").stack.cuda_graphs
    assert of("mbridge26.08-pretrain-002").stack.dispatcher == "deepep"
    assert not of("mbridge26.04-pretrain-024").stack.cuda_graphs, "graphs of the router alone"
    assert not of("vtrain-multi-005").stack.overlap_grad_reduce
    assert of("bloom-094").stack.gradient_dtype == "float32"
    assert of("bloom-094").embedding_is_layer
    assert of("tt2412-017").layout.shard == 0, "dp 2 and cp 4 share states"
    assert of("fms-fsdp-001").layout.shard == 8


def test_tasks() -> None:
    lora = of("qwen-finetune-003")
    assert (lora.task, lora.lora_rank, lora.trains_embeddings) == ("lora", 64, False)
    assert of("mbridge26.06-sft-004").task == "sft"
    assert {of(name).task for name in ROWS if name.startswith("qwen")} == {"lora", "qlora", "sft"}


def test_rows_of_no_known_source_get_the_defaults_of_a_class_and_say_so(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(changed(layout={"precision": "bf16 mixed"}, hardware={"gpu": "NVIDIA GH200 96GB"}))
    request = request_of(read_rows([file])[0][0])
    assert request.stack.name == "eager-torch"
    assert request.machine == "gh200"
    text = "; ".join(request.assumed)
    assert "software that is not known: PyTorch, eager" in text
    assert "'bf16 mixed' as bf16" in text


def test_what_published_recipes_set_and_tables_do_not_print(tmp_path: Path) -> None:
    model = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336}
    layout = {
        "dp": 8,
        "fsdp": 8,
        "zero_stage": 3,
        "precision": "fp8",
        "precision_detail": "FP8-CS",
        "global_batch": 128,
    }
    parts: dict[str, Any] = {"model": model, "layout": layout, "hardware": {"gpus": 8}}
    file = tmp_path / "rows.jsonl"
    file.write_text(changed(source="Megatron-Bridge docs/performance-summary.md", **parts))
    request = request_of(read_rows([file])[0][0])
    assert (request.layout.recompute, request.layout.recompute_layers) == ("full", 5)
    assert request.high_precision_layers == 2, "current scaling keeps the first and the last layer in 16 bits"
    assert request.stack.gather_dtype == "float8_e4m3fn"
    assert any("recompute_num_layers" in text for text in request.assumed)
    model |= {"layers": 80, "hidden": 8192, "heads": 64, "ffn_hidden": 28672}
    parts["hardware"] = {"gpus": 8, "gpu": "GB200 (192GB)"}
    file.write_text(changed(source="Megatron-Bridge docs/performance-summary.md", **parts))
    request = request_of(read_rows([file])[0][0])
    assert (request.layout.offload, request.layout.offload_layers) == (("activations",), 40)
    file.write_text(changed(source="torchtitan docs/performance.md", **parts))
    assert request_of(read_rows([file])[0][0]).layout.offload == (), "another stack, another recipe"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"hardware": {"gpu": "Gaudi 3"}}, "expected a GPU of the catalog"),
        ({"hardware": {"gpus": 3}}, r"expected dp\*tp\*cp\*pp to be the 3 GPUs, got 2"),
        ({"model": {"heads": 3}}, "expected hidden a multiple of heads"),
        ({"model": {"seq_len": None}}, "model.seq_len: expected a number above 0"),
        ({"model": {"experts": 8}}, "model.topk: expected 1 to 8 experts"),
    ],
)
def test_rows_that_cannot_be_say_why(tmp_path: Path, parts: dict[str, Any], message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(changed(**parts))
    with pytest.raises(ConfigError, match=message):
        request_of(read_rows([file])[0][0])


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("NVIDIA A100-PCIE-40GB", "a100-pcie"),
        ("A100 SXM4 40 GB", "a100-40gb"),
        ("H100 SXM 96GB HBM2e (94/95GB, lower TDP)", "h100-96gb"),
        ("H100 NVL 94GB", "h100-pcie"),
        ("Blackwell SM100 (~184 GiB, GB200/B200-class; exact SKU not stated)", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Tesla V100 32GB", "v100-32gb"),
        ("Tesla V100-PCIE-16GB", "v100-pcie"),
        ("NVIDIA V100S", "v100s"),
        ("A800 PCIe 80GB", "a100-pcie"),
        ("H800 PCIe", "h100-pcie"),
        ("GeForce RTX 4090", "rtx4090"),
        ("A100 SXM 80GB (400 W)", "a100"),
        ("H100 SXM5 80GB, NVLink 900 GB/s", "h100"),
        ("H100 SXM 80GB, 96 nodes", "h100"),
        ("V100 SXM3 32GB (DGX-2, 16 of them)", "v100-32gb"),
    ],
)
def test_words_of_gpus(words: str, name: str) -> None:
    assert machine_of(words)[0] == name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("A100-PCIE-40GB", "1.24 times as fast"),
        ("H100 NVL 94GB", "2 TB/s where it has 3.9"),
        ("H200 NVL", "600"),
        ("H20 141GB", "4.8"),
        ("B100", "1.29 times its peak"),
        ("RTX 4090 D", "114"),
        ("V100-SXM3-32GB", "SXM3"),
    ],
)
def test_another_form_of_a_board_is_said(words: str, said: str) -> None:
    _, assumed = machine_of(words)
    assert said in " ".join(assumed)


def test_an_h100_of_pytorchs_team_is_the_one_of_torchtitans_tables(tmp_path: Path) -> None:
    """Where a repository of theirs says nothing but H100; what is said of a board counts before."""
    file = tmp_path / "rows.jsonl"

    def read(gpu: str, source: str) -> StepRequest:
        file.write_text(changed(source=source, hardware={"gpu": gpu}))
        return request_of(read_rows([file])[0][0])

    theirs = read("H100", "pytorch/ao docs/source/workflows/training.md, 2025-04")
    assert theirs.machine == "h100-96gb"
    assert any("PyTorch's team" in told for told in theirs.assumed)
    assert read("H100 SXM 80GB", "pytorch/ao docs, 2025-04").machine == "h100"
    assert read("H100", "https://github.com/pytorch/torchtitan docs/fp8.md").machine == "h100-96gb"
    assert read("H100", "somebody/pytorch-examples README.md, 2025-04").machine == "h100"
    assert read("H100", "a cluster's blog on pytorch/torchtitan, 2025-04").machine == "h100", "it only runs theirs"
    assert read("H100", "pytorch/ao-mirror README.md, 2025-04").machine == "h100"


def test_an_inference_of_a_board_widens_the_interval(tmp_path: Path) -> None:
    file, requests = tmp_path / "rows.jsonl", list[StepRequest]()
    for gpu in ("H100", "H100 96GB HBM2e"):
        file.write_text(changed(source="pytorch/ao docs, 2025-04", hardware={"gpu": gpu}))
        requests.append(request_of(read_rows([file])[0][0]))
    inferred, named = requests
    assert inferred.machine == named.machine == "h100-96gb"
    assert {*inferred.unstated} - {*named.unstated} == {"which H100"}
    assert simulate(inferred).spread > simulate(named).spread


def test_words_of_a_board_that_nobody_reads_widen_the_interval(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for words, unread in (("H100 engineering sample", "engineering sample"), ("RTX PRO 6000 Max-Q", "Max-Q board")):
        file.write_text(changed(hardware={"gpu": words}))
        (told,) = [text for text in request_of(read_rows([file])[0][0]).unread if "hardware.gpu" in text]
        assert unread in told
    assert not unread_of_name("NVIDIA H100-SXM5-80GB HBM3 (p5.48xlarge)")
    with pytest.raises(ConfigError, match="a laptop's part"):
        machine_of("GeForce RTX 4090 Laptop GPU")


def test_a_v100_on_pcie_has_no_nvlink() -> None:
    board, module = load_machine("v100-pcie"), load_machine("v100-32gb")
    assert [link.name for link in board.links] == ["pcie", "network"]
    assert board.device.peak_flops_per_s["float16"] < module.device.peak_flops_per_s["float16"]


def test_words_of_stacks_are_tried_in_order() -> None:
    assert stack_rule_of("a note about nothing") is None
    found = stack_rule_of(json.dumps({"source": "torchtitan docs", "note": "compile=true"}))
    assert found is not None
    assert found.stack == "torchtitan-compile"


@pytest.mark.parametrize(
    ("parts", "expected", "said"),
    [
        ({"layout": {"dp": None}}, {"dp": 2}, "dp 2: what the other ways leave"),
        ({"layout": {"micro_batch": None, "grad_accum": 2}}, {"micro_batch": 1, "global_batch": 4}, "micro-batch of 1"),
        ({"layout": {"global_batch": None, "n_microbatches": 3}}, {"global_batch": 6}, "3 micro-batches"),
        ({"layout": {"global_batch": 5}}, {"global_batch": 6}, "instead of 5"),
        ({"layout": {"fsdp": 2}}, {"zero": 3, "shard": 0}, "as under ZeRO-3"),
        ({"layout": {"precision": "FP8-MX"}}, {"precision": "mxfp8"}, "'fp8-mx' as mxfp8"),
        ({"layout": {"precision": None}}, {"precision": "bf16"}, "no precision is stated"),
        ({"layout": {"dp": 1, "pp": 2, "vpp": None}}, {"vpp": 1, "schedule": "1f1b"}, "without interleaving"),
        ({"layout": {"dp": 1, "pp": 2, "vpp": 2}}, {"vpp": 2, "schedule": "interleaved"}, ""),
        ({"layout": {"dp": 1, "tp": 2}}, {"sp": True}, "with sequence parallel"),
    ],
)
def test_what_is_not_stated_is_assumed_and_said(
    tmp_path: Path, parts: dict[str, Any], expected: dict[str, Any], said: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(changed(**{"measured": {"tokens_per_s_per_gpu": None}, **parts}))
    request = request_of(read_rows([file])[0][0])
    assert {name: getattr(request.layout, name) for name in expected} == expected
    assert said in "; ".join(request.assumed)


def test_a_micro_batch_that_nobody_states_is_the_largest_that_fits_where_there_is_no_pipeline(tmp_path: Path) -> None:
    """A pipeline, accumulation that is stated, and sequences that no power of two divides keep one."""
    file = tmp_path / "rows.jsonl"
    nobody: dict[str, Any] = {"dp": 2, "micro_batch": None, "grad_accum": None, "global_batch": 128}

    def read(**layout: Any) -> StepRequest:
        model = {"layers": 24, "hidden": 2048, "heads": 16, "seq_len": 2048, "vocab": 50304}
        file.write_text(changed(model=model, measured={"tokens_per_s_per_gpu": None}, layout={**nobody, **layout}))
        return request_of(read_rows([file])[0][0])

    request = read()
    size = request.layout.micro_batch
    assert 1 < size < 64, "some of a replica's 64 sequences fit"
    assert simulate(request).prediction.fits
    twice = dataclasses.replace(request, layout=dataclasses.replace(request.layout, micro_batch=2 * size))
    assert not simulate(twice).prediction.fits
    assert any(told.startswith(f"a micro-batch of {size}: the largest") for told in request.assumed)
    assert "the micro-batch" in request.unstated
    one = dataclasses.replace(request, layout=dataclasses.replace(request.layout, micro_batch=1))
    longer = simulate(one).step.step_s / simulate(request).step.step_s
    assert request.otherwise == pytest.approx(longer)
    plain, held = (simulate(dataclasses.replace(request, otherwise=x)).interval for x in (1.0, request.otherwise))
    assert held == (min(1.0, longer) * plain[0], max(1.0, longer) * plain[1])
    assert held[0] < longer < held[1], "steps with a micro-batch of one are held"
    assert any(f"{longer:.2f} times as long" in told for told in request.assumed)
    assert read(grad_accum=64).layout.micro_batch == 1
    assert read(grad_accum=64).otherwise == 1
    assert read(dp=1, pp=2, vpp=1).layout.micro_batch == 1
    assert read(global_batch=6).layout.micro_batch == 1, "three sequences for a replica"


def test_what_the_files_of_a_source_set_for_its_rows() -> None:
    small, large = of("mosaic-075").stack, next(of(n) for n, r in ROWS.items() if r.family.startswith("mosaic") and
        r.hardware["gpus"] >= 128 and "H100" in r.hardware["gpu"]).stack  # fmt: skip
    assert (small.attention, small.gradient_dtype) == ("triton", "bfloat16")
    assert (large.attention, large.gradient_dtype) == ("flash2", "float32")
    assert of("dgxc2501-001").stack.hidden["tp"] == 0.0
    assert of("dgxc2501-001").stack.hidden["cp"] > 0, "the rest of the stack stays"
    rows = {name: request_of(row) for name, row in ROWS.items() if name.startswith("dgxc2501")}
    large_nemotron = [r for r in rows.values() if r.model.family == "nemotron" and r.layout.pp > 1]
    assert large_nemotron
    assert all(r.stack.hidden["pp"] == 0.0 for r in large_nemotron)
    assert of("tt2412-008").layout.cp_comm == "all_gather"
    assert (of("dgxc2505-004").stack.attention, of("dgxc2505-001").stack.attention) == ("unfused", "cudnn")
    assert of("simumax-b200-llama3_70b_l12_tp1_cp8_pp1_dp1_seq131072_mbc4_cef").layout.cp_comm == "all_to_all"
    assert of("tt2412-006").stack.gather_dtype == "float8_e4m3fn"
    assert of("tt2506async-011").stack.gather_dtype == "", "scales by rows are not gathered in fp8"


@pytest.mark.parametrize(
    ("model", "family"),
    [
        ({"name": "Wan2.1 14B", "layers": 40, "hidden": 5120, "ffn_hidden": 13824, "heads": 40}, "wan"),
        ({"name": "video", "layers": 40, "hidden": 5120, "ffn_hidden": 13824, "heads": 40, "params_b": 14.0}, "wan"),
        ({"name": "DiT-XL", "layers": 28, "hidden": 1152, "heads": 16, "params_b": 0.675}, "dit"),
        ({"name": "unknown", "layers": 28, "hidden": 1152, "heads": 16}, "dit"),
    ],
)
def test_diffusion_transformers_attend_to_text_or_not(tmp_path: Path, model: dict[str, Any], family: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(changed(model={"kind": "dit", "gated_mlp": False, "vocab": None, **model}))
    request = request_of(read_rows([file])[0][0])
    assert request.model.family == family
    assert request.model.symbols["p"] == 64
    assert ("t" in request.model.symbols) == (family == "wan")
