"""Bars, lines, gaps and legends that the figures share. All of them fit one column of a two-column page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from analysis import style, tables

# `style` chooses the backend without a display; pyplot must come after it.
import matplotlib.pyplot as plt  # isort: skip
from matplotlib.artist import Artist  # isort: skip
from matplotlib.axes import Axes  # isort: skip
from matplotlib.container import ErrorbarContainer  # isort: skip
from matplotlib.figure import Figure  # isort: skip
from matplotlib.lines import Line2D  # isort: skip
from matplotlib.patches import Patch  # isort: skip

SHORT_LABELS = {
    "output_tokens_per_s": "output tokens/s",
    "adapter_cost": "adapter cost (%)",
    "ttft_s_p50": "TTFT p50 (s)",
    "ttft_s_p99": "TTFT p99 (s)",
    "tpot_s_p50": "TPOT p50 (ms)",
    "slo_attainment": "SLO attained (%)",
    "slora_attainment": "TTFT < 6 s (%)",
    "goodput_requests_per_s": "goodput (requests/s)",
    "requests_per_s": "requests/s",
}
"""Axis labels short enough for a narrow panel; names and units are those of `metrics`."""
SCALES = {"adapter_cost": 100.0, "slo_attainment": 100.0, "slora_attainment": 100.0, "tpot_s_p50": 1e3}
WRONG = "outputs wrong by design"
SHARE_OF_GAP, SHARE_OF_AXIS = 0.3, 0.1
"""How far the variants of a line figure spread at most around a value: of the least gap, and of the whole axis."""


def panels(
    rows: int, columns: int, height: float, sharey: Literal["row"] | bool = "row"
) -> tuple[Figure, np.ndarray]:
    """A grid one column wide; `height` in inches is that of a row without its share of legend and notes."""
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(style.ONE_COLUMN, height * rows + 0.95),
        sharey=sharey,
        squeeze=False,
        layout="constrained",
    )
    return figure, grid


def bars(axes: Axes, part: pd.DataFrame, column: str, by: str, values: Sequence[Any]) -> None:
    """A group of bars for each of `values` of the column `by`, one bar per variant, with 95 % intervals."""
    variants = shown_variants(part, column)
    width = 0.84 / max(len(variants), 1)
    scale = SCALES.get(column, 1.0)
    for i, variant in enumerate(variants):
        for j, value in enumerate(values):
            mine = part[(part["variant"] == variant) & (part[by] == value)]
            x = j + (i - (len(variants) - 1) / 2) * width
            if mine.empty:
                continue
            found = tables.interval(mine, column)
            if not np.isfinite(found.centre):
                gap_text(axes, x, mine)
                continue
            error = None
            if np.isfinite(found.low):
                error = [[(found.centre - found.low) * scale], [(found.high - found.centre) * scale]]
            axes.bar(
                [x],
                [found.centre * scale],
                width * 0.92,
                yerr=error,
                color=style.colour(variant),
                alpha=0.45 if _wrong(mine) else 1.0,
                hatch=style.HATCHES[str(mine["provenance"].iloc[0])],
                edgecolor="white",
                linewidth=0.3,
                error_kw={"elinewidth": 0.8, "capsize": 1.2, "ecolor": "black"},
            )
    axes.set_xlim(-0.5, len(values) - 0.5)
    label_axis(axes, column)
    _limit(axes, part, column)


def lines(axes: Axes, part: pd.DataFrame, column: str, by: str, values: Sequence[Any]) -> None:
    """A line per variant over `values` of the column `by`, 95 % intervals as bars; it breaks where a cell has no
    result, and a cross below says that there was one to have. Variants stand a little beside each other."""
    variants = shown_variants(part, column)
    scale = SCALES.get(column, 1.0)
    for i, variant in enumerate(variants):
        mine = part[part["variant"] == variant]
        for kind, rows in mine.groupby("provenance", sort=False):
            found = [tables.interval(rows[rows[by] == value], column) for value in values]
            centre = np.array([f.centre for f in found]) * scale
            if not np.isfinite(centre).any():
                continue
            low = np.array([f.low for f in found]) * scale
            high = np.array([f.high for f in found]) * scale
            axes.errorbar(
                beside(values, i, len(variants)),
                centre,
                yerr=np.nan_to_num(np.array([centre - low, high - centre])),
                **style.curve(variant, str(kind)),
                alpha=0.45 if _wrong(rows) else 1.0,
                capsize=1.5,
                elinewidth=0.7,
            )
        lost = [v for v in values if _lost(mine[mine[by] == v], column)]
        if lost:
            # Staggered, so that several backends lost at one place are all seen.
            height = 0.03 + 0.045 * i
            axes.plot(
                lost,
                [height] * len(lost),
                linestyle="none",
                marker="x",
                markersize=4,
                markeredgewidth=1.2,
                color=style.colour(variant),
                transform=axes.get_xaxis_transform(),
                gid="gap",
                zorder=5,
            )
    label_axis(axes, column)
    _limit(axes, part, column)


def beside(values: Sequence[Any], i: int, count: int) -> np.ndarray:
    """`values` as x of the i-th of `count` variants, shifted so that error bars at one value can be told apart.

    On the axis of `log2_axis`, where values are positive, the shift is a factor.
    """
    x = np.asarray(values, dtype=float)
    if len(x) < 2 or count < 2:
        return x
    log = x.min() > 0
    at = np.log2(x) if log else x
    span = min(SHARE_OF_GAP * np.diff(np.sort(at)).min(), SHARE_OF_AXIS * np.ptp(at))
    at = at + span * (i / (count - 1) - 0.5)
    return np.exp2(at) if log else at


def _limit(axes: Axes, part: pd.DataFrame, column: str) -> None:
    """Keeps an interval of two rounds from flattening all else: beyond twice the span of the values it is cut off."""
    keys = [k for k in ("variant", "cell") if k in part]
    centres = part[part["status"] == "complete"].groupby(keys)[column].mean().dropna().astype(float)
    if centres.empty or axes.get_yscale() == "log" or column.endswith("attainment"):
        return
    centres = centres * SCALES.get(column, 1.0)
    top, bottom = max(float(centres.max()), 0.0), min(float(centres.min()), 0.0)
    room = max(top - bottom, 5.0 if column == "adapter_cost" else 0.0)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, bottom - room) if low < 0 else low, min(high, top + room))


def log2_axis(axes: Axes, values: Sequence[float], most: int = 6) -> None:
    """A doubling axis with the values themselves as ticks, at most `most` of them."""
    if min(values) > 0 and len(values) > 1:
        axes.set_xscale("log", base=2)
    step = -(-len(values) // most)
    kept = list(values)[::step]
    axes.set_xticks(kept, [f"{value:g}" for value in kept])
    axes.minorticks_off()


def label_axis(axes: Axes, column: str) -> None:
    axes.set_ylabel(SHORT_LABELS.get(column, column))
    if column == "adapter_cost":
        axes.axhline(0.0, color="black", linewidth=0.6)
    elif column.endswith("attainment"):
        axes.set_ylim(0, 104)
    else:
        axes.set_ylim(bottom=0)


def shown_variants(part: pd.DataFrame, column: str) -> list[str]:
    """In fixed order; base has no adapter cost."""
    return [v for v in style.in_order(part) if not (column == "adapter_cost" and v == "base")]


def legend(
    figure: Figure, part: pd.DataFrame, as_lines: bool, crosses: bool | None = None, also: Sequence[str] = ()
) -> None:
    """Backends in their order, then how provenance, wrong outputs and gaps look where the figure has them. `also`:
    provenances of what is drawn beside the rows of `part`."""
    handles: list[Artist] = []
    for variant in style.in_order(part):
        text, colour = style.name(variant), style.colour(variant)
        mine = part[part["variant"] == variant]
        if _wrong(mine):
            text += " †"
        if as_lines:
            marker = style.MARKERS.get(variant.partition(":")[0], "o")
            handles.append(Line2D([], [], color=colour, marker=marker, markersize=4, lw=1.1, label=text))
        else:
            handles.append(Patch(facecolor=colour, label=text))
    kinds = provenances(part, also)
    for kind in kinds if kinds != ["measured"] else []:
        if as_lines:
            face = "black" if kind == "measured" else "white"
            handles.append(
                Line2D([], [], color="black", ls=style.LINES[kind], marker="o", mfc=face, ms=3, label=kind)
            )
        else:
            handles.append(Patch(facecolor="white", edgecolor="black", hatch=style.HATCHES[kind], label=kind))
    if (as_lines if crosses is None else crosses) and (part["status"] != "complete").any():
        handles.append(Line2D([], [], color="black", marker="x", ls="none", ms=4, label="no result"))
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=3,
        frameon=False,
        columnspacing=1.0,
        handlelength=1.6,
        handletextpad=0.5,
        labelspacing=0.3,
    )


def provenances(part: pd.DataFrame, also: Sequence[str] = ()) -> list[str]:
    """Those of the rows and `also`, in the fixed order."""
    return [kind for kind in style.HATCHES if kind in {*part["provenance"], *also}]


def footer(figure: Figure, part: pd.DataFrame, *notes: str, also: Sequence[str] = ()) -> None:
    """Where the numbers come from, in a few short lines below the panels; the last thing to be drawn. `also`: as in
    `legend`."""
    first = part.iloc[0]
    rounds = part[part["status"] == "complete"].groupby("cell")["repeat"].nunique()
    fewest, most = (int(rounds.min()), int(rounds.max())) if len(rounds) else (0, 0)
    words = [
        "/".join(provenances(part, also)),
        f"{first['model']} {first['dtype']} on {first['device']}",
        f"{most} rounds" if fewest == most else f"{fewest} to {most} rounds",
        "bars: 95 % interval" if most > 1 else "no interval",
        f"commit\u00a0{', '.join(commits(part)) or 'unknown'}",
    ]
    if _wrong(part):
        words.append(f"† {WRONG}")
    if _cut(figure):
        words.append("intervals cut at the frame")
    text = "; ".join([*words, *notes, *tables.cautions(part)])
    width = round(74 * figure.get_figwidth() / style.ONE_COLUMN)
    figure.supxlabel("\n".join(textwrap.wrap(text, width)), fontsize=6, color="#444444")


def _cut(figure: Figure) -> bool:
    """Whether an interval reaches beyond the panel that it is drawn in."""
    for axes in figure.axes:
        low, high = sorted(axes.get_ylim())  # an axis may be inverted
        room = 1e-6 * (high - low)
        for container in axes.containers:
            if not isinstance(container, ErrorbarContainer):
                continue
            for bars in container.lines[2]:
                for segment in bars.get_segments():
                    ends = np.reshape(segment, (-1, 2))[:, 1]  # empty where nothing is known
                    if (ends < low - room).any() or (ends > high + room).any():
                        return True
    return False


def commits(part: pd.DataFrame) -> list[str]:
    """Short commits, those of trees with uncommitted changes marked `+changes`."""
    seen: dict[str, bool] = {}
    for sha, dirty in zip(part["git_sha"], part["git_dirty"], strict=True):
        if pd.notna(sha):
            key = str(sha)[:7]
            seen[key] = seen.get(key, False) or (pd.notna(dirty) and bool(dirty))
    return [f"{sha}+changes" if dirty else sha for sha, dirty in sorted(seen.items())]


def gap_text(axes: Axes, x: float, mine: pd.DataFrame) -> None:
    """A cell without a number is a gap that says why."""
    status = str(mine["status"].iloc[0])
    axes.annotate(
        "no base" if status == "complete" else status,
        (x, 0.03),
        xycoords=("data", "axes fraction"),
        rotation=90,
        ha="center",
        va="bottom",
        fontsize=5.5,
        color="#555555",
    )


def _lost(mine: pd.DataFrame, column: str) -> bool:
    return not mine.empty and not np.isfinite(tables.interval(mine, column).centre)


def _wrong(part: pd.DataFrame) -> bool:
    return "wrong_by_design" in part and bool(part["wrong_by_design"].fillna(False).astype(bool).any())
