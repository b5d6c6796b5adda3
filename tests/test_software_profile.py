"""A script's software becomes a set of switches: what is asked of the script, what is fitted, what is written."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from pathlib import Path

import pytest

from lading import software_profile
from lading.catalog.load import load_machine, save_machine
from lading.catalog.stacks import stack_by_name
from lading.catalog.tables import family_table
from lading.cli.main import main
from lading.errors import ConfigError
from lading.ir.layout import parse_layout
from lading.ir.machine import Curve, Machine, Processes
from lading.ir.request import Architecture, StepRequest
from lading.ir.stack import Stack
from lading.runtime.host import host_id
from lading.runtime.probe import LoadMeter
from lading.runtime.probe_software import (
    Measured,
    ProfileCase,
    ProfiledRanks,
    Timing,
    UserSoftware,
    cases,
    measure,
    quietest,
)
from lading.sim.simulate import simulate
from lading.software_profile import profile_to, stack_to_toml

BLOCK = """
from torch import nn

def block(width):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
"""
LINE = Curve(size=(1e3, 1e9), rate=(1e9, 1e9))
SHARED = Processes(
    cores=2,
    slowdown={"products": (1.0, 1.1, 1.6, 2.2), "memory-bound": (1.0, 1.4, 2.0, 2.8)},
    busy={"all_reduce.2": 2.0, "all_gather.2": 2.0, "reduce_scatter.2": 2.0},
    overhead_s={"operation": 1e-5},
)
#: What software of a host that is simulated takes, as a profile should find it.
FRESH_S = 4e-10
HIDDEN = {"products": 1.3, "attention": 0.8, "memory-bound": 1.7, "loss": 1.6, "optimizer": 4.0}


def script_of(folder: Path, text: str = BLOCK) -> Path:
    path = folder / "train_block.py"
    path.write_text(text)
    return path


def machine_of(folder: Path, ranks: tuple[int, ...] = (2,), **changes: object) -> Path:
    collectives = {f"{op}.{n}": LINE for op in ("all_reduce", "all_gather", "reduce_scatter") for n in ranks}
    machine = dataclasses.replace(
        load_machine("cpu"), collectives=collectives, processes=SHARED, host_id=host_id(), **changes
    )
    save_machine(machine, folder / "machine.toml")
    return folder / "machine.toml"


def hidden(stack: Stack) -> Stack:
    factors = {f"cpu.{what}": factor for what, factor in HIDDEN.items()}
    factors |= {"cpu.all_reduce.2": 2.5, "cpu.all_reduce.4": 1.5}
    host = {"launch_s": 2e-5, "parameter_s": 3e-5, "reduced_parameter_s": 2e-5, "step_s": 4e-4}
    engine = {"gradient_copies": 1.0, "fresh_bytes_per_s": {str(n): 1 / (n * FRESH_S) for n in (1, 2, 4)}}
    return dataclasses.replace(stack, **host, **engine, product_bytes_per_s=8e9, in_situ=stack.in_situ | factors)


@pytest.fixture
def simulated_host(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Measures what the simulator says of software with factors that the fit does not know.

    Its parameters are the share of the processors that others took, and how often the engine copies gradients.
    """
    others, copies = getattr(request, "param", (0.0, 1.0))
    made: list[software_profile._Bench] = []
    kept = software_profile._Bench.__init__

    def init(self: software_profile._Bench, *args: object) -> None:
        kept(self, *args)  # type: ignore[arg-type]
        made.append(self)

    def measured(path: Path, asked: tuple[ProfileCase, ...], groups: list[ProfiledRanks]) -> list[Measured]:
        return [measured_of(asked, group.ranks) for group in groups]

    def measured_of(asked: tuple[ProfileCase, ...], ranks: int) -> Measured:
        bench, timings = made[-1], list[Timing]()
        for number in range(len(asked)):
            engine = dataclasses.replace(hidden(stack_by_name("torch-eager-cpu")), gradient_copies=copies)
            step = bench.simulated(number, engine, ranks).step
            plain = bench.simulated(number, dataclasses.replace(engine, gradient_copies=0.0), ranks).step
            shares = step.shares_s
            behind = plain.shares_s["optimizer"] + plain.shares_s["host"]  # gradients are copied before that
            kernels = shares.get("products", 0.0), shares.get("attention", 0.0)
            timings.append(Timing(step.step_s - behind, behind, *kernels, others=others))
        gather_s = 3 * (8 << 20) / 1e9 if ranks > 1 else 0.0
        return Measured(tuple(timings), gather_s=gather_s, no_product="none here", fresh_s=ranks * FRESH_S)

    monkeypatch.setattr(software_profile._Bench, "__init__", init)
    monkeypatch.setattr(software_profile, "measure", measured)


@pytest.mark.long
def test_factors_of_a_simulated_host_come_out_of_the_fit(tmp_path: Path, simulated_host: None) -> None:
    said: list[str] = []
    out = tmp_path / "mine.toml"
    machine = machine_of(tmp_path, (2, 4))
    profile = profile_to(out, script_of(tmp_path), machine, ranks=4, seconds=1, progress=said.append)
    found = profile.stack.in_situ
    for what in ("products", "memory-bound", "loss", "optimizer"):
        assert found[f"cpu.{what}"] == pytest.approx(HIDDEN[what], rel=0.15), what
    assert profile.stack.launch_s == pytest.approx(2e-5, rel=0.1)
    assert profile.stack.parameter_s == pytest.approx(3e-5, rel=0.1)
    assert profile.stack.step_s == pytest.approx(4e-4, rel=0.15)
    assert profile.stack.product_bytes_per_s == pytest.approx(8e9, rel=0.15)
    assert profile.stack.reduced_parameter_s == pytest.approx(2e-5, rel=0.2)
    assert profile.stack.gradient_copies == pytest.approx(1.0, rel=0.1)
    assert profile.stack.fresh_bytes_per_s == pytest.approx({str(n): 1 / (n * FRESH_S) for n in (1, 2, 4)}, rel=1e-3)
    assert [found[f"cpu.all_reduce.{ranks}"] for ranks in (2, 4)] == pytest.approx([2.5, 1.5], rel=0.1)
    assert found["cpu.all_gather.2"] == pytest.approx(3.0, rel=0.01)
    assert max(abs(row.after_s / row.measured_s - 1) for row in profile.rows) < 0.03
    assert max(abs(row.before_s / row.measured_s - 1) for row in profile.rows) > 0.3
    assert "read block; torch's own for prepare, optimizer, loss" in said[0]


@pytest.mark.long
def test_what_is_written_is_what_is_read_and_runs_nothing(tmp_path: Path, simulated_host: None) -> None:
    out = tmp_path / "mine.toml"
    profile = profile_to(out, script_of(tmp_path), machine_of(tmp_path), seconds=1, progress=lambda _: None)
    (tmp_path / "train_block.py").unlink()
    again = stack_by_name(str(out))
    assert again == profile.stack
    assert again.name == "mine"
    assert again.framework == "train_block"
    assert again.evidence_on("cpu") == "fitted"
    assert "measured" in again.sources["launch_s"]
    assert "none here" in again.sources["in_situ"]


@pytest.mark.long
@pytest.mark.parametrize("simulated_host", [(0.34, 0.2)], indirect=True)
def test_a_profile_that_was_measured_beside_others_says_so_and_takes_no_part_of_a_copy_for_one(
    tmp_path: Path, simulated_host: None
) -> None:
    said: list[str] = []
    out = tmp_path / "mine.toml"
    profile_to(out, script_of(tmp_path), machine_of(tmp_path), seconds=1, progress=said.append)
    told = "others took 34% of the processors while steps were measured, 3 times in a row"
    assert stack_by_name(str(out)).gradient_copies == 0  # a fifth of a copy is what steps differ by themselves
    assert told in said[-1]
    assert told in stack_by_name(str(out)).sources["in_situ"]


@pytest.mark.long
def test_a_profile_that_begins_with_a_profile_measures_all_anew(tmp_path: Path, simulated_host: None) -> None:
    (tmp_path / "before.toml").write_text(stack_to_toml(hidden(stack_by_name("torch-eager-cpu"))))
    script = script_of(tmp_path, f'{BLOCK}like = "{tmp_path}/before.toml"\n')
    profile = profile_to(tmp_path / "again.toml", script, machine_of(tmp_path), seconds=1, progress=list[str]().append)
    stack = profile.stack
    assert stack.gradient_copies == pytest.approx(1.0, rel=0.1)
    assert stack.product_bytes_per_s == pytest.approx(8e9, rel=0.15)
    assert stack.fresh_bytes_per_s == pytest.approx({"1": 1 / FRESH_S}, rel=1e-3), "of two nobody looked again"
    assert stack.reduced_parameter_s == 0


def test_what_is_measured_beside_others_is_measured_again_and_the_quietest_counts() -> None:
    def kept(*loads: float) -> tuple[float, int]:
        left = list(loads)
        return quietest(lambda: left.pop(0), lambda load: load), len(loads) - len(left)

    assert kept(0.02, 0.0) == (0.02, 1)
    assert kept(0.5, 0.05, 0.0) == (0.05, 2)
    assert kept(0.5, 0.3, 0.4) == (0.3, 3)


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="who works is read from /proc/stat")
def test_what_no_rank_worked_others_took() -> None:
    meter, begun, worked = LoadMeter(), time.monotonic(), time.process_time()
    while time.process_time() - worked < 0.5:
        pass
    worked_s = time.process_time() - worked
    all_of, beyond = meter.share(0.0), meter.share(worked_s)
    assert all_of is not None
    assert beyond is not None
    own = worked_s / (time.monotonic() - begun) / len(os.sched_getaffinity(0))
    assert all_of - beyond == pytest.approx(own, abs=0.1)


def test_a_host_that_was_slower_beside_the_profiler_leaves_the_rest_of_a_pass_as_it_is() -> None:
    """In a short case the 2 us of the profiler for an operation count; while it looked at the large, all was slower."""
    short = Timing(10e-3, 1e-3, 3e-3, 1e-3, profiled_s=10e-3 + 1000 * 2e-6, events=1000)
    large = Timing(300e-3, 30e-3, 1.2 * 200e-3, 1.2 * 30e-3, profiled_s=1.2 * 300e-3 + 500 * 2e-6, events=500)
    slow = [short, dataclasses.replace(short), large]
    for timing, products_s, attention_s in zip(
        software_profile._paired(slow), (3e-3, 3e-3, 0.2), (1e-3, 1e-3, 0.03), strict=True
    ):
        assert (timing.products_s, timing.attention_s) == pytest.approx((products_s, attention_s), rel=1e-6)


def test_every_stack_of_the_catalog_is_written_as_it_is_read(tmp_path: Path) -> None:
    for name in ("megatron-core", "torchtitan-compile", "torch-eager-cpu", "qwen-finetune"):
        path = tmp_path / f"{name}-again.toml"
        path.write_text(stack_to_toml(stack_by_name(name)))
        assert dataclasses.replace(stack_by_name(str(path)), name=name) == stack_by_name(name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def blocks(width): ...\n", r"expected a function block\(width\).*did you mean"),
        ("x = 1\n", r"expected a function block\(width\).*none"),
        ("block = 3\n", "expected block to be a function, got int"),
        ("raise SystemExit(3)\n", "the script itself raised SystemExit"),
        ("import no_such_module_at_all\n", "raised ModuleNotFoundError"),
        (BLOCK + "widths = (1, 2)\n", "expected widths of three ascending numbers"),
        (BLOCK + "layout = 'tp2'\n", "expected layout to be one of zero0, zero2, zero3"),
        (BLOCK + "layout = 'zero3'\n", r"expected a function prepare\(model\) that shards it so"),
        (BLOCK + "like = 3\n", "expected like to be a text, got 3"),
        (BLOCK + "optimizer = 'adamw'\n", "expected optimizer to be a function, got str"),
    ],
)
def test_a_script_that_lacks_something_is_refused_with_what_was_expected(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?is){said}"):
        UserSoftware(script_of(tmp_path, text))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return 3", r"expected block\(64\) to give a torch.nn.Module, got <class 'int'>"),
        ("return nn.Linear(width, 2)", r"to map \(1, 16, 64\) to the same, got \(1, 16, 2\)"),
        ("return nn.Linear(3, 4)", r"block\(64\) on \(1, 16, 64\) raised RuntimeError"),
        ("return nn.Linear(width, width).bfloat16()", "in float32, got .*bfloat16"),
        ("return nn.Linear(width, width).nothing", "raised AttributeError"),
    ],
)
def test_a_block_is_a_module_that_keeps_its_input_s_shape(tmp_path: Path, body: str, said: str) -> None:
    software = UserSoftware(script_of(tmp_path, f"from torch import nn\ndef block(width):\n    {body}\n"))
    with pytest.raises(ConfigError, match=said):
        software.block(64)


def test_advice_on_training_is_for_what_the_script_does_as_it_is_read(tmp_path: Path) -> None:
    begins = "so put what begins to train under"
    with pytest.raises(ConfigError, match=rf"raised RuntimeError in line 2: .*{begins}"):
        UserSoftware(script_of(tmp_path, "x = 1\nraise RuntimeError('no data')\n"))
    software = UserSoftware(script_of(tmp_path, "def block(width):\n    raise KeyError('no size')\n"))
    for read in (lambda: software.block(64), lambda: UserSoftware(script_of(tmp_path, "def block("))):
        with pytest.raises(ConfigError) as refused:
            read()
        assert begins not in str(refused.value)
    with pytest.raises(ConfigError, match=r"block\(64\) raised KeyError in line 2: 'no size'; mend it there"):
        software.block(64)


@pytest.mark.long
def test_a_signal_that_ends_the_process_is_no_fault_of_the_script_that_runs(tmp_path: Path) -> None:
    script = script_of(tmp_path, "import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)\n")
    with pytest.raises(SystemExit) as ended:
        main(
            ["probe", "--software", str(script), "--machine", str(machine_of(tmp_path)), "--out", f"{tmp_path}/o.toml"]
        )
    assert ended.value.code == 128 + signal.SIGTERM


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "limit", "said"),
    [
        (
            "while True:\n    pass\n",
            "6",
            "expected an end within 6 s, it still runs.*give it longer with --limit SECONDS",
        ),
        ("import os\nos._exit(0)\n", "60", "the process that ran it ended \\(exit code 0\\).*leave out what ends it"),
    ],
)
def test_a_script_that_never_ends_or_ends_its_process_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, limit: str, said: str
) -> None:
    given = ["--machine", str(machine_of(tmp_path)), "--out", f"{tmp_path}/o.toml", "--limit", limit]
    assert main(["probe", "--software", str(script_of(tmp_path, text)), *given]) == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


@pytest.mark.long
def test_a_rank_that_ends_without_a_word_is_an_error(tmp_path: Path) -> None:
    text = BLOCK + "def prepare(model):\n    import os\n    os._exit(0)\n"
    with pytest.raises(ConfigError, match="a process ended before that"):
        measure(script_of(tmp_path, text), small()[:1], [ProfiledRanks(1, 1, 0.1)])


def test_an_empty_file_is_no_software(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("# nothing\n")
    with pytest.raises(ConfigError, match=r"expected switches of software.*got an empty file"):
        stack_by_name(str(path))


def test_blocks_that_are_no_more_than_the_head_are_refused_with_what_was_expected(tmp_path: Path) -> None:
    script = script_of(tmp_path, "from torch import nn\ndef block(width):\n    return nn.Linear(width, width)\n")
    with pytest.raises(ConfigError, match="found no run of equal ones"):
        profile_to(tmp_path / "mine.toml", script, machine_of(tmp_path), seconds=1)


def test_the_machine_file_is_of_processors_of_this_host(tmp_path: Path) -> None:
    script = script_of(tmp_path)
    with pytest.raises(ConfigError, match="expected a file measured on this host"):
        profile_to(tmp_path / "mine.toml", script, Path("cpu"), seconds=1)
    with pytest.raises(ConfigError, match="software is measured on processors only"):
        profile_to(tmp_path / "mine.toml", script, Path("h100"), seconds=1)
    alone: Machine = dataclasses.replace(load_machine("cpu"), host_id=host_id())
    save_machine(alone, tmp_path / "alone.toml")
    with pytest.raises(ConfigError, match="expected a file of lading probe --ranks 2"):
        profile_to(tmp_path / "mine.toml", script, tmp_path / "alone.toml", ranks=2, seconds=1)


def test_a_block_that_cannot_be_captured_is_refused_by_name(tmp_path: Path) -> None:
    text = """
import torch

class Odd(torch.nn.Linear):
    def forward(self, x):
        return super().forward(torch.from_numpy(x.detach().numpy()))

def block(width):
    return Odd(width, width)
"""
    with pytest.raises(ConfigError, match=r"compile or wrap it in prepare\(model\)"):
        profile_to(tmp_path / "mine.toml", script_of(tmp_path, text), machine_of(tmp_path), seconds=1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--software", "{script}"], "expected --machine FILE next to --software"),
        (["--machine", "{script}"], "--machine belongs to --software"),
        (["--limit", "5"], "--limit belongs to --software"),
        (["--software", "{script}", "--machine", "cpu", "--limit", "0"], "--limit: expected seconds above 0"),
        (["--software", "{script}", "--machine", "cpu", "--folder", "{folder}"], "--folder is a disk to measure"),
        (["--software", "{folder}/none.py", "--machine", "cpu"], "expected a file measured on this host"),
    ],
)
def test_the_command_asks_for_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    given = [word.format(script=script_of(tmp_path), folder=tmp_path) for word in arguments]
    assert main(["probe", *given, "--out", str(tmp_path / "m.toml")]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_products_in_8_bits_take_so_many_times_as_long_as_in_their_own_format(tmp_path: Path) -> None:
    table, machine = family_table("gpt", layers=2, h=256, n=4, v=1000), machine_of(tmp_path)

    def shares(precision: str, stack: Stack) -> dict[str, float]:
        request = StepRequest(
            name=precision,
            model=Architecture(family="gpt", symbols={}, blocks=(("block", 2),)),
            seq_len=128,
            machine=str(machine),
            layout=parse_layout(f"{precision},mb1,gb1"),
            stack=stack,
        )
        return simulate(request, table).step.shares_s

    plain = stack_by_name("torch-eager-cpu")
    with pytest.raises(ConfigError, match="peak only for"):
        shares("fp8", plain)
    low = dataclasses.replace(plain, in_situ={"cpu.low-precision products": 3.0})
    wide, eight = shares("bf16", low), shares("fp8", low)
    assert eight["low-precision products"] > 0
    both = eight["low-precision products"] / 3 + eight.get("products", 0.0)
    assert both == pytest.approx(wide["products"])


@pytest.mark.parametrize("key", ["cpu.product", "cpu.", "zen.products", "products"])
def test_a_factor_of_nothing_that_is_known_is_refused(tmp_path: Path, key: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'title = "t"\n[in_situ]\n"{key}" = 1.5\n')
    with pytest.raises(ConfigError, match=r"in_situ has factors for ampere, .*cpu, or one of these with \.products"):
        stack_by_name(str(path))


def copied_s(machine: Path, ranks: int, width: int, **switches: object) -> float:
    """Seconds by which copying gradients makes a step of GPT blocks longer."""
    seconds: list[float] = []
    for copies in (0.0, 1.0):
        request = StepRequest(
            name="copied",
            model=Architecture(family="gpt", symbols={}, blocks=(("block", 2),)),
            seq_len=64,
            machine=str(machine),
            layout=parse_layout(f"fp32,dp{ranks},mb1,gb{ranks}"),
            stack=dataclasses.replace(stack_by_name("torch-eager-cpu"), gradient_copies=copies, **switches),
        )
        seconds.append(simulate(request, family_table("gpt", layers=2, h=width, n=4, v=1000)).step.step_s)
    return seconds[1] - seconds[0]


def test_a_buffer_of_gradients_is_memory_anew_from_32_mib_on_and_ranks_take_turns(tmp_path: Path) -> None:
    """Two blocks 256 wide have 8 MB of gradients, 512 wide 29 MB, 768 wide 62 MB."""
    machine = machine_of(tmp_path)
    rates = {"1": 2e9, "2": 1e9}
    for width, anew in ((256, False), (512, False), (768, True)):
        plain, fresh = (copied_s(machine, 1, width, fresh_bytes_per_s=given) for given in ({}, rates))
        assert plain > 0
        assert (fresh > plain) == anew, width
    size = 2e9 * (fresh - plain)
    assert size == pytest.approx(4 * (2 * 12 * 768**2 + 1000 * 768), rel=0.05)
    for ranks, rate in ((2, 1e9), (4, 5e8)):
        machine = machine_of(tmp_path, ranks=(2, 4))
        both = [copied_s(machine, ranks, 768, fresh_bytes_per_s=given) for given in ({}, rates)]
        assert both[1] - both[0] == pytest.approx(size / rate, rel=1e-6)


def test_ranks_with_hosts_of_their_own_ask_alone_for_memory_and_gpus_copy_no_gradients(tmp_path: Path) -> None:
    rates = {"1": 2e9, "2": 1e9}
    machine = machine_of(tmp_path, ranks=(4,))
    alone = copied_s(machine, 1, 768, fresh_bytes_per_s=rates) - copied_s(machine, 1, 768, fresh_bytes_per_s={})
    lines = load_machine(str(machine))
    save_machine(dataclasses.replace(lines, processes=None), apart := tmp_path / "apart.toml")
    of_four = copied_s(apart, 4, 768, fresh_bytes_per_s=rates) - copied_s(apart, 4, 768, fresh_bytes_per_s={})
    assert of_four == pytest.approx(alone, rel=1e-6)
    assert copied_s(Path("rtx3090"), 1, 768, fresh_bytes_per_s=rates) == 0


@pytest.mark.parametrize("rates", [{"two": 1e9}, {"0": 1e9}, {"1": 0.0}])
def test_rates_of_new_memory_are_of_numbers_of_processes(tmp_path: Path, rates: dict[str, float]) -> None:
    path = tmp_path / "mine.toml"
    (key, rate), *_ = rates.items()
    path.write_text(f'title = "t"\n[fresh_bytes_per_s]\n"{key}" = {rate}\n')
    with pytest.raises(ConfigError, match="fresh_bytes_per_s must have rates above 0 by numbers of processes"):
        stack_by_name(str(path))


def small() -> tuple[ProfileCase, ...]:
    return tuple(dataclasses.replace(case, rows=1, tokens=16, vocabulary=64) for case in cases((16, 32, 64)))


def test_steps_of_a_script_are_timed(tmp_path: Path) -> None:
    (found,) = measure(script_of(tmp_path), small(), [ProfiledRanks(1, 1, 0.2)])
    assert len(found.timings) == 6
    for timing in found.timings:
        assert 0 < timing.products_s < timing.pass_s < 5
        assert 0 < timing.update_s < 5
        assert timing.attention_s == 0
        assert timing.profiled_s > timing.products_s
        assert timing.events > 10
    assert found.product_s or found.no_product
    assert found.gather_s == 0
    assert 0 <= found.fresh_s < 1e-7


@pytest.mark.slow
def test_ranks_are_timed_and_replicas_that_drift_apart_refused(tmp_path: Path) -> None:
    alone, found = measure(script_of(tmp_path), small(), [ProfiledRanks(1, 1, 0.2), ProfiledRanks(2, 1, 0.2)])
    assert alone.gather_s == 0
    assert 0 < found.gather_s < 1
    apart = BLOCK + "def prepare(model):\n    return model\n"
    with pytest.raises(ConfigError, match=r"expected prepare\(model\) to reduce gradients over the 2 ranks"):
        measure(script_of(tmp_path, apart), small(), [ProfiledRanks(2, 1, 0.2)])


def test_an_engine_has_backward_and_step(tmp_path: Path) -> None:
    engine = """
def prepare(model):
    class Engine:
        parameters = model.parameters
        def __call__(self, tokens):
            return model(tokens)
        def backward(self, loss):
            loss.backward()
    return Engine()
"""
    with pytest.raises(ConfigError, match="has one of backward and step, not both"):
        measure(script_of(tmp_path, BLOCK + engine), small(), [ProfiledRanks(1, 1, 0.1)])
