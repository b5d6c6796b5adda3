"""Scores are what the rules say: by hand on small cases, and whole on the published rows."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tools.validate.__main__ import main
from tools.validate.constant import ConstantEfficiency, forward_flop_of_token
from tools.validate.document import document_of, predictions_of
from tools.validate.order import kendall_tau, noise, order, regret
from tools.validate.protocols import (
    anchor_of,
    anchored,
    framework_anchored,
    framework_left_out,
    known_run,
    left_out,
    most_telling,
    shift_by,
    source_anchored,
)
from tools.validate.rows import Row, read_rows
from tools.validate.scoring import Pair, memory_pairs, outcomes_of, step_pairs, summary, worst
from tools.validate.shrinkage import Cell, expected

from lading.errors import ConfigError
from lading.ir.request import Prediction, StepRequest
from lading.ir.stack import GUESSED
from lading.sim.interval import bounds, half_width
from lading.sim.known_runs import KnownRun, shift_of
from lading.units import GiB
from tests.validate.test_rows import FILES, changed

ROWS = {row.id: row for row in read_rows(FILES[:1])[0]}
SINGLE = list(read_rows(FILES[1:])[0])


class Told:
    """Predicts what it is told by row; others cannot be simulated."""

    def __init__(self, seconds: Mapping[str, float], **more: Any) -> None:
        self.seconds = seconds
        self.more = more

    def predict(self, request: StepRequest) -> Prediction:
        if request.name not in self.seconds:
            raise ConfigError("not told")
        step_s = self.seconds[request.name]
        return Prediction(step_s=step_s, low_s=0.9 * step_s, high_s=1.1 * step_s, **self.more)


def rows_of(tmp_path: Path, *lines: str) -> list[Row]:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines))
    return read_rows([file])[0]


def timed(name: str, seconds: float, **more: Any) -> str:
    measured = {"iteration_s": seconds, "tokens_per_s_per_gpu": None}
    return changed(id=name, measured=measured, **{"config_key": name, "source_family": "mine", **more})


def pairs_of(tmp_path: Path, predicted: Mapping[str, float], *lines: str) -> list[Pair]:
    return step_pairs(outcomes_of(rows_of(tmp_path, *lines), Told(predicted)))


def test_the_average_is_over_families_first(tmp_path: Path) -> None:
    lines = [timed(f"a{i}", 1.0, source_family="many") for i in range(3)] + [timed("b", 2.0, source_family="few")]
    found = summary(pairs_of(tmp_path, {"a0": 1.1, "a1": 1.1, "a2": 0.9, "b": 1.0}, *lines))
    assert found["families"] == pytest.approx({"many": 0.1, "few": 0.5})
    assert found["macro_abs_error"] == pytest.approx(0.3)
    assert found["bias"] == pytest.approx((0.1 / 3 - 0.5) / 2)
    assert found["median"] == pytest.approx(0.1)
    assert found["p90"] == pytest.approx(0.1 + 0.4 * 0.7)
    assert found["coverage"] == pytest.approx((2 / 3 + 0) / 2)


def test_the_interval_holds_what_lies_in_it(tmp_path: Path) -> None:
    lines = [timed("a", 1.0), timed("b", 1.0)]
    found = summary(pairs_of(tmp_path, {"a": 1.05, "b": 1.5}, *lines))
    assert found["coverage"] == 0.5


def test_tier_a_alone_is_scored_and_skipped_rows_are_counted(tmp_path: Path) -> None:
    lines = [timed("a", 1.0), timed("b", 1.0, tier="B"), timed("c", 1.0, tier="C"), timed("d", 1.0)]
    outcomes = outcomes_of(rows_of(tmp_path, *lines), Told({"a": 1.0, "b": 2.0, "c": 3.0}))
    document = document_of(outcomes)
    assert (document["rows"], document["rows_skipped"]) == (4, 1)
    assert document["skipped"] == [{"id": "d", "reason": "not told"}]
    assert document["step_time"]["rows"] == 1
    assert document["step_time_tier_b"]["macro_abs_error"] == 1.0
    assert predictions_of(outcomes)[3]["reason"] == "not told"


@pytest.mark.long
def test_of_repeats_the_newest_is_scored(tmp_path: Path) -> None:
    lines = [
        timed("new", 2.0, config_key="k", source="Summary, release 26.06 container"),
        timed("old", 1.0, config_key="k", source="Summary, release 25.11 container"),
    ]
    (pair,) = pairs_of(tmp_path, {"new": 2.0, "old": 2.0}, *lines)
    assert pair.outcome.row.id == "new"
    kept = {pair.outcome.row.id for pair in step_pairs(outcomes_of(ROWS.values(), ConstantEfficiency()))}
    assert "mbridge26.08-pretrain-002" in kept
    assert not {"mbridge26.06-pretrain-010", "mbridge26.04-pretrain-015"} & kept


@pytest.mark.long
def test_memory_is_compared_like_with_like() -> None:
    told = Told(dict.fromkeys(ROWS, 1.0), peak_bytes=60 * GiB, low_bytes=58 * GiB, high_bytes=62 * GiB)
    outcomes = outcomes_of(ROWS.values(), told)
    allocated = memory_pairs(outcomes)
    assert {pair.outcome.row.family for pair in allocated} == {"simumax-b200", "mbridge-skills"}
    llama = next(pair for pair in allocated if pair.outcome.row.id.endswith("llama3_70b_tp2_pp1_dp4_l12_mbc4_cef"))
    assert llama.error == pytest.approx(60 / llama.outcome.row.measured["peak_memory_gib"] - 1)
    assert llama.in_interval
    assert memory_pairs(outcomes, "reserved") == [], "nothing reserved was predicted"
    outcomes = outcomes_of(ROWS.values(), Told(told.seconds, peak_bytes=60 * GiB, reserved_bytes=64 * GiB))
    reserved = memory_pairs(outcomes, "reserved")
    assert {pair.outcome.row.family for pair in reserved} == {"torchtitan"}
    assert reserved[0].predicted == 64 * GiB
    assert {pair.outcome.row.family for pair in memory_pairs(outcomes, "nvidia-smi")} == {"bloom-tuning"}


def test_a_fault_of_the_predictor_is_a_row_with_a_reason(tmp_path: Path) -> None:
    class Faulty:
        def predict(self, request: StepRequest) -> Prediction:
            raise ZeroDivisionError(request.name)

    (outcome,) = outcomes_of(rows_of(tmp_path, timed("a", 1.0)), Faulty())
    assert outcome.reason == "a fault inside Lading: ZeroDivisionError: a"


def test_regret_and_tau(tmp_path: Path) -> None:
    lines = [timed("a", 1.0), timed("b", 2.0), timed("c", 3.0)]
    same = pairs_of(tmp_path, {"a": 10.0, "b": 20.0, "c": 30.0}, *lines)
    assert (regret(same), kendall_tau(same)) == (0.0, 1.0)
    reverse = pairs_of(tmp_path, {"a": 3.0, "b": 2.0, "c": 1.0}, *lines)
    assert (regret(reverse), kendall_tau(reverse)) == (2.0, -1.0)
    ties = pairs_of(tmp_path, {"a": 1.0, "b": 1.0, "c": 1.0}, *lines)
    assert kendall_tau(ties) == 0.0
    mixed = pairs_of(tmp_path, {"a": 2.0, "b": 1.0, "c": 3.0}, *lines)
    assert kendall_tau(mixed) == pytest.approx(1 / 3)
    assert order(mixed)["mine"] == {
        "groups": 1,
        "rows": 3,
        "mean_regret": pytest.approx(1.0),
        "max_regret": pytest.approx(1.0),
        "kendall_tau": pytest.approx(1 / 3),
    }


def test_groups_share_model_machine_and_batch(tmp_path: Path) -> None:
    lines = [timed("a", 1.0), timed("b", 2.0), timed("c", 3.0, layout={"global_batch": 8})]
    pairs = pairs_of(tmp_path, {"a": 1.0, "b": 2.0, "c": 3.0}, *lines)
    assert order(pairs) == {}
    assert order(pairs, any_batch=True)["mine"]["rows"] == 3


def test_noise_is_of_rows_that_are_equal_in_all_they_state(tmp_path: Path) -> None:
    lines = [timed("a", 1.0, config_key="k"), timed("b", 1.21, config_key="k"), timed("c", 5.0)]
    other = timed("d", 9.0, config_key="k", layout={"ac_detail": "mlp"})
    found = noise(rows_of(tmp_path, *lines, other))
    assert found["configurations"] == 1
    assert found["median"] == pytest.approx(0.21)
    assert found["floor"] == pytest.approx((0.1 + 1 - 1 / 1.1) / 2)
    assert noise([])["median"] is None
    published = noise(ROWS.values())
    assert published["configurations"] > 20
    assert 0.04 < published["median"] < 0.08


def test_an_anchor_takes_out_a_part_of_what_its_stack_has_in_common() -> None:
    rows = [row for row in ROWS.values() if row.family in ("korthikanti22", "simumax-b200", "vtrain-multi")]
    off = {"korthikanti22": 0.9, "simumax-b200": 0.9, "vtrain-multi": 1.1}
    pairs = step_pairs(outcomes_of(rows, Told({row.id: off[row.family] * (row.step_s or 0) for row in rows})))
    scaled, anchors = anchored(pairs)
    assert set(anchors) == {"megatron-2022", "megatron-core", "megatron-deepspeed"}
    assert len(scaled) == len(pairs) - 3, "an anchor is not scored"
    assert {name for name, _ in anchors.values()}.isdisjoint(pair.outcome.row.id for pair in scaled)
    assert 0.02 < summary(scaled)["macro_abs_error"] < 0.09
    assert 1.03 < anchors["megatron-core"][1] < 1 / 0.9, "the only one of its architecture keeps most of it"
    assert anchors["megatron-deepspeed"][1] < 1 < anchors["megatron-core"][1]


def test_what_many_rows_say_is_kept_and_what_one_says_is_shrunk() -> None:
    def of(*cells: Cell, target: Cell) -> float:
        return expected(cells, target)

    many, one = Cell("a", "s", "ampere", 0.1, 1000), Cell("a", "s", "ampere", 0.1, 1)
    target = Cell("b", "s", "ampere")
    assert 0.08 < of(many, target=target) < 0.1
    assert 0.02 < of(one, target=target) < 0.05
    other_stack, other_device = (Cell("b", "t", "ampere"), Cell("b", "s", "hopper"))
    assert 0 < of(many, target=other_stack) < of(many, target=target)
    assert 0 < of(many, target=other_device) < of(many, target=target)
    wild = dataclasses.replace(one, median=5.0)
    assert of(wild, target=target) == pytest.approx(of(dataclasses.replace(one, median=0.3), target=target))
    assert expected([], target) == 0


def test_which_row_is_the_anchor_does_not_depend_on_what_was_measured() -> None:
    pairs = step_pairs(outcomes_of(SINGLE[:40], ConstantEfficiency()))
    other = [dataclasses.replace(pair, measured=7.0, predicted=1.0) for pair in reversed(pairs)]
    assert anchor_of(pairs).outcome.row.id == anchor_of(other).outcome.row.id


def test_left_out_takes_nothing_of_the_family_itself(tmp_path: Path) -> None:
    lines = [timed("a", 1.0, source_family="one"), timed("b", 1.0, source_family="two")]
    pairs = pairs_of(tmp_path, {"a": 0.5, "b": 0.8}, *lines)
    one, two = left_out(pairs)
    known = Cell("two", "eager-torch-2023", "ampere", math.log(1 / 0.8), 1)
    assert one.predicted == pytest.approx(0.5 * math.exp(expected([known], known)))
    changed = left_out([dataclasses.replace(pairs[0], measured=0.6), pairs[1]])
    assert changed[0].predicted == one.predicted
    assert changed[1].predicted != two.predicted


def test_a_framework_left_out_takes_nothing_of_its_own_rows(tmp_path: Path) -> None:
    sources = {"a": "torchtitan", "b": "llm-foundry", "c": "qwenlm/qwen x"}
    lines = [timed(name, 1.0, source=source) for name, source in sources.items()]
    rows = rows_of(tmp_path, *lines)
    told = Told({"a": 0.5, "b": 0.8, "c": 0.9})
    plain = step_pairs(outcomes_of(rows, told))
    guessed = step_pairs(outcomes_of(rows, told, known=False))
    left = {pair.outcome.row.id: pair for pair in framework_left_out(plain, guessed)}
    slower = [dataclasses.replace(pair, measured=0.6) if pair.outcome.row.id == "a" else pair for pair in plain]
    changed = {pair.outcome.row.id: pair for pair in framework_left_out(slower, guessed)}
    assert changed["a"].predicted == left["a"].predicted > 0.5, "others ran slower than predicted"
    assert changed["b"].predicted != left["b"].predicted
    assert left["a"].outcome.request is not None
    assert left["a"].outcome.request.stack.framework == ""
    untold, columns = len(left["a"].outcome.request.unstated), left["a"].outcome.request.model.symbols["h"]
    half = half_width(GUESSED, {}, measured=True, untold=untold, columns=columns)
    factors = bounds(GUESSED, half, first_reading=True)
    assert (left["a"].low, left["a"].high) == pytest.approx([left["a"].predicted * factor for factor in factors])


def test_one_run_of_a_framework_moves_the_others_part_of_the_way(tmp_path: Path) -> None:
    lines = [timed(name, 1.0, source="torchtitan") for name in "abc"]
    told = Told(dict.fromkeys("abc", 0.8))
    left = step_pairs(outcomes_of(rows_of(tmp_path, *lines), told, known=False))
    near, runs = framework_anchored(left)
    name, factor = runs["torchtitan"]
    assert {pair.outcome.row.id for pair in near} == {*"abc"} - {name}
    assert 1 < factor < 1 / 0.8
    assert [pair.predicted for pair in near] == pytest.approx([0.8 * factor] * 2)
    assert near[0].outcome.request is not None
    half = half_width(GUESSED, {}, measured=True, untold=1, columns=near[0].outcome.request.model.symbols["h"])
    known = KnownRun(1 / 0.8, {}, untold=1)
    low, high = shift_of({}, [known], untold=1).bounds(half)
    assert (near[0].low, near[0].high) == pytest.approx((near[0].predicted * low, near[0].predicted * high))


def test_a_known_run_of_another_source_or_machine_says_less(tmp_path: Path) -> None:
    lines = [timed(name, 1.0, source="torchtitan", source_family=family) for name, family in ("ax", "bx", "cy")]
    left = step_pairs(outcomes_of(rows_of(tmp_path, *lines), Told(dict.fromkeys("abc", 0.8)), known=False))
    anchor, same, other = left
    assert known_run(anchor, same).elsewhere == frozenset()
    assert known_run(anchor, other).elsewhere == {"source"}
    assert shift_by(same, anchor).factor > shift_by(other, anchor).factor > 1
    assert other.outcome.request is not None
    moved = dataclasses.replace(other.outcome.request, machine="b200")
    away = dataclasses.replace(other, outcome=dataclasses.replace(other.outcome, request=moved))
    assert known_run(anchor, away).elsewhere == {"source", "machine"}
    assert shift_by(away, anchor).factor < shift_by(other, anchor).factor


def test_the_most_telling_run_is_chosen_without_a_look_at_times(tmp_path: Path) -> None:
    lines = [timed(name, 1.0, source="torchtitan") for name in "abc"]
    left = step_pairs(outcomes_of(rows_of(tmp_path, *lines), Told(dict.fromkeys("abc", 0.8)), known=False))
    shares = [{"products": 0.95, "launches": share, "memory-bound": 0.05 - share} for share in (0.0, 0.02, 0.04)]
    varied = [with_shares(pair, parts) for pair, parts in zip(left, shares, strict=True)]
    told = {pair.outcome.row.id: shift_by(other, pair).explained for pair in varied for other in varied[:1]}
    best = most_telling(varied)
    sums = {one.outcome.row.id: sum(shift_by(two, one).explained for two in varied if two is not one) for one in varied}
    assert best.outcome.row.id == max(sums, key=lambda name: sums[name])
    assert len(set(told.values())) == 3
    slower = [dataclasses.replace(pair, measured=9.0 if pair is best else 0.1) for pair in reversed(varied)]
    assert most_telling(slower).outcome.row.id == best.outcome.row.id


def with_shares(pair: Pair, shares: dict[str, float]) -> Pair:
    assert pair.outcome.prediction is not None
    prediction = dataclasses.replace(pair.outcome.prediction, shares=shares)
    return dataclasses.replace(pair, outcome=dataclasses.replace(pair.outcome, prediction=prediction))


def test_one_run_of_a_source_corrects_its_others_alone(tmp_path: Path) -> None:
    lines = [timed(name, 1.0, source_family=family) for name, family in ("ax", "bx", "cy", "dz", "ez")]
    told = dict.fromkeys("abc", 0.8) | dict.fromkeys("de", 1.0)
    pairs = step_pairs(outcomes_of(rows_of(tmp_path, *lines), Told(told)))
    before, after = source_anchored(pairs)
    assert [pair.outcome.row.family for pair in before] == [pair.outcome.row.family for pair in after] == ["x", "z"]
    assert [pair.predicted for pair in before] == [0.8, 1.0]
    assert 0.8 < after[0].predicted < 1.0
    assert after[1].predicted == pytest.approx(1.0)


def test_kernels_of_which_half_a_step_consists_say_half_as_much() -> None:
    whole, half = Cell("s", "x", "ampere", 0.1, 10), Cell("s", "x", "ampere", 0.1, 10, share=0.5)
    target = Cell("", "x", "ampere")
    assert expected([half], target) != expected([whole], target)
    assert expected([whole], dataclasses.replace(target, share=0.5)) == pytest.approx(expected([whole], target) / 2)


def test_what_was_fitted_for_a_stack_is_taken_out_by_the_protocols(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, timed("a", 1.0))
    pairs = step_pairs(outcomes_of(rows, Told({"a": 1.2}, residual=1.2)))
    assert left_out(pairs)[0].predicted == pytest.approx(1.0)


def test_the_constant_reference_counts_flop_as_the_papers_do() -> None:
    """GPT-3 175B of Korthikanti et al.: 24 b s h^2 (1 + s/6h + v/12lh) per layer of a forward, attention whole."""
    row = ROWS["korthikanti22-T5-175B-full"]
    outcome = outcomes_of([row], ConstantEfficiency())[0]
    assert outcome.request is not None
    h, s, layers, v = 12288, 2048, 96, 51200
    formula = 24 * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    whole = forward_flop_of_token(outcome.request.model, 2 * s)
    assert whole == pytest.approx(formula, rel=0.002)


def test_worst_rows_come_first(tmp_path: Path) -> None:
    pairs = pairs_of(tmp_path, {"a": 1.1, "b": 0.5, "c": 1.2}, *(timed(name, 1.0) for name in "abc"))
    assert [pair.outcome.row.id for pair in worst(pairs, 2)] == ["b", "c"]


@pytest.mark.long
def test_the_command_writes_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, rows = tmp_path / "scores.json", tmp_path / "rows.jsonl"
    files = [str(path) for path in FILES[:1]]
    assert main([*files, "--predictor", "constant", "--json", str(out), "--rows", str(rows)]) == 0
    document = json.loads(out.read_text())
    keys = {"macro_abs_error", "median", "p90", "bias", "coverage", "width", "families"}
    assert keys <= document["step_time"].keys()
    assert keys <= document["memory"].keys()
    assert document["rows"] == len(ROWS) == len(rows.read_text().splitlines())
    assert document["rows_skipped"] <= 0.06 * len(ROWS)
    shown = capsys.readouterr().out
    assert "korthikanti22" in shown
    assert "Kendall's tau" in shown
    assert "not simulated" in shown or not document["rows_skipped"]


def test_a_corrupt_file_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(timed("a", 1.0) + "\n{broken\n")
    assert main([str(file)]) == 2
    assert "rows.jsonl:2: expected a JSON object" in capsys.readouterr().err
