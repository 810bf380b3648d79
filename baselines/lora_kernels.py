"""Segmented LoRA kernels in Triton: shrink ``x A^T`` and expand ``y += (x A^T) B^T``, grouped by adapter slot.

What Punica's SGMV computes, for fused projections at once; used where vLLM's own kernels are not at hand. Step
metadata and the way tiles find their slot are those of `tessa.ops.triton_kernels`: grids depend on shapes only, so
launches can be captured in a CUDA graph and replayed with new metadata.

- ``x: [T, d_in]``, ``y: [T, d_out]`` (rows may be strided); ``inner: [T, n r]`` float32, contiguous
- ``a: [S, n r, d_in]``: the A factors of n fused projections one under the other
- ``b: [S, m, r]``: their B factors one under the other; projection p owns rows ``part_start[p]`` to
  ``part_start[p + 1]`` of ``b`` and the same columns of ``y``, and columns ``p r`` to ``(p + 1) r`` of ``inner``
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tessa.ops.triton_kernels import _find_segment, _upcast


@triton.jit
def _shrink_kernel(
    inner_ptr,
    x_ptr,
    a_ptr,
    order_ptr,
    seg_start_ptr,
    N,
    d_in,
    S,
    stride_i,
    stride_x,
    stride_as,
    stride_an,
    UPCAST: tl.constexpr,
    S_PAD: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    slot, lo, hi = _find_segment(seg_start_ptr, tl.program_id(0), S, BLOCK_M, S_PAD)
    if lo >= hi:
        return
    rows = lo + tl.arange(0, BLOCK_M)
    row_ok = rows < hi
    token = tl.load(order_ptr + rows, mask=row_ok, other=0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_ok = n < N
    x_rows = x_ptr + token * stride_x
    a_rows = a_ptr + slot.to(tl.int64) * stride_as + n.to(tl.int64) * stride_an
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for j0 in range(tl.program_id(2) * BLOCK_K, d_in, SPLIT_K * BLOCK_K):
        j = j0 + tl.arange(0, BLOCK_K)
        j_ok = j < d_in
        left = tl.load(x_rows[:, None] + j[None, :], mask=row_ok[:, None] & j_ok[None, :], other=0.0)
        right = tl.load(a_rows[None, :] + j[:, None], mask=j_ok[:, None] & n_ok[None, :], other=0.0)
        if UPCAST:
            left, right = left.to(tl.float32), right.to(tl.float32)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    target = inner_ptr + token[:, None] * stride_i + n[None, :]
    mask = row_ok[:, None] & n_ok[None, :]
    if SPLIT_K == 1:
        tl.store(target, acc, mask=mask)
    else:
        tl.atomic_add(target, acc, mask=mask, sem="relaxed")


@triton.jit
def _expand_kernel(
    y_ptr,
    inner_ptr,
    b_ptr,
    order_ptr,
    seg_start_ptr,
    part_start_ptr,
    r,
    S,
    stride_y,
    stride_i,
    stride_bs,
    stride_bm,
    UPCAST: tl.constexpr,
    S_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    slot, lo, hi = _find_segment(seg_start_ptr, tl.program_id(0), S, BLOCK_M, S_PAD)
    part = tl.program_id(2)
    first = tl.load(part_start_ptr + part) + tl.program_id(1) * BLOCK_N
    end = tl.load(part_start_ptr + part + 1)
    if (lo >= hi) | (first >= end):
        return
    rows = lo + tl.arange(0, BLOCK_M)
    row_ok = rows < hi
    token = tl.load(order_ptr + rows, mask=row_ok, other=0).to(tl.int64)
    cols = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
    col_ok = cols < end
    b_rows = b_ptr + slot.to(tl.int64) * stride_bs + cols * stride_bm
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, r, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        k_ok = k < r
        left = tl.load(
            inner_ptr + token[:, None] * stride_i + part * r + k[None, :],
            mask=row_ok[:, None] & k_ok[None, :],
            other=0.0,
        )
        right = tl.load(b_rows[None, :] + k[:, None], mask=k_ok[:, None] & col_ok[None, :], other=0.0)
        if UPCAST:
            right = right.to(tl.float32)
        else:
            left = left.to(right.dtype)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    y_ptrs = y_ptr + token[:, None] * stride_y + cols[None, :]
    mask = row_ok[:, None] & col_ok[None, :]
    base = tl.load(y_ptrs, mask=mask, other=0.0)
    tl.store(y_ptrs, (base.to(tl.float32) + acc).to(base.dtype), mask=mask)


def shrink(inner: Tensor, x: Tensor, a: Tensor, order: Tensor, seg_start: Tensor) -> None:
    """Write ``inner[t] = a[slot_t] x[t]``; rows of tokens without adapter are left as they are, or zeroed.

    With few tokens the sum over d_in is split over thread blocks that add atomically, so the result's last bits may
    differ from run to run.
    """
    slots, n, d_in = a.shape
    _check(inner.shape == (x.shape[0], n) and x.shape[1] == d_in, inner, x, a, seg_start)
    config = shrink_config(x.shape[0], n, d_in, x.dtype)
    if config["SPLIT_K"] > 1:
        inner.zero_()
    grid = (x.shape[0] // config["BLOCK_M"] + slots, triton.cdiv(n, config["BLOCK_N"]), config["SPLIT_K"])
    _shrink_kernel[grid](
        inner, x, a, order, seg_start, n, d_in, slots,
        inner.stride(0), x.stride(0), a.stride(0), a.stride(1),
        UPCAST=_upcast(x), S_PAD=triton.next_power_of_2(slots), **config,
    )  # fmt: skip


def expand(
    y: Tensor, inner: Tensor, b: Tensor, order: Tensor, seg_start: Tensor, part_start: Tensor, widest: int
) -> None:
    """Add ``b[slot_t] inner[t]`` of every projection to its columns of ``y``.

    part_start: int32 ``[n + 1]`` on the same device; widest: the most rows of ``b`` that one projection owns.
    """
    slots, rows, r = b.shape
    parts = part_start.shape[0] - 1
    fits = inner.shape == (y.shape[0], parts * r) and rows <= y.shape[1]
    _check(fits, inner, y, b, seg_start)
    config = expand_config(y.shape[0], r, widest, y.dtype)
    grid = (y.shape[0] // config["BLOCK_M"] + slots, triton.cdiv(widest, config["BLOCK_N"]), parts)
    _expand_kernel[grid](
        y, inner, b, order, seg_start, part_start, r, slots,
        y.stride(0), inner.stride(0), b.stride(0), b.stride(1),
        UPCAST=_upcast(y), S_PAD=triton.next_power_of_2(slots), **config,
    )  # fmt: skip


def shrink_config(tokens: int, n: int, d_in: int, dtype: torch.dtype) -> dict[str, Any]:
    """Block sizes from shapes alone. The output is narrow, so few tokens need a split sum to fill the GPU."""
    few = tokens <= 256
    block_k = max(16, min(64 if dtype == torch.float32 else 128, triton.next_power_of_2(d_in)))
    split = 1 if tokens > 2048 else max(1, min(16 if few else 4, d_in // (2 * block_k)))
    return {
        "BLOCK_M": 16 if few else 32,
        "BLOCK_N": max(16, min(64, triton.next_power_of_2(n))),
        "BLOCK_K": block_k,
        "SPLIT_K": split,
        "num_warps": 4,
        "num_stages": 3 if dtype != torch.float32 else 2,
    }


def expand_config(tokens: int, r: int, widest: int, dtype: torch.dtype) -> dict[str, Any]:
    """Block sizes from shapes alone. The sum over r is short and the output wide: spread over d_out."""
    few = tokens <= 256
    return {
        "BLOCK_M": 16 if few else 64,
        "BLOCK_N": max(16, min(64 if few or dtype == torch.float32 else 128, triton.next_power_of_2(widest))),
        "BLOCK_K": max(16, min(64, triton.next_power_of_2(r))),
        "num_warps": 4,
        "num_stages": 2,
    }


def _check(fits: bool, inner: Tensor, wide: Tensor, factor: Tensor, seg_start: Tensor) -> None:
    if not fits or seg_start.shape[0] != factor.shape[0] + 1:
        raise ValueError(
            f"LoRA kernel: shapes do not fit: inner {tuple(inner.shape)}, x or y {tuple(wide.shape)}, "
            f"factor {tuple(factor.shape)}, segment starts {tuple(seg_start.shape)}"
        )
    if inner.dtype != torch.float32 or inner.stride(1) != 1 or wide.stride(1) != 1 or factor.stride(2) != 1:
        raise ValueError(
            "LoRA kernel: inner must be float32, and inner, x, y and the factors need stride 1 along the last "
            f"dimension; inner is {inner.dtype}, strides {inner.stride()}, {wide.stride()}, {factor.stride()}"
        )
