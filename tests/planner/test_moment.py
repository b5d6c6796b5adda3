"""The tree of the peak: every byte of it once, in the state that the walk of the step says."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lading.cli.main import main
from lading.clusters import step_of
from lading.ir.plan import Plan
from lading.ir.reporting import Branch
from lading.ir.request import Request
from lading.planner.moment import tree_of
from lading.planner.unshard import choose_groups, neighbor_peaks
from lading.report.plan_table import print_tree


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "layout", "stack", "share"),
    [
        ("gpt2", "zero3", "default", 0.4),
        ("llama3.2-1b", "zero3,gb128,recompute=full", "torchtitan-compile", 0.5),
        ("qwen3-30b-a3b", "zero3,ep8", "torchtitan-eager", 0.2),
    ],
)
def test_all_bytes_once(model: str, layout: str, stack: str, share: float) -> None:
    asked = Request(model=model, machine="h100", devices=64, layout=layout, seq_len=2048, stack=stack)
    request, table = step_of(asked)
    low, high = neighbor_peaks(request, table)
    chosen = choose_groups(request, table, int(low + share * (high - low)))
    total, moment = tree_of(chosen, table).total, chosen.gathered.peak
    states = {
        "gathered": moment.gathered,
        "coming": moment.coming,
        "gradients": moment.gradients,
        "in reduction": moment.reduced,
    }
    for state, sizes in states.items():
        assert total.get(state, 0) == pytest.approx(sum(sizes.values()), rel=1e-6), state
    assert total["sharded"] == pytest.approx(moment.state_bytes, rel=0.001)
    assert total["kept"] == pytest.approx(moment.activation_bytes, rel=1e-6)
    assert sum(total.values()) == pytest.approx(chosen.peak_bytes, rel=0.001)


def test_blocks_like_one_before_are_summed_up() -> None:
    leaf = Branch("w", "tensor", "bfloat16 2 x 2", {"sharded": 1024})
    same = Branch("a", "module", children=(leaf,), num_equal=3)
    root = Branch(
        "model [x]", "module", states={"kept": 2048}, children=(same, Branch("b", "module", children=(leaf,)))
    )
    said = io.StringIO()
    print_tree(root, Console(file=said, width=100))
    assert said.getvalue().splitlines() == [
        "model [x]: sharded 4.00 KiB, kept 2.00 KiB",
        "├── a x 3: sharded 3.00 KiB",
        "│   └── w bfloat16 2 x 2: sharded 1.00 KiB",
        "└── b: sharded 1.00 KiB",
    ]


def test_long_lines_go_on_below() -> None:
    """Nothing is cut off at the console's edge."""
    sizes = {"sharded": 1024, "gathered": 2048, "kept": 4096}
    below = Branch("a.very.long.name", "module", "group 0, backward", sizes)
    said = io.StringIO()
    print_tree(Branch("a model at its peak, somewhere", "module", children=(below,)), Console(file=said, width=40))
    for line in said.getvalue().splitlines():
        assert len(line) <= 40
    words = said.getvalue().replace("│", " ").split()
    figures = ["sharded", "1.00", "KiB,", "gathered", "2.00", "KiB,", "kept", "4.00", "KiB"]
    assert words[-len(figures) :] == figures
    assert words[: words.index("└──")][-len(figures) :] == figures


@pytest.mark.long
def test_the_command_says_and_saves_it(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    pins = [word for pin in ("zero=3", "pp=1", "tp=1", "cp=1") for word in ("--pin", pin)]
    asked = ["plan", "--model", "gpt2", "--machine", "h100", "--devices", "16", "--global-batch", "64", *pins]
    assert main([*asked, "--tree", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "What stays gathered in" in said
    assert "residency *" in said
    assert "tokens.weight bfloat16 50257 x 768: sharded" in said
    plan = Plan.load(out)
    assert plan.request.policy == "residency"
    assert {name for group in plan.choices.units for name in group.modules} >= {"tokens", "positions", "norm", "head"}
    assert set(plan.predictions.peaks) == {"start", "step", "longest", "save", "resume"}
    assert main([*asked, "--unshard", "zero3", "--out", str(out)]) == 0
    assert Plan.load(out).request.policy == "zero3"
    whole = ["--pin", "zero=0", *pins[2:], "--tree"]
    assert main([*asked[:9], *whole, "--out", str(out)]) == 0
    assert "no tree: expected a layout with zero3" in capsys.readouterr().out
    assert Plan.load(out).choices.units == ()
