"""Length distributions. Each returns int64 [n] token counts and how many of them were clipped."""

from __future__ import annotations

import numpy as np


def fixed(n: int, value: int) -> tuple[np.ndarray, int]:
    """L = value."""
    return np.full(n, value, dtype=np.int64), 0


def uniform(n: int, low: int, high: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """L ~ Uniform{low, ..., high}, both ends included."""
    return rng.integers(low, high, n, dtype=np.int64, endpoint=True), 0


def lognormal(
    n: int, median: float, sigma: float, low: int, high: int, rng: np.random.Generator
) -> tuple[np.ndarray, int]:
    """L = round(median * exp(sigma * Z)), Z ~ Normal(0, 1), clipped to low..high."""
    drawn = np.rint(median * np.exp(sigma * rng.standard_normal(n)))
    clipped = np.clip(drawn, low, high)
    return clipped.astype(np.int64), int((clipped != drawn).sum())
