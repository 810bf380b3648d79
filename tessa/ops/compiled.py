"""Compiled CPU kernels for products over rows grouped by adapter slot; float32, on one thread.

Library products over a handful of rows spend most of their time on packing operands and on a second pass over the
output. These read each delta once per pair of tokens and add into the output directly. Numba compiles them on first
use and caches them on disk; without Numba, in other dtypes, or where a rank has several threads, the library
products are used instead. TESSA and the LoRA baselines share them.

Rows come in slot order (`tessa.ops.routing.Routing`): ``order [n]`` int64, ``ends [S]`` int32. ``width`` weight rows
per slot take part; they are taken four at a time, and the rest one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessa.ops.routing import Routing

try:
    from numba import njit
except ImportError:  # a requirement of vLLM, not of this package
    njit = None

MOST_WORK = 2**15
"""Rows times width times threads of the rank up to which these kernels, which use one thread, are faster: beyond,
a matrix library's blocking and its threads pay (`python -m experiments.bench_schedules` and
`python -m experiments.bench_lora_ops` show both sides)."""
CHUNK = 1024  # floats of an output row that stay in the first-level cache beside four weight rows


def usable(routing: Routing, width: int, *tensors: Tensor) -> bool:
    """Whether these kernels can and should compute a product; the tensors must be contiguous float32."""
    return (
        njit is not None
        and 0 < routing.rows * width * torch.get_num_threads() <= MOST_WORK
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    )


if njit is not None:

    @njit(cache=True, fastmath=True, nogil=True, boundscheck=False)
    def _add_combined(
        y: Any, start: int, values: Any, first: int, width: int, weights: Any, order: Any, ends: Any
    ) -> None:
        """``y[order[i], start:start+d] += sum_k values[i, first + k] * weights[s_i, k, :]``."""
        length, fours = weights.shape[2], width - width % 4
        low = 0
        for s in range(ends.shape[0]):
            high = ends[s]
            for j0 in range(0, length, CHUNK):
                j1 = min(j0 + CHUNK, length)
                i = low
                while i + 1 < high:
                    ya = y[order[i], start + j0 : start + j1]
                    yb = y[order[i + 1], start + j0 : start + j1]
                    va, vb = values[i, first : first + width], values[i + 1, first : first + width]
                    for k in range(0, fours, 4):
                        w0, w1 = weights[s, k, j0:j1], weights[s, k + 1, j0:j1]
                        w2, w3 = weights[s, k + 2, j0:j1], weights[s, k + 3, j0:j1]
                        a0, a1, a2, a3 = va[k], va[k + 1], va[k + 2], va[k + 3]
                        b0, b1, b2, b3 = vb[k], vb[k + 1], vb[k + 2], vb[k + 3]
                        for j in range(j1 - j0):
                            ya[j] += a0 * w0[j] + a1 * w1[j] + a2 * w2[j] + a3 * w3[j]
                            yb[j] += b0 * w0[j] + b1 * w1[j] + b2 * w2[j] + b3 * w3[j]
                    for k in range(fours, width):
                        w0, a0, b0 = weights[s, k, j0:j1], va[k], vb[k]
                        for j in range(j1 - j0):
                            ya[j] += a0 * w0[j]
                            yb[j] += b0 * w0[j]
                    i += 2
                if i < high:
                    ya = y[order[i], start + j0 : start + j1]
                    va = values[i, first : first + width]
                    for k in range(0, fours, 4):
                        w0, w1 = weights[s, k, j0:j1], weights[s, k + 1, j0:j1]
                        w2, w3 = weights[s, k + 2, j0:j1], weights[s, k + 3, j0:j1]
                        a0, a1, a2, a3 = va[k], va[k + 1], va[k + 2], va[k + 3]
                        for j in range(j1 - j0):
                            ya[j] += a0 * w0[j] + a1 * w1[j] + a2 * w2[j] + a3 * w3[j]
                    for k in range(fours, width):
                        w0, a0 = weights[s, k, j0:j1], va[k]
                        for j in range(j1 - j0):
                            ya[j] += a0 * w0[j]
            low = high

    @njit(cache=True, fastmath=True, nogil=True, boundscheck=False)
    def _dot_rows(out: Any, x: Any, width: int, weights: Any, order: Any, ends: Any) -> None:
        """``out[i, k] = weights[s_i, k, :] . x[order[i], :]``."""
        length, fours = weights.shape[2], width - width % 4
        low = 0
        for s in range(ends.shape[0]):
            high = ends[s]
            for k in range(0, fours, 4):
                w0, w1, w2, w3 = weights[s, k], weights[s, k + 1], weights[s, k + 2], weights[s, k + 3]
                i = low
                while i + 1 < high:
                    xa, xb = x[order[i]], x[order[i + 1]]
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
                    out[i, k], out[i, k + 1], out[i, k + 2], out[i, k + 3] = a0, a1, a2, a3
                    out[i + 1, k], out[i + 1, k + 1], out[i + 1, k + 2], out[i + 1, k + 3] = b0, b1, b2, b3
                    i += 2
                if i < high:
                    xa = x[order[i]]
                    a0 = a1 = a2 = a3 = np.float32(0)
                    for j in range(length):
                        a0 += w0[j] * xa[j]
                        a1 += w1[j] * xa[j]
                        a2 += w2[j] * xa[j]
                        a3 += w3[j] * xa[j]
                    out[i, k], out[i, k + 1], out[i, k + 2], out[i, k + 3] = a0, a1, a2, a3
            for k in range(fours, width):
                w0 = weights[s, k]
                for i in range(low, high):
                    xa, a0 = x[order[i]], np.float32(0)
                    for j in range(length):
                        a0 += w0[j] * xa[j]
                    out[i, k] = a0
            low = high

    @njit(cache=True, nogil=True, boundscheck=False)
    def _gather(out: Any, x: Any, index: Any, order: Any, ends: Any) -> None:
        """``out[i, k] = x[order[i], index[s_i, k]]``."""
        low = 0
        for s in range(ends.shape[0]):
            for i in range(low, ends[s]):
                row = order[i]
                for k in range(out.shape[1]):
                    out[i, k] = x[row, index[s, k]]
            low = ends[s]

    @njit(cache=True, nogil=True, boundscheck=False)
    def _scatter(y: Any, values: Any, index: Any, order: Any, ends: Any) -> None:
        """``y[order[i], index[s_i, k]] += values[i, k]``."""
        low = 0
        for s in range(ends.shape[0]):
            for i in range(low, ends[s]):
                row = order[i]
                for k in range(values.shape[1]):
                    y[row, index[s, k]] += values[i, k]
            low = ends[s]


def add_combined(
    y: Tensor, start: int, values: Tensor, first: int, width: int, weights: Tensor, routing: Routing
) -> None:
    """``y[order[i], start:start+d] += values[i, first:first+width] @ weights[s_i, :width]`` in place.

    Args:
        y: ``[T, >= start + d]``. values: ``[n, >= first + width]`` in slot order. weights: ``[S, >= width, d]``.
    """
    order, ends = routing.arrays
    _add_combined(y.numpy(), start, values.numpy(), first, width, weights.numpy(), order, ends)


def dot_rows(x: Tensor, width: int, weights: Tensor, routing: Routing) -> Tensor:
    """``weights[s_i, :width] @ x[order[i]]`` for every row in slot order, ``[n, width]``; x ``[T, d]``."""
    order, ends = routing.arrays
    out = np.empty((order.shape[0], width), dtype=np.float32)
    _dot_rows(out, x.numpy(), width, weights.numpy(), order, ends)
    return torch.from_numpy(out)


def segmented_in(y: Tensor, x: Tensor, index: Tensor, width: int, weights: Tensor, routing: Routing) -> None:
    """``y[order[i]] += x[order[i], index[s_i, :width]] @ weights[s_i, :width]`` in place."""
    order, ends = routing.arrays
    values = np.empty((order.shape[0], width), dtype=np.float32)
    _gather(values, x.numpy(), index.numpy(), order, ends)
    _add_combined(y.numpy(), 0, values, 0, width, weights.numpy(), order, ends)


def segmented_out(y: Tensor, x: Tensor, index: Tensor, width: int, weights: Tensor, routing: Routing) -> None:
    """``y[order[i], index[s_i, :width]] += weights[s_i, :width] @ x[order[i]]`` in place."""
    order, ends = routing.arrays
    values = np.empty((order.shape[0], width), dtype=np.float32)
    _dot_rows(values, x.numpy(), width, weights.numpy(), order, ends)
    _scatter(y.numpy(), values, index.numpy(), order, ends)
