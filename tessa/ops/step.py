"""Per-step metadata that every adapter op of a step shares."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StepMeta(NamedTuple):
    """Which token uses which adapter slot, and the same tokens grouped by slot. All int32, one device.

    token_slot: [Tmax]  slot of each token, -1 for none (and for the unused tail of a persistent buffer)
    order:      [Tmax]  token numbers, stably sorted by slot, tokens without adapter last
    seg_start:  [S + 1] slot s owns ``order[seg_start[s] : seg_start[s + 1]]``; ``seg_start[S]`` is the number
                        of tokens that have an adapter, entries of ``order`` from there on are never read
    """

    token_slot: Tensor
    order: Tensor
    seg_start: Tensor


def step_buffers(max_tokens: int, slots: int, device: torch.device | str) -> StepMeta:
    """Persistent buffers (fixed addresses, as CUDA graphs need) that describe a step without any adapter."""
    return StepMeta(
        token_slot=torch.full((max_tokens,), -1, dtype=torch.int32, device=device),
        order=torch.arange(max_tokens, dtype=torch.int32, device=device),
        seg_start=torch.zeros(slots + 1, dtype=torch.int32, device=device),
    )


def step_meta(token_slot: Tensor, slots: int, out: StepMeta | None = None) -> StepMeta:
    """Group the tokens of one step by adapter slot, without a host synchronisation.

    token_slot: integer [T], slot per token; a value outside ``[0, slots)`` means no adapter.
    out: buffers from `step_buffers` with ``Tmax >= T`` that are filled in place and returned. Their first
        ``T' >= T`` entries then serve a graph captured at any padded size T', because tokens with an adapter
        come first in ``order`` and the tail of ``token_slot`` is -1.
    """
    tokens = token_slot.shape[0]
    if out is None:
        out = step_buffers(tokens, slots, token_slot.device)
    elif out.token_slot.shape[0] < tokens or out.seg_start.shape[0] != slots + 1:
        raise ValueError(
            f"step buffers hold {out.token_slot.shape[0]} tokens and {out.seg_start.shape[0] - 1} slots, "
            f"the step has {tokens} tokens and {slots} slots"
        )
    out.token_slot[:tokens] = token_slot
    out.token_slot[tokens:] = -1
    active = (out.token_slot >= 0) & (out.token_slot < slots)
    key, order = torch.sort(torch.where(active, out.token_slot, slots), stable=True)
    out.order.copy_(order)
    bounds = torch.arange(slots + 1, dtype=key.dtype, device=key.device)
    out.seg_start.copy_(torch.searchsorted(key, bounds))
    return out
