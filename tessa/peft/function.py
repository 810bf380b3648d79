"""The product of a frozen linear layer with a trainable slice, forward and backward, in few passes.

Autograd built from plain operations would copy the output to add into part of it, and would add two full-size
gradients of the input. Here the delta's product accumulates into the base product's own memory in both
directions, the weight's gradient is never formed, and of the input only what the delta's gradient needs is
kept: the sliced columns for ``axis="in"``, the whole input for ``axis="out"``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tessa.slices import Slice


def window(t: Tensor, s: Slice) -> Tensor:
    """View ``[n, segments, segment_width]`` of the sliced positions of ``t: [n, dim]``."""
    return t.unflatten(1, (s.segments, s.part)).narrow(2, s.offset, s.segment_width)


def gather(t: Tensor, s: Slice) -> Tensor:
    """The sliced positions of ``t: [n, dim]`` as ``[n, width]``: a view for one segment, else a copy."""
    if s.segments == 1:
        return t.narrow(1, s.offset, s.width)
    return window(t, s).flatten(1)


def _add_product(out: Tensor, s: Slice, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b: [n, width]`` to the sliced positions of ``out: [n, dim]``."""
    if s.segments == 1:
        out.narrow(1, s.offset, s.width).addmm_(a, b)
    else:
        window(out, s).add_((a @ b).unflatten(1, (s.segments, s.segment_width)))


def _delta_grad(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a.T @ b`` in the delta's dtype; on CUDA a float32 result keeps the product's float32 accumulator."""
    if a.dtype == dtype:
        return a.t() @ b
    if a.is_cuda and dtype == torch.float32:
        return torch.mm(a.t(), b, out_dtype=dtype)
    return (a.t() @ b).to(dtype)


class SliceLinear(torch.autograd.Function):
    """``y = x W^T + bias``, plus the slice's product; gradients for ``x`` and ``delta`` only.

    Shapes: x ``[..., d_in]``, weight ``[d_out, d_in]``, bias ``[d_out]`` or None, delta as
        `Slice.delta_shape`. x,
    weight and bias share a dtype; the delta may have another (float32 beside bfloat16) and is multiplied in
    x's.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, delta: Tensor, s: Slice) -> Tensor:
        y = F.linear(x, weight, bias)
        x2, y2, d = x.reshape(-1, s.d_in), y.view(-1, s.d_out), delta.to(x.dtype)
        kept = x2
        if s.axis == "in":
            kept = gather(x2, s)
            if ctx.needs_input_grad[3]:
                kept = kept.contiguous()  # a view would keep all of x alive until the backward pass
            y2.addmm_(kept, d.t())
        else:
            _add_product(y2, s, x2, d.t())
        ctx.slice = s
        ctx.save_for_backward(weight, delta, kept if ctx.needs_input_grad[3] else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
        s: Slice = ctx.slice
        weight, delta, kept = ctx.saved_tensors
        g = grad.reshape(-1, s.d_out)
        g_delta = gather(g, s) if s.axis == "out" else g
        grad_x = grad_delta = None
        if ctx.needs_input_grad[0]:
            d = delta.to(g.dtype)
            x2 = g @ weight
            if s.axis == "in":
                _add_product(x2, s, g, d)
            else:
                x2.addmm_(g_delta, d)
            grad_x = x2.view(*grad.shape[:-1], s.d_in)
        if ctx.needs_input_grad[3]:
            grad_delta = _delta_grad(g_delta, kept, delta.dtype)
        return grad_x, None, None, grad_delta, None


def add_slice(y: Tensor, x: Tensor, delta: Tensor, s: Slice) -> Tensor:
    """``y`` plus the slice's product, for any base output: quantised layers, autocast, a second adapter.

    Shapes: y ``[..., d_out]``, x ``[..., d_in]``. The product runs in y's dtype. Plain differentiable
        operations.
    """
    x, delta = x.to(y.dtype), delta.to(y.dtype)
    lead = y.shape[:-1]
    if s.axis == "in":
        return y + F.linear(gather(x.reshape(-1, s.d_in), s), delta).view(*lead, s.d_out)
    parts = y.reshape(-1, s.segments, s.part)
    product = F.linear(x.reshape(-1, s.d_in), delta).unflatten(1, (s.segments, s.segment_width))
    before, inside, after = parts.split(
        [s.offset, s.segment_width, s.part - s.offset - s.segment_width], dim=2
    )
    return torch.cat([before, inside + product.to(y.dtype), after], dim=2).view(*lead, s.d_out)
