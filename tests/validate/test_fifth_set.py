"""Words of the fifth set that was predicted before anything was changed for it, and what they mean."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tools.validate.requests import request_of
from tools.validate.rows import Row, read_rows
from tools.validate.words import machine_of

from lading.catalog.load import load_machine
from lading.catalog.networks import parse_network
from lading.ir.request import StepRequest
from lading.sim.simulate import simulate

_FOLDER = Path(__file__).parents[2] / "benchmarks" / "validation"


@pytest.fixture(scope="module", name="rows")
def fixture_rows() -> dict[str, Row]:
    rows, notes = read_rows([_FOLDER / "blind_frameworks_5.jsonl"])
    assert (len(rows), notes) == (58, [])
    return {row.id: row for row in rows}


def asked(row: Row, *, notes: str | None = None, **parts: dict[str, Any]) -> StepRequest:
    """Request of a row, fields of its parts replaced, and its notes."""
    more: dict[str, Any] = {part: {**getattr(row, part), **fields} for part, fields in parts.items()}
    return request_of(dataclasses.replace(row, **more, notes=row.notes if notes is None else notes))


def test_every_word_of_the_fifth_set_is_read(rows: dict[str, Row]) -> None:
    assert {word for row in rows.values() for word in request_of(row).unread} == set()


@pytest.mark.parametrize(
    ("arch", "blocks"),
    [
        ("an MoE layer in every other block (moe-freq 2)", (("dense", 1), ("moe", 1)) * 12),
        ("--moe-layer-freq 3", (("dense", 2), ("moe", 1)) * 8),
        ("decoder_sparse_step=2", (("dense", 1), ("moe", 1)) * 12),
        ("", (("moe", 24),)),
    ],
)
def test_experts_are_in_one_block_of_so_many(
    rows: dict[str, Row], arch: str, blocks: tuple[tuple[str, int], ...]
) -> None:
    """An MoE in "every other block" had experts in all."""
    assert asked(rows["ds-moe-1.3b-moe128"], model={"arch": arch}).model.blocks == blocks


def test_windows_of_every_other_layer_leave_experts_in_all() -> None:
    """GPT-OSS had experts in every other block, and windows in none."""
    rows = {row.id: row for row in read_rows([_FOLDER / "other_frameworks.jsonl"])[0]}
    assert request_of(rows["automodel-GPT-OSS-20B-8"]).model.blocks == (("window", 1), ("full", 1)) * 12


def test_an_encoder_that_answers_questions_has_no_vocabulary_at_its_head(rows: dict[str, Row]) -> None:
    row = rows["ds-bert-32gb-pt-12"]
    words = request_of(dataclasses.replace(row, source="BERT pretraining", notes="dropout 0.1"))
    answers = asked(row)
    assert (answers.model.symbols["v"], words.model.symbols["v"]) == (2, 30522)
    assert simulate(answers).step.step_s < 0.92 * simulate(words).step.step_s


def test_mingpt_writes_its_gelu_in_operations_of_pytorch(rows: dict[str, Row]) -> None:
    row = rows["mingpt-fsdp-64-ac"]
    plain = dataclasses.replace(row, source="a report, 2022-10", family="a report", notes="attention in parts")
    other = asked(plain, layout={"framework": "PyTorch 1.13, Lightning Lite FSDPStrategy"}, model={"name": "GPT"})
    assert ("gelu" in asked(row).stack.unfused, "gelu" in other.stack.unfused) == (True, False)


@pytest.mark.parametrize(
    ("gpu", "words", "nics", "gigabits"),
    [
        ("A100 80GB", "Elastic Fabric Adapter", 4, 100),
        ("A100 40GB", "EFA", 4, 100),
        ("H100", "EFAv2", 8, 400),
        ("A100 80GB", "EFA, 1600 Gb/s a node", 8, 200),
    ],
)
def test_efa_without_a_rate_is_that_of_the_instances_with_the_gpu(
    rows: dict[str, Row], gpu: str, words: str, nics: int, gigabits: float
) -> None:
    request = asked(rows["hf-fsdp-llama2-70b"], hardware={"gpu": gpu, "inter_node_link": words})
    link = parse_network(request.network, 8).link
    assert link is not None
    assert (link.nics, link.bandwidth_bytes_per_s * 8 / 1e9, link.kind) == (nics, gigabits, "ethernet")
    assert not request.unread


@pytest.mark.parametrize(
    ("source", "attention"),
    [
        ("a table, NeMo 24.03.01", "flash2"),
        ("a table (24.05, FP8, DGX-H100) of NeMo", "flash2"),
        ("a table, NeMo 24.07", "cudnn"),
        ("a table, NeMo 25.04", "cudnn"),
    ],
)
def test_cudnn_before_9_1_attends_no_faster_than_flash_attention(
    rows: dict[str, Row], source: str, attention: str
) -> None:
    framework = source.rsplit(", ", maxsplit=1)[-1] if "24.05" not in source else "NeMo"
    row = dataclasses.replace(rows["nemo-long-16k"], source=source)
    request = asked(row, layout={"framework": f"{framework} (Megatron-Core)"})
    assert (request.stack.attention, request.stack.framework) == (attention, "NeMo")


def test_a_pipeline_whose_transfers_overlap_is_interleaved(rows: dict[str, Row]) -> None:
    """Megatron-Core overlaps a pipeline's transfers in interleaved schedules alone."""
    row = rows["mcore-readme-314b"]
    told, plain, denied = (
        asked(row, notes=notes)
        for notes in (row.notes, "network is not stated", "no overlap of communication, PP included")
    )
    assert (told.layout.vpp, told.layout.schedule) == (6, "interleaved")
    assert (plain.layout.vpp, plain.layout.schedule) == (1, "1f1b")
    assert denied.layout.vpp == 1
    longer, shorter = simulate(told).prediction, simulate(plain).prediction
    assert longer.step_s < 0.9 * shorter.step_s
    assert told.otherwise == pytest.approx(shorter.step_s / longer.step_s)
    assert plain.otherwise == pytest.approx(longer.step_s / shorter.step_s, rel=0.01)
    assert longer.high_s > shorter.step_s, "the interval holds the other pipeline"
    assert shorter.low_s < longer.step_s
    assert asked(row, layout={"vpp": 1}).otherwise == 1.0


def test_a_gh200_is_a_machine_of_its_own() -> None:
    assert [machine_of(words)[0] for words in ("GH200 96GB", "GH200 144GB HBM3e")] == ["gh200", "h200"]
    machine = load_machine("gh200")
    link = next(link for link in machine.links if link.name == "nvlink")
    assert (link.ranks, link.fewer) == (4, (0.271, 0.542))
    host = machine.tier("host")
    assert host is not None
    assert host.read_bytes_per_s > 5 * load_machine("h200").tier("host").read_bytes_per_s  # type: ignore[union-attr]
