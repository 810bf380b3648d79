"""Metadata of a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessa.ops.step import step_buffers, step_meta


@settings(max_examples=60, deadline=None)
@given(slots=st.integers(1, 8), data=st.data())
def test_groups_every_token_once(slots: int, data: st.DataObject) -> None:
    token_slot = data.draw(st.lists(st.integers(-1, slots - 1), max_size=40))
    spare = data.draw(st.integers(0, 5))
    buffers = step_buffers(len(token_slot) + spare, slots, "cpu")
    for buffer in buffers:
        buffer.fill_(12345)
    meta = step_meta(torch.tensor(token_slot, dtype=torch.int64), slots, out=buffers)
    assert all(a is b for a, b in zip(meta, buffers, strict=True))
    assert all(value.dtype == torch.int32 for value in meta)
    assert meta.token_slot.tolist() == token_slot + [-1] * spare
    for s in range(slots):
        segment = meta.order[int(meta.seg_start[s]) : int(meta.seg_start[s + 1])].tolist()
        assert segment == [t for t, slot in enumerate(token_slot) if slot == s]
    assert sorted(meta.order.tolist()) == list(range(len(token_slot) + spare))
    assert int(meta.seg_start[-1]) == sum(s >= 0 for s in token_slot)


def test_slots_that_do_not_exist_have_no_adapter() -> None:
    meta = step_meta(torch.tensor([2, 5, 0, -3]), slots=3)
    assert meta.seg_start.tolist() == [0, 1, 1, 2]
    assert meta.order[:2].tolist() == [2, 0]


def test_buffers_that_are_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match="hold 3 tokens and 2 slots"):
        step_meta(torch.zeros(4, dtype=torch.int32), 2, out=step_buffers(3, 2, "cpu"))
    with pytest.raises(ValueError, match="has 3 tokens and 4 slots"):
        step_meta(torch.zeros(3, dtype=torch.int32), 4, out=step_buffers(3, 2, "cpu"))


def test_empty_buffers_describe_a_step_without_adapters() -> None:
    meta = step_buffers(5, 3, "cpu")
    assert meta.token_slot.tolist() == [-1] * 5
    assert meta.seg_start.tolist() == [0] * 4
