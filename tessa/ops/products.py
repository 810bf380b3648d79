"""A layer's resident adapters together with the products that compute them; one class per way of keeping them.

Both take adapters in the form of `tessa.ops.slots`: positions ``[k]`` and delta rows ``[k, length]`` for the in
part and for the out part. ``base(x, bias)`` computes the plain layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from tessa.ops import cpu
from tessa.ops.routing import Routing
from tessa.ops.schedule import Schedule
from tessa.ops.slots import SlotPart
from tessa.ops.step import StepMeta
from tessa.ops.wide import WideWeight

BaseProduct = Callable[[Tensor, Tensor | None], Tensor]
Rows = tuple[Tensor, Tensor]


class Products(Protocol):
    """What a layer needs of its slots."""

    def clear(self, slot: int) -> None: ...
    def set(self, slot: int, ins: Rows | None, outs: Rows | None) -> None: ...
    def apply(self, base: BaseProduct, x: Tensor, bias: Tensor | None, step: Any) -> Tensor: ...
    def check(self, ins: int, outs: int) -> None:
        """ValueError where an adapter with so many rows does not fit a slot."""

    @property
    def nbytes(self) -> int:
        """Bytes that the adapters occupy on this rank."""


class GrowingProducts:
    """For the CPU: slots grow with the adapters that come, and every step chooses its products anew.

    Args:
        weight: the plain base weight ``[d_out, d_in]``, or None where it is quantised or not kept; then nothing
            is ever wide.
        pack: makes ``x -> x @ w.T`` from a weight, in the kernel that the base layers use.
    """

    def __init__(
        self,
        slots: int,
        d_out: int,
        d_in: int,
        dtype: torch.dtype,
        schedule: Schedule,
        weight: Tensor | None,
        pack: Callable[[Tensor], Callable[[Tensor], Tensor]],
    ) -> None:
        self.d_out, self.schedule, self.weight, self.pack = d_out, schedule, weight, pack
        device = torch.device("cpu")
        self.part_in = SlotPart(slots, d_out, dtype, device)
        self.part_out = SlotPart(slots, d_in, dtype, device)
        self._wide: tuple[tuple[int, int], Callable[[Tensor], Tensor]] | None = None

    @property
    def nbytes(self) -> int:
        return self.part_in.nbytes + self.part_out.nbytes

    def check(self, ins: int, outs: int) -> None:
        """Any width fits."""

    def clear(self, slot: int) -> None:
        self.part_in.clear(slot)
        self.part_out.clear(slot)

    def set(self, slot: int, ins: Rows | None, outs: Rows | None) -> None:
        self.clear(slot)
        if ins is not None:
            self.part_in.set(slot, *ins)
        if outs is not None:
            self.part_out.set(slot, *outs)

    def apply(self, base: BaseProduct, x: Tensor, bias: Tensor | None, step: Routing) -> Tensor:
        use_in, use_out = self.part_in.used > 0, self.part_out.used > 0
        if not step.rows or not (use_in or use_out):
            return base(x, bias)
        part = self.part_in if use_in else self.part_out
        if self.weight is not None and use_in != use_out and self.schedule.wide(step, part, x.numel()):
            y = self._wide_product(x, step, part)
            return y if bias is None else y.add_(bias)
        y = base(x, bias)
        if use_in:
            cpu.segmented_in(y, x, self.part_in, step)
        if use_out:
            cpu.segmented_out(y, x, self.part_out, step)
        return y

    def _wide_product(self, x: Tensor, step: Routing, part: SlotPart) -> Tensor:
        product = self.wide_gemm()
        if part is self.part_in:
            return product(cpu.widen_input(x, part, step))
        return cpu.narrow_output(product(x), self.d_out, part, step)

    def wide_gemm(self) -> Callable[[Tensor], Tensor]:
        """The packed product over ``[W, D_1 ... D_S]``, packed again when a slot has changed."""
        version = (self.part_in.version, self.part_out.version)
        if self._wide is None or self._wide[0] != version:
            assert self.weight is not None
            widen, part = (
                (cpu.wide_weight_in, self.part_in)
                if self.part_in.used
                else (cpu.wide_weight_out, self.part_out)
            )
            self._wide = (version, self.pack(widen(self.weight, part)))
        return self._wide[1]


class StaticProducts:
    """For the GPU: buffers at fixed addresses, so that CUDA graphs stay valid when adapters come and go.

    One of the two parts is kept, the one that the engine's placement uses. W lives in the wide buffer itself, so
    it is stored once; the segmented product reads the deltas from there.

    Args:
        axis: "in" or "out", the part that is kept.
        width: rows K reserved for each slot.
        wide_tokens: steps of up to so many tokens are wide, larger ones segmented (`wide_limit`).
    """

    def __init__(self, slots: int, width: int, axis: str, weight: Tensor, wide_tokens: int) -> None:
        from tessa.ops import linear_op  # registers torch.ops.tessa

        self.op = linear_op.linear_in if axis == "in" else linear_op.linear_out
        self.axis, self.wide_tokens = axis, wide_tokens
        self.wide = WideWeight(weight, slots, width, axis)  # type: ignore[arg-type]

    @property
    def base_weight(self) -> Tensor:
        """W as a view of the wide buffer, to replace the layer's own parameter."""
        return self.wide.base

    @property
    def nbytes(self) -> int:
        wide = self.wide
        return wide.slots * wide.width * wide.delta.shape[2] * wide.buffer.element_size() + wide.index.nbytes

    def check(self, ins: int, outs: int) -> None:
        here, elsewhere = (ins, outs) if self.axis == "in" else (outs, ins)
        if elsewhere:
            other = "along" if self.axis == "in" else "across"
            raise ValueError(
                f"the engine reserved room for slices of the other placement; start it with 'placement': '{other}'"
            )
        if here > self.wide.width:
            raise ValueError(
                f"its slice of {here} rows exceeds the {self.wide.width} reserved per slot; raise --max-lora-rank"
            )

    def clear(self, slot: int) -> None:
        self.wide.clear_slot(slot)

    def set(self, slot: int, ins: Rows | None, outs: Rows | None) -> None:
        rows = ins if self.axis == "in" else outs
        if rows is None:
            self.clear(slot)
        else:
            index, delta = rows
            device = self.wide.buffer.device
            self.wide.set_slot(slot, delta.to(device), index.to(device))

    def apply(self, base: BaseProduct, x: Tensor, bias: Tensor | None, step: StepMeta) -> Tensor:
        w = self.wide
        return self.op(
            x,
            w.buffer,
            w.index,
            w.delta,
            w.base,
            w.widths,
            step.token_slot,
            step.order,
            step.seg_start,
            bias,
            self.wide_tokens,
        )
