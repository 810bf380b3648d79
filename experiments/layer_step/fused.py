"""Row-wise kernels of a layer, the same for every backend: one launch each on a GPU, plain torch on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-5


def add_rms_norm(residual: Tensor, update: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``(residual + update, its RMS norm times weight)``, both [T, d], sums in float32."""
    if residual.device.type == "cuda":
        from experiments.layer_step.fused_kernels import add_rms_norm as kernel

        return kernel(residual, update, weight, EPS)
    total = residual + update
    scale = torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + EPS)
    return total, (total.float() * scale).to(total.dtype) * weight


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[gate | up]``: [T, 2 f] to [T, f]."""
    if gate_up.device.type == "cuda":
        from experiments.layer_step.fused_kernels import silu_mul as kernel

        return kernel(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
