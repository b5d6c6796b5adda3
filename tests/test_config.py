"""The configuration: every mistake is an error that names the place and the remedy; nothing is ignored."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lading.config import (
    DataConfig,
    MemoryConfig,
    ModelConfig,
    Optimization,
    RunConfig,
    load_run,
    lr_at,
    run_from_dict,
    run_to_dict,
)
from lading.errors import ConfigError
from lading.optim.adamw import AdamW
from lading.units import share_or_bytes

RUN = """\
threads = 1
out = "out/tiny"

[model]
name = "llama"
sizes = { dim = 64, num_layers = 2, rope_theta = 1e4, tied = true }

[data]
sequence_length = 32
batch_size = 4

[optimization]
steps = 20
warmup_steps = 5
optimizer = { lr = 1e-3 }

[memory]
budget = "50%"
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN)
    return "run.toml"


def test_a_file_of_another_editor_is_the_same_run(run_file: str) -> None:
    """Lines that end as on Windows, and a byte order mark, which Notepad writes."""
    plain = load_run(run_file)
    Path(run_file).write_bytes(b"\xef\xbb\xbf" + RUN.replace("\n", "\r\n").encode())
    assert load_run(run_file) == plain
    Path(run_file).write_bytes(RUN.encode("utf-16"))
    assert "encoded as UTF-8, found byte 0xff at 0; save it as UTF-8" in message(run_file)


def message(run_file: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run(run_file, overrides)
    return str(caught.value)


def edited(run_file: str, old: str, new: str) -> str:
    text = Path(run_file).read_text()
    assert old in text
    Path(run_file).write_text(text.replace(old, new))
    return message(run_file)


def test_load(run_file: str) -> None:
    run = load_run(run_file)
    assert run.model.sizes == {"dim": 64, "num_layers": 2, "rope_theta": 1e4, "tied": True}
    assert run.optimization == Optimization(steps=20, warmup_steps=5, optimizer=AdamW(lr=1e-3))
    assert run.data.source == "stdlib"
    assert run.num_threads == 1


def test_overrides(run_file: str) -> None:
    run = load_run(
        run_file,
        ["optimization.steps=7", "optimization.schedule=cosine", 'memory.budget="1GB"', "model.sizes.dim=128",
         "memory.disk_budget=25%", "optimization.optimizer.lr=1", "data.source=/a=b", "out=2026-11-20"],
    )  # fmt: skip
    assert (run.optimization.steps, run.optimization.schedule) == (7, "cosine")
    assert run.memory == MemoryConfig(budget="1GB", disk_budget="25%")
    assert run.model.sizes["dim"] == 128
    assert type(run.optimization.optimizer.lr) is float
    assert (run.data.source, run.out) == ("/a=b", "2026-11-20")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("steps = 20", "stpes = 20", "run.toml: unknown key 'optimization.stpes'; did you mean 'optimization.steps'?"),
        ("steps = 20", "steps = 20\nlr = 1", "unknown key 'optimization.lr'; did you mean 'optimization.optimizer.lr'"),
        (
            "steps = 20",
            'steps = 20\nmatrices = { rule = "muon", lr = 1.0, setings = {} }',
            "unknown key 'optimization.matrices.setings'; did you mean 'optimization.matrices.settings'?",
        ),
        ("threads = 1", "treads = 1", "run.toml: unknown key 'treads'; did you mean 'threads'?"),
        ("threads = 1", "batchsize = 1", "unknown key 'batchsize'; did you mean 'data.batch_size'?"),
        ("threads = 1", "zzz = 1", "unknown key 'zzz'; expected one of checkpoint, data, freeze, layout, logging"),
        ("steps = 20\n", "", "run.toml: missing key 'optimization.steps': expected an integer"),
        ('[memory]\nbudget = "50%"', "", "run.toml: missing key 'memory': expected a table"),
        ("steps = 20", "steps = '20'", "run.toml: optimization.steps: expected an integer, got '20'"),
        ("steps = 20", "steps = true", "optimization.steps: expected an integer, got True"),
        ("lr = 1e-3", "lr = '1e-3'", "run.toml: optimization.optimizer.lr: expected a number, got '1e-3'"),
        ("lr = 1e-3", "lr = nan", "run.toml: optimization.optimizer.lr: expected a number >= 0, got nan"),
        ("lr = 1e-3", "beta1 = 1", "optimization.optimizer.beta1: expected a number >= 0 and < 1, got 1"),
        ("warmup_steps = 5", "warmup_steps = -1", "optimization.warmup_steps: expected an integer >= 0, got -1"),
        ("optimizer = { lr = 1e-3 }", "optimizer = 'adamw'", "optimization.optimizer: expected a table, got 'adamw'"),
        ("dim = 64", "dim = 'x'", "model.sizes.dim: expected an integer or a number or true or false, got 'x'"),
        ('name = "llama"', 'name = "lama"', "model.name: expected one of llama, gpt, moe"),
        ('name = "llama"', 'name = "lama"', "got 'lama'; did you mean 'llama'?"),
        ('budget = "50%"', 'budget = "150%"', "memory.budget: expected a share above 0% and up to 100%"),
        ('budget = "50%"', "budget = -1", "memory.budget: expected a size"),
        ('budget = "50%"', "budget = 0", "memory.budget: expected a size above 0, got 0"),
        ('budget = "50%"', "budget = 1.5", "memory.budget: expected a unit: 1.5 may mean"),
        ("[model]", "[model", "run.toml: expected a run configuration in TOML:"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_file_is_named(run_file: str, old: str, new: str, expected: str) -> None:
    assert expected in edited(run_file, old, new)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimization.stpes=2", "command line: unknown key 'optimization.stpes'; did you mean 'optimization.steps'?"),
        ("optimization.steps=2x", "command line: optimization.steps: expected an integer, got '2x'"),
        ("optimization.steps=0", "command line: optimization.steps: expected an integer >= 1, got 0"),
        ("optimization.schedule=linear", "expected 'constant' or 'cosine', got 'linear'"),
        ("threads.x=1", "command line: cannot set 'threads.x': 'threads' is not a table"),
        (
            "checkpoint={every_steps=4, keep_every_steps=6}",
            "checkpoint.keep_every_steps: expected a multiple of every_steps (4), as only what is saved can be kept",
        ),
        ("checkpoint.keep_every_steps=6", "expected a multiple of every_steps (0)"),
        ("steps", "command line: expected key=value such as optimization.steps=20, got 'steps'"),
        ("optimization.=3", "command line: expected key=value"),
        ('out="open', "is not a TOML value"),
        ("threads=1\nseed=2", "command line: threads: expected an integer, got '1\\nseed=2'"),
        (
            "optimization.optimizer={rule='sgd', states='8bit'}",
            "unknown key 'optimization.optimizer.states', which adamw has and sgd has not; expected one of dampening",
        ),
        (
            "optimization={steps=2, accumulation=2, micro_batches=4}",
            "command line: optimization.micro_batches: expected it in place of accumulation, as it counts those of all",
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_named(run_file: str, override: str, expected: str) -> None:
    assert expected in message(run_file, override)


def test_checkpoints_that_stay_are_counted(run_file: str) -> None:
    """Of 20 steps: the two newest, and those of steps 5, 10, 15 and 20."""
    run = load_run(run_file, ["checkpoint={every_steps=1, keep_every_steps=5}"])
    assert run.kept_checkpoints == 2 + 4
    assert load_run(run_file, ["checkpoint.every_steps=1"]).kept_checkpoints == 2


def test_the_file_is_blamed_for_what_the_command_line_did_not_set(run_file: str) -> None:
    assert edited(run_file, "steps = 20", "steps = 0").startswith("run.toml: optimization.steps")
    assert message(run_file, "threads=1").startswith("run.toml: optimization.steps")


def test_no_file_or_not_text(tmp_path: Path) -> None:
    assert "found no file" in message(str(tmp_path / "absent.toml"))
    assert "expected a run configuration" in message(str(tmp_path))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert "expected a run configuration in TOML" in message(str(tmp_path / "binary.toml"))


def test_wrong_types_in_python_are_config_errors_too() -> None:
    for make in (
        lambda: Optimization(steps="20"),  # pyright: ignore[reportArgumentType]
        lambda: AdamW(lr="fast"),  # pyright: ignore[reportArgumentType]
        lambda: DataConfig(sequence_length=4, batch_size=True),
        lambda: MemoryConfig(budget=None),  # pyright: ignore[reportArgumentType]
        lambda: ModelConfig(name=""),
    ):
        with pytest.raises(ConfigError, match=r"expected .*, got"):
            make()


sizes = st.integers(1, 2**63 - 1)
rates = st.floats(0, 1, exclude_max=True)
runs = st.builds(
    RunConfig,
    model=st.builds(
        ModelConfig,
        name=st.sampled_from(["llama", "pkg.mod:make", "a/config.json"]),
        sizes=st.dictionaries(st.text(min_size=1), st.integers() | st.booleans() | st.floats(allow_nan=False)),
    ),
    data=st.builds(DataConfig, sequence_length=sizes, batch_size=sizes),
    optimization=st.builds(
        Optimization,
        steps=st.integers(9, 2**63 - 1),
        optimizer=st.builds(AdamW, lr=rates, beta1=rates, beta2=rates),
        schedule=st.sampled_from(["constant", "cosine"]),
        warmup_steps=st.integers(0, 9),
    ),
    memory=st.builds(MemoryConfig, budget=st.integers(1024, 2**63 - 1) | st.just("24GiB") | st.just("12.5%")),
    seed=st.integers(0, 2**63 - 1),
)


@pytest.mark.long
@given(runs)
def test_round_trip_through_json(run: RunConfig) -> None:
    assert run_from_dict(json.loads(json.dumps(run_to_dict(run)))) == run


def test_run_from_dict_is_strict(run_file: str) -> None:
    data = run_to_dict(load_run(run_file))
    data["memory"]["bugdet"] = 3
    with pytest.raises(ConfigError, match=r"plan\.json: unknown key 'memory\.bugdet'; did you mean 'memory\.budget'"):
        run_from_dict(data, "plan.json")
    with pytest.raises(ConfigError, match=r"plan\.json: expected a table, got \[\]"):
        run_from_dict([], "plan.json")


def test_learning_rate() -> None:
    cosine = Optimization(steps=30, warmup_steps=10, schedule="cosine", optimizer=AdamW(lr=1.0))
    rates = [lr_at(cosine, step) for step in range(40)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10] == 1.0
    assert rates[20] == pytest.approx(0.5)
    assert all(a > b for a, b in itertools.pairwise(rates[10:31]))
    assert rates[30:] == [0.0] * 10
    constant = Optimization(steps=5, optimizer=AdamW(lr=0.25))
    assert {lr_at(constant, step) for step in range(9)} == {0.25}
    whole_run = Optimization(steps=5, warmup_steps=5, schedule="cosine", optimizer=AdamW(lr=1.0))
    assert lr_at(whole_run, 4) == 1.0
    cut = Optimization(steps=2, warmup_steps=4, schedule="cosine", optimizer=AdamW(lr=1.0))
    assert [lr_at(cut, step) for step in range(3)] == [0.25, 0.5, 0.75]
    with pytest.raises(ConfigError, match="step: expected an integer >= 0, got -1"):
        lr_at(constant, -1)


@given(st.floats(0.01, 100), st.integers(0, 1 << 50))
def test_shares(share: float, whole: int) -> None:
    part = share_or_bytes(f"{share:.4f}%", whole)
    assert 0 <= part <= whole
    assert part == pytest.approx(whole * share / 100, abs=1 + whole * 1e-6)


def test_sizes() -> None:
    assert share_or_bytes("256MB", 1) == 256_000_000
    assert MemoryConfig(budget="50%").budget_bytes(1000) == 500
    assert MemoryConfig(budget="1KB", disk_budget=0).tier_budgets({"disk": 10**9}, "disk") == {"disk": 0}
    assert not math.isnan(share_or_bytes("100%", 3))
    with pytest.raises(ConfigError, match="above 0%"):
        share_or_bytes("0%", 100)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("checkpoint={wait=true}", "checkpoint.wait: expected every_steps > 0 beside it"),
        ("checkpoint={every_steps=2, in_place=true, wait=true}", "checkpoint.wait: expected in_place = false beside"),
        ("data={batch_size=1, kind='random', inputs={x='float32 3'}, source='a.npz'}", "data.source: expected files"),
        ("data={batch_size=1, kind='arrays', source='a.npz', text_field='t'}", "data.text_field: expected kind 'text'"),
        ("data={batch_size=1, kind='arrays', source='a.npz', format='jsonl'}", "data.format: expected kind 'text'"),
        ("data={batch_size=1, sequence_length=4, source='synthetic', tokenizer='bytes'}", "found source 'synthetic'"),
        ("data={batch_size=1, sequence_length=4, source='a', format='text', label_field='y'}", "found format 'text'"),
        ("data.text_field='t'", "data.text_field: expected JSON lines or Parquet beside it, found source 'stdlib'"),
        ("optimization={steps=2, optimizer={rule='sgd', dampening=0.5}}", "dampening: expected momentum above 0"),
    ],
)
def test_a_setting_that_does_nothing_without_another_is_refused(run_file: str, settings: str, expected: str) -> None:
    said = message(run_file, settings)
    assert expected in said
    assert "; leave it out" in said


def test_a_setting_that_does_nothing_may_be_as_it_is_by_default(run_file: str) -> None:
    load_run(run_file, ["checkpoint={wait=false, keep=2, at_end=false}"])
    load_run(run_file, ["checkpoint={every_steps=2, wait=true, keep=3}"])


def test_fields_of_validation_data_may_be_set_beside_the_standard_library(run_file: str) -> None:
    run = load_run(run_file, ["data.text_field='t'", "validation={source='val.jsonl', every_steps=2}"])
    assert run.data.text_field == "t"
