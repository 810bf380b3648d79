"""The buffer of a base weight and its slots."""

from __future__ import annotations

import pytest
import torch

from tessa.ops.wide import WideWeight


@pytest.mark.parametrize("axis", ["in", "out"])
def test_layout_is_updated_in_place(axis: str) -> None:
    weight = torch.randn(6, 5, dtype=torch.bfloat16)
    wide = WideWeight(weight, slots=3, width=4, axis=axis)
    addresses = [t.data_ptr() for t in (wide.buffer, wide.base, wide.delta, wide.index, wide.widths)]
    delta = torch.randn(3, 6 if axis == "in" else 5)
    wide.set_slot(1, torch.ones(4, delta.shape[1]), torch.tensor([0, 2, 3, 4]))
    wide.set_slot(1, delta, torch.tensor([4, 1, 2]))
    assert torch.equal(wide.base, weight)
    block = wide.buffer[:, 5 + 4 : 5 + 8].T if axis == "in" else wide.buffer[6 + 4 : 6 + 8]
    assert torch.equal(block[:3], delta.bfloat16())
    assert not block[3].any()
    assert wide.index.tolist() == [[0] * 4, [4, 1, 2, 0], [0] * 4]
    assert wide.widths.tolist() == [0, 3, 0]
    assert torch.equal(wide.delta[1], block)
    wide.clear_slot(1)
    assert not wide.delta.any()
    assert not wide.index.any()
    assert not wide.widths.any()
    assert torch.equal(wide.base, weight)
    assert addresses == [t.data_ptr() for t in (wide.buffer, wide.base, wide.delta, wide.index, wide.widths)]


def test_rows_of_the_in_layout_are_aligned() -> None:
    wide = WideWeight(torch.randn(6, 5, dtype=torch.bfloat16), slots=3, width=1, axis="in")
    assert wide.buffer.shape == (6, 8)
    assert WideWeight(torch.randn(6, 5), slots=3, width=1, axis="in").buffer.shape == (6, 8)
    assert WideWeight(torch.randn(6, 5), slots=3, width=2, axis="in").buffer.shape == (6, 12)


def test_bias_is_zero_beyond_the_base_outputs() -> None:
    wide = WideWeight(torch.randn(3, 5), slots=2, width=2, axis="out", bias=torch.ones(3))
    assert wide.bias is not None
    assert wide.bias.tolist() == [1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("slot", "delta", "index", "message"),
    [
        (0, torch.zeros(3, 6), torch.arange(3), "at most 2 rows"),
        (0, torch.zeros(2, 5), torch.arange(2), "of length 6"),
        (0, torch.zeros(2, 6), torch.arange(3), "index"),
        (0, torch.zeros(2, 6), torch.tensor([0, 5]), r"\[0, 5\)"),
        (0, torch.zeros(2, 6), torch.tensor([-1, 0]), r"\[0, 5\)"),
        (0, torch.full((2, 6), float("nan")), torch.arange(2), "finite"),
        (4, torch.zeros(2, 6), torch.arange(2), r"\[0, 4\)"),
        (-1, torch.zeros(2, 6), torch.arange(2), r"\[0, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(
    slot: int, delta: torch.Tensor, index: torch.Tensor, message: str
) -> None:
    wide = WideWeight(torch.randn(6, 5), slots=4, width=2, axis="in")
    before = wide.buffer.clone()
    with pytest.raises(ValueError, match=message):
        wide.set_slot(slot, delta, index)
    assert torch.equal(wide.buffer, before)


@pytest.mark.parametrize(("slots", "width", "axis"), [(0, 1, "in"), (1, 0, "in"), (1, 1, "both")])
def test_arguments_out_of_range_are_refused(slots: int, width: int, axis: str) -> None:
    with pytest.raises(ValueError, match="need axis"):
        WideWeight(torch.randn(2, 2), slots, width, axis)
