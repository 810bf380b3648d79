"""TESSA's two schedules on this machine: what a resident slot and a distinct adapter cost, and the rule's regret."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import files, studies, style
from experiments.schedule_costs import summary

# `style` chooses the backend without a display; pyplot must come after it.
import matplotlib.pyplot as plt  # isort: skip

FOLDER = "schedules"
COMMAND = "python -m experiments.bench_schedules"
SCHEDULES = {"wide_us": ("wide", "#0072B2", "s"), "segmented_us": ("segmented", style.COLOURS["tessa"], "o")}


def read(results_dir: str | Path, reference: bool = False) -> pd.DataFrame:
    """The stored rows, one per layer and point, or those that may be a reference; UserError names their command."""
    return studies.rows(Path(results_dir) / FOLDER, "timed schedules", COMMAND, reference)


def over_adapters(rows: pd.DataFrame) -> Figure:
    """Two panels, cost over resident slots (all in use) and over distinct adapters (all slots taken)."""
    table = summary(rows).reset_index()
    most, first = int(table["slots"].max()), rows.iloc[0]
    tokens = int(table.loc[table["slots"] == most, "tokens"].max())
    table = table[table["tokens"] == tokens]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(style.TWO_COLUMNS, 2.5), sharey=True, layout="constrained"
    )
    _lines(left, table[table["slots"] == table["distinct"]], "slots")
    _lines(right, table[table["slots"] == most], "distinct")
    left.set(xlabel="resident adapters, all in the batch", ylabel="time over the base products'")
    right.set(xlabel=f"distinct adapters in the batch, {most} resident")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(
        f"One layer of {first['model']}, TP {first['tp']:g}, rank-equivalent {first['rank']:g}, {tokens} tokens, "
        f"{first['threads']:g} thread{'s' if first['threads'] > 1 else ''}, measured on {first['machine']}",
        fontsize=8,
    )
    return figure


def _lines(axes: Axes, table: pd.DataFrame, x: str) -> None:
    for column, (name, colour, marker) in SCHEDULES.items():
        ratio = table[column] / table["base_us"]
        axes.plot(table[x], ratio, marker=marker, ms=4, color=colour, label=name)
    rule = table["rule_us"] / table["base_us"]
    axes.plot(table[x], rule, "o", ms=9, mfc="none", mec="black", label="the rule's choice")
    axes.axhline(1, color=style.COLOURS["base"], lw=0.8, label="base products alone")
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(table[x]), [f"{v:g}" for v in table[x]])


def draw(results_dir: str | Path, out_dir: str | Path, reference: bool = False) -> list[Path]:
    """The figure as PNG and PDF; returns the paths."""
    rows = read(results_dir, reference)
    with plt.rc_context(style.RC):
        figure = over_adapters(rows)
    return files.write(figure, Path(out_dir), "schedules")
