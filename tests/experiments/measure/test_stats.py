"""Intervals against scipy, and what they do with too little or broken data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from experiments.measure.stats import (
    adapter_cost,
    ratio_interval,
    t_interval,
)
from tessa.errors import UserError


def test_t_interval_is_scipys():
    x = [3.1, 2.9, 3.4, 3.0, 3.3]
    i = t_interval(x)
    low, high = scipy_stats.t.interval(0.95, len(x) - 1, np.mean(x), scipy_stats.sem(x))
    assert (i.centre, i.low, i.high, i.n) == pytest.approx((np.mean(x), low, high, 5))


def test_t_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = sum((i := t_interval(rng.normal(5, 2, 4), 0.9)).low <= 5 <= i.high for _ in range(2000))
    assert 0.88 < hits / 2000 < 0.92


def test_too_little_or_broken_data_give_no_interval():
    empty, one, broken = t_interval([]), t_interval([2.0]), t_interval([1.0, math.nan, 2.0])
    assert math.isnan(empty.centre)
    assert one.centre == 2.0
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert math.isnan(broken.centre)
    with pytest.raises(UserError, match="confidence level"):
        t_interval([1.0, 2.0], level=95)


def test_pairing_takes_out_what_rounds_differ_in():
    base = np.array([100.0, 60.0, 140.0, 80.0])
    i = ratio_interval(0.8 * base, base)
    assert (i.centre, i.low, i.high) == pytest.approx((0.8, 0.8, 0.8))
    cost = adapter_cost(np.array([0.79, 0.81, 0.8, 0.8]) * base, base)
    assert cost.low < 0.2 < cost.high
    assert cost.high - cost.low < 0.05
    with pytest.raises(UserError, match="round by round"):
        ratio_interval([1.0], [1.0, 2.0])
    with pytest.raises(UserError, match="above 0"):
        ratio_interval([0.0], [1.0])
