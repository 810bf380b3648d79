"""Drawn gaps against the distributions they are named after (fixed seeds)."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from experiments.workload import arrivals

N, RATE = 20_000, 4.0


def gaps(times):
    return np.diff(times, prepend=0.0)


def test_exact_ones_are_exact():
    assert arrivals.all_at_once(3).tolist() == [0, 0, 0]
    assert arrivals.closed_loop(3).tolist() == [0, 0, 0]
    assert arrivals.constant(4, 2.0).tolist() == [0.5, 1.0, 1.5, 2.0]


def test_poisson_gaps_are_exponential_and_independent():
    g = gaps(arrivals.poisson(N, RATE, np.random.default_rng(1)))
    assert stats.kstest(g, stats.expon(scale=1 / RATE).cdf).pvalue > 0.01
    assert abs(np.corrcoef(g[:-1], g[1:])[0, 1]) < 0.02


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0, 8.0])
def test_gamma_gaps_have_the_stated_shape(cv):
    g = gaps(arrivals.gamma(N, RATE, cv, np.random.default_rng(2)))
    reference = stats.gamma(1 / cv**2, scale=cv**2 / RATE)
    # Differences of the summed times lose the digits of the tiniest gaps, which a large cv has many of.
    assert (
        stats.kstest(
            g[g > 1e-9], lambda x: (reference.cdf(x) - reference.cdf(1e-9)) / reference.sf(1e-9)
        ).pvalue
        > 0.01
    )
    assert g.mean() == pytest.approx(1 / RATE, rel=0.15)
    assert g.std() / g.mean() == pytest.approx(cv, rel=0.1)


def test_gamma_of_cv_one_is_not_some_other_process():
    g = gaps(arrivals.gamma(N, RATE, 2.0, np.random.default_rng(2)))
    assert stats.kstest(g, stats.expon(scale=1 / RATE).cdf).pvalue < 1e-6
