"""Throughput and adapter cost over tensor-parallel degrees, over a swept setting, or over named settings."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis import sweeps
from analysis.figures import marks

COLUMNS = ("output_tokens_per_s", "adapter_cost")
PANELS_WIDE = 3


def over_tp(part: pd.DataFrame) -> Figure:
    """Throughput as bars per degree; adapter cost below, as lines where there are several degrees."""
    degrees = [int(tp) for tp in sorted(part["tp"].dropna().unique())]
    several = len(degrees) > 1
    figure, grid = marks.panels(2, 1, 1.45)
    top, bottom = grid[:, 0]
    marks.bars(top, part, COLUMNS[0], "tp", degrees)
    top.set_xticks(range(len(degrees)), [f"TP {tp}" for tp in degrees])
    if several:
        marks.lines(bottom, part, COLUMNS[1], "tp", degrees)
        marks.log2_axis(bottom, degrees)
        bottom.set_xlabel("tensor-parallel ranks")
    else:
        marks.bars(bottom, part, COLUMNS[1], "tp", degrees)
        bottom.set_xticks(range(len(degrees)), [f"TP {tp}" for tp in degrees])
    marks.legend(figure, part, as_lines=False, crosses=several)
    marks.footer(figure, part)
    return figure


def over_sweep(part: pd.DataFrame, sweep: sweeps.Sweep) -> list[Figure]:
    """A row per metric and a column per facet, at most three of them in a figure."""
    facets = sweeps.in_order(sweep.facet, part[sweep.facet]) if sweep.facet else [None]
    figures = []
    for start in range(0, len(facets), PANELS_WIDE):
        chosen = facets[start : start + PANELS_WIDE]
        figure, grid = marks.panels(len(sweep.columns), len(chosen), 1.4)
        for j, facet in enumerate(chosen):
            rows = part if facet is None else part[part[sweep.facet] == facet]
            values = sweeps.in_order(sweep.x, part[sweep.x])
            for i, column in enumerate(sweep.columns):
                axes = grid[i][j]
                marks.lines(axes, rows, column, sweep.x, values)
                marks.log2_axis(axes, values, most=9 - 2 * len(chosen))
                if j > 0:
                    axes.set_ylabel("")
            if facet is not None:
                grid[0][j].set_title(sweeps.shown(str(sweep.facet), facet))
        middle = grid[-1][len(chosen) // 2] if len(chosen) % 2 else None
        if middle is not None:
            middle.set_xlabel(sweep.label)
        else:
            for axes in grid[-1]:
                axes.set_xlabel(sweep.label)
        _level(grid, sweep.columns)
        marks.legend(figure, part, as_lines=True)
        marks.footer(figure, part, f"TP {part['tp'].iloc[0]}")
        figures.append(figure)
    return figures


def over_names(part: pd.DataFrame, sweep: sweeps.Sweep) -> Figure:
    """Bars for each named value, such as an adapter popularity."""
    values = sweeps.in_order(sweep.x, part[sweep.x])
    figure, grid = marks.panels(len(sweep.columns), 1, 1.45)
    for axes, column in zip(grid[:, 0], sweep.columns, strict=True):
        marks.bars(axes, part, column, sweep.x, values)
        axes.set_xticks(range(len(values)), [])
    names = [sweeps.shown(sweep.x, value).replace(" ", "\n") for value in values]
    grid[-1][0].set_xticks(range(len(values)), names)
    grid[-1][0].set_xlabel(sweep.label)
    marks.legend(figure, part, as_lines=False)
    marks.footer(figure, part, f"TP {part['tp'].iloc[0]}")
    return figure


def _level(grid: object, columns: tuple[str, ...]) -> None:
    """Shared y axes start at 0 for speeds, whichever panel was drawn last."""
    for i, column in enumerate(columns):
        if column != "adapter_cost":
            grid[i][0].set_ylim(bottom=0)  # type: ignore[index]
