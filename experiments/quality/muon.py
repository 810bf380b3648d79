"""Muon in float32: momentum whose matrices are made orthogonal before each step (Jordan et al., 2024).

PyTorch's own orthogonalises in bfloat16, which a CPU without AVX-512 emulates: there it takes longer than the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
RMS = 0.2
"""Root mean square of an update's entries, as AdamW's updates have, so that both take one learning rate."""


class Muon(torch.optim.Optimizer):
    """For matrices only; Nesterov momentum, no weight decay."""

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            # Matrices of one shape go through the products together.
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape.setdefault(weight.shape, []).append(weight)
            for shape, weights in by_shape.items():
                updates = torch.stack([self._momentum(weight, group["momentum"]) for weight in weights])
                scale = group["lr"] * RMS * max(shape) ** 0.5
                for weight, update in zip(weights, orthogonal(updates), strict=True):
                    weight.add_(update, alpha=-scale)

    def _momentum(self, weight: Tensor, momentum: float) -> Tensor:
        state = self.state[weight]
        buffer = state.setdefault("momentum", torch.zeros_like(weight))
        assert weight.grad is not None
        buffer.lerp_(weight.grad, 1 - momentum)
        return weight.grad.lerp(buffer, momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly the closest semi-orthogonal matrix of each of ``[n, rows, columns]``, by Newton and Schulz's iteration
    with coefficients that bring singular values to between 0.7 and 1.2 in five rounds."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
