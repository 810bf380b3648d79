"""Intervals over repeats, and ratios within rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from tessa.errors import UserError


@dataclass(frozen=True)
class Interval:
    """Centre and confidence interval of n values; low and high are NaN where n cannot support one."""

    centre: float
    low: float
    high: float
    n: int
    method: str


def t_interval(values: Sequence[float] | np.ndarray, level: float = 0.95) -> Interval:
    """Mean and Student's t interval; no interval from a single value. A NaN among the values makes it NaN."""
    x = _values(values, level)
    if x.size == 0 or np.isnan(x).any():
        return Interval(np.nan, np.nan, np.nan, x.size, "t")
    half = np.nan
    if x.size > 1:
        half = stats.t.ppf(0.5 + level / 2, x.size - 1) * x.std(ddof=1) / np.sqrt(x.size)
    return Interval(float(x.mean()), float(x.mean() - half), float(x.mean() + half), x.size, "t")


def ratio_interval(
    values: Sequence[float] | np.ndarray, reference: Sequence[float] | np.ndarray, level: float = 0.95
) -> Interval:
    """values[i] / reference[i] over rounds i: geometric mean, and the t interval of the logarithms.

    Pairing within a round takes out what the rounds differ in. Rounds in which either is NaN make it NaN.
    """
    a, b = _values(values, level), _values(reference, level)
    if a.size != b.size:
        raise UserError(f"{a.size} values and {b.size} reference values; pair them round by round")
    if (a <= 0).any() or (b <= 0).any():
        raise UserError("ratios need values above 0")
    log = t_interval(np.log(a / b), level)
    centre, low, high = np.exp([log.centre, log.low, log.high]).tolist()
    return Interval(centre, low, high, log.n, "t of log ratio")


def adapter_cost(values: Sequence[float], base: Sequence[float], level: float = 0.95) -> Interval:
    """1 - throughput / throughput of base, from ratios within rounds."""
    r = ratio_interval(values, base, level)
    return Interval(1 - r.centre, 1 - r.high, 1 - r.low, r.n, r.method)


def _values(values: Sequence[float] | np.ndarray, level: float) -> np.ndarray:
    if not 0 < level < 1:
        raise UserError(f"confidence level is {level}; give a share between 0 and 1, such as 0.95")
    return np.asarray(values, dtype=np.float64).ravel()
