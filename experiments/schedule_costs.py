"""What TESSA's two schedules cost over the base products, from the rows of `experiments.bench_schedules`."""

from __future__ import annotations

import pandas as pd

POINT = ["tokens", "slots", "distinct"]


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """The four linear layers together, indexed by (tokens, slots, distinct).

    Columns: `base_us`, `wide_us`, `segmented_us`; `rule_us`, with the schedule that the rule chooses for each layer;
    `best_us`, with the faster one for each; `regret`, rule_us / best_us - 1; `wide_layers`, for how many it chooses
    wide.
    """
    rows = rows.assign(
        rule_us=rows["wide_us"].where(rows["chose_wide"], rows["segmented_us"]),
        best_us=rows[["wide_us", "segmented_us"]].min(axis=1),
        wide_layers=rows["chose_wide"].astype(int),
    )
    columns = ["base_us", "wide_us", "segmented_us", "rule_us", "best_us", "wide_layers"]
    table = rows.groupby(POINT)[columns].sum()
    return table.assign(regret=table["rule_us"] / table["best_us"] - 1)
