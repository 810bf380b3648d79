"""Drawn lengths against their distributions (fixed seeds)."""

from __future__ import annotations

import numpy as np
from scipy import stats

from experiments.workload import lengths


def test_fixed():
    values, clipped = lengths.fixed(5, 7)
    assert values.tolist() == [7] * 5
    assert clipped == 0


def test_uniform_includes_both_ends_and_is_flat():
    values, _ = lengths.uniform(30_000, 3, 8, np.random.default_rng(1))
    counts = np.bincount(values, minlength=9)
    assert counts[:3].sum() == 0
    assert counts[3:].size == 6
    assert stats.chisquare(counts[3:]).pvalue > 0.01


def test_lognormal_has_its_median_and_sigma():
    values, clipped = lengths.lognormal(20_000, 1000.0, 0.8, 1, 10**7, np.random.default_rng(2))
    assert clipped == 0
    log = (np.log(values) - np.log(1000.0)) / 0.8
    assert stats.kstest(log, "norm").pvalue > 0.01


def test_lognormal_counts_what_it_clips():
    values, clipped = lengths.lognormal(20_000, 100.0, 1.0, 50, 200, np.random.default_rng(3))
    assert values.min() == 50
    assert values.max() == 200
    expected = 2 * stats.norm.sf(np.log(2))  # both ends lie a factor 2 from the median
    assert abs(clipped / 20_000 - expected) < 0.02
