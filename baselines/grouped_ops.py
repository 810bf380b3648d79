"""Products over rows that are grouped by adapter slot, in plain torch; the LoRA baselines' ops without vLLM."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tessa.ops.routing import Routing


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
