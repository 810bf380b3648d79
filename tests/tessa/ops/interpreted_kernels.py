"""Tests of the Triton kernels in Triton's interpreter; tests/test_triton_interpreter.py runs this file.

Not collected by its name: the interpreter has to be chosen before triton is imported, which takes a process
of its own.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessa.ops import reference
from tessa.ops import triton_kernels as kernels
from tessa.ops.selfcheck import (
    NAN,
    SMALL,
    Case,
    Shape,
    check_segmented,
    check_wide,
    make_case,
    triton_implementation,
    verdict,
    wide_weight,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPS = triton_implementation()


def test_runs_in_the_interpreter() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert type(kernels._segmented_in_kernel).__name__ == "InterpretedFunction"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [False, True])
@pytest.mark.parametrize("part", ["in", "out"])
@pytest.mark.parametrize("shape", SMALL[:3], ids=str)
def test_ragged_batches(part: str, shape: Shape, widths: bool, dtype: torch.dtype) -> None:
    case = make_case(part, shape, dtype, "cpu", 11, widths)
    worst, ok = check_segmented(part, getattr(OPS, f"segmented_{part}"), case)
    assert ok, f"segmented: error {worst}"
    case = make_case(part, shape, dtype, "cpu", 11, widths)
    worst, ok = check_wide(part, getattr(OPS, f"wide_{part}"), case, bias=widths)
    assert ok, f"wide: error {worst}"


@pytest.mark.parametrize("part", ["in", "out"])
def test_several_hundred_rows(part: str) -> None:
    case = make_case(part, SMALL[3], torch.float32, "cpu", 2, widths=True)
    worst, ok = check_segmented(part, getattr(OPS, f"segmented_{part}"), case)
    assert ok, worst


@pytest.mark.parametrize("part", ["in", "out"])
@pytest.mark.parametrize("tokens", [257, 1030])
def test_larger_token_blocks(part: str, tokens: int) -> None:
    """The block sizes change with the number of tokens; segments end inside and at the edges of blocks."""
    case = make_case(part, Shape(tokens, 3, 4, 24, 20, 3), torch.float16, "cpu", 3, widths=False)
    worst, ok = check_segmented(part, getattr(OPS, f"segmented_{part}"), case)
    assert ok, worst


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 40), "k")
    slots = data.draw(st.integers(1, 9), "slots")
    shape = Shape(
        tokens=data.draw(st.integers(1, 50), "tokens"),
        slots=slots,
        k=k,
        d_in=data.draw(st.integers(k, 90), "d_in"),
        d_out=data.draw(st.integers(k, 90), "d_out"),
        used=data.draw(st.integers(1, slots), "used"),
    )
    part = data.draw(st.sampled_from(["in", "out"]), "part")
    widths = data.draw(st.booleans(), "widths")
    seed = data.draw(st.integers(0, 1000), "seed")
    case = make_case(part, shape, torch.float32, "cpu", seed, widths)
    worst, ok = check_segmented(part, getattr(OPS, f"segmented_{part}"), case)
    assert ok, f"segmented: error {worst}"
    case = make_case(part, shape, torch.float32, "cpu", seed, widths)
    worst, ok = check_wide(part, getattr(OPS, f"wide_{part}"), case, bias=True)
    assert ok, f"wide: error {worst}"


@pytest.mark.parametrize("part", ["in", "out"])
def test_segmented_takes_the_slots_of_a_wide_weight_as_they_lie(part: str) -> None:
    case = make_case(part, SMALL[2], torch.float32, "cpu", 4, widths=True)
    wide, _ = wide_weight(part, case, bias=False)
    assert wide.delta.untyped_storage().data_ptr() == wide.buffer.untyped_storage().data_ptr()
    case.delta, case.index, case.widths = wide.delta, wide.index, wide.widths
    worst, ok = check_segmented(part, getattr(OPS, f"segmented_{part}"), case)
    assert ok, worst


@pytest.mark.parametrize("part", ["in", "out"])
def test_batch_without_adapters_is_untouched(part: str) -> None:
    case = make_case(part, SMALL[1], torch.float32, "cpu", 5, widths=True)
    case.meta.seg_start.zero_()
    case.delta.fill_(NAN)
    before = case.y.clone()
    getattr(OPS, f"segmented_{part}")(
        case.y, case.x, case.index, case.delta, case.meta.order, case.meta.seg_start, case.widths
    )
    assert torch.equal(case.y, before)


@pytest.mark.parametrize("part", ["in", "out"])
def test_empty_batch(part: str) -> None:
    case = make_case(part, SMALL[1], torch.float32, "cpu", 5, widths=True)
    y = case.y[:0]
    meta = case.meta
    getattr(OPS, f"segmented_{part}")(y, case.x[:0], case.index, case.delta, meta.order, meta.seg_start)
    columns = case.x.shape[1] + case.index.numel()
    assert kernels.scatter_inputs(case.x[:0], case.index, meta.token_slot, columns).shape == (0, columns)


def _wide_case(part: str, dtype: torch.dtype) -> Case:
    case = make_case(
        part, Shape(13, 4, 9, 37, 1100 if part == "out" else 40, 3), dtype, "cpu", 6, widths=True
    )
    case.x[case.without_adapter] = 2
    return case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [False, True])
@pytest.mark.parametrize("outside", [-1, 4, 77])
def test_prologue_writes_everything_exactly(dtype: torch.dtype, outside: int, widths: bool) -> None:
    """Also the alignment columns, and for tokens whose slot does not exist."""
    case = _wide_case("in", dtype)
    if not widths:
        case.widths = None
    case.meta.token_slot[case.meta.token_slot < 0] = outside
    columns = case.x.shape[1] + case.index.numel() + 11
    out = torch.full((13, columns + 2), NAN, dtype=dtype)
    kernels.scatter_inputs(
        case.x, case.index, case.meta.token_slot, columns, case.widths, out=out[:, :columns]
    )
    want = reference.scatter_inputs_torch(case.x, case.index, case.meta.token_slot, columns, case.widths)
    assert torch.equal(out[:, :columns], want)
    assert bool(out[:, columns:].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogue_writes_everything_and_reads_only_its_own_slot(dtype: torch.dtype) -> None:
    case = _wide_case("out", dtype)
    slots, k = case.index.shape
    d_out = case.y.shape[1]
    wide = torch.full((13, d_out + slots * k + 4), NAN, dtype=dtype)
    wide[:, :d_out] = case.y
    token_slot = case.meta.token_slot[:13]
    want, magnitude = case.y.double(), case.y.double().abs()
    gen = torch.Generator().manual_seed(1)
    for t, s in enumerate(token_slot.tolist()):
        if s >= 0:
            rows = int(case.widths[s])
            part = torch.randn(rows, generator=gen).to(dtype)
            wide[t, d_out + s * k : d_out + s * k + rows] = part
            want[t].index_add_(0, case.index[s, :rows].long(), part.double())
            magnitude[t].index_add_(0, case.index[s, :rows].long(), part.double().abs())
    out = torch.full((13, d_out), NAN, dtype=dtype)
    kernels.route_outputs(wide, case.index, case.meta.token_slot, d_out, case.widths, out=out)
    worst, ok = verdict(out, want, magnitude, 1)
    assert ok, worst
    assert torch.equal(out[token_slot < 0], case.y[token_slot < 0])


def test_shapes_and_strides_that_do_not_fit_are_refused() -> None:
    case = make_case("in", SMALL[2], torch.float32, "cpu", 7, widths=False)
    meta = case.meta
    with pytest.raises(ValueError, match="shapes do not fit"):
        kernels.segmented_in(case.y[:, :-1], case.x, case.index, case.delta, meta.order, meta.seg_start)
    with pytest.raises(ValueError, match="shapes do not fit"):
        kernels.segmented_in(case.y, case.x, case.index, case.delta, meta.order, meta.seg_start[:-1])
    columns_first = case.x.T.contiguous().T
    with pytest.raises(ValueError, match="stride 1"):
        kernels.segmented_in(case.y, columns_first, case.index, case.delta, meta.order, meta.seg_start)
    with pytest.raises(ValueError, match="integer index"):
        kernels.segmented_in(case.y, case.x, case.index.float(), case.delta, meta.order, meta.seg_start)
    with pytest.raises(ValueError, match="shapes do not fit"):
        kernels.route_outputs(case.y, case.index, meta.token_slot, case.y.shape[1])
