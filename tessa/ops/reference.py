"""What the adapter ops must compute: float64 references, and a portable implementation in plain torch.

Canonical form of all adapters of one linear layer on one rank, with S slots of at most K rows each:

- in part:  ``y[t, :] += sum_k x[t, x_index[s, k]] * delta[s, k, :]``, ``delta: [S, K, d_out]``
- out part: ``y[t, y_index[s, k]] += sum_j x[t, j] * delta[s, k, j]``, ``delta: [S, K, d_in]``

where ``s = token_slot[t]``. A token whose slot lies outside ``[0, S)`` keeps the base output, bit for bit.
Rows beyond an adapter's own width are padding: index 0, delta zero; with ``width: [S]`` given they are not
read. Apart from padding, the indices of one slot are distinct.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def reference_in(
    y: Tensor, x: Tensor, x_index: Tensor, delta: Tensor, token_slot: Tensor, width: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """In part in float64, token by token: (result, magnitude), both [T, d_out].

    The magnitude is the sum of the absolute terms; rounding errors are proportional to it.
    """
    result, magnitude = y.double(), y.double().abs()
    for t, s in enumerate(token_slot.tolist()):
        if 0 <= s < delta.shape[0]:
            k = delta.shape[1] if width is None else int(width[s])
            taken = x[t].double()[x_index[s, :k].long()]
            result[t] = result[t] + taken @ delta[s, :k].double()
            magnitude[t] = magnitude[t] + taken.abs() @ delta[s, :k].double().abs()
    return result, magnitude


def reference_out(
    y: Tensor, x: Tensor, y_index: Tensor, delta: Tensor, token_slot: Tensor, width: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Out part in float64, token by token: (result, magnitude) as `reference_in`."""
    result, magnitude = y.double(), y.double().abs()
    for t, s in enumerate(token_slot.tolist()):
        if 0 <= s < delta.shape[0]:
            k = delta.shape[1] if width is None else int(width[s])
            target, rows = y_index[s, :k].long(), delta[s, :k].double()
            result[t].index_add_(0, target, rows @ x[t].double())
            magnitude[t].index_add_(0, target, rows.abs() @ x[t].double().abs())
    return result, magnitude


def segmented_in_torch(
    y: Tensor,
    x: Tensor,
    x_index: Tensor,
    delta: Tensor,
    order: Tensor,
    seg_start: Tensor,
    width: Tensor | None = None,
) -> None:
    """In part, added into y; sums in float32 (float64 for float64) and rounds once, as the kernel does."""
    for s, tokens in _segments(order, seg_start):
        k = delta.shape[1] if width is None else int(width[s])
        part = _wide_float(x[tokens][:, x_index[s, :k].long()]) @ _wide_float(delta[s, :k])
        y[tokens] = (_wide_float(y[tokens]) + part).to(y.dtype)


def segmented_out_torch(
    y: Tensor,
    x: Tensor,
    y_index: Tensor,
    delta: Tensor,
    order: Tensor,
    seg_start: Tensor,
    width: Tensor | None = None,
) -> None:
    """Out part, added into y; sums in float32 (float64 for float64) and rounds once, as the kernel does."""
    for s, tokens in _segments(order, seg_start):
        rows = live_rows(delta[s]) if width is None else torch.arange(int(width[s]), device=y.device)
        at = tokens[:, None], y_index[s, rows].long()[None, :]
        part = _wide_float(x[tokens]) @ _wide_float(delta[s, rows]).T
        y[at] = (_wide_float(y[at]) + part).to(y.dtype)


def scatter_inputs_torch(
    x: Tensor, x_index: Tensor, token_slot: Tensor, columns: int, width: Tensor | None = None
) -> Tensor:
    """[T, columns]: x, then each token's gathered inputs in its own slot's block of K, zero elsewhere."""
    slots, k = x_index.shape
    tokens, d_in = x.shape
    slot = token_slot[:tokens].long()
    wide = x.new_zeros(tokens, columns)
    wide[:, :d_in] = x
    used = ((slot >= 0) & (slot < slots)).nonzero().squeeze(1)
    slot = slot[used]
    taken = x[used[:, None], x_index.long()[slot]]
    if width is not None:
        taken = taken.masked_fill(torch.arange(k, device=x.device) >= width.long()[slot][:, None], 0)
    blocks = wide[:, d_in : d_in + slots * k].unflatten(1, (slots, k))
    blocks[used, slot] = taken
    return wide


def route_outputs_torch(
    wide: Tensor, y_index: Tensor, token_slot: Tensor, d_out: int, width: Tensor | None = None
) -> Tensor:
    """[T, d_out]: the base columns of ``wide: [T, >= d_out + S K]`` plus each token's own block."""
    slots, k = y_index.shape
    tokens = wide.shape[0]
    slot = token_slot[:tokens].long()
    y = wide[:, :d_out].contiguous().clone()
    used = ((slot >= 0) & (slot < slots)).nonzero().squeeze(1)
    slot = slot[used]
    part = wide[:, d_out : d_out + slots * k].unflatten(1, (slots, k))[used, slot]
    live = part != 0
    if width is not None:
        live &= torch.arange(k, device=wide.device) < width.long()[slot][:, None]
    i, j = live.nonzero(as_tuple=True)
    at = used[i], y_index.long()[slot[i], j]
    y[at] = (_wide_float(y[at]) + _wide_float(part[i, j])).to(y.dtype)
    return y


def live_rows(delta: Tensor) -> Tensor:
    """Numbers of the rows of ``delta: [K, d]`` that are not all zero: the others add nothing."""
    return (delta != 0).any(dim=1).nonzero().squeeze(1)


def _segments(order: Tensor, seg_start: Tensor) -> list[tuple[int, Tensor]]:
    bounds = seg_start.tolist()
    return [(s, order[lo:hi].long()) for s, (lo, hi) in enumerate(pairwise(bounds)) if hi > lo]


def _wide_float(value: Tensor) -> Tensor:
    return value if value.dtype == torch.float64 else value.float()
