"""Offset rules and the plan of a model's slices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessa.errors import UserError
from tessa.offsets import best_window, plan_slices, random_offset

PARENT = "model.layers.0.self_attn"
LLAMA = {
    f"{PARENT}.q_proj": (512, 512),
    f"{PARENT}.k_proj": (128, 512),
    f"{PARENT}.v_proj": (128, 512),
    f"{PARENT}.o_proj": (512, 512),
    "model.layers.0.mlp.gate_proj": (1024, 512),
    "model.layers.0.mlp.up_proj": (1024, 512),
    "model.layers.0.mlp.down_proj": (512, 1024),
}
Q, K, V, OUT = (f"{PARENT}.{n}_proj" for n in "qkvo")


@settings(max_examples=200, deadline=None)
@given(
    segments=st.integers(1, 6),
    part=st.integers(1, 40),
    data=st.data(),
    multiple=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_best_window_equals_brute_force(segments, part, data, multiple, seed):
    width = data.draw(st.integers(1, part))
    energy = np.random.default_rng(seed).integers(0, 50, segments * part).astype(float)
    offset = best_window(energy, segments, width, multiple)
    sums = {
        start: sum(energy[p * part + start : p * part + start + width].sum() for p in range(segments))
        for start in range(0, part - width + 1, multiple)
    }
    assert offset == min(sums, key=lambda start: (-sums[start], start))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 300), st.data(), st.integers(1, 16))
def test_random_offsets_are_allowed_and_repeatable(seed, part, data, multiple):
    width = data.draw(st.integers(1, part))
    offset = random_offset(seed, "m", part, width, multiple)
    assert offset % multiple == 0
    assert 0 <= offset <= part - width
    assert offset == random_offset(seed, "m", part, width, multiple)


def test_random_offsets_reach_both_ends_and_depend_on_the_name():
    drawn = {random_offset(s, "m", 16, 8, 4) for s in range(60)}
    assert drawn == {0, 4, 8}
    assert len({random_offset(0, f"layer{i}", 4096, 32) for i in range(20)}) > 15
    # A fixed value: another would move the columns of adapters that are to share them.
    assert random_offset(0, "model.layers.0.self_attn", 4096, 32, 8) == 3592


@pytest.mark.parametrize("rule", ["first", "random"])
@pytest.mark.parametrize("placement", ["across", "along"])
def test_plan_covers_every_module(rule, placement):
    slices = plan_slices(LLAMA, rank=8, placement=placement, shards=4, rule=rule, seed=3)
    assert set(slices) == set(LLAMA)
    for module, s in slices.items():
        assert (s.d_out, s.d_in) == LLAMA[module]
        assert s.segments == (4 if placement == "along" else 1)
        assert s.offset % 8 == 0
    assert slices[Q].axis == ("in" if placement == "across" else "out")
    assert slices[OUT].axis == ("out" if placement == "across" else "in")
    if rule == "first":
        assert all(s.offset == 0 for s in slices.values())


def test_fused_siblings_share_their_columns():
    for seed in range(20):
        slices = plan_slices(LLAMA, rank=8, rule="random", seed=seed)
        assert slices[Q].offset == slices[K].offset == slices[V].offset
        assert slices["model.layers.0.mlp.gate_proj"].offset == slices["model.layers.0.mlp.up_proj"].offset
    assert slices[K].width > slices[Q].width  # the offset has to leave room for the widest
    alone = plan_slices({Q: LLAMA[Q]}, rank=8, rule="random", seed=19)
    assert alone[Q].width == slices[Q].width


def test_energy_of_siblings_is_summed():
    def peak(at, height):
        return np.where((np.arange(512) >= at) & (np.arange(512) < at + 8), height, 0.0)

    energy = {Q: peak(0, 5.0), K: peak(400, 3.0), V: peak(400, 3.0)}
    qkv = {m: LLAMA[m] for m in (Q, K, V)}
    slices = plan_slices(qkv, rank=2, rule="gradient", energy=energy, multiple=1)
    starts = {s.offset for s in slices.values()}
    assert len(starts) == 1
    offset = starts.pop()
    assert offset <= 400 < offset + slices[K].width
    alone = plan_slices({Q: LLAMA[Q]}, rank=2, rule="gradient", energy=energy)
    assert alone[Q].offset == 0


def test_along_sums_energy_over_shards():
    energy = np.zeros(512)
    energy[[5, 128 + 17, 256 + 17, 384 + 17]] = [2.5, 1.0, 1.0, 1.0]
    s = plan_slices(
        {Q: (512, 512)},
        rank=2,
        placement="along",
        shards=4,
        rule="weight",
        energy={Q: energy},
        offset_multiple=1,
    )[Q]
    assert s.segment_width == 1
    assert s.offset == 17


def test_placement_per_module_by_name_or_path():
    mixed = {"q_proj": "along", "k_proj": "across", "v_proj": "across", "o_proj": "across", Q: "across"}
    four = {m: LLAMA[m] for m in (Q, K, V, OUT)}
    slices = plan_slices(four, rank=4, placement=mixed, rule="first")
    assert [slices[m].axis for m in (Q, K, V, OUT)] == ["in", "in", "in", "out"]
    with pytest.raises(UserError, match=r"no entry for 'model.*o_proj'"):
        plan_slices(four, rank=4, placement={"q_proj": "along", "k_proj": "across", "v_proj": "across"})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rule": "best"}, "allowed: first, random, weight, gradient"),
        ({"rule": "weight"}, "needs the energy"),
        ({"rule": "weight", "energy": {Q: np.ones(3)}}, "512 finite numbers"),
        ({"rule": "weight", "energy": {Q: -np.ones(512)}}, "not negative"),
        ({"placement": "beside"}, "allowed: across, along"),
        ({"placement": "along", "shards": 7}, r"q_proj.*7 shards do not divide"),
        ({"offset_multiple": 0}, "at least 1"),
    ],
)
def test_refusals(kwargs, message):
    with pytest.raises(UserError, match=message):
        plan_slices({Q: LLAMA[Q]}, rank=4, **kwargs)
