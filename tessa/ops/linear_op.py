"""A whole TESSA layer as one op, so that the choice of its products is made when a step runs or is captured.

- ``tessa::linear_in(x, w_wide, index, delta, w, width, token_slot, order, seg_start, bias, wide_tokens) -> y``
- ``tessa::linear_out(...)``, the same arguments

Notation as in `tessa.ops.custom_ops`; ``w`` is W as a view of ``w_wide``. A step of at most ``wide_tokens`` tokens
is computed by the wide product, a larger one by the base product and the segmented one. The number of tokens is
fixed inside a captured CUDA graph, so each graph holds the products that suit its size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tessa.ops import custom_ops

_LIBRARY = torch.library.Library("tessa", "FRAGMENT")
_ARGUMENTS = (
    "(Tensor x, Tensor w_wide, Tensor index, Tensor delta, Tensor w, Tensor width, Tensor token_slot,"
    " Tensor order, Tensor seg_start, Tensor? bias, int wide_tokens) -> Tensor"
)


def _linear_in(
    x: Tensor,
    w_wide: Tensor,
    index: Tensor,
    delta: Tensor,
    w: Tensor,
    width: Tensor,
    token_slot: Tensor,
    order: Tensor,
    seg_start: Tensor,
    bias: Tensor | None,
    wide_tokens: int,
) -> Tensor:
    if x.shape[0] <= wide_tokens:
        return custom_ops.wide_in(x, w_wide, index, token_slot, bias, width)
    y = F.linear(x, w, bias)
    custom_ops.segmented_in(y, x, index, delta, order, seg_start, width)
    return y


def _linear_out(
    x: Tensor,
    w_wide: Tensor,
    index: Tensor,
    delta: Tensor,
    w: Tensor,
    width: Tensor,
    token_slot: Tensor,
    order: Tensor,
    seg_start: Tensor,
    bias: Tensor | None,
    wide_tokens: int,
) -> Tensor:
    if x.shape[0] <= wide_tokens:
        y = custom_ops.wide_out(x, w_wide, index, token_slot, w.shape[0], None, width)
        return y if bias is None else y.add_(bias)
    y = F.linear(x, w, bias)
    custom_ops.segmented_out(y, x, index, delta, order, seg_start, width)
    return y


def _fake(
    x: Tensor,
    w_wide: Tensor,
    index: Tensor,
    delta: Tensor,
    w: Tensor,
    width: Tensor,
    token_slot: Tensor,
    order: Tensor,
    seg_start: Tensor,
    bias: Tensor | None,
    wide_tokens: int,
) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


for _name, _function in (("linear_in", _linear_in), ("linear_out", _linear_out)):
    _LIBRARY.define(_name + _ARGUMENTS, tags=(torch.Tag.needs_exact_strides,))
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tessa::{_name}", _fake, lib=_LIBRARY)

linear_in = torch.ops.tessa.linear_in.default
linear_out = torch.ops.tessa.linear_out.default
