"""Arrival processes. Each returns arrival times in seconds from the start of the load, float64 [n], in order.

The first arrival of a random process comes one gap after the start, as S-LoRA's generator does it; with
`constant` that gap is 1/rate too.
"""

from __future__ import annotations

import numpy as np


def all_at_once(n: int) -> np.ndarray:
    """t_i = 0."""
    return np.zeros(n)


def closed_loop(n: int) -> np.ndarray:
    """t_i = 0; the load generator keeps `concurrency` requests in flight and sends the next when one ends."""
    return np.zeros(n)


def constant(n: int, rate: float) -> np.ndarray:
    """t_i = (i + 1) / rate."""
    return np.arange(1, n + 1) / rate


def poisson(n: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Gaps ~ Exponential(mean 1/rate)."""
    return np.cumsum(rng.exponential(1.0 / rate, n))


def gamma(n: int, rate: float, cv: float, rng: np.random.Generator) -> np.ndarray:
    """Gaps ~ Gamma(shape 1/cv^2, scale cv^2/rate): mean 1/rate, coefficient of variation cv (S-LoRA)."""
    return np.cumsum(rng.gamma(1.0 / cv**2, cv**2 / rate, n))
