"""Where the time of a token goes: base, adapter products, communication, and the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import style
from analysis.figures import marks
from experiments.measure import stats

RULE = (
    "Times are wall time per output token. Adapter products = S-LoRA - S-LoRA without its products; communication "
    "= S-LoRA - S-LoRA without its communication; the rest = S-LoRA - base - both, below 0 where the two overlap. "
    "Differences are formed within rounds. For the other backends only the sum of the three is known."
)
PARTS = ("products", "communication", "rest")
TINTS = {"base": "#BBBBBB", "products": "#E69F00", "communication": "#0072B2", "rest": "#F0E442"}
SUM = "adapters, unsplit"
TINTS[SUM] = "#999999"
WITHOUT_COMMUNICATION, WITHOUT_COMPUTE = "slora:communication=off", "slora:compute=off"


@dataclass(frozen=True)
class Share:
    """One piece of a backend's time per output token, in milliseconds."""

    variant: str
    piece: str
    time: stats.Interval


def shares(part: pd.DataFrame) -> list[Share]:
    """The pieces of every backend that has complete rounds beside base; ablations are no backends of their own."""
    times = {v: _milliseconds(part[part["variant"] == v]) for v in style.in_order(part)}
    base = times.get("base")
    if base is None or base.empty:
        return []
    found = [Share("base", "base", stats.t_interval(base.to_numpy()))]
    for variant, own in times.items():
        if variant in ("base", WITHOUT_COMMUNICATION, WITHOUT_COMPUTE) or own.empty:
            continue
        found.append(Share(variant, "base", _difference(base, 0.0 * base)))
        if variant != "slora" or not _both(times):
            found.append(Share(variant, SUM, _difference(own, base)))
            continue
        products, communication = own - times[WITHOUT_COMPUTE], own - times[WITHOUT_COMMUNICATION]
        pieces = (products, communication, own - base - products - communication)
        found += [
            Share(variant, name, stats.t_interval(p.dropna().to_numpy()))
            for name, p in zip(PARTS, pieces, strict=True)
        ]
    return found


def split(part: pd.DataFrame) -> Figure | None:
    """Stacked bars per backend; below, each piece with its interval, in percent of the base model's time."""
    found = [s for s in shares(part) if np.isfinite(s.time.centre)]
    if not found:
        return None
    variants = list(dict.fromkeys(s.variant for s in found))
    base = next(s.time.centre for s in found if s.variant == "base")
    added = [s for s in found if s.piece != "base"]
    figure, grid = marks.panels(2, 1, 0.8 + 0.13 * max(len(variants), len(added)), sharey=False)
    top, bottom = grid[:, 0]
    kinds = {v: str(part.loc[part["variant"] == v, "provenance"].iloc[0]) for v in variants}
    for i, variant in enumerate(variants):
        left = 0.0
        for share in (s for s in found if s.variant == variant):
            # A negative piece cannot be stacked: the panel below shows it, and a tick where the whole ends.
            width = max(share.time.centre, 0.0)
            top.barh(
                [i], [width], 0.7, left=left, color=TINTS[share.piece], hatch=style.HATCHES[kinds[variant]],
                edgecolor="white", linewidth=0.4,
            )  # fmt: skip
            left += width
        total = sum(share.time.centre for share in found if share.variant == variant)
        if total < left - 1e-9:
            top.plot(
                [total], [i], marker="|", markersize=9, color="black", linestyle="none", gid="measured total"
            )
    top.set_yticks(range(len(variants)), [style.name(v) for v in variants])
    top.invert_yaxis()
    top.set_xlabel("wall time / output tokens (ms)")
    for i, share in enumerate(added):
        t = share.time
        error = [[t.centre - t.low], [t.high - t.centre]] if np.isfinite(t.low) else None
        scale = 100.0 / base
        bottom.errorbar(
            [t.centre * scale], [i], xerr=None if error is None else np.array(error) * scale, marker="o",
            markersize=4, capsize=2, elinewidth=0.8, color=TINTS[share.piece], markeredgecolor="black",
            markeredgewidth=0.5, ecolor="black", linestyle="none",
            markerfacecolor=TINTS[share.piece] if kinds[share.variant] == "measured" else "white",
        )  # fmt: skip
    bottom.set_yticks(
        range(len(added)),
        [style.name(s.variant) if s.piece == SUM else f"S-LoRA: {s.piece} †" for s in added],
    )
    bottom.set_ylim(len(added) - 0.5, -0.5)
    bottom.axvline(0.0, color="black", lw=0.6)
    bottom.set_xlabel("added time (% of base)")
    for axes in (top, bottom):
        axes.grid(True, axis="x")
        axes.grid(False, axis="y")
    handles = [Patch(facecolor=colour, label=name) for name, colour in TINTS.items() if _drawn(found, name)]
    hatched = sorted(set(kinds.values()) - {"measured"})
    handles += [Patch(facecolor="white", edgecolor="black", hatch=style.HATCHES[k], label=k) for k in hatched]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False, columnspacing=1.0)
    ticks = ["black tick: measured total, where a piece is below 0"] if top.lines else []
    marks.footer(figure, part, f"TP {part['tp'].iloc[0]}", *ticks)
    return figure


def _milliseconds(rows: pd.DataFrame) -> pd.Series:
    good = rows[(rows["status"] == "complete") & rows["output_tokens_per_s"].notna()]
    # Rounds of different sessions are no pairs.
    index = pd.MultiIndex.from_frame(good.reindex(columns=["session", "repeat"]))
    return pd.Series(1e3 / good["output_tokens_per_s"].to_numpy(float), index=index)


def _difference(own: pd.Series, other: pd.Series) -> stats.Interval:
    return stats.t_interval((own - other).dropna().to_numpy())


def _both(times: dict[str, pd.Series]) -> bool:
    return all(
        not times.get(v, pd.Series(dtype=float)).empty for v in (WITHOUT_COMMUNICATION, WITHOUT_COMPUTE)
    )


def _drawn(found: list[Share], name: str) -> bool:
    """Whether a bar has an area of this piece."""
    return any(s.piece == name and s.time.centre > 0 for s in found)
