"""Budgets: widths within their bound, counts against LoRA's and BD-LoRA's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessa.budget import (
    MAX_COMPENSATION,
    TOLERANCE,
    bd_lora_params,
    budget_of,
    lora_params,
    most_width_for,
    width_for,
    widths_for,
)
from tessa.errors import UserError
from tessa.slices import Slice


@settings(max_examples=400, deadline=None)
@given(
    rank=st.integers(1, 128),
    part=st.integers(1, 1024),
    segments=st.sampled_from([1, 2, 3, 4, 8, 16]),
    other=st.integers(1, 8192),
    axis=st.sampled_from(["in", "out"]),
    multiple=st.sampled_from([1, 4, 16, 64]),
)
def test_every_width_lies_within_its_bound(rank, part, segments, other, axis, multiple):
    dim = part * segments
    d_out, d_in = (dim, other) if axis == "out" else (other, dim)
    width = width_for(rank, d_out, d_in, axis, segments, multiple)
    ideal = rank * (dim + other) / other
    s = Slice(axis, 0, width, segments, d_out, d_in)  # whole segments that fit, or this raises
    error = abs(s.num_params - rank * (d_in + d_out)) / (rank * (d_in + d_out))
    # Bound: matched, or no closer width with whole segments exists inside the layer.
    nearer = [w for w in (width - segments, width + segments) if 0 < w <= dim]
    assert error <= TOLERANCE + 1e-9 or all(abs(w - ideal) >= abs(width - ideal) for w in nearer)
    layer = budget_of({"m.q_proj": s}, rank).layers[0]
    if abs(error - TOLERANCE) > 1e-9:  # at the bound itself, rounding decides
        assert layer.matched == (error <= TOLERANCE)


@settings(max_examples=200, deadline=None)
@given(rank=st.integers(1, 64), dim=st.integers(256, 8192), other=st.integers(256, 8192))
def test_a_single_block_is_matched_whenever_rounding_allows(rank, dim, other):
    ideal = rank * (dim + other) / other
    width = width_for(rank, dim, other, "out")
    if TOLERANCE * ideal >= 0.5 and ideal <= dim:
        assert abs(width - ideal) <= TOLERANCE * ideal


def test_hardware_multiple_is_kept_where_the_budget_allows():
    # Llama-3-8B q_proj at 16: 32 wide, exactly LoRA's count; k_proj's 80 is a multiple of 16 too.
    assert width_for(16, 4096, 4096, "in") == 32
    assert width_for(16, 1024, 4096, "in") == 80
    # 4 * (512 + 128) / 128 = 20: 16 would be 20 % short, so the step is halved to 4.
    assert width_for(4, 128, 512, "in") == 20
    assert width_for(4, 128, 512, "in", multiple=4) == 20


def test_segments_force_an_unmatched_width_and_it_is_said():
    # 4 * (512 + 128) / 512 = 5 rows, but eight shards need at least eight.
    width = width_for(4, 128, 512, "out", segments=8)
    assert width == 8
    budget = budget_of({"m.k_proj": Slice("out", 0, width, 8, 128, 512)}, 4)
    assert not budget.matched
    assert "NOT within 5%" in budget.render()


def _rank_4_layers(hidden: int = 512, inner: int = 1408):
    return {
        "l.q_proj": (hidden, hidden, "in", 1),
        "l.gate_proj": (inner, hidden, "in", 1),
        "l.up_proj": (inner, hidden, "in", 1),
        "l.down_proj": (hidden, inner, "out", 1),
    }


def test_rounding_in_one_kind_makes_up_for_another():
    layers = _rank_4_layers()
    alone = {m: width_for(4, *layer) for m, layer in layers.items()}
    assert alone == {"l.q_proj": 8, "l.gate_proj": 5, "l.up_proj": 5, "l.down_proj": 5}  # 5.45 is wanted
    widths = widths_for(layers, 4)
    assert widths == alone | {"l.down_proj": 6}
    assert most_width_for(4, *layers["l.down_proj"]) == 6

    def budget(chosen):
        return budget_of(
            {m: Slice(a, 0, chosen[m], n, d_out, d_in) for m, (d_out, d_in, a, n) in layers.items()}, 4
        )

    assert not budget(alone).matched
    assert budget(widths).matched


@settings(max_examples=200, deadline=None)
@given(
    rank=st.integers(1, 64),
    hidden=st.integers(8, 600),
    inner=st.integers(8, 1600),
    placement=st.sampled_from(["across", "along"]),
)
def test_compensation_keeps_every_layer_within_its_bound(rank, hidden, inner, placement):
    layers = {m: (8 * o, 8 * i, a, 1) for m, (o, i, a, _) in _rank_4_layers(hidden, inner).items()}
    if placement == "along":
        swap = {"in": "out", "out": "in"}
        layers = {m: (o, i, swap[a], 8) for m, (o, i, a, _) in layers.items()}
    widths = widths_for(layers, rank)
    totals = {"alone": 0.0, "together": 0.0}
    for module, (d_out, d_in, axis, segments) in layers.items():
        alone = width_for(rank, d_out, d_in, axis, segments)
        other, wanted = (d_in if axis == "out" else d_out), rank * (d_in + d_out)
        error = abs(widths[module] * other / wanted - 1)
        assert widths[module] == alone or (TOLERANCE < error <= MAX_COMPENSATION)
        assert max(widths[module], alone) <= most_width_for(rank, d_out, d_in, axis, segments)
        assert widths[module] % segments == 0
        totals["alone"] += alone * other - wanted
        totals["together"] += widths[module] * other - wanted
    assert widths["l.gate_proj"] == widths["l.up_proj"]
    assert abs(totals["together"]) <= abs(totals["alone"]) + 1e-6


def test_width_never_exceeds_the_layer():
    assert width_for(64, 128, 16, "in") == 16


def test_lora_and_bd_lora_counts():
    assert lora_params(16, 1024, 4096) == 16 * 5120
    # Column: A [16, 4096] whole, B four blocks of [256, 4]; row: A four blocks of [4, 1024], B [1024, 16].
    assert bd_lora_params(16, 1024, 4096, "column", 4) == 16 * 4096 + 4 * 256 * 4
    assert bd_lora_params(16, 1024, 4096, "row", 4) == 4 * 4 * 1024 + 1024 * 16
    with pytest.raises(UserError, match="rank 6"):
        bd_lora_params(6, 1024, 4096, "row", 4)


def test_bd_lora_matched_rank_differs_and_is_near():
    slices = {
        "l.q_proj": Slice("in", 0, 32, 1, 4096, 4096),
        "l.o_proj": Slice("out", 0, 32, 1, 4096, 4096),
    }
    budget = budget_of(slices, 16, blocks=8)
    assert budget.tessa == budget.lora == 2 * 16 * 8192
    assert budget.bd_lora == 2 * 16 * (4096 + 512)
    # 16 * 8192 / 4608 = 28.4, nearest multiple of eight: 32 (24 spends 0.84 of the budget, 32 spends 1.125).
    assert budget.bd_lora_rank == 32
    assert budget.bd_lora_matched_params == 2 * 32 * 4608
    assert "BD-LoRA at its nearest rank 32" in budget.render()


def test_bd_lora_is_absent_where_blocks_do_not_fit():
    slices = {"l.q_proj": Slice("in", 0, 6, 1, 90, 64)}
    budget = budget_of(slices, 8, blocks=8)
    assert (budget.bd_lora, budget.bd_lora_rank, budget.bd_lora_matched_params) == (None, None, None)
    assert budget_of({"l.q_proj": Slice("in", 0, 6, 1, 96, 64)}, 4, blocks=8).bd_lora is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: width_for(0, 8, 8, "in"), "positive"),
        (lambda: width_for(1, 8, 8, "in", multiple=3), "power of two"),
        (lambda: width_for(1, 12, 8, "out", segments=8), "8 shards do not divide"),
        (lambda: budget_of({}, 4), "at least one"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(UserError, match=message):
        call()
