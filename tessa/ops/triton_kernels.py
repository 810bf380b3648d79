"""Triton kernels of the adapter ops: two segmented kernels, prologue and epilogue of the wide product.

Notation, padding and the meaning of every argument: `tessa.ops.reference` and `tessa.ops.step`. All tensors
lie on one device; ``x``, ``y`` and ``wide`` may be strided by rows, with stride 1 along the last dimension;
``delta`` may have any strides, so that a slot's block inside a wide weight serves the segmented kernels too.
Indices are contiguous int32 or int64, metadata and widths int32.

Every grid depends on shapes only, never on the contents of the metadata, and block sizes are chosen from
shapes, never by timing, so a launch can be captured in a CUDA graph and replayed with new metadata. The
block sizes follow from the tensor-core tile sizes and the number of SMs of an A100/H100; they have not been
tuned by measurement.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _find_segment(seg_start_ptr, tile, S, BLOCK_M: tl.constexpr, S_PAD: tl.constexpr):
    """Slot of a tile, and the range of ``order`` from the tile's first token to the slot's end, or empty.

    Slot s begins at tile ``seg_start[s] // BLOCK_M + s``. That leaves room for segments of any raggedness,
    since ``floor(b / M) - floor(a / M) + 1 >= ceil((b - a) / M)``, without a prefix sum over the slots.
    """
    slots = tl.arange(0, S_PAD)
    begin = tl.load(seg_start_ptr + slots, mask=slots < S, other=0)
    started = (begin // BLOCK_M + slots <= tile) & (slots < S)
    slot = tl.sum(started.to(tl.int32), axis=0) - 1
    lo = tl.load(seg_start_ptr + slot)
    hi = tl.load(seg_start_ptr + slot + 1)
    lo += (tile - (lo // BLOCK_M + slot)) * BLOCK_M
    return slot, lo, hi


@triton.jit
def _segmented_in_kernel(
    y_ptr,
    x_ptr,
    x_index_ptr,
    delta_ptr,
    order_ptr,
    seg_start_ptr,
    width_ptr,
    d_out,
    S,
    K,
    stride_y,
    stride_x,
    stride_ds,
    stride_dk,
    stride_dn,
    HAS_WIDTH: tl.constexpr,
    UPCAST: tl.constexpr,
    S_PAD: tl.constexpr,
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
    cols = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    col_ok = cols < d_out
    width = K
    if HAS_WIDTH:
        width = tl.load(width_ptr + slot)
    delta_ptr += slot.to(tl.int64) * stride_ds
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, width, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        k_ok = k < width
        source = tl.load(x_index_ptr + slot * K + k, mask=k_ok, other=0)
        a = tl.load(
            x_ptr + token[:, None] * stride_x + source[None, :],
            mask=row_ok[:, None] & k_ok[None, :],
            other=0.0,
        )
        b = tl.load(
            delta_ptr + k.to(tl.int64)[:, None] * stride_dk + cols[None, :] * stride_dn,
            mask=k_ok[:, None] & col_ok[None, :],
            other=0.0,
        )
        b = b.to(a.dtype)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    y_ptrs = y_ptr + token[:, None] * stride_y + cols[None, :]
    mask = row_ok[:, None] & col_ok[None, :]
    base = tl.load(y_ptrs, mask=mask, other=0.0)
    tl.store(y_ptrs, (base.to(tl.float32) + acc).to(base.dtype), mask=mask)


@triton.jit
def _segmented_out_kernel(
    y_ptr,
    x_ptr,
    y_index_ptr,
    delta_ptr,
    order_ptr,
    seg_start_ptr,
    width_ptr,
    d_in,
    S,
    K,
    stride_y,
    stride_x,
    stride_ds,
    stride_dk,
    stride_dn,
    HAS_WIDTH: tl.constexpr,
    UPCAST: tl.constexpr,
    S_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    slot, lo, hi = _find_segment(seg_start_ptr, tl.program_id(0), S, BLOCK_M, S_PAD)
    width = K
    if HAS_WIDTH:
        width = tl.load(width_ptr + slot)
    if (lo >= hi) | (tl.program_id(1) * BLOCK_N >= width):
        return
    rows = lo + tl.arange(0, BLOCK_M)
    row_ok = rows < hi
    token = tl.load(order_ptr + rows, mask=row_ok, other=0).to(tl.int64)
    k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_ok = k < width
    x_rows = x_ptr + token * stride_x
    delta_rows = delta_ptr + slot.to(tl.int64) * stride_ds + k.to(tl.int64) * stride_dk
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for j0 in range(0, d_in, BLOCK_K):
        j = j0 + tl.arange(0, BLOCK_K)
        j_ok = j < d_in
        a = tl.load(x_rows[:, None] + j[None, :], mask=row_ok[:, None] & j_ok[None, :], other=0.0)
        b = tl.load(
            delta_rows[None, :] + j.to(tl.int64)[:, None] * stride_dn,
            mask=j_ok[:, None] & k_ok[None, :],
            other=0.0,
        )
        b = b.to(a.dtype)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    target = tl.load(y_index_ptr + slot * K + k, mask=k_ok, other=0)
    y_ptrs = y_ptr + token[:, None] * stride_y + target[None, :]
    # Padding rows point at column 0, which a real row may own too. Their sum is exactly zero, so writing only
    # where there is something to add keeps them from overwriting the real row's result.
    mask = row_ok[:, None] & k_ok[None, :] & (acc != 0.0)
    base = tl.load(y_ptrs, mask=mask, other=0.0)
    tl.store(y_ptrs, (base.to(tl.float32) + acc).to(base.dtype), mask=mask)


@triton.jit
def _scatter_inputs_kernel(
    wide_ptr,
    x_ptr,
    x_index_ptr,
    token_slot_ptr,
    width_ptr,
    columns,
    d_in,
    S,
    K,
    stride_w,
    stride_x,
    HAS_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(token_slot_ptr + token)
    width = K
    if HAS_WIDTH:
        width = tl.load(width_ptr + slot, mask=(slot >= 0) & (slot < S), other=0)
    # A slot outside [0, S) puts k outside [0, K) in every one of the S blocks.
    k = cols - d_in - slot * K
    own = (cols >= d_in) & (cols < d_in + S * K) & (k >= 0) & (k < width)
    source = tl.load(x_index_ptr + slot * K + k, mask=own, other=0)
    source = tl.where(own, source, cols)
    value = tl.load(x_ptr + token * stride_x + source, mask=own | (cols < d_in), other=0.0)
    tl.store(wide_ptr + token * stride_w + cols, value, mask=cols < columns)


@triton.jit
def _route_outputs_kernel(
    y_ptr,
    wide_ptr,
    y_index_ptr,
    token_slot_ptr,
    width_ptr,
    d_out,
    S,
    K,
    stride_y,
    stride_w,
    HAS_WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)
    col_ok = cols < d_out
    wide_ptr += token * stride_w
    y_ptr += token * stride_y
    tl.store(y_ptr + cols, tl.load(wide_ptr + cols, mask=col_ok), mask=col_ok)
    slot = tl.load(token_slot_ptr + token)
    if (slot >= 0) & (slot < S):
        # The copies above and the stores below reach the same columns from different threads.
        tl.debug_barrier()
        width = K
        if HAS_WIDTH:
            width = tl.load(width_ptr + slot)
        for k0 in range(0, width, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            k_ok = k < width
            target = tl.load(y_index_ptr + slot * K + k, mask=k_ok, other=0)
            here = k_ok & (target >= first) & (target < first + BLOCK_N)
            part = tl.load(wide_ptr + d_out + slot * K + k, mask=here, other=0.0).to(tl.float32)
            # As in the segmented kernel: padding adds zero and must not overwrite a real row's column.
            here &= part != 0.0
            base = tl.load(wide_ptr + target, mask=here, other=0.0)
            tl.store(y_ptr + target, (base.to(tl.float32) + part).to(base.dtype), mask=here)


def segmented_in(
    y: Tensor,
    x: Tensor,
    x_index: Tensor,
    delta: Tensor,
    order: Tensor,
    seg_start: Tensor,
    width: Tensor | None = None,
) -> None:
    """Add the in part into ``y: [T, d_out]``; ``x: [T, d_in]``, ``delta: [S, K, d_out]``."""
    slots, k, d_out = delta.shape
    _check(y, x, x_index, slots, k, (y.shape[1] == d_out) and seg_start.shape[0] == slots + 1)
    tokens = x.shape[0]
    if tokens == 0 or k == 0:
        return
    config = segmented_in_config(tokens, k, d_out, x.dtype)
    grid = (tokens // config["BLOCK_M"] + slots, triton.cdiv(d_out, config["BLOCK_N"]))
    _segmented_in_kernel[grid](
        y, x, x_index, delta, order, seg_start, seg_start if width is None else width,
        d_out, slots, k, y.stride(0), x.stride(0), *delta.stride(),
        HAS_WIDTH=width is not None, UPCAST=_upcast(x), S_PAD=triton.next_power_of_2(slots), **config,
    )  # fmt: skip


def segmented_out(
    y: Tensor,
    x: Tensor,
    y_index: Tensor,
    delta: Tensor,
    order: Tensor,
    seg_start: Tensor,
    width: Tensor | None = None,
) -> None:
    """Add the out part into ``y: [T, d_out]``; ``x: [T, d_in]``, ``delta: [S, K, d_in]``."""
    slots, k, d_in = delta.shape
    _check(y, x, y_index, slots, k, (x.shape[1] == d_in) and seg_start.shape[0] == slots + 1)
    tokens = x.shape[0]
    if tokens == 0 or k == 0:
        return
    config = segmented_out_config(tokens, k, d_in, x.dtype)
    grid = (tokens // config["BLOCK_M"] + slots, triton.cdiv(k, config["BLOCK_N"]))
    _segmented_out_kernel[grid](
        y, x, y_index, delta, order, seg_start, seg_start if width is None else width,
        d_in, slots, k, y.stride(0), x.stride(0), *delta.stride(),
        HAS_WIDTH=width is not None, UPCAST=_upcast(x), S_PAD=triton.next_power_of_2(slots), **config,
    )  # fmt: skip


def scatter_inputs(
    x: Tensor,
    x_index: Tensor,
    token_slot: Tensor,
    columns: int,
    width: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Input of the wide product ``[W | D_1 | ... | D_S]``: [T, columns], ``columns >= d_in + S * K``.

    Holds x, then the gathered inputs of each token in its own slot's block, zero everywhere else. Every
    element of ``out`` is written.
    """
    slots, k = x_index.shape
    tokens, d_in = x.shape
    wide = x.new_empty(tokens, columns) if out is None else out
    _check(wide, x, x_index, slots, k, wide.shape[1] == columns >= d_in + slots * k)
    if tokens:
        block = min(1024, triton.next_power_of_2(columns))
        _scatter_inputs_kernel[(tokens, triton.cdiv(columns, block))](
            wide, x, x_index, token_slot, token_slot if width is None else width,
            columns, d_in, slots, k, wide.stride(0), x.stride(0),
            HAS_WIDTH=width is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return wide


def route_outputs(
    wide: Tensor,
    y_index: Tensor,
    token_slot: Tensor,
    d_out: int,
    width: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Output of the product with ``[W; D_1; ...; D_S]``: [T, d_out] contiguous.

    Takes ``wide: [T, >= d_out + S K]``: the base columns, plus the K results of each token's own slot at
    ``y_index``. Other slots' results are not read; every element of ``out`` is written.
    """
    slots, k = y_index.shape
    tokens = wide.shape[0]
    y = wide.new_empty(tokens, d_out) if out is None else out
    _check(y, wide, y_index, slots, k, y.shape[1] == d_out <= wide.shape[1] - slots * k)
    if tokens:
        block = min(1024, triton.next_power_of_2(d_out))
        _route_outputs_kernel[(tokens, triton.cdiv(d_out, block))](
            y, wide, y_index, token_slot, token_slot if width is None else width,
            d_out, slots, k, y.stride(0), wide.stride(0),
            HAS_WIDTH=width is not None, BLOCK_N=block, BLOCK_K=min(256, triton.next_power_of_2(max(k, 1))),
            num_warps=4,
        )  # fmt: skip
    return y


def segmented_in_config(tokens: int, k: int, d_out: int, dtype: torch.dtype) -> dict[str, Any]:
    """Block sizes for the in part: the sum over K is short, the output wide: spread over d_out."""
    config = _by_tokens(tokens, dtype)
    block_n = 64 if tokens <= 256 or dtype == torch.float32 else 128
    config["BLOCK_N"] = max(16, min(block_n, triton.next_power_of_2(d_out)))
    config["BLOCK_K"] = max(16, min(32 if dtype == torch.float32 else 64, triton.next_power_of_2(k)))
    config["num_stages"] = 2 if k <= 2 * config["BLOCK_K"] else 3
    return config


def segmented_out_config(tokens: int, k: int, d_in: int, dtype: torch.dtype) -> dict[str, Any]:
    """Block sizes for the out part: the sum over d_in is long, the output narrow.

    With few tokens the blocks over K are kept narrow, since they are then the only parallelism beside the
    distinct slots, and the blocks along d_in long with more stages in flight.
    """
    config = _by_tokens(tokens, dtype)
    few = tokens <= 256
    config["BLOCK_N"] = max(16, min(16 if few else 64, triton.next_power_of_2(k)))
    block_k = 32 if dtype == torch.float32 else 128 if few else 64
    config["BLOCK_K"] = max(16, min(block_k, triton.next_power_of_2(d_in)))
    config["num_stages"] = 4 if few else 3
    return config


def _by_tokens(tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    if tokens <= 256:
        return {"BLOCK_M": 16, "num_warps": 4}
    # Eight warps: with four, ptxas for sm_80 spills registers at these sizes.
    if tokens <= 1024 or dtype == torch.float32:
        return {"BLOCK_M": 32, "num_warps": 8}
    return {"BLOCK_M": 64, "num_warps": 8}


def _upcast(x: Tensor) -> bool:
    """Whether to multiply in float32: Triton's interpreter would multiply the bit patterns of bfloat16.

    The products of two bfloat16 numbers are exact in float32, so the result is what a GPU computes.
    """
    return x.dtype == torch.bfloat16 and x.device.type == "cpu"


def _check(y: Tensor, x: Tensor, index: Tensor, slots: int, k: int, shapes_fit: bool) -> None:
    """Refuse what the kernels would silently read or write out of bounds."""
    if not shapes_fit or index.shape != (slots, k) or y.shape[0] != x.shape[0] or slots < 1:
        raise ValueError(
            f"adapter op: shapes do not fit: y {tuple(y.shape)}, x {tuple(x.shape)}, "
            f"index {tuple(index.shape)}, slots {slots}, rows per slot {k}"
        )
    if x.stride(1) != 1 or y.stride(1) != 1 or not index.is_contiguous() or index.is_floating_point():
        raise ValueError(
            f"adapter op: x and y need stride 1 along the last dimension (have {x.stride(1)}, {y.stride(1)}) "
            f"and a contiguous integer index (is {index.dtype})"
        )
