"""Evidence of C5: TESSA against LoRA on the same task, budget and seeds."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.claims.evidence import Evidence
from analysis.figures import quality
from experiments.measure import stats

MATCHED = 0.05
DEFAULT = ("tessa across", "tessa")


def differences(table: pd.DataFrame) -> list[Evidence]:
    """One entry per task and budget: mean difference over seeds with its paired interval, of TESSA's default placement
    where it was trained, else of the first. `reference` is 1 where TESSA's mean is within or above LoRA's interval.
    """
    if table.empty:
        return []
    table = table.assign(structure=quality.structure(table))
    ours = [s for s in (*DEFAULT, *sorted(table["structure"].unique())) if s in set(table["structure"])]
    chosen = next((s for s in ours if s.startswith("tessa")), None)
    if chosen is None:
        return []
    found = []
    for (task, budget), rows in table.groupby(["task", "rank_equivalent"], sort=False):
        both = {s: _by_seed(rows[rows["structure"] == s]) for s in ("lora", chosen)}
        paired = pd.concat(both, axis=1, join="inner").dropna()
        if len(paired) < 2 or not _matched(rows, chosen):
            continue
        difference = stats.t_interval((paired[chosen] - paired["lora"]).to_numpy())
        lora = stats.t_interval(both["lora"].to_numpy())
        inside = float(both[chosen].mean() >= lora.low)
        setting = f"{task}, rank-equivalent {budget:g}, {chosen}, {len(paired)} seeds"
        kind = str(rows["provenance"].iloc[0]) if "provenance" in rows else "measured"
        found.append(
            Evidence(
                "tessa", 1, difference.centre, difference.low, difference.high, kind, setting, False, inside
            )
        )
    return found


def _by_seed(rows: pd.DataFrame) -> pd.Series:
    return rows.groupby("seed")["value"].mean()


def _matched(rows: pd.DataFrame, chosen: str) -> bool:
    """Trained parameters within 5 %, where they are recorded."""
    if "trainable_params" not in rows:
        return True
    ours = rows.loc[rows["structure"] == chosen, "trainable_params"].mean()
    theirs = rows.loc[rows["structure"] == "lora", "trainable_params"].mean()
    return not np.isfinite(ours / theirs) or abs(ours / theirs - 1) <= MATCHED
