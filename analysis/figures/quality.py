"""Adaptation quality against the trained parameters, from the rows of `experiment=quality`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import style
from analysis.figures import marks
from experiments.measure import stats

NEEDED = ("method", "rank_equivalent", "seed", "task", "value")
# Methods are trained structures, not serving backends; each takes the colour of the backend that serves it.
BACKENDS = {"lora": "punica", "bd_lora": "bd_lora", "tessa": "tessa", "full": "merged", "base": "base"}
NAMES = {"lora": "LoRA", "bd_lora": "BD-LoRA", "tessa": "TESSA", "full": "full fine-tuning", "base": "base"}
DASHES = ("-", "--", ":", "-.")


def rows(results: Path, frame: pd.DataFrame | None = None) -> pd.DataFrame:
    """The stored quality rows: cells of the store that have a `method`, else a table in `<results>/quality`.

    Empty where there are none. Columns NEEDED are there; `metric`, `placement`, `stderr` and others may be.
    """
    if frame is not None and "method" in frame and set(NEEDED) <= set(frame.columns):
        found = frame[frame["method"].notna() & (frame["status"] == "complete")]
        if len(found):
            return found
    for name, read in (("rows.parquet", pd.read_parquet), ("rows.csv", pd.read_csv)):
        file = results / "quality" / name
        if file.is_file():
            table = read(file)
            if "status" in table:
                table = table[table["status"] == "complete"]
            if set(NEEDED) <= set(table.columns):
                return table
    return pd.DataFrame(columns=list(NEEDED))


def structure(table: pd.DataFrame) -> pd.Series:
    """`tessa across`, `lora`: method with its placement where it has one."""
    placement = table["placement"].fillna("") if "placement" in table else ""
    return (table["method"].astype(str) + " " + placement).str.strip()


def against_budget(table: pd.DataFrame) -> Figure:
    """A panel per task: mean over seeds and 95 % t interval at each budget, a line per structure."""
    table = table.assign(structure=structure(table))
    tasks = list(dict.fromkeys(table["task"]))
    figure, grid = marks.panels(len(tasks), 1, 1.4, sharey=False)
    order = sorted(table["structure"].unique(), key=lambda s: (list(BACKENDS).index(_method(s)), s))
    budgets = sorted(table["rank_equivalent"].dropna().unique())
    for axes, task in zip(grid[:, 0], tasks, strict=True):
        mine = table[table["task"] == task]
        for kind in order:
            row = mine[mine["structure"] == kind]
            if row.empty:
                continue
            same = [s for s in order if _method(s) == _method(kind)]
            line = DASHES[same.index(kind) % len(DASHES)]
            colour = style.colour(BACKENDS[_method(kind)])
            label = NAMES[_method(kind)] + kind.removeprefix(_method(kind))
            if row["rank_equivalent"].isna().all() or _method(kind) in ("full", "base"):
                axes.axhline(row["value"].mean(), color=colour, lw=1.0, ls="-.", label=label)
                continue
            found = [stats.t_interval(row.loc[row["rank_equivalent"] == b, "value"]) for b in budgets]
            centre = np.array([f.centre for f in found])
            error = np.nan_to_num([[f.centre - f.low for f in found], [f.high - f.centre for f in found]])
            marker = style.MARKERS[BACKENDS[_method(kind)]]
            axes.errorbar(
                budgets, centre, yerr=error, color=colour, ls=line, marker=marker, ms=4, lw=1.1, capsize=1.5,
                elinewidth=0.7, label=label,
            )  # fmt: skip
        metric = mine["metric"].iloc[0] if "metric" in mine else "score"
        axes.set_ylabel(str(metric))
        axes.set_title(str(task))
        if budgets:
            marks.log2_axis(axes, budgets)
    grid[-1][0].set_xlabel("budget (rank-equivalents)")
    handles = {label: h for a in grid[:, 0] for h, label in zip(*a.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3, frameon=False)
    seeds = table.groupby(["structure", "rank_equivalent", "task"], dropna=False)["seed"].nunique()
    count = f"{seeds.min()}" if seeds.min() == seeds.max() else f"{seeds.min()} to {seeds.max()}"
    figure.supxlabel(f"measured; {count} seeds; bars: 95 % interval over seeds", fontsize=6, color="#444444")
    return figure


def _method(kind: str) -> str:
    method = kind.partition(" ")[0]
    return method if method in BACKENDS else "base"
