"""``lading simulate --model ... --lora`` and ``--qlora``: steps that train adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lading.cli.main import main

ASKED = ["simulate", "--model", "llama3-8b", "--machine", "a100", "--layout", "mb1,gb8,recompute=full", "--seq", "2048"]
STACK = ["--stack", "hf-transformers"]


def test_adapters_need_less_than_all_weights(tmp_path: Path) -> None:
    found = {}
    for name, more in (("all", []), ("lora", ["--lora", "16"]), ("qlora", ["--qlora", "16"])):
        out = tmp_path / f"{name}.json"
        assert main([*ASKED, *STACK, *more, "--json", str(out)]) == 0
        found[name] = json.loads(out.read_text())
    assert found["lora"]["peak_bytes"] < 0.5 * found["all"]["peak_bytes"]
    assert found["qlora"]["peak_bytes"] < 0.6 * found["lora"]["peak_bytes"]
    assert found["qlora"]["step_s"] > found["lora"]["step_s"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([*STACK, "--lora", "8", "--qlora", "8"], "expected one rank above 0"),
        (["--qlora", "8"], "a stack with a quantizer"),
    ],
)
def test_what_cannot_be_is_told(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, *more]) != 0
    captured = capsys.readouterr()
    assert said in " ".join((captured.out + captured.err).split())
