"""Adapter popularity: exact where the rule is exact, chi-square where it is drawn (fixed seeds)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from experiments.workload import popularity as p

N = 30_000


def counts(ids, k):
    return np.bincount(ids, minlength=k)


def test_identical_and_distinct():
    assert p.identical(4).tolist() == [0, 0, 0, 0]
    assert p.distinct(5, 3).tolist() == [0, 1, 2, 0, 1]


def test_uniform_is_flat():
    assert stats.chisquare(counts(p.uniform(N, 12, np.random.default_rng(1)), 12)).pvalue > 0.01


@pytest.mark.parametrize("s", [0.0, 0.9, 1.0, 1.5])
def test_zipf_follows_its_shares(s):
    k = 50
    shares = p.zipf_shares(k, s)
    assert shares[0] / shares[1] == pytest.approx(2**s)
    assert shares[0] / shares[9] == pytest.approx(10**s)
    drawn = counts(p.zipf(N, k, s, np.random.default_rng(2)), k)
    assert stats.chisquare(drawn, N * shares).pvalue > 0.01


@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0, 3.0])
def test_slora_power_follows_its_formula(alpha):
    k = 20
    drawn = counts(p.slora_power(N, k, alpha, np.random.default_rng(3)), k)
    assert drawn.size == k
    # floor(k U^(1/alpha)) <= a  <=>  U < ((a + 1) / k)^alpha
    shares = np.diff((np.arange(k + 1) / k) ** alpha)
    assert stats.chisquare(drawn, N * shares).pvalue > 0.01


# floor(1.5^k) for k = 0..14, and the 133 requests that are left of 1,000.
PUNICA_1000 = [291, 194, 133, 129, 86, 57, 38, 25, 17, 11, 7, 5, 3, 2, 1, 1]


def test_punica_shares_of_1000_requests_are_exact():
    assert p.punica_geometric_counts(1000, 1.5) == PUNICA_1000
    assert sum(PUNICA_1000) == 1000
    assert sorted(PUNICA_1000) == sorted([int(1.5**k) for k in range(15)] + [133])
    ids, as_published = p.punica_geometric(1000, 1.5, None, np.random.default_rng(0))
    assert as_published
    assert counts(ids, 1).tolist() == PUNICA_1000
    assert ids.tolist() != sorted(ids)


@given(st.integers(1, 5000), st.floats(1.05, 4.0))
def test_punica_counts_add_up_and_fall(n, ratio):
    got = p.punica_geometric_counts(n, ratio)
    assert sum(got) == n
    assert min(got) >= 1
    assert got == sorted(got, reverse=True)


@given(st.integers(1, 2000), st.integers(1, 40), st.floats(1.01, 4.0))
def test_truncated_geometric_counts_add_up_and_keep_the_ratio(n, k, ratio):
    got = p.truncated_geometric_counts(n, k, ratio)
    assert sum(got) == n
    assert len(got) == k
    shares = ratio ** -np.arange(k, dtype=float)
    assert np.abs(np.array(got) - n * shares / shares.sum()).max() < 1 + 1e-6


def test_punica_with_a_given_number_of_adapters():
    rng = np.random.default_rng(0)
    ids, as_published = p.punica_geometric(1000, 1.5, 4, rng)
    assert not as_published
    assert counts(ids, 4).tolist() == p.truncated_geometric_counts(1000, 4, 1.5) == [415, 277, 185, 123]
    ids, as_published = p.punica_geometric(1000, 1.5, 64, rng)
    assert as_published
    assert ids.max() < 16


@given(st.integers(0, 50), st.integers(1, 50))
def test_base_requests_are_spread_and_the_order_of_the_rest_is_kept(m, extra):
    ids = np.arange(m, dtype=np.int32)
    out = p.interleave_base(ids, m + extra, np.random.default_rng(m))
    assert (out == -1).sum() == extra
    assert out[out >= 0].tolist() == ids.tolist()


def test_base_places_are_uniform():
    rng = np.random.default_rng(5)
    where = np.zeros(10)
    for _ in range(3000):
        where += p.interleave_base(np.zeros(4, dtype=np.int32), 10, rng) < 0
    assert stats.chisquare(where).pvalue > 0.01


def test_realised_shares_count_base_requests_in_the_total():
    shares = p.realised_shares(np.array([-1, 0, 0, 3, 3, 3, 7, 7, 1, -1]))
    assert shares == {
        "top1_share": 0.3,
        "top5_share": 0.8,
        "top20_share": 0.8,
        "distinct_adapters": 4,
        "base_share": 0.2,
    }
    assert p.realised_shares(np.array([-1, -1]))["top1_share"] == 0.0
