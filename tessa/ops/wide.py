"""One buffer that holds a base weight and the deltas of all resident slots beside it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


class WideWeight:
    """``[W | D_1 | ... | D_S]`` (``axis="in"``) or ``[W; D_1; ...; D_S]`` (``axis="out"``).

    weight: [d_out, d_in], copied into the buffer; replace the layer's parameter by `base` so that W is stored
        once. slots: S. width: K, the most rows of an adapter. bias: [d_out] or None.

    Attributes, all at fixed addresses so that captured graphs stay valid when a slot changes:

    - buffer:  [d_out, d_in + S K (+ alignment)] or [d_out + S K, d_in]; operand of the one matrix product
    - base:    [d_out, d_in] view of W
    - delta:   [S, K, d_out] or [S, K, d_in] view of the slots' blocks, which the segmented ops take as it is
    - index:   int32 [S, K], the input columns or output rows of each slot; padding is 0
    - widths:  int32 [S], 0 for an empty slot
    - bias:    [d_out], or for ``axis="out"`` [d_out + S K] with zeros for the slots, or None

    In the ``in`` layout the blocks of other slots are multiplied by zeros, so a delta with a non-finite value
    would reach every token: `set_slot` refuses such a delta.
    """

    def __init__(
        self, weight: Tensor, slots: int, width: int, axis: Literal["in", "out"], bias: Tensor | None = None
    ) -> None:
        if axis not in ("in", "out") or slots < 1 or width < 1:
            raise ValueError(f"need axis 'in' or 'out', slots and width >= 1; got {axis}, {slots}, {width}")
        d_out, d_in = weight.shape
        extra = slots * width
        self.axis, self.slots, self.width = axis, slots, width
        self.d_out, self.d_in = d_out, d_in
        if axis == "in":
            # Rows stay aligned to 16 bytes, which matrix-product libraries need for their fast kernels.
            unit = max(1, 16 // weight.element_size())
            columns = -(-(d_in + extra) // unit) * unit
            self.buffer = weight.new_zeros(d_out, columns)
            self.delta = self.buffer[:, d_in : d_in + extra].unflatten(1, (slots, width)).permute(1, 2, 0)
            self.bias = bias
        else:
            self.buffer = weight.new_zeros(d_out + extra, d_in)
            self.delta = self.buffer[d_out:].view(slots, width, d_in)
            self.bias = None if bias is None else torch.cat([bias, bias.new_zeros(extra)])
        self.base = self.buffer[:d_out, :d_in]
        self.base.copy_(weight)
        self.index = torch.zeros(slots, width, dtype=torch.int32, device=weight.device)
        self.widths = torch.zeros(slots, dtype=torch.int32, device=weight.device)

    def set_slot(self, slot: int, delta: Tensor, index: Tensor) -> None:
        """Put an adapter into a slot: ``delta: [k, d_out or d_in]``, ``index: [k]``, k <= K."""
        rows, length = delta.shape
        if rows > self.width or length != self.delta.shape[2] or index.shape != (rows,):
            raise ValueError(
                f"a slot holds at most {self.width} rows of length {self.delta.shape[2]}; "
                f"got delta {tuple(delta.shape)} with index {tuple(index.shape)}"
            )
        limit = self.d_in if self.axis == "in" else self.d_out
        if bool(((index < 0) | (index >= limit)).any()):
            raise ValueError(
                f"slice indices must lie in [0, {limit}), got {int(index.min())} to {int(index.max())}"
            )
        if not bool(torch.isfinite(delta).all()):
            raise ValueError("the delta has a value that is not finite")
        self.clear_slot(slot)
        self.delta[slot, :rows] = delta.to(self.delta)
        self.index[slot, :rows] = index.to(self.index)
        self.widths[slot] = rows

    def clear_slot(self, slot: int) -> None:
        """Empty a slot: zero delta, index 0, width 0."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot must lie in [0, {self.slots}), got {slot}")
        self.delta[slot].zero_()
        self.index[slot].zero_()
        self.widths[slot] = 0
