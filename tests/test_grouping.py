"""Which parameters a rule for matrices moves: by itself, as told, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lading.config import Optimization, load_run, run_from_dict, run_to_dict
from lading.errors import ConfigError
from lading.grouping import Described, Matrices, Use, group, matrices_from

NAMED = [
    Described(("tokens.weight", "head.weight"), (256, 32), Use.TABLE),
    Described(("positions.weight",), (64, 32), Use.OTHER),
    Described(("layers.0.qkv.weight",), (96, 32), Use.PRODUCT),
    Described(("layers.1.qkv.weight",), (96, 32), Use.PRODUCT),
    Described(("layers.0.norm.weight",), (32,), Use.OTHER),
    Described(("experts.up",), (4, 64, 32), Use.PRODUCT),
    Described(("out.weight",), (10, 32), Use.HEAD),
]
CONV = Described(("patches.weight",), (32, 3, 4, 4), Use.CONVOLUTION)


def matrices(**parameters: int | str) -> Matrices:
    return Matrices(rule="muon", lr=0.02, parameters={k.replace("_", "*"): v for k, v in parameters.items()})


def test_matrices_by_themselves() -> None:
    found = group(matrices(), NAMED)
    assert found.matrices == {2: (), 3: (), 5: ()}
    assert found.rest == {0: "embedding", 1: "in no product", 4: "no matrix", 6: "head"}
    assert found.describe("muon", NAMED) == (
        "muon moves 2 of layers.*.qkv.weight, experts.up; adamw moves tokens.weight (embedding); positions.weight "
        "(in no product); out.weight (head); 1 of fewer than two dims"
    )


def test_matrices_as_told() -> None:
    told = {"layers.0.qkv.weight": "48 32 16", "*.qkv.weight": 3, "experts.*": "rest", "out.weight": "matrix"}
    found = group(Matrices(rule="soap", lr=0.01, parameters={**told, "head.weight": "matrix"}), NAMED)
    assert found.matrices == {0: (), 2: (48, 32, 16), 3: (32, 32, 32), 6: ()}
    assert found.rest[5] == "as told"
    assert "in parts" in found.describe("soap", NAMED)
    assert group(matrices(experts_=2), NAMED).matrices[5] == (32, 32)


def test_what_is_said_of_frozen_matrices_waits() -> None:
    """None of them is moved, and no pattern of theirs is an error; where there never was a matrix, that is one."""
    trained, frozen = [NAMED[0], NAMED[4]], [NAMED[2], NAMED[3]]
    found = group(matrices(_qkv_=3), trained, frozen)
    assert (found.matrices, found.rest) == ({}, {0: "embedding", 1: "no matrix"})
    assert found.describe("muon", trained).startswith("muon moves nothing, as its matrices are frozen; adamw moves")
    with pytest.raises(ConfigError, match="at least one matrix"):
        group(matrices(), trained, [NAMED[0]])
    with pytest.raises(ConfigError, match="at least one matrix"):
        group(Matrices(rule="muon", lr=0.02, parameters={"layers.*": "rest"}), trained, frozen)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"layers.0.qvk.weight": "rest"}, "'layers.0.qvk.weight' matches none; did you mean 'layers.0.qkv.weight'"),
        ({"_qkv_": 5}, "parts that divide its 96 rows, got 5"),
        ({"_qkv_": "64 16"}, "add up to its 96 rows, got 80"),
        ({"_norm_": "matrix"}, r"expected a matrix or a stack of matrices for muon, got shape \(32,\)"),
        ({"_weight": "rest", "layers_": "matrix"}, "comes behind patterns that take all it matches"),
        ({"_": "rest"}, "at least one matrix"),
    ],
)
def test_what_is_refused(parameters: dict[str, int | str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        group(matrices(**parameters), NAMED)


def test_a_weight_that_no_rule_matches_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"patches.weight: muon moves matrices .*convolution weight.*= \"rest\""):
        group(matrices(), [*NAMED, CONV])
    assert group(matrices(patches_="rest"), [*NAMED, CONV]).rest[7] == "as told"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'rule = "mion"\nlr = 0.1',
            "one of muon, shampoo, soap, or 'module:Class' for your own, got 'mion'; did you mean 'muon'",
        ),
        ('rule = "muon"', "missing key 'optimization.matrices.lr'"),
        ('rule = "muon"\nlr = -1', "optimization.matrices.lr: expected a number >= 0"),
        ('rule = "muon"\nlr = 1\nsettings = { beta1 = 0.5 }', "settings: unknown 'beta1' of muon; expected one of mom"),
        ('rule = "muon"\nlr = 1\nsettings = { steps = 2.5 }', "expected steps of muon as int, got 2.5"),
        ('rule = "soap"\nlr = 1\nsettings = { frequency = 0 }', "soap: expected frequency >= 1"),
        ('rule = "muon"\nlr = 1\nparameters = { a = "3x" }', "'a': expected 'matrix', 'rest', a number of equal parts"),
        ('rule = "muon"\nlr = 1\nparameters = { a = 0 }', "'a': expected 'matrix'"),
        ('rule = "muon"\nlr = 1\nwho = "a"', "unknown key 'optimization.matrices.who'"),
    ],
)
def test_settings_in_a_file(text: str, said: str, tmp_path: Path) -> None:
    example = (Path(__file__).parent.parent / "examples" / "muon.toml").read_text()
    begin, end = example.index("[optimization.matrices]"), example.index("[memory]")
    path = tmp_path / "run.toml"
    path.write_text(f"{example[:begin]}[optimization.matrices]\n{text}\n{example[end:]}")
    with pytest.raises(ConfigError, match=said):
        load_run(path)


def test_settings_come_back_from_a_plan() -> None:
    run = load_run(Path(__file__).parent.parent / "examples" / "muon.toml", ["optimization.matrices.lr=1"])
    assert run.optimization.matrices == Matrices(
        rule="muon", lr=1.0, settings={"momentum": 0.95, "weight_decay": 0.1}, parameters={"*.qkv.weight": 3}
    )
    table = run_to_dict(run)
    assert run_from_dict(table) == run
    assert matrices_from(table["optimization"]["matrices"]) == run.optimization.matrices
    assert Optimization(steps=1).matrices is None
    with pytest.raises(ConfigError, match="expected rule, lr, settings and parameters of matrices, got rule, rate"):
        matrices_from({"rule": "muon", "rate": 1})
