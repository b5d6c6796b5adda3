"""Sources that are read for the first time, and those whose rows were compared with predictions."""

from __future__ import annotations

import dataclasses
import json
from math import hypot, log
from pathlib import Path

import pytest
from tools.validate.known_sources import is_first_reading
from tools.validate.requests import request_of
from tools.validate.rows import read_rows

from lading.sim.interval import FIRST_READING
from lading.sim.simulate import simulate
from tests.validate.test_rows import changed

_ROWS = Path(__file__).parents[2] / "benchmarks" / "validation"


def test_a_source_that_is_read_for_the_first_time_has_a_wider_interval_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    requests = []
    for family in ("torchtitan", "nobody-looked"):
        file.write_text(changed(source_family=family))
        requests.append(request_of(read_rows([file])[0][0]))
        assert any("compared with a prediction before" in told for told in requests[-1].assumed) == (family[0] == "n")
    assert [request.first_reading for request in requests] == [False, True]
    pairs = [simulate(dataclasses.replace(requests[0], first_reading=first)).interval for first in (False, True)]
    seen, new = ((-log(low), log(high)) for low, high in pairs)
    assert new == pytest.approx([hypot(a, b) for a, b in zip(seen, FIRST_READING, strict=True)])


def test_sources_of_all_rows_here_were_looked_at() -> None:
    files = [file for file in _ROWS.glob("*.jsonl") if "model" in json.loads(file.read_text().splitlines()[0])]
    families = {row.family for row in read_rows(files)[0]}
    assert len(families) > 80
    assert not {family for family in families if is_first_reading(family)}


def test_rows_that_were_predicted_blind_are_there() -> None:
    blind = [json.loads(text) for text in (_ROWS / "blind_predictions.jsonl").read_text().splitlines()]
    names = {file: {row.id for row in read_rows([_ROWS / f"{file}.jsonl"])[0]} for file in {b["file"] for b in blind}}
    assert len(names) == 9
    assert not [b["id"] for b in blind if b["id"] not in names[b["file"]]]
