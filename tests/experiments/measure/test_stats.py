"""Intervals against scipy, and what they do with too little or broken data."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from experiments.measure.stats import (
    adapter_cost,
    bootstrap_interval,
    over_repeats,
    ratio_interval,
    ratios_within_rounds,
    rotated_orders,
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


def test_bootstrap_covers_the_median_and_repeats_itself():
    x = np.random.default_rng(2).lognormal(0, 0.5, 200)
    i = bootstrap_interval(x)
    assert i == bootstrap_interval(x)
    assert i.low < np.median(x) < i.high
    assert i.low < 1.0 < i.high
    assert bootstrap_interval(x, "mean").centre == pytest.approx(x.mean())
    with pytest.raises(UserError, match="mean, median"):
        bootstrap_interval(x, "mode")


@pytest.mark.parametrize("interval", [t_interval, bootstrap_interval])
def test_too_little_or_broken_data_give_no_interval(interval):
    empty, one, broken = interval([]), interval([2.0]), interval([1.0, math.nan, 2.0])
    assert math.isnan(empty.centre)
    assert one.centre == 2.0
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    assert math.isnan(broken.centre)
    with pytest.raises(UserError, match="confidence level"):
        interval([1.0, 2.0], level=95)


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


def test_every_backend_runs_once_in_every_place():
    names = ["base", "punica", "slora", "tessa"]
    orders = rotated_orders(names, 4)
    assert orders[0] == names
    for place in range(4):
        assert {order[place] for order in orders} == set(names)
    assert rotated_orders(names, 5)[4] == names
    for wrong in ([], ["a", "a"]):
        with pytest.raises(UserError):
            rotated_orders(wrong, 1)
    with pytest.raises(UserError):
        rotated_orders(names, 0)


def frame():
    rows = []
    for repeat, base in enumerate([100.0, 50.0, 80.0]):
        rows.append({"backend": "base", "tp": 1, "repeat": repeat, "status": "complete", "x": base})
        rows.append({"backend": "tessa", "tp": 1, "repeat": repeat, "status": "complete", "x": 0.9 * base})
        status = "complete" if repeat else "failed"
        rows.append(
            {
                "backend": "slora",
                "tp": 1,
                "repeat": repeat,
                "status": status,
                "x": 0.5 * base if repeat else 1e9,
            }
        )
        rows.append({"backend": "punica", "tp": 1, "repeat": repeat, "status": "invalid", "x": 1e9})
    return pd.DataFrame(rows)


def test_ratios_within_rounds_pair_complete_rows_only():
    out = ratios_within_rounds(frame(), "x", "base", by=["tp"]).set_index("backend")
    assert out["centre"].to_dict() == pytest.approx(
        {"base": 1.0, "tessa": 0.9, "slora": 0.5, "punica": math.nan}, nan_ok=True
    )
    assert out["n"].to_dict() == {"base": 3, "tessa": 3, "slora": 2, "punica": 0}
    with pytest.raises(UserError, match="several rows"):
        ratios_within_rounds(pd.concat([frame(), frame()]), "x", "base")


def test_ratios_keep_groups_whose_key_is_missing():
    f = frame().assign(popularity=None)
    out = ratios_within_rounds(f, "x", "base", by=["popularity"]).set_index("backend")
    assert out["centre"]["tessa"] == pytest.approx(0.9)


def test_over_repeats_keeps_gaps_as_gaps():
    out = over_repeats(frame(), ["backend"], "x").set_index("backend")
    assert out["n"].to_dict() == {"base": 3, "tessa": 3, "slora": 2, "punica": 0}
    assert math.isnan(out["centre"]["punica"])
    assert out["centre"]["slora"] == pytest.approx(32.5)
