"""Evidence of C5: TESSA's default structure against LoRA on the same task, budget, modules and seeds."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis import quality
from analysis.claims.evidence import Evidence

PREFERRED = ("tessa across random", "tessa across", "tessa")


def differences(table: pd.DataFrame) -> list[Evidence]:
    """One entry per task and matched budget, in points: mean difference over seeds with its paired interval.

    Of the structure that TESSA's configuration chooses by default, where it was trained, else of the first.
    `reference` is 1 where TESSA's mean is within or above LoRA's interval; `gpu` says that the base model is a
    published one, not one trained here.
    """
    if table.empty:
        return []
    kinds = [k for k in (*PREFERRED, *quality.in_order(table["structure"])) if k in set(table["structure"])]
    chosen = next((kind for kind in kinds if kind.startswith("tessa")), None)
    found = []
    own = {e for e, p in zip(table["experiment"], table["protocol"], strict=True) if p == "skills"}
    for point in quality.points(table):
        if point.structure != chosen or point.difference is None or not point.matched:
            continue
        change = point.difference
        if change.n < 2 or not np.isfinite(change.low):
            continue
        setting = f"{point.task}, rank-equivalent {point.rank_equivalent:g}, {chosen}, {change.n} seeds"
        values = (100 * change.centre, 100 * change.low, 100 * change.high)
        found.append(
            Evidence(
                "tessa",
                1,
                *values,
                point.provenance,
                setting,
                point.experiment not in own,
                float(bool(point.inside)),
            )
        )
    return found
