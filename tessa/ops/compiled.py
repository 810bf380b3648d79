"""Compiled CPU kernels for products over rows grouped by adapter slot; float32, on all threads of the rank.

Library products over a handful of rows spend most of their time on packing operands and on a second pass over the
output. These read each weight once per pair of rows and add into the output directly. Numba compiles them on first
use and caches them on disk; without Numba or in other dtypes the library products are used instead. TESSA and the
LoRA baselines share them.

Both kernels take weights ``[S, K, L]``, rows in slot order (`tessa.ops.routing.Routing`), and two operands: a long
one whose rows have L elements, and a short one of which slot s uses ``width_s <= K`` columns:

* combine: ``long[row_i] += sum_k short[i, k] * weights[s_i, k]``; threads share out the columns of the long operand
* dot:     ``short[i, k] += weights[s_i, k] . long[row_i]``; threads share out the weight rows, four at a time

No two threads write one element, and no result depends on how many there are.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessa.ops import openmp
from tessa.ops.routing import Routing
from tessa.ops.slots import SlotPart

try:
    from llvmlite import ir
    from numba import carray, cfunc, from_dtype, njit, types
    from numba.extending import intrinsic
except ImportError:  # a requirement of vLLM, not of this package
    njit = None

MOST_WORK = 2**15
"""Rows times width up to which these kernels are faster: beyond, a matrix library's blocking pays
(`python -m experiments.bench_schedules` and `python -m experiments.bench_lora_ops` show both sides)."""
WORTH_THREADS = 2**16  # multiply-adds from which more threads save more than waking them costs
NARROWEST = 256  # columns that a thread takes at least
CHUNK = 2048  # columns whose four weight rows stay in the first-level cache while the slot's rows pass by
ENDLESS = 2**40  # kernels get addresses; how far an array may be read, the sizes of the call say

# One call as the kernels read it: addresses, sizes, and strides in elements. `ticket` counts the pieces of work that
# threads have taken; `widths`, int32 [S], is 0 where every slot has `width`.
FIELDS = (
    "ticket pieces weights slots slot_rows length widths width ends long long_stride long_rows "
    "short short_stride short_rows columns columns_stride"
)
CALL = np.dtype([(name, np.int64) for name in FIELDS.split()])


def usable(rows: int, width: int, *tensors: Tensor) -> bool:
    """Whether these kernels can and should compute a product of `rows` rows; tensors must be contiguous float32."""
    return (
        njit is not None
        and 0 < rows * width <= MOST_WORK
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    )


if njit is not None:

    @intrinsic
    def _at(typing: Any, address: Any) -> Any:
        """An address as a pointer."""

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

        return types.voidptr(types.int64), code

    @intrinsic
    def _take(typing: Any, call: Any) -> Any:
        """The next piece of work: reads the call's ticket and counts it on, in one step for all threads."""

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number = ir.IntType(64)
            ticket = builder.bitcast(arguments[0], number.as_pointer())
            return builder.atomic_rmw("add", ticket, ir.Constant(number, 1), "monotonic")

        return types.int64(call), code

    @njit
    def _numbers(address: Any) -> Any:
        return carray(_at(address), ENDLESS, np.int64)

    @njit
    def _add_four(out: Any, columns: Any, k: int, count: int, v0: Any, v1: Any, v2: Any, v3: Any) -> None:
        out[columns[k]] += v0
        if count > 1:
            out[columns[k + 1]] += v1
        if count > 2:
            out[columns[k + 2]] += v2
        if count > 3:
            out[columns[k + 3]] += v3


def _combine(call: Any) -> None:
    c = carray(call, 1)[0]
    slots, length, same, varied, step = c.slots, c.length, c.width, c.widths, c.columns_stride
    ends, widths = carray(_at(c.ends), slots, np.int32), carray(_at(c.widths), slots, np.int32)
    weights = carray(_at(c.weights), (slots, c.slot_rows, length), np.float32)
    out, out_rows = carray(_at(c.long), (ENDLESS, c.long_stride), np.float32), _numbers(c.long_rows)
    short, short_rows = carray(_at(c.short), (ENDLESS, c.short_stride), np.float32), _numbers(c.short_rows)
    columns, pieces, piece = _numbers(c.columns), c.pieces, _take(call)
    while piece < pieces:
        begin, end = length * piece // pieces, length * (piece + 1) // pieces
        low = 0
        for s in range(slots):
            high = ends[s]
            width = 0 if high == low else widths[s] if varied else same
            first = s * step
            for k in range(0, width, 4):
                # Of the last four, what lies beyond the width is the last row again, times zero.
                count = width - k
                k1, k2, k3 = min(k + 1, width - 1), min(k + 2, width - 1), min(k + 3, width - 1)
                c0, c1 = columns[first + k], columns[first + k1]
                c2, c3 = columns[first + k2], columns[first + k3]
                m1, m2, m3 = np.float32(count > 1), np.float32(count > 2), np.float32(count > 3)
                for j0 in range(begin, end, CHUNK):
                    j1 = min(j0 + CHUNK, end)
                    w0, w1 = weights[s, k, j0:j1], weights[s, k1, j0:j1]
                    w2, w3 = weights[s, k2, j0:j1], weights[s, k3, j0:j1]
                    i = low
                    while i + 1 < high:
                        ya, yb = out[out_rows[i], j0:j1], out[out_rows[i + 1], j0:j1]
                        va, vb = short[short_rows[i]], short[short_rows[i + 1]]
                        a0, a1, a2, a3 = va[c0], m1 * va[c1], m2 * va[c2], m3 * va[c3]
                        b0, b1, b2, b3 = vb[c0], m1 * vb[c1], m2 * vb[c2], m3 * vb[c3]
                        for j in range(j1 - j0):
                            ya[j] += a0 * w0[j] + a1 * w1[j] + a2 * w2[j] + a3 * w3[j]
                            yb[j] += b0 * w0[j] + b1 * w1[j] + b2 * w2[j] + b3 * w3[j]
                        i += 2
                    if i < high:
                        ya, va = out[out_rows[i], j0:j1], short[short_rows[i]]
                        a0, a1, a2, a3 = va[c0], m1 * va[c1], m2 * va[c2], m3 * va[c3]
                        for j in range(j1 - j0):
                            ya[j] += a0 * w0[j] + a1 * w1[j] + a2 * w2[j] + a3 * w3[j]
            low = high
        piece = _take(call)


def _dot(call: Any) -> None:
    c = carray(call, 1)[0]
    slots, length, same, varied, step = c.slots, c.length, c.width, c.widths, c.columns_stride
    ends, widths = carray(_at(c.ends), slots, np.int32), carray(_at(c.widths), slots, np.int32)
    weights = carray(_at(c.weights), (slots, c.slot_rows, length), np.float32)
    x, x_rows = carray(_at(c.long), (ENDLESS, c.long_stride), np.float32), _numbers(c.long_rows)
    short, short_rows = carray(_at(c.short), (ENDLESS, c.short_stride), np.float32), _numbers(c.short_rows)
    columns, pieces, piece = _numbers(c.columns), c.pieces, _take(call)
    while piece < pieces:
        low = turn = 0
        for s in range(slots):
            high = ends[s]
            width = 0 if high == low else widths[s] if varied else same
            for k in range(0, width, 4):
                turn = 0 if turn + 1 == pieces else turn + 1
                if turn != piece:
                    continue
                # Of the last four, what lies beyond the width is the last row again, and its result is dropped.
                count, first = width - k, s * step + k
                k1, k2, k3 = min(k + 1, width - 1), min(k + 2, width - 1), min(k + 3, width - 1)
                w0, w1, w2, w3 = weights[s, k], weights[s, k1], weights[s, k2], weights[s, k3]
                i = low
                while i + 1 < high:
                    xa, xb = x[x_rows[i], :length], x[x_rows[i + 1], :length]
                    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
                    for j in range(length):
                        a0 += w0[j] * xa[j]
                        a1 += w1[j] * xa[j]
                        a2 += w2[j] * xa[j]
                        a3 += w3[j] * xa[j]
                        b0 += w0[j] * xb[j]
                        b1 += w1[j] * xb[j]
                        b2 += w2[j] * xb[j]
                        b3 += w3[j] * xb[j]
                    _add_four(short[short_rows[i]], columns, first, count, a0, a1, a2, a3)
                    _add_four(short[short_rows[i + 1]], columns, first, count, b0, b1, b2, b3)
                    i += 2
                if i < high:
                    xa = x[x_rows[i], :length]
                    a0 = a1 = a2 = a3 = np.float32(0)
                    for j in range(length):
                        a0 += w0[j] * xa[j]
                        a1 += w1[j] * xa[j]
                        a2 += w2[j] * xa[j]
                        a3 += w3[j] * xa[j]
                    _add_four(short[short_rows[i]], columns, first, count, a0, a1, a2, a3)
            low = high
        piece = _take(call)


@functools.cache
def _compiled(kernel: Callable[[Any], None]) -> Any:
    """A kernel as a C function, kept as long as the process."""
    signature = types.void(types.CPointer(from_dtype(CALL)))
    return cfunc(signature, nopython=True, cache=True, fastmath=True)(kernel)


def _run(
    kernel: Callable[[Any], None],
    operand: tuple[int, ...],
    routing: Routing,
    long: int,
    long_stride: int,
    short: int,
    short_stride: int,
    short_rows: int,
    columns: int,
    columns_stride: int,
) -> None:
    """One product. operand: the fields of a call from `weights` to `width`; the rest are its other fields. Tens of
    these run per step, so this avoids what Python does slowly."""
    threads = openmp.threads()
    length = operand[3]
    if threads > 1:
        small = routing.rows * operand[5] * length < WORTH_THREADS
        threads = 1 if small else min(threads, 1 + length // NARROWEST)
    order = routing.order.data_ptr()
    call = array(
        "q",
        (
            *(0, threads, *operand, routing.ends.data_ptr(), long, long_stride, order),
            *(short, short_stride, short_rows or order, columns, columns_stride),
        ),
    )
    openmp.run(_compiled(kernel).address, call.buffer_info()[0], threads > 1)


_POSITIONS = torch.arange(MOST_WORK)


def _operand(weights: Tensor, width: int) -> tuple[int, ...]:
    return (weights.data_ptr(), *weights.shape, 0, width)


def add_combined(
    y: Tensor, start: int, values: Tensor, first: int, width: int, weights: Tensor, routing: Routing
) -> None:
    """``y[order[i], start:start+d] += values[i, first:first+width] @ weights[s_i, :width]`` in place.

    Args:
        y: ``[T, >= start + d]``. values: ``[n, >= first + width]`` in slot order. weights: ``[S, >= width, d]``.
    """
    long, short, own = y.data_ptr() + 4 * start, values.data_ptr() + 4 * first, _POSITIONS.data_ptr()
    operand = _operand(weights, width)
    _run(_combine, operand, routing, long, y.shape[1], short, values.shape[1], own, own, 0)


def dot_rows(x: Tensor, width: int, weights: Tensor, routing: Routing) -> Tensor:
    """``weights[s_i, :width] @ x[order[i]]`` for every row in slot order, ``[n, width]``; x ``[T, d]``."""
    # From NumPy, as zeros made by PyTorch are one more operation that a step's counters see and that takes its time.
    out = torch.from_numpy(np.zeros((routing.rows, width), dtype=np.float32))
    own = _POSITIONS.data_ptr()
    operand = _operand(weights, width)
    _run(_dot, operand, routing, x.data_ptr(), x.shape[1], out.data_ptr(), width, own, own, 0)
    return out


def segmented_in(y: Tensor, x: Tensor, part: SlotPart, routing: Routing) -> None:
    """``y[order[i]] += x[order[i], index[s_i]] @ delta[s_i]`` in place, over each slot's own width."""
    long, short = y.data_ptr(), x.data_ptr()
    _run(_combine, part.operand, routing, long, y.shape[1], short, x.shape[1], 0, *part.columns)


def segmented_out(y: Tensor, x: Tensor, part: SlotPart, routing: Routing) -> None:
    """``y[order[i], index[s_i]] += delta[s_i] @ x[order[i]]`` in place, over each slot's own width."""
    long, short = x.data_ptr(), y.data_ptr()
    _run(_dot, part.operand, routing, long, x.shape[1], short, y.shape[1], 0, *part.columns)
