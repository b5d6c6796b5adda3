"""Words of the fourth set that was predicted before anything was changed for it, and what they mean."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tools.validate.requests import request_of
from tools.validate.rows import Row, read_rows
from tools.validate.scoring import Outcome, step_pairs

from lading.catalog.architectures import architecture_table
from lading.catalog.load import load_machine
from lading.cost.curves import product_curve_s
from lading.ir.graph import OpKind
from lading.ir.request import Prediction, StepRequest
from lading.ir.stack import GUESSED
from lading.ir.work import Product
from lading.sim.simulate import simulate

_FILE = Path(__file__).parents[2] / "benchmarks" / "validation" / "blind_frameworks_4.jsonl"


@pytest.fixture(scope="module", name="rows")
def fixture_rows() -> dict[str, Row]:
    rows, notes = read_rows([_FILE])
    assert (len(rows), notes) == (95, [])
    return {row.id: row for row in rows}


def asked(rows: dict[str, Row], name: str, *, known: bool = True, **parts: dict[str, Any]) -> StepRequest:
    """Request of a row, fields of its parts replaced."""
    row = rows[name]
    more = {part: {**getattr(row, part), **fields} for part, fields in parts.items()}
    return request_of(dataclasses.replace(row, **more), known=known)


def test_the_fourth_set_is_read_but_for_what_is_not_priced(rows: dict[str, Row]) -> None:
    requests = {name: request_of(row) for name, row in rows.items()}
    unread = {word.split(":")[0] for request in requests.values() for word in request.unread}
    assert unread == {"'binned'", "layout.precision 'float8 rowwise_with_gw_hp, bfloat16 all-gather'"}
    assert {name for name, request in requests.items() if request.stack.tf32} == {
        "dle-bert-a100-1-512-tf32",
        "dle-bert-a100-8-128-tf32",
        "jaxtoolbox-llama7b-8",
    }


@pytest.mark.parametrize("name", ["dle-bert-a100-1-128", "esm2-ddp-bs8"])
def test_every_token_of_an_encoder_sees_all(rows: dict[str, Row], name: str) -> None:
    request = asked(rows, name)
    attentions = [
        dict(op.settings)
        for segment in architecture_table(request.model).segments
        for op in segment.ops
        if op.kind is OpKind.ATTENTION
    ]
    assert attentions
    assert not any(settings["is_causal"] for settings in attentions)
    request = asked(rows, name, model={"seq_len": 2048})
    decoder = asked(rows, name, model={"seq_len": 2048, "kind": "decoder", "attention": "causal"})
    flash = [
        dataclasses.replace(one, stack=dataclasses.replace(one.stack, attention="flash2")) for one in (request, decoder)
    ]
    whole, causal = (simulate(one).step.shares_s["attention"] for one in flash)
    assert 1.2 * causal < whole < 2.5 * causal


def test_products_in_tf32_are_not_fp32(rows: dict[str, Row]) -> None:
    request = asked(rows, "dle-bert-a100-8-128-tf32")
    exact = dataclasses.replace(request, stack=dataclasses.replace(request.stack, tf32=False))
    fast, slow = (simulate(one).step.shares_s["products"] for one in (request, exact))
    assert 6 < slow / fast < 8.5, "156 against 19.5 TFLOP/s"
    volta = dataclasses.replace(request, machine="v100-32gb")
    same = dataclasses.replace(exact, machine="v100-32gb")
    assert simulate(volta).step.step_s == simulate(same).step.step_s, "no such tensor cores before Ampere"
    ada, plain = (dataclasses.replace(one, machine="l40s") for one in (request, exact))
    assert simulate(ada).step.shares_s["products"] < simulate(plain).step.shares_s["products"]


def test_flash_attention_4_is_a_kernel_of_blackwell(rows: dict[str, Row]) -> None:
    request = asked(rows, "mleng-b200-256k")
    assert request.stack.attention == "flash4"
    older = dataclasses.replace(request, stack=dataclasses.replace(request.stack, attention="cudnn"))
    fast, slow = (simulate(one).step.shares_s["attention"] for one in (request, older))
    assert 1.1 < slow / fast < 1.4, "up to 1.3 times as fast as cuDNN 9.13 (arXiv 2603.05451)"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dstune-gpt2-ddp", {"attention": "unfused", "unfused": ("gelu",), "parameters_dtype": "float32"}),
        ("esm2-ddp-bs8", {"attention": "unfused", "unfused": ("gelu-erf",)}),
        ("fms-mistral-full-bs4", {"attention": "flash2", "unfused": (), "parameters_dtype": ""}),
        ("dle-bert-v100-1-128", {"attention": "unfused", "update_passes": 5.0, "foreach": False}),
        ("bmtrain-13b-bs8", {"parameters_dtype": "", "master_weights": True, "gradient_dtype": "float16"}),
        ("xtuner-tp2-ep8-pp8", {"cuda_graphs": False}),
        ("jaxtoolbox-llama7b-8", {"attention": "cudnn"}),
        ("ao-h100-tensorwise", {"gather_dtype": "float8_e4m3fn"}),
        ("ao-h100-rowwise", {"gather_dtype": ""}),
    ],
)
def test_software_by_what_its_release_has(rows: dict[str, Row], name: str, expected: dict[str, Any]) -> None:
    stack = asked(rows, name).stack
    assert {key: getattr(stack, key) for key in expected} == expected


def test_esm_has_fused_attention_from_a_release_on(rows: dict[str, Row]) -> None:
    """huggingface/transformers pull 40370, of August 2025."""
    row = dataclasses.replace(rows["esm2-ddp-bs8"], source="a blog, 2025-10")
    assert request_of(row).stack.attention == "flash2"


def test_parts_that_megatron_recomputes_are_listed_with_blanks(rows: dict[str, Row]) -> None:
    layouts = [asked(rows, f"xtuner-{name}").layout for name in ("tp2-ep8-pp8", "tp1-ep8-pp32-vpp3-moe")]
    assert [layout.recompute_modules for layout in layouts] == [("moe_act", "layernorm"), ("moe", "layernorm")]
    shares = [
        simulate(asked(rows, f"xtuner-{name}")).step.shares_s["recomputing"]
        for name in ("tp2-ep8-pp8", "tp1-ep8-pp32-vpp3-moe")
    ]
    assert shares[1] > 2 * shares[0] > 0, "experts again, not activations alone"


def test_a_gelu_in_parts_moves_more(rows: dict[str, Row]) -> None:
    request = asked(rows, "dstune-gpt2-z1")
    fused = dataclasses.replace(request, stack=dataclasses.replace(request.stack, unfused=()))
    slow, fast = (simulate(one).step.shares_s["memory-bound"] for one in (request, fused))
    assert 1.1 * fast < slow < 2 * fast


def test_scores_of_every_head_come_and_go_no_faster_than_memory_takes_them() -> None:
    device = load_machine("a10g").device
    scores = Product(512, 512, 32, 160)
    assert product_curve_s(scores, scores.flops, None, "bfloat16", device, "scores") > 2 * 160 * 512 * 512 / 600e9
    one = Product(4096, 4096, 4096)
    assert product_curve_s(one, one.flops, None, "bfloat16", device, "one") > one.flops / 70e12


def test_a_board_at_an_untold_limit_of_power_is_slower_never_faster(rows: dict[str, Row]) -> None:
    told = asked(rows, "mleng-b200-8k-z2")
    limited = asked(rows, "mleng-b200-8k-z2", hardware={"gpu": "B200 (power limited)"})
    assert (told.clocks_untold, limited.clocks_untold) == (False, True)
    plain = simulate(dataclasses.replace(limited, clocks_untold=False)).interval
    wide = simulate(limited).interval
    assert wide[0] == plain[0]
    assert plain[1] * 1.2 < wide[1] < plain[1] * 2


def test_named_software_is_unknown_on_gpus_of_which_no_step_was_seen(rows: dict[str, Row]) -> None:
    seen, unseen = (simulate(asked(rows, f"ao-{name}-bf16")) for name in ("h100", "mi300x"))
    assert (seen.evidence == GUESSED, unseen.evidence == GUESSED) == (False, True)
    assert load_machine("mi300x").device.gpu is None
    assert any("no step of any software was seen" in sentence for sentence in unseen.assumed)


def test_updates_on_the_host_err_either_way(rows: dict[str, Row]) -> None:
    on_host = simulate(asked(rows, "mleng-h200-8k"))
    assert on_host.causes["updates on the host"] > 0.5
    low, high = on_host.interval
    assert low < 0.6
    assert high > 1.6
    on_device = simulate(asked(rows, "mleng-h200-8k-z2"))
    assert on_device.interval[0] > 0.8


def test_a_printed_rate_is_scored_by_the_batch_that_is_predicted(rows: dict[str, Row]) -> None:
    row = rows["primus-mi325x-70b-fp8-8n"]
    request = request_of(row)
    assert row.step_s is None
    outcome = Outcome(row, request, Prediction(step_s=75.0, low_s=70.0, high_s=80.0))
    (pair,) = step_pairs([outcome], "B")
    assert pair.measured == request.layout.global_batch * 8192 / (1726 * 64)
    silent = dataclasses.replace(row, layout={**row.layout, "micro_batch": None})
    assert step_pairs([dataclasses.replace(outcome, row=silent)], "B") == []
