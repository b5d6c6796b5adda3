"""The HTML report is well formed, self-contained, small, and shows the numbers it was given."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lading.ir.timeline import Event, MemorySample, Timeline
from lading.report.charts import memory_figure, metric_figure
from lading.report.figures import compute_seconds, seconds_by_kind
from lading.report.gantt import gantt_figure, merge
from lading.report.html import metric_series, write_report
from lading.report.promises import (
    Promise,
    RunSummary,
    budget_remedy,
    container_words,
    error_words,
    remarks,
    verdict,
)
from lading.report.svg import Frame, breakable, byte_ticks, second_ticks, ticks, unbroken_options, x_axis
from lading.summary import reproduction
from lading.units import GiB, MiB, format_bytes, format_seconds

VOID = {"meta", "wbr"}
SVG_VOID = {"rect", "line", "path", "circle"}


class Page(HTMLParser):
    """Checks that tags nest; collects the text of cells, of the title and of the verdict."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in VOID | SVG_VOID, f"<{tag}> must close itself"
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID | SVG_VOID, tag
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return "".join(self.words)


def page_of(path: Path, run: dict[str, Any]) -> tuple[str, Page]:
    write_report(path, **run)
    source = path.read_text(encoding="utf-8")
    return source, Page(source)


@pytest.fixture(scope="module")
def report(run: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Page]:
    return page_of(tmp_path_factory.mktemp("report") / "r.html", run)


def test_nothing_is_fetched(report: tuple[str, Page]) -> None:
    source, page = report
    assert "http:" not in source
    assert "https:" not in source
    assert "//" not in re.sub(r"</?[a-z]", "", source.split("<style>")[0])
    assert not re.search(r"@import|url\(|fetch\(|XMLHttp", source)
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object")
        assert not {"src", "href", "xlink:href"} & attributes.keys()


def test_numbers_shown_are_the_inputs(report: tuple[str, Page], run: dict[str, Any]) -> None:
    _, page = report
    summary, plan = run["summary"], run["plan"]
    assert verdict(summary) in page.text
    rows = {row[0]: row for row in page.rows if row}
    for name in ("predicted", "measured"):
        column = 1 + ("predicted", "measured").index(name)
        for kind, seconds in seconds_by_kind(run["program"], run[name]).items():
            if seconds < 0.01 * run[name].duration_s:  # summed as one
                continue
            assert rows["optimizer step" if kind == "step" else kind][column] == format_seconds(seconds)
        assert rows["whole step"][column] == format_seconds(run[name].duration_s)
    for policy in plan.policies:
        assert rows[policy.policy][2] == ("-" if policy.step_s is None else format_seconds(policy.step_s))
        assert format_bytes(policy.peak_bytes) in rows[policy.policy]
    assert f"{plan.gap:.1%} above" in page.text
    assert rows["activation"] == ["activation", "192", "720.00 MiB", "240.00 MiB", "240.00 MiB", "240.00 MiB"]
    for assumption in plan.assumptions:
        assert assumption in page.text
    for shown in (plan.request.graph_fingerprint, run["program"].fingerprint, summary.command, "torch 2.13.0"):
        assert shown in page.text


def test_the_storages_shown_cover_most_of_the_peak(report: tuple[str, Page]) -> None:
    _, page = report
    start = next(i for i, row in enumerate(page.rows) if row[0] == "what")
    rows = page.rows[start + 1 :]
    shares = [float(row[4].rstrip("%")) for row in rows if "more rows like these" not in row[0]]
    assert sum(shares) >= 85
    assert any("layers.*." in row[0] for row in rows)


def test_kinds_of_action_that_take_next_to_nothing_are_one_row(run: dict[str, Any], tmp_path: Path) -> None:
    def stretched(line: Timeline) -> Timeline:
        return dataclasses.replace(
            line,
            events=tuple(
                dataclasses.replace(e, end_s=e.start_s + 1e-7)
                if run["program"].actions[e.action].source == "caller"
                else e
                for e in line.events
            ),
        )

    changed = {**run, "predicted": stretched(run["predicted"]), "measured": stretched(run["measured"])}
    _, page = page_of(tmp_path / "r.html", changed)
    rows = {row[0]: row for row in page.rows if row}
    assert "read caller" not in rows
    assert rows["below 1% of the step each"][3] == "-"
    assert "Below 1%: read caller" in page.text


@pytest.mark.parametrize("plain_step_s", [0.5, None])
def test_a_step_of_plain_pytorch_stands_beside(run: dict[str, Any], tmp_path: Path, plain_step_s: float | None) -> None:
    summary = dataclasses.replace(run["summary"], plain_step_s=plain_step_s)
    _, page = page_of(tmp_path / "r.html", {**run, "summary": summary})
    compute_s = compute_seconds(run["program"], run["predicted"])
    if plain_step_s:
        assert f"Plain PyTorch's step{format_seconds(0.5)}measured; this run takes" in page.text
    else:
        assert f"Step without a budget{format_seconds(compute_s)}predicted, for computing alone" in page.text


def test_only_the_chosen_policy_and_the_resource_that_binds_are_marked(report: tuple[str, Page]) -> None:
    source, _ = report
    assert re.findall(r'<tr class="chosen"><td class="l name">([^<]+)', source) == ["residency", "computing"]
    assert "Limit of a step in this budget: computing" in source


def test_tooltips_know_every_slice(report: tuple[str, Page], run: dict[str, Any]) -> None:
    source, page = report
    match = re.search(r'<script type="application/json" class="actions">(.*?)</script>', source)
    assert match is not None
    actions = json.loads(match[1])["actions"]
    drawn = {attributes["data-a"] for _, attributes in page.tags if "data-a" in attributes}
    assert drawn == actions.keys()
    seconds = {e.action: e.end_s - e.start_s for e in run["measured"].events}
    for action, (label, _, measured) in actions.items():
        assert label == run["predicted"].labels[int(action)]
        assert measured == pytest.approx(seconds[int(action)], rel=1e-3)


def test_names_are_escaped(run: dict[str, Any], tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>&'
    labels = dict.fromkeys(run["predicted"].labels, "</script><script>alert(2)</script>")
    predictions = run["plan"].predictions
    rows = (dataclasses.replace(predictions.policies[0], note=evil),)
    plan = dataclasses.replace(
        run["plan"], assumptions=(evil,), predictions=dataclasses.replace(predictions, policies=rows)
    )
    graph = run["program"].graph
    storages = tuple(dataclasses.replace(s, name=evil) for s in graph.storages)
    changed = {
        **run,
        "plan": plan,
        "program": dataclasses.replace(run["program"], graph=dataclasses.replace(graph, storages=storages)),
        "summary": dataclasses.replace(run["summary"], title=evil, model=evil, machine=evil, command=evil),
        "predicted": dataclasses.replace(run["predicted"], labels=labels),
    }
    source, page = page_of(tmp_path / "r.html", changed)
    assert source.count("<script") == 2
    assert page.text.count(evil) >= 7


@pytest.mark.long
def test_a_large_step_stays_small(synthetic: ModuleType, tmp_path: Path) -> None:
    run = synthetic.run(blocks=70)
    assert len(run["program"].actions) > 10_000
    source, _ = page_of(tmp_path / "r.html", run)
    assert len(source.encode()) < 2_000_000


def test_a_plan_that_has_not_run(run: dict[str, Any], tmp_path: Path) -> None:
    summary = dataclasses.replace(
        run["summary"], measured_step_s=None, measured_peak_bytes=None, plain_peak_bytes=None, identical_to_plain=None
    )
    _, page = page_of(tmp_path / "r.html", {**run, "summary": summary, "measured": None, "metrics": []})
    assert "Not run yet" in page.text
    assert "Training" not in page.text
    assert "measured" not in page.text.lower()


def summary(**changes: Any) -> RunSummary:
    fields: dict[str, Any] = {
        "title": "t", "model": "m", "machine": "x", "date": "d", "budget_bytes": 400 * MiB, "keep_all_bytes": GiB,
        "predicted_step_s": 0.9, "measured_step_s": 1.0, "predicted_peak_bytes": 380 * MiB,
        "measured_peak_bytes": 400 * MiB,
    }  # fmt: skip
    return RunSummary(**{**fields, **changes})


def test_the_promise_is_kept_to_the_byte() -> None:
    assert summary().promise is Promise.KEPT
    broken = summary(measured_peak_bytes=400 * MiB + 1)
    assert broken.promise is Promise.BROKEN
    assert verdict(broken).startswith("Promise broken")
    assert "predicted 900.0 ms, 10.0% too low" in verdict(broken)
    assert summary(measured_step_s=None, measured_peak_bytes=None).promise is Promise.OPEN
    with pytest.raises(ValueError, match="both"):
        summary(measured_step_s=None)


def test_a_broken_promise_says_why_and_what_would_do() -> None:
    broken = summary(measured_peak_bytes=430 * MiB, excess=("step 1 took 430 MiB", "what was not predicted: a copy"))
    assert remarks(broken)[:3] == [
        "Step 1 took 430 MiB.",
        "What was not predicted: a copy.",
        "This plan needs a budget of 430.00 MiB, which it took; to stay under 400.00 MiB, plan for 350.00 MiB, less by "
        "what was not predicted.",
    ]
    assert "plan for" not in budget_remedy(10, 10, 20)
    assert not any("needs a budget" in line for line in remarks(summary()))


def test_the_whole_process_is_said() -> None:
    container = container_words(300 * MiB, 380 * MiB, 400 * MiB)
    words = remarks(summary(container=container, measured_peak_bytes=380 * MiB))[-1]
    assert "had 300.00 MiB before training" in words
    assert "680.00 MiB at the peak" in words
    assert "--memory=704m" in words  # 300 and the budget of 400
    assert "container" not in " ".join(remarks(summary()))


def test_charts_for_a_phone_keep_their_text_inside(report: tuple[str, Page]) -> None:
    source, _ = report
    assert "@media screen and (max-width:640px){.both svg.wide{display:none}svg.phone{display:block}" in source
    drawings = re.findall(r'<svg viewBox="0 0 340 \d+" class="(phone|half)"[^>]*>(.*?)</svg>', source)
    assert {class_ for class_, _ in drawings} == {"phone", "half"}
    for _, drawing in drawings:
        rows: dict[float, list[tuple[float, float]]] = {}
        for x, y, class_, words in re.findall(r'<text x="([\d.]+)" y="([\d.]+)" class="([^"]+)">([^<]*)<', drawing):
            width, names = 6.6 * len(words), class_.split()  # about 0.57 of 11.5 pixels a letter
            left = float(x) - (width if "end" in names else width / 2 if "mid" in names else 0)
            assert left >= 0, words
            assert left + width <= 340, words
            rows.setdefault(float(y), []).append((left, left + width))
        for spans in rows.values():
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))


def test_a_step_that_is_off_says_where(run: dict[str, Any], tmp_path: Path) -> None:
    line = run["measured"]
    events = tuple(dataclasses.replace(e, start_s=2 * e.start_s, end_s=2 * e.end_s) for e in line.events)
    late = dataclasses.replace(line, events=events)
    _, page = page_of(tmp_path / "r.html", {**run, "measured": late})
    assert "The measured step is longer than predicted by" in page.text
    slow = seconds_by_kind(run["program"], late)
    fast = seconds_by_kind(run["program"], run["predicted"])
    idle = {n: x.duration_s - x.busy_s("compute") for n, x in (("slow", late), ("fast", run["predicted"]))}
    by = {name: slow[name] - fast[name] for name in slow} | {"compute stream waits": idle["slow"] - idle["fast"]}
    name = max(by, key=lambda n: by[n])
    assert f"what is off most is {name}, by {format_seconds(by[name])}." in page.text


def test_error_words() -> None:
    assert error_words(110, 100) == "10.0% too high"
    assert error_words(0.95, 1) == "5.0% too low"
    assert error_words(1.0004, 1) == "exact"


def test_gantt_merges_without_losing_time(run: dict[str, Any]) -> None:
    line = run["measured"]
    events = [e for e in line.events if e.stream == "compute"]
    slices = merge(run["program"], events, line.duration_s / 100)
    assert len(slices) <= 300
    assert sum(s.busy_s for s in slices) == pytest.approx(line.busy_s("compute"))
    assert sum(s.count for s in slices) == sum(e.end_s > e.start_s for e in events)
    assert all(a.start_s <= b.start_s for a, b in itertools.pairwise(slices))


def test_timeline_shares_one_axis(run: dict[str, Any]) -> None:
    duration_s = 2 * run["measured"].duration_s
    drawn = gantt_figure(run["program"], [run["predicted"], run["measured"]], duration_s)
    ends = [
        float(x) + float(w)
        for x, w in re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)" height="22" class="k-', drawn)
    ]
    assert max(ends) == pytest.approx(78 + 948 / 2, abs=1.5)


def test_the_peak_is_drawn_at_its_height() -> None:
    samples = [MemorySample(i * 1e-5, "device", {"activation": 10 if i == 777 else 1}) for i in range(100_000)]
    line = Timeline("predicted", (Event(0, "compute", 0, 0.0, 1.0),), tuple(samples), peak_bytes=10)
    drawn = memory_figure("device", 1.0, None, [line])
    path = re.search(r'<path d="(M[^"]+)" class="r-activation"', drawn)
    assert path is not None
    assert min(float(y) for y in re.findall(r"V([\d.]+)", path[1])) == pytest.approx(16 + 270 * (1 - 1 / 1.08), abs=0.1)


def test_a_loss_that_is_not_finite_breaks_the_line() -> None:
    points = [(0.0, 3.0), (1.0, 2.0), (2.0, math.nan), (3.0, 2.0), (4.0, 1.0), (5.0, math.inf)]
    drawn = metric_figure("Loss", points, unit="")
    assert drawn.count('class="series"') == 2
    assert drawn.count('class="bad"') == 2
    assert "nan" not in drawn
    assert "inf" not in drawn
    assert "No finite value" in metric_figure("Loss", [(0.0, math.nan)], unit="")


@pytest.mark.parametrize("high", [1e-6, 3e-4, 0.02, 1.0, 1.93, 47.0, 3600.0])
def test_time_ticks_are_round_and_few(high: float) -> None:
    marks = second_ticks(high, 10)
    assert 2 <= len(marks) <= 12
    assert marks[0] == (0, "0")
    assert all(value <= high * (1 + 1e-9) for value, _ in marks)
    assert len({label for _, label in marks}) == len(marks)
    assert all(len(label) <= 9 for _, label in marks)


@pytest.mark.parametrize("high", [1.0, 900, 70_000, 690 * MiB, 1.9 * GiB, 3 * GiB, 80 * GiB, 900 * GiB])
def test_byte_ticks_are_round_and_few(high: float) -> None:
    marks = byte_ticks(high, 7)
    assert 2 <= len(marks) <= 10
    assert all(value <= high for value, _ in marks)
    assert len({label for _, label in marks}) == len(marks)


def test_ticks_keep_to_their_range() -> None:
    assert ticks(0, 1, 5) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(-3, 3, 3) == pytest.approx([-2, 0, 2])


def test_a_run_of_one_step_has_no_spread_and_is_a_dot(run: dict[str, Any], tmp_path: Path) -> None:
    summary = dataclasses.replace(run["summary"], measured_step_spread_s=0.0, plain_losses=())
    _, page = page_of(tmp_path / "r.html", run | {"summary": summary, "metrics": run["metrics"][:1]})
    assert "Spread" not in page.text
    dots = [attributes for tag, attributes in page.tags if tag == "circle"]
    assert [dot["class"] for dot in dots] == ["series"] * 3


def test_steps_are_counted_from_one() -> None:
    assert metric_series([{"step": 0, "loss": 2.5}], "loss") == [(1.0, 2.5)]


def test_names_break_at_dots_and_options_nowhere() -> None:
    assert breakable("layers.*.mlp_norm.mul") == "layers.<wbr/>*.<wbr/>mlp_<wbr/>norm.<wbr/>mul"
    assert breakable("1.5 <s>") == "1.5 &lt;s&gt;"
    assert unbroken_options("needs --memory=512m.") == 'needs <span class="word">--memory=512m</span>.'


def test_the_last_label_of_an_axis_is_not_cut() -> None:
    frame = Frame(left=70, top=0, width=200, height=50, x_high=603.8, y_high=1)
    labels = re.findall(r'<text x="([^"]+)"[^>]*class="([^"]*)">([^<]*)', x_axis(frame, [(0, "0"), (600, "600 ms")]))
    assert labels == [("70", "tick mid", "0"), ("282", "tick end", "600 ms")]


def test_what_is_typed_to_run_a_plan_again_keeps_checkpoints(tmp_path: Path) -> None:
    out = tmp_path / "my run"
    again = f"lading train --plan '{out}/plan.json'"
    assert reproduction(out) == again
    (out / "checkpoints").mkdir(parents=True)
    (out / "best").mkdir()
    moved = [f"mv '{out}/{name}' '{out}/{name}-before'" for name in ("checkpoints", "best")]
    assert reproduction(out).splitlines() == [*moved, again]
