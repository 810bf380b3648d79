"""Figures from the stored cells, as PNG and PDF."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pandas as pd

from analysis import style, tables
from experiments.measure import metrics

# `style` chooses the backend without a display; pyplot must come after it.
import matplotlib.pyplot as plt  # isort: skip
from matplotlib.axes import Axes  # isort: skip
from matplotlib.figure import Figure  # isort: skip
from matplotlib.patches import Patch  # isort: skip


def draw(frame: pd.DataFrame, folder: Path) -> list[Path]:
    """Throughput and adapter cost for every setting of the frame; returns the PNG paths (a PDF lies beside)."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for part in tables.settings(frame):
        first = part.iloc[0]
        stem = f"{first['experiment']}_{first['model']}_{first['setting']}"
        with plt.rc_context(style.RC):
            figure = throughput_and_cost(part)
            for suffix in (".pdf", ".png"):
                # A fixed date keeps the files equal from run to run.
                stamp = {"CreationDate": None} if suffix == ".pdf" else {}
                figure.savefig(folder / f"{stem}{suffix}", metadata=stamp)
            plt.close(figure)
        paths.append(folder / f"{stem}.png")
    return paths


def throughput_and_cost(part: pd.DataFrame) -> Figure:
    """Two panels over the tensor-parallel degrees of one setting, one bar per backend, with 95 % intervals."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(style.TWO_COLUMNS, 2.9), layout="constrained")
    variants = style.in_order(part)
    _bars(left, part, "output_tokens_per_s", variants, scale=1.0)
    _bars(right, part, "adapter_cost", [v for v in variants if v != "base"], scale=100.0)
    left.set_ylabel(metrics.axis_label("output_tokens_per_s"))
    right.set_ylabel("Adapter cost (% of base throughput)")
    right.axhline(0.0, color="black", linewidth=0.6)
    handles = [Patch(facecolor=style.colour(v), label=style.name(v)) for v in variants]
    for kind in sorted(set(part["provenance"]) - {"measured"}):
        handles.append(Patch(facecolor="white", edgecolor="black", hatch=style.HATCHES[kind], label=kind))
    figure.legend(handles=handles, loc="outside upper center", ncols=min(8, len(handles)), frameon=False)
    figure.supxlabel("\n".join(textwrap.wrap(caption(part), 150)), fontsize=5.5, color="#555555")
    return figure


def _bars(axes: Axes, part: pd.DataFrame, column: str, variants: list[str], scale: float) -> None:
    degrees = sorted(part["tp"].dropna().unique())
    width = 0.8 / max(len(variants), 1)
    for i, variant in enumerate(variants):
        for j, tp in enumerate(degrees):
            mine = part[(part["variant"] == variant) & (part["tp"] == tp)]
            x = j + (i - (len(variants) - 1) / 2) * width
            if mine.empty:
                continue
            found = tables.interval(mine, column)
            if not np.isfinite(found.centre):
                _gap(axes, x, str(mine["status"].iloc[0]))
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
                hatch=style.HATCHES[str(mine["provenance"].iloc[0])],
                edgecolor="white",
                linewidth=0.3,
                error_kw={"elinewidth": 0.8, "capsize": 1.5, "ecolor": "black"},
            )
    axes.set_xticks(range(len(degrees)), [f"TP {tp}" for tp in degrees])
    axes.set_xlim(-0.5, len(degrees) - 0.5)


def _gap(axes: Axes, x: float, status: str) -> None:
    """A cell without a number is shown as a gap that says why."""
    text = "no base" if status == "complete" else status
    axes.annotate(
        text,
        (x, 0.02),
        xycoords=("data", "axes fraction"),
        rotation=90,
        ha="center",
        va="bottom",
        fontsize=6,
        color="#777777",
    )


def caption(part: pd.DataFrame) -> str:
    """Setting, provenance and commits behind a figure."""
    commits = sorted(str(sha)[:10] for sha in part["git_sha"].dropna().unique())
    dirty = ", uncommitted changes" if part["git_dirty"].fillna(False).astype(bool).any() else ""
    rounds = int(part.groupby("cell")["repeat"].nunique().max())
    return f"{tables.describe(part)}; {rounds} rounds; commit {', '.join(commits) or 'unknown'}{dirty}"
