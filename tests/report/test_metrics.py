"""metrics.jsonl survives a kill at any byte, and nothing else that is wrong passes for a kill."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from lading.errors import ConfigError
from lading.report.metrics import MetricsLog, read_metrics, read_steps, truncate_after


def write(path: Path, steps: int) -> list[dict[str, float]]:
    records = [{"step": step, "loss": 1.0 / step} for step in range(1, steps + 1)]
    with MetricsLog(path) as log:
        for record in records:
            log.log(record)
    return records


def test_records_are_readable_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    log = MetricsLog(path)
    log.log({"step": 1, "loss": math.inf})
    assert read_metrics(path) == [{"step": 1, "loss": math.inf}]
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.log({"step": 2})


def test_a_kill_at_any_byte_loses_one_record_at_most(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    records = write(path, 3)
    data = path.read_bytes()
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = data[:cut].count(b"\n")
        assert read_metrics(path) == records[:whole]
        with MetricsLog(path) as log:
            log.log({"step": 9})
        assert read_metrics(path) == [*records[:whole], {"step": 9}]


@pytest.mark.parametrize("bad", [b'{"step": 2, "lo\n', b"[1]\n", b"\n", b"\0\0\n", b"\xff\n"])
def test_a_bad_line_elsewhere_is_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"m\.jsonl, line 2: expected a JSON object"):
        read_metrics(path)


def test_a_bad_last_line_with_its_newline_is_not_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_metrics(path)


@pytest.mark.parametrize("wrong", [{"base_bytes": None}, {"base_bytes": -1}, {"excess": "above"}, {"excess": [1]}])
def test_what_a_step_may_say_is_of_its_kind(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "m.jsonl"
    step = {"step": 1, "loss": 0.5, "step_s": 0.1, "memory_bytes": 10, "base_bytes": 5, "excess": ["above"]}
    path.write_text(f"{json.dumps(step)}\n{json.dumps(step | wrong)}\n")
    with pytest.raises(ConfigError, match=f"line 2: expected a .* as '{next(iter(wrong))}'"):
        read_steps(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found no file"):
        read_metrics(tmp_path / "none")


def test_truncate_keeps_what_a_resumed_run_will_not_write_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    records = write(path, 5)
    with MetricsLog(path) as log:
        log.log({"event": "note"})
    assert truncate_after(path, 3) == 2
    assert read_metrics(path) == [*records[:3], {"event": "note"}]
    assert truncate_after(path, 3) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


def test_a_value_without_json_form_is_refused_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsLog(path) as log, pytest.raises(ConfigError, match="expected numbers"):
        log.log({"step": 1, "loss": object()})
    assert path.read_bytes() == b""
