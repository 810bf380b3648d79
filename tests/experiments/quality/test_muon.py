"""Muon's update is nearly orthogonal, and it learns what AdamW's learning rate would."""

from __future__ import annotations

import pytest
import torch

from experiments.quality.muon import RMS, Muon, orthogonal


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 96, 24), (2, 24, 96)])
def test_singular_values_come_near_one_and_directions_stay(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made = orthogonal(x)
    values = torch.linalg.svdvals(made)
    assert values.max() < 1.25
    assert values.quantile(0.1) > 0.6
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    nearest = u @ v
    cosine = (made * nearest).sum((1, 2)) / made.norm(dim=(1, 2)) / nearest.norm(dim=(1, 2))
    assert cosine.min() > 0.95


def test_an_update_has_the_size_that_the_learning_rate_says():
    weight = torch.nn.Parameter(torch.zeros(64, 16))
    weight.grad = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * 1e-4
    Muon([weight], lr=0.01).step()
    assert weight.detach().square().mean().sqrt() == pytest.approx(0.01 * RMS, rel=0.25)
    # The rarest of the gradient's directions moves as much as the strongest, which is what sets it apart from momentum.
    values = torch.linalg.svdvals(weight.detach())
    assert values.max() / values.min() < 2


def test_it_finds_a_linear_map():
    generator = torch.Generator().manual_seed(0)
    target, inputs = torch.randn(8, 8, generator=generator), torch.randn(256, 8, generator=generator)
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([weight], lr=0.1)
    for step in range(200):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 200)
        loss = (inputs @ weight.T - inputs @ target.T).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 5e-3  # from about 8
