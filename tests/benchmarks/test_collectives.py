"""Collectives against figures of sources that no constant was set from."""

from __future__ import annotations

import numpy as np
from benchmarks.calibrate.collectives import published_sweeps

from lading.cost.collective import NCCL


def test_figures_published_elsewhere_are_predicted() -> None:
    errors = {sweep.name: np.abs(np.expm1(sweep.errors(NCCL))).mean() for sweep in published_sweeps(used=False)}
    assert len(errors) >= 12
    assert np.mean(list(errors.values())) < 0.09
    assert max(errors.values()) < 0.2


def test_what_constants_were_set_from_is_met() -> None:
    errors = [np.abs(np.expm1(sweep.errors(NCCL))).mean() for sweep in published_sweeps(used=True)]
    assert np.mean(errors) < 0.06
