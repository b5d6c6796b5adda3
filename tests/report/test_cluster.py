"""The page of a cluster's step is well formed, self-contained, and shows the numbers it was given."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from tests.report.test_html import Page
from tools.pipelines import PipelineSeconds, simulate_pipeline

from lading.ir.schedules import schedule
from lading.ir.timeline import Event, MemorySample, Timeline
from lading.report.cluster_page import ClusterPage, growth_figure, ranks_figure, write_cluster_page
from lading.sim.traces import rank_timeline

RUN = simulate_pipeline(schedule("1f1b", 4, 1, 8), PipelineSeconds(forward=1, backward=2, send_forward=0.1))
HELD = tuple(
    MemorySample(time_s, f"rank {rank}", {"parameter": 4 << 30, "activation": size << 30})
    for rank in (0, 3)
    for time_s, size in ((0.0, 10), (5.0, 40), (20.0, 0))
)
SHOWN = ClusterPage(
    title="llama on 32 x <device>",
    subtitle="dp8,pp4",
    fits=(False, "Does not fit: up to 90 GiB of 80 GiB"),
    tiles=[("Step", "34.2 s", "30 to 38 s")],
    shares_s={"products": 20.0, "bubble": 9.0, "nothing": 0.0, "optimizer": 1.0},
    memory=[{"parameter": 4 << 30, "activation": 40 << 30}, {"parameter": 4 << 30, "activation": 30 << 30}],
    device_bytes=80 << 30,
    timeline=dataclasses.replace(rank_timeline(RUN.times, ranks=[0, 3]), memory=HELD),
    growth=[(4, 30.0, 100.0), (8, 31.0, 96.8), (16, 32.0, 93.8)],
    sentences=["16 ranks one by one"],
    assumed=["a network & its NICs"],
)


@pytest.fixture
def page(tmp_path: Path) -> Page:
    path = tmp_path / "page.html"
    write_cluster_page(path, SHOWN)
    source = path.read_text()
    assert "http" not in re.sub(r"http://www.w3.org/\S+", "", source)
    return Page(source)


def test_it_shows_what_it_was_given(page: Page) -> None:
    words = " ".join(page.words)
    for sentence in (SHOWN.title, SHOWN.fits[1], "16 ranks one by one", "34.2 s", "a network & its NICs"):
        assert sentence in words
    cells = {row[0]: row[1:] for row in page.rows if row}
    assert cells["products"] == ["20.000 s", "66.7%"]
    assert "nothing" not in cells
    assert cells["sum"] == ["44.00 GiB", "34.00 GiB"]
    assert cells["16"] == ["32.000 s", "94", "93.8%"]
    assert "broken" in str([attributes.get("class") for tag, attributes in page.tags if tag == "div"])


def test_slices_are_those_of_the_timeline() -> None:
    drawn = ranks_figure(SHOWN.timeline)
    actions = {int(found) for found in re.findall(r'data-a="(\d+)"', drawn)}
    assert actions == {e.action for e in SHOWN.timeline.events if e.end_s > e.start_s}
    data = json.loads(re.findall(r'<script type="application/json" class="actions">(.*?)</script>', drawn)[0])
    assert {int(key) for key in data["actions"]} == actions
    for class_ in ("k-forward", "k-backward", "k-communication"):
        assert f'class="{class_}"' in drawn
    assert "rank 3" in drawn
    beside = re.findall(r'class="tick end">([^<]*)<', drawn)
    assert set(beside) == {"compute", "send on", "send back"}
    assert "rank 1" not in drawn


def test_short_slices_are_merged() -> None:
    events = tuple(Event(0, "compute", i, i * 1e-6, (i + 1) * 1e-6) for i in range(5000))
    long = Event(0, "compute", 9999, 0.005, 1.0)
    timeline = dataclasses.replace(Timeline("predicted", (), ()), events=(*events, long))
    drawn = ranks_figure(timeline)
    assert drawn.count("<rect") < 20
    assert 'data-n="' in drawn


def test_growth_falls_from_its_first_point() -> None:
    drawn = growth_figure(SHOWN.growth)
    path = re.findall(r'<path d="M([^"]+)" class="series"', drawn)[0]
    heights = [float(point.split(" ")[1]) for point in path.split("L")]
    assert heights == sorted(heights)
    assert heights[0] < heights[-1]
