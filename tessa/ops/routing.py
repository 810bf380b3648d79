"""Which token of a step belongs to which adapter slot, worked out once per step and used by every layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Routing:
    """The tokens of one step, sorted by adapter slot.

    Attributes:
        num_tokens: rows of the step's batch.
        num_slots: resident slots S.
        order: int64 [n], rows that have an adapter, sorted by slot and stable within a slot; rows without an
            adapter are absent, so they stay as the base layer left them.
        slots: int64 [n], slot of each row in `order`.
        ends: int32 [S], where each slot's rows end in `order` (the running sum of the rows per slot), the form
            that `torch.nn.functional.grouped_mm` takes.
        groups: the distinct slots in use, ascending.
        identity: whether `order` is 0, 1, ..., n-1, so that gathering rows can be left out.
    """

    num_tokens: int
    num_slots: int
    order: torch.Tensor
    slots: torch.Tensor
    ends: torch.Tensor
    groups: tuple[int, ...]
    identity: bool

    @property
    def rows(self) -> int:
        """Rows that have an adapter."""
        return self.order.shape[0]

    def to(self, device: torch.device | str) -> Routing:
        """With `order` and `slots` on a device; `ends` stays on the CPU, where the products per adapter read it."""
        return replace(self, order=self.order.to(device), slots=self.slots.to(device))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of ``x [num_tokens, ...]`` in slot order; a view where they already are."""
        return x[: self.rows] if self.identity else x.index_select(0, self.order)

    def add_rows(self, y: torch.Tensor, update: torch.Tensor) -> None:
        """``y[order] += update`` in place; ``update [n, ...]`` has the dtype of y."""
        if self.identity:
            y[: self.rows].add_(update)
        else:
            y.index_add_(0, self.order, update)


def route(token_slots: torch.Tensor, num_slots: int) -> Routing:
    """Sort a step's tokens by slot.

    Args:
        token_slots: int64 [num_tokens] on the CPU; -1 marks a token without adapter.
        num_slots: resident slots; every entry of `token_slots` lies below it.
    """
    rank = torch.where(token_slots < 0, num_slots, token_slots)
    sorted_slots, order = torch.sort(rank, stable=True)
    counts = torch.bincount(sorted_slots, minlength=num_slots + 1)
    rows = int(token_slots.shape[0] - counts[num_slots])
    groups = tuple(torch.nonzero(counts[:num_slots]).flatten().tolist())
    order, sorted_slots = order[:rows], sorted_slots[:rows]
    ends = counts[:num_slots].cumsum(0).to(torch.int32)
    return Routing(
        num_tokens=token_slots.shape[0],
        num_slots=num_slots,
        order=order,
        slots=sorted_slots,
        ends=ends,
        groups=groups,
        identity=bool((order == torch.arange(rows)).all()),
    )
