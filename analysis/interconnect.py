"""What a latency added to every collective does: slopes against counts, the projection's prediction, crossings.

All of it from the rows of `experiment=interconnect` (`analysis.load.load`). The prediction reads a backend's cell
without added latency and the analytic number of collectives, never a cell with added latency.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd

from experiments.projection.step import adapter_collectives, base_collectives
from tessa.slices import ALL_MODULES

EXPERIMENT = "interconnect"
X = "added_latency_us"
SPEED = "output_tokens_per_s"
_NEEDED = {X, SPEED, "step_collectives", "step_s_plain", "step_s_added", "engine_steps", "wall_s", "layers"}
_REST = ("step_rest_s_plain", "step_rest_s_added")


def usable(frame: pd.DataFrame) -> pd.DataFrame:
    """The complete rows with all that the functions here read; empty where the frame holds none."""
    if frame.empty or not set(frame.columns) >= _NEEDED:
        return pd.DataFrame(columns=[*sorted(_NEEDED), "variant", "family", "tp", "model"])
    return frame[(frame.experiment == EXPERIMENT) & (frame.status == "complete")].dropna(subset=list(_NEEDED))


def slopes(part: pd.DataFrame) -> pd.DataFrame:
    """Per variant: `counted` collectives of a decode step, `slope` of its time against the latency, their `ratio`, and
    `ratio_low` and `ratio_high`, the least and most of the ratio at a single latency, and `waited`, the slope of a step
    less the time inside its collectives: the waits alone (NaN where the store does not hold it).

    The slope is the least-squares line through the origin of (step with - step without) over the latency; each pair
    of step times comes from one engine within seconds.
    """
    part = part.reindex(columns=list(dict.fromkeys([*part.columns, *_REST])))
    rows = []
    for variant, mine in usable(part).groupby("variant", sort=False):
        cells = mine.groupby(X)[["step_collectives", "step_s_plain", "step_s_added", *_REST]].mean()
        added = cells.index.to_numpy(float) * 1e-6
        grown = (cells.step_s_added - cells.step_s_plain).to_numpy(float)
        rest = (cells.step_rest_s_added - cells.step_rest_s_plain).to_numpy(float)
        if not (added > 0).any():
            continue
        slope, waited = (float(added @ grown_s / (added @ added)) for grown_s in (grown, rest))
        counted = float(cells.step_collectives.mean())
        single = grown[added > 0] / added[added > 0] / counted
        ratios = {"ratio": slope / counted, "ratio_low": single.min(), "ratio_high": single.max()}
        rows.append({"variant": variant, "counted": counted, "slope": slope, "waited": waited, **ratios})
    columns = ["variant", "counted", "slope", "waited", "ratio", "ratio_low", "ratio_high"]
    return pd.DataFrame(rows, columns=columns)


def collectives(variant: str, layers: int, tp: int, modules: str | None = None) -> int:
    """The analytic number of collectives of a step."""
    backend, _, option = variant.partition(":")
    names = tuple(modules.split("+")) if modules else ALL_MODULES
    more = 0 if "communication=off" in option else adapter_collectives(backend, layers, tp, names)
    return base_collectives(layers, tp) + more


def predictions(part: pd.DataFrame) -> pd.DataFrame:
    """Per variant and latency: `measured` and `predicted` output tokens/s, and the analytic `collectives`.

    The run of the same cell without added latency gives seconds and steps; every step gets `collectives` waits more.
    Of several rounds, all of them are means, as in the figures and tables.
    """
    rows = []
    for variant, mine in usable(part).groupby("variant", sort=False):
        start = mine[mine[X] == 0]
        if start.empty:
            continue
        first = start.iloc[0]
        count = collectives(str(variant), int(first.layers), int(first.tp), first.get("target_modules"))
        wall, steps = float(start.wall_s.mean()), float(start.engine_steps.mean())
        speed = float(start[SPEED].mean())
        for added, cells in mine.groupby(X):
            waited = steps * count * float(added) * 1e-6  # type: ignore[arg-type]
            rows.append(
                {
                    "variant": variant,
                    X: float(added),  # type: ignore[arg-type]
                    "measured": float(cells[SPEED].mean()),
                    "predicted": speed * wall / (wall + waited),
                    "collectives": count,
                }
            )
    return pd.DataFrame(rows, columns=["variant", X, "measured", "predicted", "collectives"])


def crossings(found: pd.DataFrame, column: str) -> list[dict[str, object]]:
    """Where the curves of two variants cross in `column` of `predictions`: latency, and who is ahead beyond it."""
    table = found.pivot(index=X, columns="variant", values=column).dropna()
    rows: list[dict[str, object]] = []
    for a, b in combinations(table.columns, 2):
        lead = (table[a] - table[b]).to_numpy()
        at = table.index.to_numpy(float)
        for i in np.flatnonzero(lead[:-1] * lead[1:] < 0):
            where = at[i] + (at[i + 1] - at[i]) * lead[i] / (lead[i] - lead[i + 1])
            rows.append({"between": (a, b), X: float(where), "ahead_beyond": a if lead[i + 1] > 0 else b})
    return rows


def errors(frame: pd.DataFrame) -> dict[str, float | int | None]:
    """Median and worst relative error of the slopes against the counts, and of the predicted throughputs."""
    out: dict[str, float | int | None] = dict.fromkeys(
        (
            "interconnect_slope_median_error",
            "interconnect_slope_worst_error",
            "interconnect_waited_worst_error",
            "interconnect_throughput_median_error",
            "interconnect_throughput_worst_error",
            "interconnect_cells",
        )
    )
    good = usable(frame)
    if good.empty:
        return out
    parts = [part for _, part in good.groupby(["family", "tp", "model"], dropna=False)]
    slope = pd.concat([slopes(part) for part in parts])
    made = pd.concat([predictions(part) for part in parts])
    made = made[made[X] > 0]
    if len(slope):
        off = (slope.ratio - 1).abs()
        out |= {
            "interconnect_slope_median_error": float(off.median()),
            "interconnect_slope_worst_error": float(off.max()),
        }
        if (waited := (slope.waited / slope.counted - 1).abs()).notna().any():
            out["interconnect_waited_worst_error"] = float(waited.max())
    if len(made):
        off = (made.predicted / made.measured - 1).abs()
        out |= {
            "interconnect_throughput_median_error": float(off.median()),
            "interconnect_throughput_worst_error": float(off.max()),
            "interconnect_cells": len(made),
        }
    return out
