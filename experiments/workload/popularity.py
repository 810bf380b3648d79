"""Which adapter a request uses. Each function returns adapter ids, int32 [n]; id 0 is the most popular.

n counts the requests that use an adapter; those for the base model are put between them by `interleave_base`.
"""

from __future__ import annotations

import math

import numpy as np


def identical(n: int) -> np.ndarray:
    """Every request uses adapter 0."""
    return np.zeros(n, dtype=np.int32)


def distinct(n: int, num_adapters: int) -> np.ndarray:
    """Request i uses adapter i mod num_adapters, so any num_adapters requests in a row are all different."""
    return (np.arange(n) % num_adapters).astype(np.int32)


def uniform(n: int, num_adapters: int, rng: np.random.Generator) -> np.ndarray:
    """P(a) = 1 / num_adapters, drawn independently."""
    return rng.integers(0, num_adapters, n, dtype=np.int32)


def zipf_shares(num_adapters: int, s: float) -> np.ndarray:
    """P(a) = (a + 1)^-s / sum_j (j + 1)^-s: float64 [num_adapters]."""
    weights = np.arange(1, num_adapters + 1, dtype=np.float64) ** -s
    return weights / weights.sum()


def zipf(n: int, num_adapters: int, s: float, rng: np.random.Generator) -> np.ndarray:
    """Drawn independently with `zipf_shares`; s = 0 is uniform."""
    edges = np.cumsum(zipf_shares(num_adapters, s))[:-1]
    return np.searchsorted(edges, rng.random(n), side="right").astype(np.int32)


def punica_geometric_counts(n: int, ratio: float) -> list[int]:
    """Requests per adapter when the i-th adapter gets `ratio` times the next, largest first.

    Punica's "Zipf-1.5". As in Punica's benchmarks: sizes floor(ratio^0), floor(ratio^1), ... are taken while
    they fit below n, and one more adapter gets what is left. The number of adapters follows from n.
    """
    counts: list[int] = []
    left, size = n, 1.0
    while math.floor(size) < left:
        counts.append(math.floor(size))
        left -= counts[-1]
        size *= ratio
    counts.append(left)
    return sorted(counts, reverse=True)


def truncated_geometric_counts(n: int, num_adapters: int, ratio: float) -> list[int]:
    """Requests per adapter for exactly num_adapters of them, shares proportional to ratio^-a.

    Largest remainders are rounded up (ties to the more popular), so the counts add up to n.
    """
    weights = ratio ** -np.arange(num_adapters, dtype=np.float64)
    quotas = n * weights / weights.sum()
    counts = np.floor(quotas).astype(np.int64)
    by_remainder = np.argsort(-(quotas - counts), kind="stable")
    counts[by_remainder[: n - int(counts.sum())]] += 1
    return counts.tolist()


def punica_geometric(
    n: int, ratio: float, num_adapters: int | None, rng: np.random.Generator
) -> tuple[np.ndarray, bool]:
    """Exact counts in random order, and whether they are Punica's own.

    With num_adapters None, or at least as many as Punica's rule uses, they are `punica_geometric_counts`
    (further adapters get no request). With fewer, they are `truncated_geometric_counts`.
    """
    counts = punica_geometric_counts(n, ratio)
    as_published = True
    if num_adapters is not None and num_adapters < len(counts):
        as_published = False
        counts = truncated_geometric_counts(n, num_adapters, ratio)
    ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    rng.shuffle(ids)
    return ids, as_published


def slora_power(n: int, num_adapters: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """floor(num_adapters * U^(1/alpha)), U ~ Uniform(0, 1); alpha = 1 is uniform, smaller is more skewed."""
    ids = np.floor(num_adapters * rng.random(n) ** (1.0 / alpha)).astype(np.int64)
    return np.minimum(ids, num_adapters - 1).astype(np.int32)


def interleave_base(ids: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Spread len(ids) adapter requests over n requests at random places, in their order; the rest get -1."""
    out = np.full(n, -1, dtype=np.int32)
    places = np.sort(rng.permutation(n)[: len(ids)])
    out[places] = ids
    return out


def realised_shares(adapter: np.ndarray) -> dict[str, float | int]:
    """Shares of the requests, base ones counted in the total, that the 1, 5 and 20 most used adapters got."""
    used = adapter[adapter >= 0]
    counts = np.sort(np.bincount(used))[::-1] if len(used) else np.zeros(1, dtype=np.int64)
    n = len(adapter)
    shares: dict[str, float | int] = {f"top{k}_share": float(counts[:k].sum() / n) for k in (1, 5, 20)}
    shares["distinct_adapters"] = int((counts > 0).sum())
    shares["base_share"] = float((adapter < 0).sum() / n)
    return shares
