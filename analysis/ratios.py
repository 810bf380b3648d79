"""Ratios of two backends within rounds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from experiments.measure import stats


@dataclass(frozen=True)
class Ratio:
    """interval: geometric mean and interval of the ratio; NaN where no round has both. paired: whether both
    ran in the same session, round by round; else the rounds were paired by their number alone."""

    interval: stats.Interval
    paired: bool


def within_rounds(part: pd.DataFrame, column: str, above: str, below: str, level: float = 0.95) -> Ratio:
    """`column` of variant `above` over that of `below` in one setting and TP degree, complete rounds only."""
    rows = {v: _complete(part[part["variant"] == v], column) for v in (above, below)}
    for keys, paired in ((["repeat", "session"], True), (["repeat"], False)):
        if any(set(keys) - set(frame.columns) for frame in rows.values()):
            continue
        both = rows[above].merge(rows[below], on=keys, suffixes=("_above", "_below"))
        if len(both):
            own, other = both[f"{column}_above"].astype(float), both[f"{column}_below"].astype(float)
            return Ratio(stats.ratio_interval(own.to_numpy(), other.to_numpy(), level), paired)
    return Ratio(stats.Interval(np.nan, np.nan, np.nan, 0, "t of log ratio"), False)


def between_stores(after: np.ndarray, before: np.ndarray, level: float = 0.95) -> stats.Interval:
    """Ratio of geometric means of two unpaired sets of rounds, with Welch's interval of the difference of logs.

    No interval where either has fewer than two rounds. Raises nothing: values of 0 or less make it NaN.
    """
    if not (len(after) and len(before) and (after > 0).all() and (before > 0).all()):
        return stats.Interval(np.nan, np.nan, np.nan, 0, "Welch t of logs")
    a, b = np.log(after), np.log(before)
    centre, n = float(a.mean() - b.mean()), min(len(a), len(b))
    if n < 2:
        return stats.Interval(float(np.exp(centre)), np.nan, np.nan, n, "Welch t of logs")
    va, vb = a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)
    half = 0.0
    if va + vb > 0:
        freedom = (va + vb) ** 2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1))
        half = float(scipy_stats.t.ppf(0.5 + level / 2, freedom) * np.sqrt(va + vb))
    low, high = np.exp([centre - half, centre + half]).tolist()
    return stats.Interval(float(np.exp(centre)), low, high, n, "Welch t of logs")


def _complete(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    good = rows[(rows["status"] == "complete") & rows[column].notna()] if column in rows else rows.iloc[:0]
    return good[[c for c in ("repeat", "session", column) if c in good]]
