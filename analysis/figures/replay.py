"""A replayed trace over its own time: requests arriving, and how long they waited on each backend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import style
from analysis.figures import marks
from analysis.load import requests

BINS = 24


def over_time(part: pd.DataFrame, results: Path, trace: str) -> Figure | None:
    """Three panels over the time since the replay began; None where no cell of the trace kept its requests.

    Top: arrivals per second. Below: median time to first token and median end-to-end latency of the requests that
    arrived in each of BINS equal intervals, over all rounds; the band is from the least to the most of the rounds.
    """
    rows = part[part["trace"] == trace]
    read = {
        variant: records
        for variant in style.in_order(rows)
        if (records := _records(rows[(rows["variant"] == variant)], results)) is not None
    }
    if not read:
        return None
    ends = [float(r["scheduled_s"].max()) for r in read.values()]
    edges = np.linspace(0.0, max(ends) * (1 + 1e-9) or 1.0, BINS + 1)
    figure, grid = marks.panels(3, 1, 1.1, sharey=False)
    top, first, whole = grid[:, 0]
    arrivals = next(iter(read.values()))
    once = arrivals[arrivals["round"] == arrivals["round"].min()]
    counts, _ = np.histogram(once["scheduled_s"], edges)
    top.stairs(counts / np.diff(edges), edges, fill=True, color="#bbbbbb")
    top.set_ylabel("arrivals\n(requests/s)")
    top.set_ylim(bottom=0)
    middles = (edges[:-1] + edges[1:]) / 2
    for axes, column, label in ((first, "first_token_s", "TTFT (s)"), (whole, "end_s", "end to end (s)")):
        for variant, records in read.items():
            each = np.array([_medians(r, column, edges) for _, r in records.groupby("round")])
            colour = style.colour(variant)
            centre = _medians(records, column, edges)
            axes.plot(
                middles,
                centre,
                color=colour,
                lw=1.1,
                marker=style.MARKERS.get(variant.partition(":")[0], "o"),
                markersize=3,
                markevery=max(BINS // 8, 1),
            )
            if len(each) > 1:
                low, high = np.min(each, axis=0), np.max(each, axis=0)
                axes.fill_between(middles, low, high, color=colour, alpha=0.18, lw=0)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.sharex(top)
    for axes in (top, first):
        axes.tick_params(labelbottom=False)
    whole.set_xlabel("time of arrival (s)")
    top.set_title(f"{trace}: {len(once)} requests")
    marks.legend(figure, rows, as_lines=True)
    marks.footer(
        figure, rows, f"TP {rows['tp'].iloc[0]}", "medians of arrivals in each interval, band: rounds"
    )
    return figure


def _records(rows: pd.DataFrame, results: Path) -> pd.DataFrame | None:
    """Finished requests of the complete cells of one backend."""
    kept = []
    for folder in rows.loc[rows["status"] == "complete", "folder"].unique():
        records = requests(results, folder)
        if records is not None:
            kept.append(records[records["status"] == "ok"])
    found = pd.concat(kept) if kept else pd.DataFrame()
    return found if len(found) else None


def _medians(records: pd.DataFrame, column: str, edges: np.ndarray) -> np.ndarray:
    """Median latency from the scheduled arrival to `column` in each interval, NaN where nothing arrived."""
    waited = records[column].astype(float) - records["scheduled_s"]
    bins = np.clip(np.searchsorted(edges, records["scheduled_s"], side="right") - 1, 0, len(edges) - 2)
    return waited.groupby(bins).median().reindex(range(len(edges) - 1)).to_numpy()
