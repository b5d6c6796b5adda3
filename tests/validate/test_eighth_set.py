"""Words of the eighth set that was predicted before anything was changed for it, and what they mean."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tools.validate.fields import attention_of
from tools.validate.requests import request_of
from tools.validate.rows import Row, read_rows
from tools.validate.software import month_of

from lading.catalog.networks import parse_network
from lading.sim.simulate import simulate
from tests.validate.test_fifth_set import asked

_FOLDER = Path(__file__).parents[2] / "benchmarks" / "validation"
_ENCODER_DECODERS = ("dle-bart", "nanot5", "t5x")


@pytest.fixture(scope="module", name="rows")
def fixture_rows() -> dict[str, Row]:
    rows, notes = read_rows([_FOLDER / "blind_frameworks_8.jsonl"])
    assert (len(rows), notes) == (163, [])
    return {row.id: row for row in rows}


def test_every_word_of_the_eighth_set_is_read_but_two(rows: dict[str, Row]) -> None:
    """What is not understood is told: a cast that is not compiled, and fewer bits of the experts only."""
    taken = [row for row in rows.values() if row.family not in _ENCODER_DECODERS]
    unread = {row.id: words for row in taken if (words := request_of(row).unread)}
    assert {name: ["nocompile" in words[0], "routed experts" in words[0]] for name, words in unread.items()} == {
        "titan778-fp8nc-eager": [True, False],
        "scout-gb200-mxfp8": [False, True],
    }


@pytest.mark.parametrize("family", _ENCODER_DECODERS)
def test_encoder_decoders_are_refused_by_name(rows: dict[str, Row], family: str) -> None:
    for row in rows.values():
        if row.family == family:
            with pytest.raises(ValueError, match=r"expected a decoder, .* got 'encoder-decoder"):
                request_of(row)


def test_a_container_named_after_nemo_holds_other_software_too(rows: dict[str, Row]) -> None:
    row = rows["idris-fsdp-h100-72b-64"]
    assert "nemo-25.09" in row.layout["framework"]
    assert (asked(row).stack.name, asked(row).stack.fitted) == ("hf-transformers", ())
    assert asked(row, layout={"framework": "NeMo 25.09"}).stack.name == "nemo"


def test_nemos_models_of_hugging_face_are_not_its_megatron(rows: dict[str, Row]) -> None:
    row = rows["idris-nemo-h100-14b-64"]
    assert "HFAutoModel" in row.layout["framework"]
    assert asked(row).stack.name == "hf-transformers"


def test_left_padded_batches_have_a_mask(rows: dict[str, Row]) -> None:
    """PyTorch has no fused attention with a mask but the memory-efficient one."""
    row = dataclasses.replace(rows["idris-fsdp-h100-14b-64"], notes="")
    assert "left-padded" in row.model["attention"]
    assert asked(row).stack.attention == "masked"
    assert asked(row, model={"attention": "PyTorch SDPA (transformers' default)"}).stack.attention == "flash2"


def test_norms_of_transformers_that_are_compiled_are_one_kernel(rows: dict[str, Row]) -> None:
    assert asked(rows["idris-fsdp-h100-14b-64"]).stack.eager_norms
    assert not asked(rows["idris-fsdp-h100-14b-64-compiled"]).stack.eager_norms


def test_launches_that_wait_for_their_kernels_are_read(rows: dict[str, Row]) -> None:
    row = rows["lucie-2k-8-tp1-pp1-z1"]
    assert "CUDA_LAUNCH_BLOCKING" in row.notes
    assert asked(row).stack.launch_blocking
    for notes in ("CUDA_LAUNCH_BLOCKING=0", ""):
        assert not asked(row, notes=notes).stack.launch_blocking


@pytest.mark.parametrize(
    ("attention", "kernel"),
    [
        ("no FlashAttention", "unfused"),
        ("without flash attention", "unfused"),
        ("FlashAttention v2, no FlashAttention v3", "flash2"),
        ("FlashAttention v2", "flash2"),
        ("FlashAttention v1", "flash1"),
    ],
)
def test_flash_attention_that_is_denied_is_not_used(rows: dict[str, Row], attention: str, kernel: str) -> None:
    """A model "without FlashAttention" had the second version of it."""
    assert asked(rows["mds-125m"], model={"attention": attention}).stack.attention == kernel


@pytest.mark.parametrize(
    ("source", "attention", "kernel"),
    [
        ("a report, 2022-12", "flash attention", "flash1"),
        ("a report, 2023-07", "flash attention", "flash1"),
        ("a report, 2023-08", "flash attention", "flash2"),
        ("a report, 2022", "flash attention", "flash1"),
        ("a report, 2022-12", "flash attention 2", "flash2"),
        ("a report, 2022-12", "flash attention (flash-attention 2)", "flash2"),
        ("a report", "flash attention", "flash2"),
    ],
)
def test_flash_attention_without_a_number_was_the_first_until_july_2023(
    rows: dict[str, Row], source: str, attention: str, kernel: str
) -> None:
    row = dataclasses.replace(rows["pythia-1b"], source=source)
    changed = asked(row, layout={"framework": "GPT-NeoX (DeepSpeed)"}, model={"attention": attention}, notes="")
    assert changed.stack.attention == kernel
    assert any("first FlashAttention" in told for told in changed.assumed) == (kernel == "flash1")


@pytest.mark.parametrize(
    ("words", "links", "gbits"),
    [
        ("Omni-Path 100 Gb/s, 4 links a node", 4, 400),
        ("8 HDR InfiniBand of 200 Gb/s a node", 8, 1600),
        ("InfiniBand 200 Gb/s, 2 adapters a node", 2, 400),
        ("InfiniBand HDR 200 Gb/s, 8 NICs a node", 8, 1600),
    ],
)
def test_links_and_generations_that_are_counted_are_nics(words: str, links: int, gbits: float) -> None:
    """Four links were read as one, and so were eight HDR."""
    link = parse_network(words, 8).link
    assert link is not None
    assert link.nics == links
    assert link.nics * link.bandwidth_bytes_per_s * 8 / 1e9 == pytest.approx(gbits)


def test_a_rate_that_was_measured_is_what_is_reached() -> None:
    rated, measured = (parse_network(f"InfiniBand, 660 Gb/s{words} a node", 8).link for words in ("", " measured"))
    assert rated is not None
    assert measured is not None
    assert (rated.efficiency < 1.0, measured.efficiency) == (True, 1.0)


def test_omni_path_of_2021_is_as_slow_as_measured(rows: dict[str, Row]) -> None:
    """An all-reduce of sixteen nodes reached 54 of 400 Gb/s (bigscience experiments/bandwidth)."""
    row = rows["jz-ds-52b-64"]
    assert asked(row).network == "Omni-Path, 54 Gb/s measured a node"
    later = dataclasses.replace(row, source=row.source.replace("2021", "2023"))
    assert asked(later).network == row.hardware["inter_node_link"]


def test_the_interval_holds_the_slowest_omni_path_that_was_measured(rows: dict[str, Row]) -> None:
    slow = asked(rows["lucie-2k-128-tp1-pp1-z1"])
    assert slow.otherwise > 2.0
    assert any("Omni-Path" in told for told in slow.assumed)
    assert asked(rows["lucie-2k-8-tp1-pp1-z1"]).otherwise == 1.0, "one node has no network"


@pytest.mark.parametrize(
    ("row", "stack"),
    [
        ("jz-meg-52b-64", "megatron-2021"),
        ("jz-ds-52b-64", "megatron-deepspeed"),
        ("jz-z3-52b-64-tp4", "deepspeed-like-2021"),
        ("jz-hf-z3-52b-64", "deepspeed-like-2021"),
    ],
)
def test_bigscience_ran_more_than_its_fork_of_megatron(rows: dict[str, Row], row: str, stack: str) -> None:
    assert asked(rows[row]).stack.name == stack


@pytest.mark.parametrize(
    ("framework", "drawn"),
    [
        ("TensorFlow 1.15, XLA", True),
        ("Keras 3 (JAX, XLA)", True),
        ("T5X (JAX, XLA)", True),
        ("TensorFlow 1.15", False),
        ("TensorFlow 2.4, XLA off", False),
        ("PyTorch 2.2", False),
    ],
)
def test_xla_draws_random_numbers_in_code_of_its_own(rows: dict[str, Row], framework: str, drawn: bool) -> None:
    row = dataclasses.replace(rows["dletf2-a100-1-128-amp"], notes="", source="a report, 2021-02")
    assert (asked(row, layout={"framework": framework}).stack.random_flop > 0) is drawn


@pytest.mark.parametrize(
    ("machine", "tokens", "low", "published"), [("t4", 256, 1.10, 1.205), ("v100-16gb", 384, 1.15, 1.41)]
)
def test_dropout_costs_xla_what_was_published(
    rows: dict[str, Row], machine: str, tokens: int, low: float, published: float
) -> None:
    """pytorch/xla issues 3352 and 3868: BERT-base is so many times as long with dropout; the lengths are inferred."""
    request = asked(rows["dletf2-v100-1-128-amp"])
    base = {**request.model.symbols, "h": 768, "n": 12, "k": 12, "f": 3072}
    request = dataclasses.replace(
        request,
        model=dataclasses.replace(request.model, symbols=base, blocks=(("block", 12),)),
        machine=machine,
        seq_len=tokens,
        layout=dataclasses.replace(request.layout, micro_batch=16, global_batch=16),
    )
    longer = {
        flop: simulate(dataclasses.replace(request, stack=dataclasses.replace(request.stack, random_flop=flop)))
        for flop in (0.0, request.stack.random_flop)
    }
    without = simulate(dataclasses.replace(request, dropout=0.0)).step.step_s
    plain, drawn = (result.step.step_s / without for result in longer.values())
    assert plain < 1.05
    assert low < drawn < published


@pytest.mark.parametrize(
    ("name", "dropout"), [("BERT-base", 0.1), ("bert-large-uncased", 0.1), ("RoBERTa", 0.1), ("ModernBERT-base", 0.0)]
)
def test_bert_has_its_dropout_where_nobody_says_it(rows: dict[str, Row], name: str, dropout: float) -> None:
    row = dataclasses.replace(rows["dletf2-a100-1-128-amp"], notes="")
    assert asked(row, model={"name": name}).dropout == dropout
    assert asked(row, model={"name": name}, notes="no dropout").dropout == 0.0


@pytest.mark.parametrize(
    ("words", "links", "gbits"),
    [
        ("25 Gb/s Ethernet link", 1, 25),
        ("ConnectX 7 NDR 400 Gb/s", 8, 3200),
        ("4x ConnectX 7 adapters", 4, 1600),
        ("50 GB/s link a node", 4, 400),
        ("Slingshot 11 NIC, 200 Gb/s a node", 2, 200),
        ("RoCE v2 NICs, 400 Gb/s a node", 4, 400),
        ("4 400 Gb/s NICs a node", 4, 1600),
        ("InfiniBand x8 400 Gb/s node-to-node", 8, 3200),
    ],
)
def test_rates_and_generations_are_no_counts(words: str, links: int, gbits: float) -> None:
    """A link of 25 Gb/s was 25 NICs."""
    link = parse_network(words, 8).link
    assert link is not None
    assert (link.nics, link.nics * link.bandwidth_bytes_per_s * 8 / 1e9) == (links, pytest.approx(gbits))


@pytest.mark.parametrize(
    ("words", "is_measured"),
    [
        ("InfiniBand, around 660 Gb/s measured a node", True),
        ("InfiniBand 660 Gb/s a node measured", True),
        ("InfiniBand 660 Gb/s (measured by nccl-tests)", True),
        ("measured 660 Gb/s a node", True),
        ("reached: ~660 Gb/s", True),
        ("4x Omni-Path 100 Gb/s (135 Gb/s measured)", False),
        ("400 Gb/s (measured 300 Gb/s)", False),
        ("400 Gb/s (measured: 300)", False),
        ("400 Gb/s, not measured", False),
        ("400 Gb/s not measured", False),
        ("400 Gb/s (not measured)", False),
        ("400 Gb/s a node, 300 Gb/s reached", False),
        ("reached 54 of 400 Gb/s", False),
    ],
)
def test_only_the_rate_beside_the_word_was_measured(words: str, is_measured: bool) -> None:
    """Any rate was reached in full where a word of a measurement stood anywhere."""
    link = parse_network(words, 8).link
    assert link is not None
    assert (link.efficiency == 1.0) is is_measured


@pytest.mark.parametrize(
    ("words", "own", "kernel"),
    [
        ("PyTorch SDPA, no FlashAttention", "flash2", None),
        ("PyTorch SDPA, no FlashAttention", "unfused", "flash2"),
        ("cuDNN fused attention, not flash", "flash2", "cudnn"),
        ("FlashAttention-3, not FlashAttention-2", "flash2", "flash3"),
        ("FlashAttention-1 (not FlashAttention-2)", "flash2", "flash1"),
        ("no FlashAttention-3", "flash2", None),
        ("xformers, no FlashAttention", "unfused", "flash1"),
        ("without SDPA or FlashAttention", "flash2", "unfused"),
        ("no flash attention, fused softmax", "flash2", "unfused"),
        ("eager, no flash_attn", "flash2", "unfused"),
        ("flash_attn==2.0.4", "unfused", "flash2"),
        ("flash attention (v2)", "flash1", "flash2"),
        ("flash attention (2 of 4 layers)", "flash1", None),
    ],
)
def test_a_kernel_that_is_named_beside_one_that_is_denied_is_used(words: str, own: str, kernel: str | None) -> None:
    """Attention was in parts wherever a FlashAttention was denied."""
    assert attention_of(words, own) == ({"attention": kernel} if kernel else {})


@pytest.mark.parametrize(
    ("words", "network"),
    [
        ("Omni-Path 100 Gb/s, 4 links a node", "Omni-Path, 54 Gb/s measured a node"),
        ("Omni-Path, 1 x 100 Gb/s", "Omni-Path, 1 x 100 Gb/s"),
        ("Omni-Path, 60 Gb/s measured a node", "Omni-Path, 60 Gb/s measured a node"),
        ("Omni-Path, 20 Gb/s measured a node", "Omni-Path, 20 Gb/s measured a node"),
    ],
)
def test_omni_path_of_another_rate_keeps_it(rows: dict[str, Row], words: str, network: str) -> None:
    """Every Omni-Path until 2021 was four links at 54 Gb/s, and the interval of a slower one held a faster."""
    request = asked(rows["jz-z3-52b-64-tp4"], hardware={"inter_node_link": words})
    assert request.network == network
    assert request.otherwise >= 1.0
    if words.startswith(("Omni-Path, 1 x", "Omni-Path, 20")):
        assert request.otherwise == 1.0, "40 Gb/s are faster"


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        *((name, 0.0) for name in ("nomic-bert", "modern-bert-base", "neo bert", "mosaic-bert", "ModernBERT")),
        *((name, 0.1) for name in ("BERT-base", "bert_large", "bert-base-uncased", "BERT pretraining")),
        *((name, 0.1) for name in ("google-bert/bert-base-uncased", "FacebookAI/xlm-roberta-base", "distilbert")),
    ],
)
def test_a_word_before_bert_names_another_model(rows: dict[str, Row], name: str, dropout: float) -> None:
    row = dataclasses.replace(rows["dletf2-a100-1-128-amp"], notes="")
    assert asked(row, model={"name": name}).dropout == dropout


@pytest.mark.parametrize(
    ("notes", "dropout"),
    [
        ("dropout off", 0.0),
        ("dropout is disabled", 0.0),
        ("hidden_dropout: none", 0.0),
        ("no dropout", 0.0),
        ("lora_dropout off", 0.1),
        ("no fusion of bias and dropout", 0.1),
    ],
)
def test_dropout_that_is_off_is_none(rows: dict[str, Row], notes: str, dropout: float) -> None:
    assert asked(rows["dletf2-a100-1-128-amp"], notes=notes).dropout == dropout


@pytest.mark.parametrize(
    ("source", "attention", "kernel"),
    [
        ("a report, 2022-12", "flash_attn==2.0.4", "flash2"),
        ("a report, 2022-12", "flash attention (v2)", "flash2"),
        ("a report, 2022-12", "flash_attn==1.0.4", "flash1"),
        ("arXiv 2306.12345", "flash attention", "flash1"),
        ("arXiv 2308.12345", "flash attention", "flash2"),
        ("arXiv 2306.12345, 2024", "flash attention", "flash2"),
    ],
)
def test_versions_in_all_ways_and_months_of_arxiv_tell_which_flash_attention(
    rows: dict[str, Row], source: str, attention: str, kernel: str
) -> None:
    row = dataclasses.replace(rows["pythia-1b"], source=source)
    framework = {"framework": "GPT-NeoX (DeepSpeed)"}
    assert asked(row, layout=framework, model={"attention": attention}, notes="").stack.attention == kernel
    assert month_of(dataclasses.replace(row, source="arXiv 2306.12345")) == (2023, 6)


def test_words_of_software_that_are_denied_or_alone(rows: dict[str, Row]) -> None:
    """A container alone is what ran; what is denied or compared with is not."""
    row = dataclasses.replace(rows["idris-fsdp-h100-14b-64"], notes="")
    assert asked(row, layout={"framework": "NGC container nvcr.io/nvidia/nemo:24.07"}).stack.name == "nemo"
    assert asked(row, model={"attention": "PyTorch SDPA, not left-padded"}).stack.attention == "flash2"
    lucie = rows["lucie-2k-8-tp1-pp1-z1"]
    for notes, waits in (
        ("without CUDA_LAUNCH_BLOCKING=1", False),
        ("CUDA_LAUNCH_BLOCKING=1 is not set", False),
        ("no biases. CUDA_LAUNCH_BLOCKING=1", True),
    ):
        assert asked(lucie, notes=notes).stack.launch_blocking is waits
    faster = {"framework": "Megatron-LM 2021, faster than DeepSpeed"}
    assert asked(dataclasses.replace(lucie, source="a report", notes=""), layout=faster).stack.name == "megatron-2021"
