"""Intervals over repeats, ratios within rounds, and the order of backends in a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
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


def bootstrap_interval(
    values: Sequence[float] | np.ndarray,
    statistic: str = "median",
    level: float = 0.95,
    resamples: int = 5000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of the "mean" or "median"; the same values always give the same interval.

    With fewer than 3 values there is no interval: resampling two points says nothing about their spread.
    """
    functions: dict[str, Callable[..., Any]] = {"mean": np.mean, "median": np.median}
    if statistic not in functions:
        raise UserError(f"statistic is {statistic!r}; choose one of {', '.join(functions)}")
    x = _values(values, level)
    method = f"bootstrap {statistic}"
    if x.size == 0 or np.isnan(x).any():
        return Interval(np.nan, np.nan, np.nan, x.size, method)
    centre = float(functions[statistic](x))
    if x.size < 3:
        return Interval(centre, np.nan, np.nan, x.size, method)
    draws = np.random.default_rng(seed).choice(x, (resamples, x.size))
    low, high = np.quantile(functions[statistic](draws, axis=1), [0.5 - level / 2, 0.5 + level / 2])
    return Interval(centre, float(low), float(high), x.size, method)


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


def rotated_orders(names: Sequence[str], rounds: int) -> list[list[str]]:
    """Order of the backends in each round: round k starts with the k-th.

    Over len(names) rounds each backend runs once in every place, so a drift of the machine hits them alike.
    """
    if not names or len(set(names)) != len(names):
        raise UserError(f"backends are {list(names)}; give at least one, each once")
    if rounds < 1:
        raise UserError(f"rounds is {rounds}; give at least 1")
    names = list(names)
    return [names[k % len(names) :] + names[: k % len(names)] for k in range(rounds)]


def over_repeats(frame: pd.DataFrame, by: Sequence[str], metric: str, level: float = 0.95) -> pd.DataFrame:
    """t interval of `metric` over the complete rows of each group: columns by..., centre, low, high, n.

    Groups without a complete row stay, with n = 0 and NaN, so that a gap is seen as one.
    """
    rows = []
    for key, group in frame.groupby(list(by), dropna=False, sort=False):
        good = group[group["status"] == "complete"] if "status" in group else group
        i = t_interval(good[metric].to_numpy(dtype=np.float64), level)
        rows.append([*key, i.centre, i.low, i.high, i.n])
    return pd.DataFrame(rows, columns=[*by, "centre", "low", "high", "n"])


def ratios_within_rounds(
    frame: pd.DataFrame, metric: str, reference: str, by: Sequence[str] = (), level: float = 0.95
) -> pd.DataFrame:
    """`metric` of each backend over that of backend `reference` in the same group and repeat.

    Columns: by..., backend, centre, low, high, n. Only repeats in which both rows are complete are paired; n
    says how many. The reference itself comes out as 1.
    """
    group_keys, keys = [*by, "backend"], [*by, "repeat"]
    frame = frame.assign(_group=frame.groupby(group_keys, dropna=False, sort=False).ngroup())
    good = frame[frame["status"] == "complete"] if "status" in frame else frame
    if good.duplicated([*keys, "backend"]).any():
        raise UserError(
            f"several rows share {', '.join(keys)} and backend; add the column that tells them apart to by"
        )
    base = good[good["backend"] == reference][[*keys, metric]].rename(columns={metric: "_reference"})
    paired = good.merge(base, on=keys)
    rows = []
    for _, first in frame.drop_duplicates("_group").iterrows():
        mine = paired[paired["_group"] == first["_group"]]
        i = ratio_interval(mine[metric].to_numpy(), mine["_reference"].to_numpy(), level)
        rows.append([*first[group_keys], i.centre, i.low, i.high, i.n])
    return pd.DataFrame(rows, columns=[*group_keys, "centre", "low", "high", "n"])


def _values(values: Sequence[float] | np.ndarray, level: float) -> np.ndarray:
    if not 0 < level < 1:
        raise UserError(f"confidence level is {level}; give a share between 0 and 1, such as 0.95")
    return np.asarray(values, dtype=np.float64).ravel()
