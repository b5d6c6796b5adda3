"""Terminal tables and the figures behind them."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lading.ir.graph import Role
from lading.ir.plan import Choice, Choices, Option, ResourceLimit
from lading.ir.timeline import Timeline
from lading.report.figures import coarse, peak_storages, placement, seconds_by_kind
from lading.report.plan_table import fit_table, limits_table, policy_table, print_plan
from lading.report.promises import limit_words, wear_words
from lading.units import MiB, format_bytes


def printed(*renderables: Any, width: int = 120) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width)
    for renderable in renderables:
        console.print(renderable)
    return out.getvalue()


def test_policies_keep_their_figures_whole_at_80_columns(run: dict[str, Any]) -> None:
    plan = run["plan"]
    for width in (80, 120):
        shown = printed(policy_table(plan), width=width)
        assert "…" not in shown
        assert all(len(line) <= width for line in shown.splitlines())
        assert [line.split()[1] for line in shown.splitlines() if line.lstrip().startswith(">")] == [
            plan.request.policy
        ]
        for row in plan.policies:
            line = next(text for text in shown.splitlines() if row.policy in text)
            assert format_bytes(row.peak_bytes) in line
    assert f"{plan.gap:.1%} above" in " ".join(shown.split())


def test_text_is_not_taken_for_markup(run: dict[str, Any]) -> None:
    predictions = run["plan"].predictions
    row = dataclasses.replace(predictions.policies[0], policy="[bold]literal[/bold]")
    plan = dataclasses.replace(run["plan"], predictions=dataclasses.replace(predictions, policies=(row,)))
    shown = printed(policy_table(plan), width=200)
    assert "[bold]literal[/bold]" in shown


def test_fit_table_says_what_does_not_fit() -> None:
    shown = printed(fit_table({"device": 401 * MiB, "disk": 5}, {"device": 400 * MiB}, {"parameter": 7 * MiB}))
    device, disk = (next(line for line in shown.splitlines() if line.strip().startswith(t)) for t in ("device", "disk"))
    assert device.split()[-1] == "no"
    assert "-1.00 MiB" in device
    assert "unlimited" in disk
    assert "parameter 7.00 MiB" in shown


def test_print_plan_shows_everything(run: dict[str, Any]) -> None:
    out = io.StringIO()
    print_plan(run["plan"], run["program"].graph, Console(file=out, width=120))
    for part in ("Does it fit", "Policies", "What goes where", *run["plan"].assumptions):
        assert part in out.getvalue()


def test_placement_counts_each_storage_under_its_options(run: dict[str, Any]) -> None:
    plan, graph = run["plan"], run["program"].graph
    table = placement(plan, graph)
    for role, options in table.items():
        assert sum(p.size_bytes for p in options.values()) == graph.bytes_of_role(Role(role))
    storage = next(c.storage for c in plan.choices.gaps if c.option == Option("disk"))
    request = dataclasses.replace(plan.request, budgets={"device": 1, "host": 1, "disk": 1})
    choices = Choices(gaps=(*plan.choices.gaps, Choice(storage, 0, 1, Option("host"))))
    mixed = dataclasses.replace(plan, request=request, choices=choices)
    role = graph.storages[storage].role
    after = placement(mixed, graph)[role]
    assert after[Option("host")].size_bytes == graph.storages[storage].size_bytes
    assert after[Option("disk")] == table[role][Option("disk")]


def test_peak_storages_agree_with_the_memory_samples(run: dict[str, Any]) -> None:
    for name in ("predicted", "measured"):
        line: Timeline = run[name]
        time_s, present = peak_storages(run["program"], line)
        sizes = [run["program"].graph.storages[s].size_bytes for s in present]
        assert sum(sizes) == line.peak_of_tier("device")
        assert sizes == sorted(sizes, reverse=True)
        assert any(s.time_s == time_s and s.total_bytes == sum(sizes) for s in line.memory if s.tier == "device")


def test_seconds_by_kind_add_up(run: dict[str, Any]) -> None:
    line: Timeline = run["measured"]
    busy = sum(line.busy_s(stream) for stream in {e.stream for e in line.events})
    seconds = seconds_by_kind(run["program"], line)
    assert sum(seconds.values()) == pytest.approx(busy)
    assert seconds["read disk"] == pytest.approx(line.busy_s("disk_read"))


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 9)), min_size=1, max_size=40), st.integers(1, 12))
def test_coarse_keeps_the_peak_and_the_order(samples: list[tuple[float, int]], columns: int) -> None:
    samples = sorted(samples)
    shown = coarse(samples, 1.0, columns)
    assert max(samples[i][1] for _, i in shown) == max(height for _, height in samples)
    assert [column for column, _ in shown] == sorted({column for column, _ in shown})
    for column, index in shown:
        assert samples[index][0] <= (column + 1) / columns + 1e-9


def test_no_torch_and_no_rich_until_needed() -> None:
    code = (
        "import sys, lading.report.html, lading.report.perfetto, lading.report.plan_table, lading.report.progress, "
        "lading.report.metrics; print([m for m in ('torch', 'rich', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_limit_of_a_step_is_said_by_resource(run: dict[str, Any]) -> None:
    """In a table at 80 columns, and in one sentence before a run."""
    limits = (
        ResourceLimit(resource="disk both ways", seconds=0.4, size_bytes=3 * MiB),
        ResourceLimit(resource="computing", seconds=0.25),
    )
    predictions = dataclasses.replace(run["plan"].predictions, limits=limits, step_s=0.5)
    plan = dataclasses.replace(run["plan"], predictions=predictions)
    shown = printed(limits_table(plan), width=80)
    binds, other = (
        next(line for line in shown.splitlines() if line.strip().startswith(each.resource)) for each in limits
    )
    assert binds.split()[3:] == ["3.00", "MiB", "400.0", "ms", "25.0%"]
    assert other.split()[1:] == ["-", "250.0", "ms", "100.0%"]
    assert limit_words(plan) == (
        "limit of a step in this budget: disk both ways 400.0 ms for 3.00 MiB (beside it: computing 250.0 ms); "
        "planned 500.0 ms, 25.0% above it"
    )
    none = dataclasses.replace(plan, predictions=dataclasses.replace(predictions, limits=()))
    assert limit_words(none) == ""
    first = dataclasses.replace(none, predictions=dataclasses.replace(predictions, limits=limits[1:]), peers=(plan,))
    assert limit_words(first) == limit_words(plan)  # of a pipeline that of the rank that is limited most


def test_what_disks_take_is_said_for_a_step_and_a_day(run: dict[str, Any]) -> None:
    """A day has 172,800 steps of half a second; memory of the host does not wear."""
    predictions = dataclasses.replace(run["plan"].predictions, step_s=0.5)
    moved = {"disk_write": 3 * MiB, "disk_read": 5 * MiB, "host_write": 7 * MiB}
    name = run["plan"].request.policy
    rows = tuple(
        dataclasses.replace(each, moved_bytes=moved if each.policy == name else {}) for each in predictions.policies
    )
    plan = dataclasses.replace(run["plan"], predictions=dataclasses.replace(predictions, policies=rows))
    words = "written: 3.00 MiB a step to disk, 506.25 GiB a day of steps as predicted, checkpoints aside"
    assert wear_words(plan) == words
    request = dataclasses.replace(plan.request, settings={**plan.request.settings, "experts": 1.0})
    some = dataclasses.replace(plan, request=request)  # whose experts without tokens are not written
    assert wear_words(some) == words.replace("written:", "written at most:")
    kept = tuple(dataclasses.replace(each, moved_bytes={}) for each in predictions.policies)
    none = dataclasses.replace(plan, predictions=dataclasses.replace(predictions, policies=kept))
    assert wear_words(none) == ""
    replicas = dataclasses.replace(plan, layout="dp2")
    assert wear_words(replicas) == words.replace("written:", "written, on each rank:")
    stages = dataclasses.replace(none, layout="pp2", peers=(plan,))
    assert wear_words(stages) == words.replace("written:", "written, on the rank that writes most:")
