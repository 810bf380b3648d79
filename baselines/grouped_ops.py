"""The LoRA baselines' ops on rows that are grouped by adapter slot, without vLLM: compiled kernels, which TESSA's ops
use too, and library products where those do not apply."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tessa.ops import compiled
from tessa.ops.routing import Routing


def shrink(x: torch.Tensor, a: torch.Tensor, step: Routing, per_adapter: bool = False) -> torch.Tensor:
    """``[n, m]`` in slot order from ``x [T, k]`` and ``a [S, m, k]``.

    `per_adapter`: with one library product per distinct adapter, whatever else applies.
    """
    if not per_adapter and compiled.usable(step.rows, a.shape[1], x, a):
        return compiled.dot_rows(x, a.shape[1], a, step)
    product = per_adapter_product if per_adapter else grouped_product
    return product(step.gather(x), a, step)


def expand(
    y: torch.Tensor,
    start: int,
    values: torch.Tensor,
    first: int,
    b: torch.Tensor,
    step: Routing,
    per_adapter: bool = False,
) -> None:
    """Add ``values[:, first:first+r] @ b^T`` to ``y[:, start:start+d]``; values in slot order, b ``[S, d, r]``.

    The compiled kernel reads B by its columns, so it takes a `b` that is stored transposed.
    """
    size, rank = b.shape[1:]
    transposed = b.transpose(1, 2)
    if not per_adapter and compiled.usable(step.rows, rank, y, values, transposed):
        compiled.add_combined(y, start, values, first, rank, transposed, step)
    else:
        product = per_adapter_product if per_adapter else grouped_product
        step.add_rows(y[:, start : start + size], product(values[:, first : first + rank], b, step))


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, step: Routing) -> torch.Tensor:
    """``rows[i] @ weights[slot_i]^T`` in one grouped product.

    rows ``[n, k]`` in slot order, weights ``[S, m, k]``, result ``[n, m]``; the rows of `weights` and of `rows` must
    be multiples of 16 bytes, which `grouped_mm` asks for.
    """
    groups = step.groups
    if len(groups) == 1:
        return torch.mm(rows, weights[groups[0]].t())
    return F.grouped_mm(rows, weights.transpose(1, 2), offs=step.ends)


def per_adapter_product(rows: torch.Tensor, weights: torch.Tensor, step: Routing) -> torch.Tensor:
    """The same with one dense product per distinct adapter, as PEFT runs a mixed batch.

    `step.ends` may stay on the CPU while the rest lies on a GPU, which saves a synchronisation per call.
    """
    out = rows.new_empty(rows.shape[0], weights.shape[1])
    start = 0
    ends = step.ends.tolist()
    for slot in step.groups:
        torch.mm(rows[start : ends[slot]], weights[slot].t(), out=out[start : ends[slot]])
        start = ends[slot]
    return out
