"""Throughput over a latency added to every collective: measured so, predicted, and the slopes beside the counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import interconnect, style
from analysis.figures import marks
from analysis.figures.save import caption

# `style` chooses the backend without a display; pyplot must come after it.
import matplotlib.pyplot as plt  # isort: skip

LABEL = "latency added to each collective (ms)"
MODELLED = ("modelled",)


def against_latency(part: pd.DataFrame, notes: dict[str, Any]) -> Figure:
    """Three panels; the caption's `notes` get slopes, counts and crossings, and what of the figure is modelled."""
    found, slopes = interconnect.predictions(part), interconnect.slopes(part)
    notes["slopes"] = slopes.round(3).to_dict("records")
    for column in ("measured", "predicted"):
        notes[f"crossings_{column}"] = interconnect.crossings(found, column)
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(style.TWO_COLUMNS, 2.9), layout="constrained", width_ratios=(1, 1, 0.8)
    )
    middle.sharey(left)
    scaled = part.assign(added_latency_ms=part[interconnect.X] / 1e3)
    values = sorted(scaled["added_latency_ms"].dropna().unique())
    marks.lines(left, scaled, interconnect.SPEED, "added_latency_ms", values)
    _ticks(left, values)
    left.set_title("emulated: real engines that wait")
    for variant, mine in found.groupby("variant", sort=False):
        middle.plot(
            mine[interconnect.X] / 1e3,
            mine.predicted,
            color=style.colour(str(variant)),
            marker=style.MARKERS.get(str(variant).partition(":")[0], "o"),
            markerfacecolor="white",
            markersize=4,
            linewidth=1.1,
            linestyle=style.LINES["modelled"],
        )
    _ticks(middle, values)
    middle.set_title("modelled from 0 ms and the collectives")
    _slopes(right, slopes)
    notes["provenance"] = marks.provenances(part, MODELLED)
    notes["caption"] = f"{caption(part)}; the middle panel is modelled"
    marks.legend(figure, part, as_lines=True, also=MODELLED)
    marks.footer(
        figure,
        part,
        f"TP {part['tp'].iloc[0]}",
        "middle panel: modelled",
        "right panel: bars from least to most of the single latencies, black dashes without time inside collectives",
        also=MODELLED,
    )
    return figure


def _ticks(axes: Axes, values: list[float]) -> None:
    """A linear axis from 0, on which a cost per collective is a straight line in time; close ticks are left out."""
    kept = [values[0]]
    for value in values[1:]:
        if value - kept[-1] > 0.12 * max(values):
            kept.append(value)
    axes.set_xticks(kept, [f"{value:g}" for value in kept])
    axes.set_xlabel(LABEL, fontsize=7)


def _slopes(axes: Axes, slopes: pd.DataFrame) -> None:
    most = slopes.counted * slopes.ratio_high
    top = 1.15 * float(np.nanmax([1.0, *slopes.counted, *slopes.slope, *most]))
    axes.plot([0, top], [0, top], color="black", lw=0.7)
    for row in slopes.to_dict("records"):
        variant, counted = str(row["variant"]), float(row["counted"])
        colour = style.colour(variant)
        ends = [counted * row["ratio_low"], counted * row["ratio_high"]]
        axes.plot([counted, counted], ends, color=colour, lw=0.9, marker="_", ms=4, gid=f"range {variant}")
        axes.plot(
            [counted],
            [float(row["slope"])],
            marker=style.MARKERS.get(variant.partition(":")[0], "o"),
            color=colour,
            ls="none",
            ms=6,
        )
        axes.plot(
            [counted],
            [float(row["waited"])],
            marker="_",
            color="black",
            ls="none",
            ms=9,
            gid=f"waits {variant}",
        )
    axes.set(xlim=(0, top), ylim=(0, top), xlabel="collectives of a step, counted")
    axes.set_ylabel("slope of a step's time")
    axes.set_title("step time per added latency")
