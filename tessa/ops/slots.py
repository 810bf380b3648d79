"""The adapters resident in one linear layer on one rank, in the form that the kernels take.

Every placement reduces to two parts. Their delta is stored with the slice's positions as rows:

* in part:  ``y[t, :] += sum_k x[t, index[s, k]] * delta[s, k, :]``, delta ``[S, K, d_out]``
* out part: ``y[t, index[s, k]] += sum_j x[t, j] * delta[s, k, j]``, delta ``[S, K, d_in]``

where ``s`` is the slot of token t. Rows beyond a slot's own width hold zeros and index 0, so they add nothing.
"""

from __future__ import annotations

import torch


def aligned(count: int, dtype: torch.dtype) -> int:
    """``count`` rounded up to whole 16 bytes, which grouped products ask of their operands' strides."""
    unit = max(1, 16 // dtype.itemsize)
    return -(-count // unit) * unit


class SlotPart:
    """One part of a layer's slots.

    Its rows K grow as adapters come.

    Args:
        num_slots: S.
        length: length of the delta's other side: d_out for the in part, d_in for the out part.
    """

    def __init__(self, num_slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots, self.length, self.dtype, self.device = num_slots, length, dtype, device
        self.widths = [0] * num_slots
        self.version = 0  # counts changes, so that what is derived from the slots knows when it is stale
        self._allocate(0)

    def _allocate(self, rows: int) -> None:
        rows = aligned(rows, self.dtype)
        self.index = torch.zeros(self.num_slots, rows, dtype=torch.int64, device=self.device)
        self.delta = torch.zeros(self.num_slots, rows, self.length, dtype=self.dtype, device=self.device)
        self._refresh()

    def _refresh(self) -> None:
        """Note whether all slots in use share one contiguous window, which makes a slice of a gather."""
        self.version += 1
        self.widest = widest = max(self.widths, default=0)
        # What a call of the compiled kernels says of the slots; the addresses hold until the next change.
        self._counts = torch.tensor(self.widths, dtype=torch.int32)
        self.operand = (self.delta.data_ptr(), *self.delta.shape, self._counts.data_ptr(), widest)
        self.columns = (self.index.data_ptr(), self.index.shape[1])
        self.used = aligned(widest, self.dtype)
        self.window: tuple[int, int] | None = None
        rows = [self.index[s, :w] for s, w in enumerate(self.widths) if w]
        if rows and all(r.shape[0] == widest for r in rows) and widest == self.used:
            start = int(rows[0][0])
            expected = torch.arange(start, start + widest, device=self.device)
            if all(torch.equal(r, expected) for r in rows):
                self.window = (start, start + self.used)

    @property
    def nbytes(self) -> int:
        return self.delta.nbytes + self.index.nbytes

    def clear(self, slot: int) -> None:
        width = self.widths[slot]
        if width:
            self.delta[slot, :width] = 0
            self.index[slot, :width] = 0
            self.widths[slot] = 0
            self._refresh()

    def set(self, slot: int, index: torch.Tensor, delta: torch.Tensor) -> None:
        """Put an adapter into a slot: ``index [k]`` and ``delta [k, length]``, any dtype and device."""
        rows = index.shape[0]
        if rows > self.index.shape[1]:
            old_index, old_delta = self.index, self.delta
            self._allocate(rows)
            self.index[:, : old_index.shape[1]] = old_index
            self.delta[:, : old_delta.shape[1]] = old_delta
        self.clear(slot)
        self.index[slot, :rows] = index.to(self.device)
        self.delta[slot, :rows] = delta.to(self.device, self.dtype)
        self.widths[slot] = rows
        self._refresh()
