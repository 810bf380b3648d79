"""Where a benchmark's rows go: one CSV beside the store's cells, each row with its machine and commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from experiments import provenance


def store(rows: pd.DataFrame, name: str, out: Path, git: dict[str, Any]) -> pd.DataFrame:
    """Writes ``out/rows.csv``, whole or not at all, and returns what it holds.

    Args:
        name: the `experiment` column's value.
        git: `provenance.git_state()` of when the measurement began.
    """
    rows = rows.assign(
        experiment=name,
        provenance="measured",
        machine=provenance.machine(),
        git_sha=git["sha"],
        git_dirty=git["dirty"],
    )
    out.mkdir(parents=True, exist_ok=True)
    part = out / "rows.csv.part"
    rows.to_csv(part, index=False)
    part.replace(out / "rows.csv")
    return rows
