"""Two result sets side by side: ratios of cells, differences of scores, and what got worse."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import quality, style, tables
from analysis.claims.evidence import together
from analysis.figures import marks
from analysis.figures.save import distinct
from analysis.load import load
from analysis.ratios import between_stores
from experiments.measure import metrics, stats

COMPARED = ("output_tokens_per_s", "requests_per_s", "ttft_s_p50", "ttft_s_p99", "tpot_s_p50", "adapter_cost")
THRESHOLD = 0.03
FEW = 3
RULE = (
    "B over A, geometric means over rounds with Welch's interval of the logs; of scores B - A in points, paired over "
    "seeds. Each interval is at {level:.5g} %, so that all {count} of them hold at once with 95 % (Bonferroni). worse "
    "or better: the whole interval lies beyond 1 (of scores 0) and the change is {threshold:.3g} % (of scores points) "
    "or more; without an interval the mark has a `?`. Adapter cost is compared as the share of base's throughput that "
    "is left, 1 - cost. How much one run differs from the next on a machine is in no interval."
)
SAME_WORK = ("experiment", "variant", "model", "dtype", "device", "tp", "setting")
SAME_STRUCTURE = ("experiment", "model", "dtype", "device", "setting", "structure", "rank_equivalent")


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
class Score:
    """One trained structure's score on one task, as a share. a, b: means over the seeds that both sets have;
    difference, low, high: B - A, paired over these seeds. mark: as of a Row."""

    experiment: str
    structure: str
    rank_equivalent: float | None
    model: str
    setting: str
    task: str
    seeds: int
    a: float
    b: float
    difference: float
    low: float
    high: float
    mark: str


@dataclass(frozen=True)
class Comparison:
    """rows: metrics of the cells that both sets completed. scores: of the structures that both trained. changed: cells
    whose status differs or that one lacks; those that B lost are regressions too. tables: studies that both sets have
    and that are not compared. count, level: how many intervals there are, and the level of each, in percent.
    machines, commits: those of A's cells and of B's. settings: what the hashes of `rows` stand for, in words."""

    rows: list[Row]
    scores: list[Score]
    changed: list[str]
    lost: list[str]
    tables: list[str]
    count: int
    level: float
    machines: tuple[list[str], list[str]]
    commits: tuple[list[str], list[str]]
    settings: dict[str, str]

    @property
    def regressions(self) -> list[Row | Score]:
        found: list[Row | Score] = [*self.rows, *self.scores]
        return [row for row in found if row.mark == "worse"]


def compare(a: Path, b: Path, experiment: str | None = None, threshold: float = THRESHOLD) -> Comparison:
    """Cells are the same work if they agree in SAME_WORK (`setting` hashes workload, adapters, engine and measure),
    trainings if they agree in SAME_STRUCTURE, role and seed; in a search for a learning rate also in that."""
    before, after = load(a, experiment), load(b, experiment)
    served = [_by_key(_served(frame), SAME_WORK) for frame in (before, after)]
    trainings = [
        _by_key(_trained(frame), (*SAME_STRUCTURE, "role", "seed", "tried")) for frame in (before, after)
    ]
    scored = [_by_key(quality.rows(_trained(frame)), (*SAME_STRUCTURE, "task")) for frame in (before, after)]
    cells = [pair for pair in _both(*served) if _status(pair[0]) == _status(pair[1]) == "complete"]
    pairs = [values for pair in cells for values in _values(*pair)]
    seeds = [_seeds(*pair) for pair in _both(*scored)]
    count = sum(min(len(left), len(right)) > 1 for _, _, left, right in pairs)
    count += sum(len(values) > 1 for _, values in seeds)
    level = together(count)
    changes = [*_changes(*served), *_changes(*trainings)]
    return Comparison(
        [_row(*values, level, threshold) for values in pairs],
        [_score(first, values, level, threshold) for first, values in seeds if len(values)],
        [text for text, is_lost in changes if not is_lost],
        [text for text, is_lost in changes if is_lost],
        sorted(_tables(a, experiment) & _tables(b, experiment)),
        count,
        100 * level,
        (distinct(before, "machine"), distinct(after, "machine")),
        (marks.commits(before), marks.commits(after)),
        {str(mine["setting"].iloc[0]): tables.describe(mine) for mine, _ in cells},
    )


def _served(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["method"].isna()] if "method" in frame else frame


def _trained(frame: pd.DataFrame) -> pd.DataFrame:
    """The trainings, with `structure`, and in a search `tried`, its learning rate."""
    if "method" not in frame:
        return frame.iloc[:0]
    found = frame[frame["method"].notna()].copy()
    for column in ("rank_equivalent", "learning_rate", "seed"):
        found[column] = found[column].astype(float)
    found["structure"] = quality.structure(found)
    return found.assign(tried=found["learning_rate"].where(found["role"].eq("search")))


def _tables(results: Path, experiment: str | None) -> set[str]:
    """Studies that keep tables of their own there."""
    files = [file for kind in ("csv", "parquet") for file in results.glob(f"{experiment or '*'}/*.{kind}")]
    return {file.parent.name for file in files} - {"figures", "report"}


Parts = dict[tuple[str, ...], pd.DataFrame]


def _by_key(frame: pd.DataFrame, keys: tuple[str, ...]) -> Parts:
    """Rows by what they have in the key columns, as text: there NaN equals NaN."""
    if frame.empty:
        return {}
    return dict(list(frame.groupby([frame[key].map(str) for key in keys], sort=False)))  # type: ignore[arg-type]


def _both(old: Parts, new: Parts) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    return [(part, new[key]) for key, part in old.items() if key in new]


def _changes(old: Parts, new: Parts) -> Iterator[tuple[str, bool]]:
    """What has another status in B or is in one set alone, in words, and whether B lost it."""
    for key in [*old, *(k for k in new if k not in old)]:
        mine, other = old.get(key), new.get(key)
        before, after = _status(mine), _status(other)
        if before != after:
            first = mine if mine is not None else new[key]
            text = f"{first['folder'].iloc[0]}: {before} -> {after}"
            yield text, before == "complete" and after != "missing"


def _status(part: pd.DataFrame | None) -> str:
    return "missing" if part is None else str(part["status"].iloc[0])


def _values(a: pd.DataFrame, b: pd.DataFrame) -> Iterator[tuple[pd.Series, str, np.ndarray, np.ndarray]]:
    """(a row, metric, values of A, values of B), a value per round, of each metric whose ratio can be formed."""
    for metric in COMPARED:
        if metric not in a or metric not in b:
            continue
        if metric == "adapter_cost" and (a["backend"] == "base").all():
            continue  # base over itself
        left, right = (part[metric].dropna().astype(float).to_numpy() for part in (a, b))
        if metric == "adapter_cost":
            left, right = 1 - left, 1 - right
        if len(left) and len(right) and (left > 0).all() and (right > 0).all():
            yield a.iloc[0], metric, left, right


def _row(
    first: pd.Series, metric: str, left: np.ndarray, right: np.ndarray, level: float, threshold: float
) -> Row:
    i = between_stores(right, left, level)
    cost = metric == "adapter_cost"
    better = "higher" if cost else metrics.lookup(metric)[0].better
    return Row(
        str(first["experiment"]), str(first["variant"]), str(first["model"]), int(first["tp"]),
        str(first["setting"]), "1 - adapter_cost" if cost else metric,
        float(np.exp(np.log(left).mean())), float(np.exp(np.log(right).mean())),
        i.centre, i.low, i.high, _mark(i.centre - 1, i.low - 1, i.high - 1, better, threshold),
    )  # fmt: skip


def _seeds(a: pd.DataFrame, b: pd.DataFrame) -> tuple[pd.Series, pd.DataFrame]:
    """A row, and the scores `a` and `b` of the seeds that both have."""
    pairs = {"a": quality.by_seed(a), "b": quality.by_seed(b)}
    return a.iloc[0], pd.concat(pairs, axis=1, join="inner").dropna()


def _score(first: pd.Series, values: pd.DataFrame, level: float, threshold: float) -> Score:
    i = stats.t_interval((values["b"] - values["a"]).to_numpy(), level)
    rank = first["rank_equivalent"]
    return Score(
        str(first["experiment"]), str(first["structure"]), None if pd.isna(rank) else float(rank),
        str(first["model"]), str(first["setting"]), str(first["task"]), len(values),
        float(values["a"].mean()), float(values["b"].mean()), i.centre, i.low, i.high,
        _mark(i.centre, i.low, i.high, "higher", threshold),
    )  # fmt: skip


def _mark(change: float, low: float, high: float, better: str | None, threshold: float) -> str:
    """Of a change from 0 with its interval."""
    if abs(change) < threshold or better is None:
        return ""
    word = "better" if (change > 0) == (better == "higher") else "worse"
    if not math.isfinite(low):
        return word + "?"
    return word if low > 0 or high < 0 else ""


def as_text(found: Comparison, threshold: float = THRESHOLD) -> str:
    """A table of cells and one of scores with the regressions marked, then the cells that changed status."""
    if not (found.rows or found.scores or found.changed or found.lost or found.tables):
        return "no cells in either folder, or none in both"
    lines = [
        f"{name}: {' and '.join(machines) or 'unknown machine'}; commit {', '.join(commits) or 'unknown'}"
        for name, machines, commits in zip("AB", found.machines, found.commits, strict=True)
    ]
    if all(found.machines) and found.machines[0] != found.machines[1]:
        lines.append(
            "The machines differ: a faster or slower B says nothing about the code; adapter costs move with them too."
        )
    lines.append("")
    if found.rows:
        lines.append(
            f"{'experiment':<14}{'setting':<10}{'backend':<26}{'TP':>3}  {'metric':<20}{'A':>11}{'B':>11}  "
            f"{'B/A':>6} {'interval':<16}"
        )
        lines.append("-" * 124)
    for row in found.rows:
        interval = f"[{row.low:.3f}, {row.high:.3f}]" if math.isfinite(row.low) else "-"
        lines.append(
            f"{row.experiment:<14}{row.setting:<10}{style.name(row.backend):<26}{row.tp:>3}  {row.metric:<20}"
            f"{row.a:>11.4g}{row.b:>11.4g}  {row.ratio:>6.3f} {interval:<16} {row.mark}".rstrip()
        )
    lines += [
        line
        for setting, words in found.settings.items()
        for line in textwrap.wrap(f"{setting}: {words}", 124, subsequent_indent=" " * 10)
    ]
    if found.scores:
        lines += [""] * bool(found.rows)
        lines.append(
            f"{'experiment':<14}{'setting':<10}{'structure':<26}{'r':>3}  {'score':<20}{'A, %':>11}{'B, %':>11}  "
            f"{'B-A':>6} {'interval':<16}"
        )
        lines.append("-" * 124)
    for score in found.scores:
        low, high = 100 * score.low, 100 * score.high
        interval = f"[{low:+.1f}, {high:+.1f}]" if math.isfinite(low) else "-"
        rank = "-" if score.rank_equivalent is None else f"{score.rank_equivalent:g}"
        lines.append(
            f"{score.experiment:<14}{score.setting:<10}{quality.name(score.structure):<26}{rank:>3}  "
            f"{score.task:<20}{100 * score.a:>11.1f}{100 * score.b:>11.1f}  {100 * score.difference:>+6.1f} "
            f"{interval:<16} {score.mark}".rstrip()
        )
    lines += [f"no result any more: {text}" for text in found.lost]
    lines += [f"no comparison: {text}" for text in _shortened(found.changed)]
    if found.tables:
        lines.append(f"no comparison: tables of {', '.join(found.tables)}")
    marked, compared = len(found.regressions), len(found.rows) + len(found.scores)
    lines.append(f"{compared} comparisons, {marked} worse, {len(found.lost)} cells lost")
    if compared:
        lines.append(textwrap.fill(_rule(found, threshold), 124))
    return "\n".join(lines)


def _shortened(changed: list[str]) -> list[str]:
    """One line for each kind of change of an experiment's cells where more than FEW have it."""
    kinds: dict[str, list[str]] = {}
    for text in changed:
        cell, _, change = text.partition(": ")
        kinds.setdefault(f"{cell.partition('/')[0]}: {change}", []).append(text)
    lines = []
    for kind, texts in kinds.items():
        experiment, _, change = kind.partition(": ")
        many = f"{len(texts)} cells of {experiment}: {change} (--json names them)"
        lines += texts if len(texts) <= FEW else [many]
    return lines


def as_json(found: Comparison, threshold: float = THRESHOLD) -> str:
    said = asdict(found) | {"rule": _rule(found, threshold)}
    for kind in ("rows", "scores"):
        said[kind] = [{k: _finite(v) for k, v in row.items()} for row in said[kind]]
    return json.dumps(said, indent=2)


def _rule(found: Comparison, threshold: float) -> str:
    return RULE.format(level=found.level, count=found.count, threshold=100 * threshold)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
