"""Triton kernels of `experiments.layer_step.fused`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_rms_norm_kernel(
    residual_ptr, update_ptr, weight_ptr, total_ptr, out_ptr, d, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * d
    cols = tl.arange(0, BLOCK)
    ok = cols < d
    left = tl.load(residual_ptr + row + cols, mask=ok, other=0.0)
    total = (left.to(tl.float32) + tl.load(update_ptr + row + cols, mask=ok, other=0.0).to(tl.float32)).to(
        left.dtype
    )
    tl.store(total_ptr + row + cols, total, mask=ok)
    wide = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / d + eps)
    weight = tl.load(weight_ptr + cols, mask=ok, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + cols, (wide * scale * weight).to(left.dtype), mask=ok)


@triton.jit
def _silu_mul_kernel(in_ptr, out_ptr, f, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < f
    gate = tl.load(in_ptr + row * 2 * f + cols, mask=ok, other=0.0)
    up = tl.load(in_ptr + row * 2 * f + f + cols, mask=ok, other=0.0)
    wide = gate.to(tl.float32)
    out = wide / (1.0 + tl.exp(-wide)) * up.to(tl.float32)
    tl.store(out_ptr + row * f + cols, out.to(gate.dtype), mask=ok)


def add_rms_norm(residual: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Contiguous [T, d] inputs."""
    tokens, d = residual.shape
    total, out = torch.empty_like(residual), torch.empty_like(residual)
    block = triton.next_power_of_2(d)
    warps = 8 if block >= 4096 else 4
    _add_rms_norm_kernel[(tokens,)](
        residual, update, weight, total, out, d, eps, BLOCK=block, num_warps=warps
    )
    return total, out


def silu_mul(gate_up: Tensor) -> Tensor:
    """Contiguous [T, 2 f] input."""
    tokens, f = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, f)
    block = min(1024, triton.next_power_of_2(f))
    _silu_mul_kernel[(tokens, triton.cdiv(f, block))](gate_up, out, f, BLOCK=block, num_warps=4)
    return out
