"""Prompts share no prefix, for as many of them as the vocabulary allows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments.workload import tokens
from experiments.workload.tokens import make_prompts
from tessa.errors import UserError


def prompts_of(lengths, vocab, low=0, seed=0):
    flat, offsets, meta = make_prompts(np.asarray(lengths), vocab, np.random.default_rng(seed), low)
    return [tuple(flat[a:b].tolist()) for a, b in itertools.pairwise(offsets)], meta


def test_first_tokens_are_all_different_while_the_vocabulary_lasts():
    prompts, meta = prompts_of([4] * 100, 100)
    assert len({p[0] for p in prompts}) == 100
    assert meta == {
        "distinct_within_tokens": 1,
        "prompts_sharing_first_token": 0,
        "prompts_too_short_to_differ": 0,
    }


def test_beyond_the_vocabulary_the_second_token_tells_apart_and_it_is_said():
    prompts, meta = prompts_of([4] * 250 + [1], 100)
    assert len({p[0] for p in prompts[:100]}) == 100
    assert len({p[:2] for p in prompts[:250]}) == 250
    assert meta == {
        "distinct_within_tokens": 2,
        "prompts_sharing_first_token": 151,
        "prompts_too_short_to_differ": 1,
    }


@settings(max_examples=60)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=200), st.integers(2, 12), st.integers(0, 3))
def test_any_two_prompts_differ_within_the_stated_tokens(lengths, size, low):
    prompts, meta = prompts_of(lengths, low + size, low)
    assert [len(p) for p in prompts] == lengths
    assert all(low <= t < low + size for p in prompts for t in p)
    k = meta["distinct_within_tokens"]
    assert size ** (k - 1) < len(lengths) <= size**k or (k == 1 and len(lengths) <= size)
    heads = [p[:k] for p in prompts if len(p) >= k]
    assert len(set(heads)) == len(heads)


def test_tokens_after_the_first_are_uniform():
    prompts, _ = prompts_of([50] * 400, 500)
    rest = np.bincount([t for p in prompts for t in p[1:]], minlength=500)
    assert stats.chisquare(rest).pvalue > 0.01


def test_too_much_or_too_little_room_is_refused(monkeypatch):
    with pytest.raises(UserError, match="min_token_id 9 leaves fewer than two"):
        prompts_of([3], 10, low=9)
    monkeypatch.setattr(tokens, "MAX_TOTAL_TOKENS", 100)
    with pytest.raises(UserError, match="hold 101 tokens"):
        prompts_of([101], 10)
