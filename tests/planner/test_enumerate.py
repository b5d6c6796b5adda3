"""On spaces small enough to enumerate: the plan is near the best there is, and the bound is below all of them."""

from __future__ import annotations

from statistics import median

import pytest
from tests.planner.steps import every_choice, in_blocks, searched, tiny

from lading.memory.verify import verify
from lading.planner.residency import lower_bound_s


def ratios(seeds: range) -> list[float]:
    """Planned step time over the best of all, by seed; the bound is checked on the way."""
    found: list[float] = []
    for seed in seeds:
        step = tiny(seed)
        every = every_choice(step)
        best = min(f.timeline.duration_s for f in every)
        bound = lower_bound_s(step)
        assert 0 < bound <= best * (1 + 1e-9), f"seed {seed}: a plan takes {best}, the bound says {bound}"
        planned = searched(step)
        verify(planned.program)
        assert planned.program.peak_bytes <= step.budgets["device"]
        assert planned.timeline.duration_s >= best * (1 - 1e-9), "enumeration missed a choice"
        found.append(planned.timeline.duration_s / best)
    return found


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 16), marks=pytest.mark.slow)], ids=str)
def test_the_plan_is_near_the_best(seeds: range) -> None:
    found = ratios(seeds)
    print("planned / best:", [round(r, 3) for r in sorted(found)])
    assert median(found) < 1.001
    assert max(found) <= 1.05


@pytest.mark.long
@pytest.mark.parametrize(
    ("seed", "slower"),
    [
        *((seed, 20.0) for seed in (102, 105, 111, 134, 141, 146)),
        *((seed, 1000.0) for seed in (102, 134)),
        *(pytest.param(seed, 1000.0, marks=pytest.mark.slow) for seed in (105, 111, 141, 146)),
    ],
)
def test_recomputing_from_block_to_block_is_planned_and_allowed_for(seed: int, slower: float) -> None:
    """Where the disk is slow, the best plans recompute chains of blocks."""
    step = in_blocks(tiny(seed), slower=slower)
    modules = [op.module for op in step.graph.ops]
    assert modules == ["layers.0", "layers.1", "", "layers.1", "layers.1", "layers.0", "layers.0"]
    best = min(f.timeline.duration_s for f in every_choice(step))
    bound = lower_bound_s(step)
    assert 0 < bound <= best * (1 + 1e-9)
    planned = searched(step)
    verify(planned.program)
    assert planned.step_s <= best * 1.001
