"""Slices: indices, sharding by rank, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessa.errors import UserError
from tessa.slices import Slice, axis_of, fused_siblings, parallel_of

ATOL = 1e-12  # float64, sums of at most a few hundred products of order one


@st.composite
def sharded_slices(draw):
    """A slice with a tensor-parallel layout that fits it: (slice, parallel, world, replicas)."""
    parallel = draw(st.sampled_from(["column", "row"]))
    axis = draw(st.sampled_from(["in", "out"]))
    along = (axis == "out") == (parallel == "column")
    shards = draw(st.sampled_from([1, 2, 3, 4, 8]))
    replicas = draw(st.sampled_from([1, 2, 4])) if parallel == "column" else 1
    segments = shards * draw(st.integers(1, 4)) if along else draw(st.integers(1, 3))
    part = draw(st.integers(1, 9))
    segment_width = draw(st.integers(1, part))
    offset = draw(st.integers(0, part - segment_width))
    sliced = segments * part
    other = draw(st.integers(1, 12)) * (1 if along else shards)
    d_out, d_in = (sliced, other) if axis == "out" else (other, sliced)
    s = Slice(axis, offset, segment_width * segments, segments, d_out, d_in)
    return s, parallel, shards * replicas, replicas


def _reference(s: Slice, delta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """delta applied as a full-size weight update."""
    full = np.zeros((s.d_out, s.d_in))
    if s.axis == "out":
        full[list(s.indices), :] = delta
    else:
        full[:, list(s.indices)] = delta
    return full @ x


def _rank_output(s: Slice, delta: np.ndarray, x: np.ndarray, rank: int, world: int, parallel, replicas: int):
    """One rank's share, from nothing but its local slice and its local input."""
    local = s.local(rank, world, parallel, replicas=replicas)
    if parallel == "row":
        x = x[rank * local.d_in : (rank + 1) * local.d_in]
    assert x.shape[0] == local.d_in
    part, y = local.take(delta), np.zeros((local.d_out, x.shape[1]))
    assert part.shape == local.shape
    if s.axis == "out":
        y[list(local.indices)] += part @ x
    else:
        y += part @ x[list(local.indices)]
    return y


@settings(max_examples=300, deadline=None)
@given(sharded_slices(), st.integers(0, 2**32 - 1))
def test_ranks_together_equal_the_unsharded_delta(case, seed):
    s, parallel, world, replicas = case
    rng = np.random.default_rng(seed)
    delta, x = rng.standard_normal(s.delta_shape), rng.standard_normal((s.d_in, 3))
    ranks = [_rank_output(s, delta, x, r, world, parallel, replicas) for r in range(world)]
    # Replicas compute the same shard: every one must agree, and one of each group enters the output.
    for r in range(world):
        np.testing.assert_array_equal(ranks[r], ranks[r - r % replicas])
    distinct = ranks[::replicas]
    total = np.concatenate(distinct) if parallel == "column" else np.sum(distinct, axis=0)
    np.testing.assert_allclose(total, _reference(s, delta, x), atol=ATOL)


@settings(max_examples=100, deadline=None)
@given(sharded_slices())
def test_every_rank_holds_the_same_amount(case):
    s, parallel, world, replicas = case
    sizes = {s.local(r, world, parallel, replicas=replicas).shape for r in range(world)}
    assert len(sizes) == 1
    rows, cols = sizes.pop()
    assert rows * cols * (world // replicas) == s.num_params


def test_kv_segments_finer_than_a_head_and_replicated_heads():
    # 2 KV heads of 64, P = 8 segments of 2 rows: each quarter of a head holds one segment at offset 3.
    s = Slice("out", offset=3, width=16, segments=8, d_out=128, d_in=32)
    assert s.ranges[:2] == ((3, 5), (19, 21))
    whole_head = ((3, 5), (19, 21), (35, 37), (51, 53))
    assert s.local(1, 2, "column").ranges == whole_head
    # On 8 ranks each head lives on 4 of them: ranks 4-7 hold head 1, that is rows 8-16 of the delta.
    for rank in range(8):
        local = s.local(rank, 8, "column", replicas=4)
        assert local.d_out == 64
        assert local.ranges == whole_head
        assert local.rows == ((0, 8) if rank < 4 else (8, 16))


def test_along_refuses_world_that_cuts_a_segment_and_names_the_allowed():
    s = Slice("out", 0, 12, 6, 48, 16)
    assert s.allowed_worlds("column") == [1, 2, 3, 6]
    with pytest.raises(UserError, match=r"\[1, 2, 3, 6\]"):
        s.local(0, 4, "column")
    assert s.allowed_worlds("row") is None
    assert s.local(3, 4, "row").cols == (12, 16)


def test_shifted_moves_positions_only():
    local = Slice("out", 1, 4, 2, 8, 6).local(0, 1, "column")
    moved = local.shifted(100)
    assert moved.ranges == ((101, 103), (105, 107))
    assert (moved.rows, moved.cols) == (local.rows, local.cols)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"axis": "rows"}, "axis must be 'in' or 'out'"),
        ({"offset": -1}, "offset must be at least 0"),
        ({"width": 0}, "width must be positive"),
        ({"width": 2.0}, "width must be an integer"),
        ({"segments": 3}, "3 segments do not divide"),
        ({"width": 3}, "3 is not a multiple of its 2"),
        ({"offset": 3}, "at most 4 and this one's offset at most 2"),
    ],
)
def test_invalid_slices_are_refused(kwargs, message):
    good = {"axis": "out", "offset": 0, "width": 4, "segments": 2, "d_out": 8, "d_in": 6}
    Slice(**good)
    with pytest.raises(UserError, match=message):
        Slice(**(good | kwargs))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((2, 2, "column"), "rank 2 of 2"),
        ((0, 3, "row"), "6 .*|does not shard"),
        ((0, 2, "both"), "'column' or 'row'"),
    ],
)
def test_invalid_ranks_are_refused(args, message):
    s = Slice("out", 0, 4, 2, 8, 8)
    with pytest.raises(UserError, match=message):
        s.local(*args)


def test_dict_round_trip_is_strict():
    s = Slice("in", 2, 4, 1, 8, 6)
    assert Slice.from_dict(s.to_dict()) == s
    with pytest.raises(UserError, match=r"q_proj: .*missing \['width'\], unknown \['c'\]"):
        Slice.from_dict({**{k: v for k, v in s.to_dict().items() if k != "width"}, "c": 4}, where="q_proj")
    with pytest.raises(UserError, match=r"q_proj: .*axis"):
        Slice.from_dict({**s.to_dict(), "axis": "x"}, where="q_proj")


def test_module_names_decide_sharding_and_axis():
    assert parallel_of("model.layers.0.self_attn.k_proj") == "column"
    assert axis_of("model.layers.0.mlp.down_proj", "across") == "out"
    assert axis_of("model.layers.0.mlp.down_proj", "along") == "in"
    assert axis_of("up_proj", "across") == "in"
    assert fused_siblings("m.v_proj") == ("m.q_proj", "m.k_proj", "m.v_proj")
    assert fused_siblings("m.mlp.down_proj") == ("m.mlp.down_proj",)
    with pytest.raises(UserError, match="lm_head"):
        parallel_of("lm_head")
    with pytest.raises(UserError, match="beside"):
        axis_of("q_proj", "beside")
