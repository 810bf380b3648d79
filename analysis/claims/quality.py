"""Evidence of C5: TESSA's default structure against LoRA on the same tasks, budget, modules and seeds."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis import quality
from analysis.claims.evidence import Evidence, together
from experiments.measure import stats

PREFERRED = ("tessa across random", "tessa across", "tessa")


def differences(table: pd.DataFrame) -> list[Evidence]:
    """One entry per matched budget, in points: the difference of the mean over its open tasks, averaged over seeds,
    with its paired interval. Then, not judged, an entry per open task of each budget. Intervals of the entries that
    are judged hold together, and so do those of the others.

    Open are the tasks that can differ, so are not `Point.saturated`: the others would pull every difference towards 0.
    A budget without any open task has no entry. Of the structure that TESSA's configuration chooses by default, where
    it was trained, else of the first. `gpu` says that base model and tasks are published ones; the skills that this
    project makes count as its own on any base model.
    """
    if table.empty:
        return []
    kinds = [k for k in (*PREFERRED, *quality.in_order(table["structure"])) if k in set(table["structure"])]
    chosen = next((kind for kind in kinds if kind.startswith("tessa")), None)
    own = {e for e, p in zip(table["experiment"], table["protocol"], strict=True) if p == "skills"}
    budgets: dict[tuple[str, str, float | None], list[quality.Point]] = {}
    for point in quality.points(quality.with_mean(table)):
        if point.structure == chosen and point.matched and len(point.changes) > 1:
            budgets.setdefault((point.experiment, point.setting, point.rank_equivalent), []).append(point)
    judged: list[tuple[quality.Point, str]] = []
    listed: list[tuple[quality.Point, str]] = []
    for points in budgets.values():
        tasks = [p for p in points if p.task != quality.MEAN]
        open_ = [p for p in tasks if not p.saturated]
        if not open_:
            continue
        mean = points[-1]  # it comes last
        if len(open_) < len(tasks):
            mean = _over(table, mean, [p.task for p in open_])
        note = f"{mean.task} at rank-equivalent {mean.rank_equivalent:g}"
        if len(open_) < len(tasks):
            note += f", {len(tasks) - len(open_)} of {len(tasks)} tasks saturated and left out"
        judged.append((mean, note))
        if len(tasks) > 1:
            listed += [(p, "") for p in open_]
    return [
        _entry(point, note, len(group), point.experiment not in own, group is judged)
        for group in (judged, listed)
        for point, note in group
    ]


def _over(table: pd.DataFrame, point: quality.Point, tasks: list[str]) -> quality.Point:
    """The point's structure and budget on the mean of these tasks alone."""
    same = (table["experiment"] == point.experiment) & (table["setting"] == point.setting)
    rows = table[same & (table["rank_equivalent"] == point.rank_equivalent) & table["task"].isin(tasks)]
    return [p for p in quality.points(quality.with_mean(rows)) if p.structure == point.structure][-1]


def _entry(point: quality.Point, note: str, together_with: int, published: bool, judged: bool) -> Evidence:
    found = stats.t_interval(100 * np.array(point.changes), together(together_with))
    rank = f"{point.rank_equivalent:g}"
    return Evidence(
        "tessa",
        1,
        found.centre,
        found.low,
        found.high,
        point.provenance,
        f"{point.task}, rank-equivalent {rank}, {point.structure}, {found.n} seeds",
        published,
        note=note,
        judged=judged,
    )
