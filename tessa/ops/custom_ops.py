"""The adapter ops as ``torch.ops.tessa.*``: torch.compile keeps them whole and CUDA graphs record them.

Importing this module registers four ops; notation and arguments as in `tessa.ops.reference` and
`tessa.ops.step`:

- ``segmented_in(Tensor(a!) y, x, x_index, delta, order, seg_start, width=None) -> ()``
- ``segmented_out(Tensor(a!) y, x, y_index, delta, order, seg_start, width=None) -> ()``
- ``wide_in(x, w_wide, x_index, token_slot, bias=None, width=None) -> y``: ``w_wide = [W | D_1 | ... | D_S]``,
  bias [d_out]
- ``wide_out(x, w_wide, y_index, token_slot, d_out, bias=None, width=None) -> y``:
  ``w_wide = [W; D_1; ...; D_S]``, bias [d_out + S K] with zeros beyond d_out

``y: [T, d_out]`` is contiguous from the wide ops; the metadata may be longer than T. On CUDA the ops run the
Triton kernels, elsewhere plain torch. They are for inference: none has a backward. They are registered
through `torch.library.Library`, which costs less per call than ``torch.library.custom_op``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tessa.ops import reference

_LIBRARY = torch.library.Library("tessa", "FRAGMENT")
# The kernels take row-strided tensors as they are; a compiler must not change the strides under them.
_TAGS = (torch.Tag.needs_exact_strides,)
_SEGMENTED = (
    "(Tensor(a!) y, Tensor x, Tensor {}, Tensor delta, Tensor order, Tensor seg_start, Tensor? width=None)"
    " -> ()"
)
_LIBRARY.define("segmented_in" + _SEGMENTED.format("x_index"), tags=_TAGS)
_LIBRARY.define("segmented_out" + _SEGMENTED.format("y_index"), tags=_TAGS)
_LIBRARY.define(
    "wide_in(Tensor x, Tensor w_wide, Tensor x_index, Tensor token_slot, Tensor? bias=None,"
    " Tensor? width=None) -> Tensor",
    tags=_TAGS,
)
_LIBRARY.define(
    "wide_out(Tensor x, Tensor w_wide, Tensor y_index, Tensor token_slot, SymInt d_out, Tensor? bias=None,"
    " Tensor? width=None) -> Tensor",
    tags=_TAGS,
)


def _wide_in_torch(
    x: Tensor,
    w_wide: Tensor,
    x_index: Tensor,
    token_slot: Tensor,
    bias: Tensor | None = None,
    width: Tensor | None = None,
) -> Tensor:
    x_wide = reference.scatter_inputs_torch(x, x_index, token_slot, w_wide.shape[1], width)
    return F.linear(x_wide, w_wide, bias)


def _wide_out_torch(
    x: Tensor,
    w_wide: Tensor,
    y_index: Tensor,
    token_slot: Tensor,
    d_out: int,
    bias: Tensor | None = None,
    width: Tensor | None = None,
) -> Tensor:
    return reference.route_outputs_torch(F.linear(x, w_wide, bias), y_index, token_slot, d_out, width)


def segmented_in_triton(
    y: Tensor,
    x: Tensor,
    x_index: Tensor,
    delta: Tensor,
    order: Tensor,
    seg_start: Tensor,
    width: Tensor | None = None,
) -> None:
    from tessa.ops import triton_kernels

    triton_kernels.segmented_in(y, x, x_index, delta, order, seg_start, width)


def segmented_out_triton(
    y: Tensor,
    x: Tensor,
    y_index: Tensor,
    delta: Tensor,
    order: Tensor,
    seg_start: Tensor,
    width: Tensor | None = None,
) -> None:
    from tessa.ops import triton_kernels

    triton_kernels.segmented_out(y, x, y_index, delta, order, seg_start, width)


def wide_in_triton(
    x: Tensor,
    w_wide: Tensor,
    x_index: Tensor,
    token_slot: Tensor,
    bias: Tensor | None = None,
    width: Tensor | None = None,
) -> Tensor:
    from tessa.ops import triton_kernels

    x_wide = triton_kernels.scatter_inputs(x, x_index, token_slot, w_wide.shape[1], width)
    return F.linear(x_wide, w_wide, bias)


def wide_out_triton(
    x: Tensor,
    w_wide: Tensor,
    y_index: Tensor,
    token_slot: Tensor,
    d_out: int,
    bias: Tensor | None = None,
    width: Tensor | None = None,
) -> Tensor:
    from tessa.ops import triton_kernels

    return triton_kernels.route_outputs(F.linear(x, w_wide, bias), y_index, token_slot, d_out, width)


def _segmented_fake(
    y: Tensor,
    x: Tensor,
    index: Tensor,
    delta: Tensor,
    order: Tensor,
    seg_start: Tensor,
    width: Tensor | None = None,
) -> None:
    return None


def _wide_in_fake(
    x: Tensor,
    w_wide: Tensor,
    x_index: Tensor,
    token_slot: Tensor,
    bias: Tensor | None = None,
    width: Tensor | None = None,
) -> Tensor:
    return x.new_empty(x.shape[0], w_wide.shape[0])


def _wide_out_fake(
    x: Tensor,
    w_wide: Tensor,
    y_index: Tensor,
    token_slot: Tensor,
    d_out: int,
    bias: Tensor | None = None,
    width: Tensor | None = None,
) -> Tensor:
    return x.new_empty(x.shape[0], d_out)


for _name, _portable, _triton, _fake in (
    ("segmented_in", reference.segmented_in_torch, segmented_in_triton, _segmented_fake),
    ("segmented_out", reference.segmented_out_torch, segmented_out_triton, _segmented_fake),
    ("wide_in", _wide_in_torch, wide_in_triton, _wide_in_fake),
    ("wide_out", _wide_out_torch, wide_out_triton, _wide_out_fake),
):
    _LIBRARY.impl(_name, _portable, "CPU")
    _LIBRARY.impl(_name, _triton, "CUDA")
    torch.library.register_fake(f"tessa::{_name}", _fake, lib=_LIBRARY)

segmented_in = torch.ops.tessa.segmented_in.default
segmented_out = torch.ops.tessa.segmented_out.default
wide_in = torch.ops.tessa.wide_in.default
wide_out = torch.ops.tessa.wide_out.default
