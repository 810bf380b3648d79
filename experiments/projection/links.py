"""Alpha-beta constants of an interconnect from timed collectives, and their error on sizes that were not fitted.

The model is that of `experiments.projection.collectives` with one fixed cost: seconds = alpha + moved / bandwidth,
where `moved` are the bytes that cross each rank's link in a ring: 2(n-1)/n of an all-reduce's message, (n-1)/n of an
all-gather's or gather's result.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from experiments.projection.hardware import Link

KEYS = ["transport", "ranks", "kind"]


def moved_bytes(kind: str, ranks: int, message_bytes: float) -> float:
    """Bytes over each rank's link; `message_bytes` is an all-reduce's tensor, or the result of a gather."""
    return message_bytes * (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def fit(moved: np.ndarray, seconds: np.ndarray) -> Link:
    """Alpha and bandwidth with the least relative errors; robust, since single sizes may be slow."""

    def residual(p: np.ndarray) -> np.ndarray:
        return (p[0] * 1e-6 + moved / (p[1] * 1e9)) / seconds - 1

    start = [max(seconds.min() * 1e6, 0.1), max(moved.max() / seconds.max() / 1e9, 1e-3)]
    found = least_squares(residual, start, bounds=([0, 1e-6], [1e6, 1e4]), loss="soft_l1", f_scale=0.2)
    alpha = float(found.x[0]) * 1e-6
    return Link(alpha, alpha, float(found.x[1]) * 1e9)


def predict(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the size sweep and of the backends' own messages with `predicted_s`, `ratio` and `held_out`.

    Fitted per transport, number of ranks and kind on every other size of the sweep, the smallest and the largest
    among them; the sizes between and every backend's message are held out. `alpha_s` and `bandwidth` are the fit's.
    """
    out = []
    for _, group in rows.groupby(KEYS, sort=False):
        sizes = sorted(group[group.backend == "sweep"].message_bytes.unique())
        fitted = group[(group.backend == "sweep") & group.message_bytes.isin(sizes[::2])]
        if len(fitted) < 3:
            continue
        triples = zip(group.kind, group.ranks, group.message_bytes, strict=True)
        moved = np.array([moved_bytes(str(kind), int(n), float(size)) for kind, n, size in triples])
        mine = group.index.isin(fitted.index)
        link = fit(moved[mine], group.seconds.to_numpy()[mine])
        out.append(
            group.assign(
                predicted_s=link.alpha_s + moved / link.bus_bandwidth,
                alpha_s=link.alpha_s,
                bandwidth=link.bus_bandwidth,
                held_out=~mine,
            )
        )
    if not out:
        return rows.iloc[:0].assign(predicted_s=[], alpha_s=[], bandwidth=[], held_out=[], ratio=[])
    frame = pd.concat(out, ignore_index=True)
    return frame.assign(ratio=frame.predicted_s / frame.seconds)


def per_layer(predicted: pd.DataFrame) -> pd.DataFrame:
    """Measured and predicted seconds of all collectives of one layer, by transport, ranks and backend."""
    own = predicted[predicted.backend != "sweep"]
    columns = {
        name: (own[name] * own["count"]).groupby([own.transport, own.ranks, own.backend], sort=False).sum()
        for name in ("seconds", "predicted_s")
    }
    frame = pd.DataFrame(columns).reset_index()
    return frame.assign(ratio=frame.predicted_s / frame.seconds)


def calls_per_layer(
    hidden: int, tokens: int, rank: int, dtype_bytes: int = 4
) -> dict[str, list[tuple[str, int, int]]]:
    """(kind, message bytes, count) of one layer's collectives by backend, as vLLM's layers make them.

    Every backend has the base model's two all-reduces of the activations. S-LoRA's sharding adds an all-gather of
    the inner values of q, k and v, one of gate and up, and an all-reduce of the inner values for o and for down, all
    of them in float32.
    """
    base = [("all_reduce", tokens * hidden * dtype_bytes, 2)]
    inner = 4 * tokens * rank
    slora = [("all_gather", 3 * inner, 1), ("all_gather", 2 * inner, 1), ("all_reduce", inner, 2)]
    return {"base": base, "slora": base + slora, "tessa": base}
