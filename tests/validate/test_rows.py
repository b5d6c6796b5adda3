"""Rows are read strictly: what is wrong is named with its line, what is not known is noted."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tools.validate.rows import Row, read_rows

from lading.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "benchmarks" / "validation"
FILES = [FOLDER / "measurements.jsonl", FOLDER / "measurements_vtrain_single_node.jsonl"]
PLAIN: dict[str, Any] = {
    "id": "mine-001",
    "model": {"layers": 4, "hidden": 256, "heads": 4, "seq_len": 128, "vocab": 1000, "gated_mlp": True},
    "hardware": {"gpu": "H100 SXM 80GB", "gpus": 2},
    "layout": {"dp": 2, "tp": 1, "pp": 1, "micro_batch": 1, "global_batch": 4},
    "measured": {"iteration_s": 0.5, "tokens_per_s_per_gpu": 512.0},
}


def read(tmp_path: Path, *lines: str) -> list[Row]:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return read_rows([file])[0]


def changed(**parts: Any) -> str:
    row = copy.deepcopy(PLAIN)
    for name, value in parts.items():
        if isinstance(value, dict) and name in row:
            row[name] |= value
        else:
            row[name] = value
    return json.dumps(row)


def test_the_published_measurements_are_read_whole() -> None:
    rows, notes = read_rows(FILES)
    assert len(rows) == 546 + 765
    assert notes == []
    assert {row.family for row in rows[546:]} == {"vtrain-single"}
    assert len({row.key for row in rows[546:]}) == 765


def test_a_row_without_seconds_has_them_from_tokens(tmp_path: Path) -> None:
    (row,) = read(tmp_path, changed(measured={"iteration_s": None}))
    assert row.step_s == 4 * 128 / (512 * 2)
    (row,) = read(tmp_path, changed(measured={"iteration_s": None, "tokens_per_s_per_gpu": None}))
    assert row.step_s is None


def test_a_row_without_a_batch_has_it_from_its_micro_batches(tmp_path: Path) -> None:
    layout = {"global_batch": None, "micro_batch": 2, "grad_accum": 3}
    (row,) = read(tmp_path, changed(measured={"iteration_s": None}, layout=layout))
    assert row.step_s == 2 * 2 * 3 * 128 / (512 * 2)
    (row,) = read(tmp_path, changed(measured={"iteration_s": None}, layout={**layout, "dp": 1}))
    assert row.step_s is None, "half of the devices are in no axis"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "a"', r"rows.jsonl:2: expected a JSON object"),
        ("[1]", r":2: expected a JSON object, got list"),
        (changed(id=7), r":2: id: expected str, got int 7"),
        (changed(measured={"iteration_s": "0.5"}), r":2: measured.iteration_s: expected int or float, got str '0.5'"),
        (changed(measured={"iteration_s": 500.0}), r":2: measured.iteration_s: expected seconds, about 0.5 .*millisec"),
        (changed(measured={"peak_memory_gib": 8e10}), r":2: measured.peak_memory_gib: expected .* in the unit"),
        (changed(measured={"iteration_s": -1}), r":2: measured.iteration_s: expected a positive number"),
        (changed(layout={"dp": True}), r":2: layout.dp: expected int or float, got bool"),
        (changed(model={"layers": -3}), r":2: model.layers: expected a number >= 0, got -3"),
        (changed(tier="D"), r":2: tier: expected A, B or C, got 'D'"),
        ("{}", r":2: missing field 'id'"),
        (json.dumps({k: v for k, v in PLAIN.items() if k != "layout"}), r":2: missing field 'layout'"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, changed(id="first"), line)


def test_a_misspelled_field_is_an_error_and_a_new_one_a_note(tmp_path: Path) -> None:
    row = copy.deepcopy(PLAIN)
    row["layout"]["micro_batchs"] = row["layout"].pop("micro_batch")
    with pytest.raises(ConfigError, match=r"unknown field layout.micro_batchs; did you mean layout.micro_batch\?"):
        read(tmp_path, json.dumps(row))
    file = tmp_path / "rows.jsonl"
    file.write_text(changed(layout={"color": "red"}))
    rows, notes = read_rows([file])
    assert "color" not in rows[0].layout
    assert len(notes) == 1
    assert "layout.color" in notes[0]


def test_two_rows_of_one_id_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 2: expected an id of its own, got 'mine-001' as in line 1"):
        read(tmp_path, json.dumps(PLAIN), json.dumps(PLAIN))


def test_a_file_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected measurements"):
        read(tmp_path, "")
    with pytest.raises(ConfigError, match="expected a text file"):
        read_rows([tmp_path / "none.jsonl"])
