"""The fused product and its gradients against plain autograd on the full weight, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tessa.peft.function import SliceLinear, add_slice
from tessa.slices import Slice


@st.composite
def slices(draw) -> Slice:
    segments = draw(st.integers(1, 4))
    part = draw(st.integers(1, 9))
    width = draw(st.integers(1, part))
    offset = draw(st.integers(0, part - width))
    dim, other = segments * part, draw(st.integers(1, 12))
    axis = draw(st.sampled_from(["in", "out"]))
    d_out, d_in = (dim, other) if axis == "out" else (other, dim)
    return Slice(axis, offset, width * segments, segments, d_out, d_in)


def _tensors(s: Slice, bias: bool, lead: tuple[int, ...], dtype=torch.float64):
    g = torch.Generator().manual_seed(7)
    x = torch.randn(*lead, s.d_in, generator=g, dtype=dtype).requires_grad_()
    weight = torch.randn(s.d_out, s.d_in, generator=g, dtype=dtype)
    b = torch.randn(s.d_out, generator=g, dtype=dtype) if bias else None
    delta = torch.randn(s.delta_shape, generator=g, dtype=dtype).requires_grad_()
    return x, weight, b, delta


def _reference(x, weight, bias, delta, s: Slice):
    """The delta scattered into a full-size weight by plain, differentiable indexing."""
    index = torch.tensor(s.indices)
    update = torch.zeros_like(weight).index_add(0 if s.axis == "out" else 1, index, delta)
    return F.linear(x, weight + update, bias)


@settings(max_examples=150, deadline=None)
@given(slices(), st.booleans(), st.sampled_from([(5,), (2, 3), (1, 1, 4), (0,)]), st.booleans())
def test_output_and_gradients_equal_the_full_weight(s, bias, lead, fused):
    x, weight, b, delta = _tensors(s, bias, lead)
    run = SliceLinear.apply if fused else lambda x, w, b, d, s: add_slice(F.linear(x, w, b), x, d, s)
    y = run(x, weight, b, delta, s)
    expected = _reference(x, weight, b, delta, s)
    torch.testing.assert_close(y, expected)
    upstream = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(8))
    got = torch.autograd.grad(y, (x, delta), upstream)
    want = torch.autograd.grad(expected, (x, delta), upstream)
    for a, e in zip(got, want, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("axis", ["in", "out"])
@pytest.mark.parametrize("segments", [1, 4])
def test_gradients_numerically(axis, segments):
    s = Slice(axis, 1, 2 * segments, segments, 12, 12)
    x, weight, b, delta = _tensors(s, True, (2, 3))
    assert torch.autograd.gradcheck(lambda x, d: SliceLinear.apply(x, weight, b, d, s), (x, delta))


@pytest.mark.parametrize("axis", ["in", "out"])
def test_inputs_that_are_not_contiguous(axis):
    s = Slice(axis, 2, 3, 1, 8, 8)
    _, weight, b, delta = _tensors(s, True, (4,))
    x = torch.randn(8, 5, dtype=torch.float64).t().requires_grad_()
    y = SliceLinear.apply(x, weight, b, delta, s)
    torch.testing.assert_close(y, _reference(x, weight, b, delta, s))
    up = torch.randn(8, 5, dtype=torch.float64).t()
    got, want = (torch.autograd.grad(f, (x, delta), up) for f in (y, _reference(x, weight, b, delta, s)))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("axis", ["in", "out"])
def test_float32_delta_beside_a_bfloat16_layer(axis):
    s = Slice(axis, 4, 8, 1, 32, 32)
    x, weight, b, delta = _tensors(s, True, (6,), torch.bfloat16)
    delta = delta.detach().float().requires_grad_()
    y = SliceLinear.apply(x, weight, b, delta, s)
    assert y.dtype == torch.bfloat16
    exact = _reference(x.double(), weight.double(), b.double(), delta.double(), s)
    assert (y.double() - exact).abs().max() < 0.01 * exact.abs().max()
    y.sum().backward()
    assert delta.grad.dtype == torch.float32
    assert x.grad.dtype == torch.bfloat16


def _kept_bytes(function) -> int:
    """Bytes of the distinct storages that the graph keeps, parameters included."""
    kept: dict[int, int] = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return sum(kept.values())


def test_only_the_sliced_input_is_kept():
    s = Slice("in", 8, 4, 1, 16, 64)
    x, weight, _, delta = _tensors(s, False, (1000,), torch.float32)
    parameters = weight.nbytes + delta.nbytes
    assert _kept_bytes(lambda: SliceLinear.apply(x, weight, None, delta, s)) == parameters + 1000 * 4 * 4
    # A frozen delta (evaluation, another adapter in training) keeps no input at all.
    frozen = delta.detach()
    assert _kept_bytes(lambda: SliceLinear.apply(x, weight, None, frozen, s)) == parameters


def test_frozen_parts_get_no_gradient():
    s = Slice("out", 0, 4, 2, 8, 6)
    x, weight, _, delta = _tensors(s, False, (3,))
    SliceLinear.apply(x.detach(), weight, None, delta, s).sum().backward()
    assert delta.grad is not None
    assert weight.grad is None
    y = SliceLinear.apply(x, weight, None, delta.detach(), s)
    y.sum().backward()
    assert x.grad is not None
