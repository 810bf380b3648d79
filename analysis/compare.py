"""Two result sets side by side: ratios with intervals, and what got worse."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import style
from analysis.load import load
from analysis.ratios import between_stores
from experiments.measure import metrics

COMPARED = ("output_tokens_per_s", "requests_per_s", "ttft_s_p50", "ttft_s_p99", "tpot_s_p50", "adapter_cost")
THRESHOLD = 0.03
RULE = (
    "B over A, geometric means over rounds with Welch's 95 % interval of the logs. worse or better: the whole "
    "interval lies beyond 1 and the ratio is off by {threshold:.0%} or more; without an interval the mark has a `?`. "
    "Adapter cost is compared as the share of base's throughput that is left, 1 - cost."
)
SAME_WORK = ("experiment", "variant", "model", "dtype", "device", "tp", "setting")


@dataclass(frozen=True)
class Row:
    """One metric of one cell. ratio, low, high: B over A, NaN where one of them has no number. mark: "", "worse",
    "better", with a "?" behind where there is no interval."""

    experiment: str
    backend: str
    model: str
    tp: int
    setting: str
    metric: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    mark: str


@dataclass(frozen=True)
class Comparison:
    """rows: metrics of the cells that both sets completed. changed: cells whose status differs or that one lacks;
    those that B lost are regressions too."""

    rows: list[Row]
    changed: list[str]
    lost: list[str]

    @property
    def regressions(self) -> list[Row]:
        return [row for row in self.rows if row.mark == "worse"]


def compare(a: Path, b: Path, experiment: str | None = None, threshold: float = THRESHOLD) -> Comparison:
    """Cells are the same work if they agree in SAME_WORK (`setting` hashes workload, adapters, engine and measure)."""
    before, after = load(a, experiment), load(b, experiment)
    keys = list(SAME_WORK)
    old, new = _by_key(before, keys), _by_key(after, keys)
    rows: list[Row] = []
    changed: list[str] = []
    lost: list[str] = []
    for key in [*old, *(k for k in new if k not in old)]:
        mine, other = old.get(key), new.get(key)
        first = mine if mine is not None else other
        assert first is not None
        state_a, state_b = _status(mine), _status(other)
        if state_a == state_b == "complete":
            assert mine is not None
            assert other is not None
            rows += _rows(mine, other, threshold)
        elif state_a != state_b:
            text = f"{first['folder'].iloc[0]}: {state_a} -> {state_b}"
            (lost if state_a == "complete" and state_b != "missing" else changed).append(text)
    return Comparison(rows, changed, lost)


def _by_key(frame: pd.DataFrame, keys: list[str]) -> dict[Any, pd.DataFrame]:
    return dict(list(frame.groupby(keys, dropna=False, sort=False))) if len(frame) else {}


def _status(part: pd.DataFrame | None) -> str:
    return "missing" if part is None else str(part["status"].iloc[0])


def _rows(a: pd.DataFrame, b: pd.DataFrame, threshold: float) -> list[Row]:
    first = a.iloc[0]
    rows = []
    for metric in COMPARED:
        if metric not in a or metric not in b:
            continue
        left, right = (part[metric].dropna().astype(float).to_numpy() for part in (a, b))
        better = metrics.lookup(metric)[0].better
        if metric == "adapter_cost":
            left, right, better = 1 - left, 1 - right, "higher"
        i = between_stores(right, left)
        if not math.isfinite(i.centre):
            continue
        mark = _mark(i.centre, i.low, i.high, better, threshold)
        rows.append(
            Row(
                str(first["experiment"]), str(first["variant"]), str(first["model"]), int(first["tp"]),
                str(first["setting"]), "1 - adapter_cost" if metric == "adapter_cost" else metric,
                float(np.exp(np.log(left).mean())), float(np.exp(np.log(right).mean())),
                i.centre, i.low, i.high, mark,
            )
        )  # fmt: skip
    return rows


def _mark(ratio: float, low: float, high: float, better: str | None, threshold: float) -> str:
    if abs(ratio - 1) < threshold or better is None:
        return ""
    word = "better" if (ratio > 1) == (better == "higher") else "worse"
    if not math.isfinite(low):
        return word + "?"
    return word if low > 1 or high < 1 else ""


def as_text(found: Comparison, threshold: float = THRESHOLD) -> str:
    """A table with the regressions marked, then the cells that changed status."""
    if not (found.rows or found.changed or found.lost):
        return "no cells in either folder, or none in both"
    lines = []
    if found.rows:
        lines.append(
            f"{'experiment':<14}{'setting':<10}{'backend':<26}{'TP':>3}  {'metric':<20}{'A':>11}{'B':>11}  "
            f"{'B/A':>6} {'95 % interval':<16}"
        )
        lines.append("-" * 124)
    for row in found.rows:
        interval = f"[{row.low:.3f}, {row.high:.3f}]" if math.isfinite(row.low) else "-"
        lines.append(
            f"{row.experiment:<14}{row.setting:<10}{style.name(row.backend):<26}{row.tp:>3}  {row.metric:<20}"
            f"{row.a:>11.4g}{row.b:>11.4g}  {row.ratio:>6.3f} {interval:<16} {row.mark}".rstrip()
        )
    lines += [f"no result any more: {text}" for text in found.lost]
    lines += [f"no comparison: {text}" for text in found.changed]
    marked = len(found.regressions)
    lines.append(f"{len(found.rows)} comparisons, {marked} worse, {len(found.lost)} cells lost")
    lines.append(RULE.format(threshold=threshold))
    return "\n".join(lines)


def as_json(found: Comparison, threshold: float = THRESHOLD) -> str:
    rows = [{k: _finite(v) for k, v in asdict(row).items()} for row in found.rows]
    rule = RULE.format(threshold=threshold)
    return json.dumps({"rows": rows, "changed": found.changed, "lost": found.lost, "rule": rule}, indent=2)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
