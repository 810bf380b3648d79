"""Metrics of each adapter of a stored cell, from its request records."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from analysis.load import requests, summaries
from experiments.measure import metrics
from experiments.measure.types import records_from_frame
from tessa.errors import UserError


def per_adapter(results_dir: str | Path, cell: str) -> pd.DataFrame:
    """One row per adapter (-1: the base model), columns as `metrics.per_adapter`: means over the cell's rounds.

    UserError where there is no such complete cell, or where its request records are not kept.
    """
    known = [s for s in summaries(results_dir) if s["status"] == "complete"]
    folder = next((s["folder"] for s in known if s["cell"] == cell), None)
    if folder is None:
        raise UserError(
            f"{cell!r} is no complete cell below {results_dir}; `python -m analysis table` names the settings, and the "
            "folders below an experiment's are its cells"
        )
    records = requests(results_dir, folder)
    if records is None or "token_times_s" not in records:
        raise UserError(
            f"{folder} has no request records (a reference set keeps none); use the results of the run"
        )
    rounds = [metrics.per_adapter(records_from_frame(part)) for _, part in records.groupby("round")]
    return pd.concat(rounds).groupby("adapter").mean().dropna(axis="columns", how="all").reset_index()


def render(frame: pd.DataFrame) -> str:
    """Four significant digits; times in seconds."""
    return frame.to_string(index=False, float_format="{:.4g}".format)
