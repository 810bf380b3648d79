"""Latency, SLO attainment and goodput against the request rate, with the knee of every backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis import style, sweeps
from analysis.figures import marks

TOLERANCE = 0.10
GENERATIONS = 4
FEWEST = 40
KNEE_RULE = (
    "A rate is sustained if the run ends no later than 10 % after the arrivals and one generation "
    "(p99 of the end-to-end latency less that of TTFT, at the lowest rate), mean over rounds. The knee is the "
    "highest rate that is sustained together with all lower ones; it lies between that rate and the next one measured. "
    f"Arrivals that last less than {GENERATIONS} generations are over before a queue shows, and tell nothing; "
    f"neither do fewer than {FEWEST} requests, whose first may come so late that a tenth of the run has passed."
)


@dataclass(frozen=True)
class Knee:
    """last: highest rate that a backend sustained, None if not even the lowest. beyond: the next one measured, None
    if the sweep ended before the knee. lost: the next rate, where it has no result that would tell. short: the next
    rate, where its arrivals are over too soon to tell."""

    last: float | None
    beyond: float | None
    lost: float | None = None
    short: float | None = None

    @property
    def drawn(self) -> bool:
        """Whether a figure has a tick for it."""
        return self.last is not None and self.lost is None and self.short is None

    def text(self) -> str:
        if self.short is not None:
            return f"not found: too few requests at {self.short:g} requests/s to tell"
        if self.lost is not None:
            return f"not found: no result at {self.lost:g} requests/s"
        if self.last is None:
            return (
                "not found: no rate measured" if self.beyond is None else f"below {self.beyond:g} requests/s"
            )
        if self.beyond is None:
            return f"not reached: above {self.last:g} requests/s"
        return f"between {self.last:g} and {self.beyond:g} requests/s"


def knee(rows: pd.DataFrame) -> Knee:
    """The knee of one backend by KNEE_RULE, from its complete rounds at all rates."""
    good = rows[(rows["status"] == "complete") & rows["request_rate"].notna()]
    needed = ("requests_per_s", "scheduled_rate", "e2e_s_p99", "ttft_s_p99", "requests_total")
    if good.empty or any(name not in good or good[name].isna().all() for name in needed):
        return Knee(None, None)
    rates = sorted(rows["request_rate"].dropna().unique())
    lowest = good[good["request_rate"] == good["request_rate"].min()]
    # Without TTFT: if even the lowest rate is too high, the time in the queue must not excuse the late end.
    generation = float((lowest["e2e_s_p99"] - lowest["ttft_s_p99"]).mean())
    last = None
    for rate in rates:
        mine = good[good["request_rate"] == rate]
        if mine.empty:
            # Beyond saturation a run may never end in time, which is an answer; another failure is none.
            late = (rows.loc[rows["request_rate"] == rate, "status"] == "timeout").any()
            return Knee(last, float(rate)) if late else Knee(last, None, float(rate))
        count = mine["requests_total"].astype(float)
        # With the wait for the first one, of a mean gap, as the run's time has it too.
        arrivals = count / mine["scheduled_rate"].astype(float)
        if float(count.mean()) < FEWEST or float(arrivals.mean()) < GENERATIONS * generation:
            return Knee(last, None, short=float(rate))
        took = count / mine["requests_per_s"].astype(float)
        if float((took / (arrivals + generation)).mean()) > 1 + TOLERANCE:
            return Knee(last, float(rate))
        last = float(rate)
    return Knee(last, None)


def knees(part: pd.DataFrame) -> dict[str, Knee]:
    return {v: knee(part[part["variant"] == v]) for v in style.in_order(part)}


def against_rate(part: pd.DataFrame) -> Figure:
    """TTFT, TPOT and SLO attainment over the rate, goodput too where a limit was set; knees as ticks on top."""
    columns = chosen_columns(part)
    rates = sweeps.in_order("request_rate", part["request_rate"])
    # Room for the half of the backends' shift that lies beyond the outermost rates.
    edge = max(1.15, (max(rates) / min(rates)) ** (marks.SHARE_OF_AXIS / 2 + 0.03))
    figure, grid = marks.panels(len(columns), 1, 1.0, sharey=False)
    for axes, column in zip(grid[:, 0], columns, strict=True):
        marks.lines(axes, part, column, "request_rate", rates)
        if column.startswith("ttft"):
            _log_latency(axes, part, column)
        axes.set_ylabel(axes.get_ylabel().replace(" (", "\n("))
        marks.log2_axis(axes, rates, most=8)
        axes.set_xlim(min(rates) / edge, max(rates) * edge)
        axes.tick_params(labelbottom=False)
    found = knees(part)
    _mark_knees(grid[0][0], found)
    grid[-1][0].tick_params(labelbottom=True)
    grid[-1][0].set_xlabel(sweeps.SWEEPS["rate_sweep"].label)
    marks.legend(figure, part, as_lines=True)
    marks.footer(figure, part, f"TP {part['tp'].iloc[0]}", *drawn_rates(part), *knee_notes(found))
    return figure


def drawn_rates(part: pd.DataFrame) -> list[str]:
    """The rates at which requests really came, where the drawn arrivals are more than 2 % off the rate of the axis."""
    if "scheduled_rate" not in part:
        return []
    drawn = part.groupby("request_rate")["scheduled_rate"].mean().dropna().astype(float)
    if drawn.empty or (drawn / drawn.index.to_numpy(float) - 1).abs().max() <= 0.02:
        return []
    return [f"arrivals as drawn: {', '.join(f'{rate:.3g}' for rate in drawn)} requests/s"]


def knee_notes(found: Mapping[str, Knee]) -> list[str]:
    """What the ticks on top mean where there are some, and why a backend has none."""
    notes = []
    if any(k.drawn for k in found.values()):
        open_ = any(k.drawn and k.beyond is None for k in found.values())
        notes.append(f"ticks on top: knee, the last rate kept up with{' (▷ not reached)' if open_ else ''}")
    reasons: dict[str, list[str]] = {}
    for variant, k in found.items():
        if not k.drawn:
            reasons.setdefault(k.text().removeprefix("not found: "), []).append(style.name(variant))
    for why, names in reasons.items():
        whose = "" if len(names) == len(found) else f" of {', '.join(names)}"
        notes.append(f"no knee{whose}: {why}")
    return notes


def chosen_columns(part: pd.DataFrame) -> tuple[str, ...]:
    """What the run could tell: attainment of its own limits where it had some, else S-LoRA's 6 s."""

    def there(name: str) -> bool:
        return name in part and bool(part[name].notna().any())

    own = there("slo_attainment")
    share = "slo_attainment" if own else "slora_attainment"
    last = "goodput_requests_per_s" if own else "requests_per_s"
    return tuple(c for c in ("ttft_s_p50", "ttft_s_p99", "tpot_s_p50", share, last) if there(c))


def _log_latency(axes: Any, part: pd.DataFrame, column: str) -> None:
    """Beyond saturation a latency grows by orders of magnitude; below it, the differences should stay visible."""
    values = part[column].dropna().astype(float)
    if len(values) and values.min() > 0 and values.max() / values.min() > 20:
        axes.set_ylim(values.min() / 2, values.max() * 2)
        axes.set_yscale("log")
        axes.minorticks_off()


def _mark_knees(axes: Any, found: dict[str, Knee]) -> None:
    """Triangles above the first panel; those at one rate stand on top of each other."""
    stacked: dict[float, int] = {}
    for variant, at in found.items():
        if at.last is None or not at.drawn:
            continue
        level = stacked.get(at.last, 0)
        stacked[at.last] = level + 1
        axes.plot(
            [at.last],
            [1.05 + 0.1 * level],
            marker="|" if at.beyond is not None else ">",
            color=style.colour(variant),
            markerfacecolor=style.colour(variant) if at.beyond is not None else "white",
            markersize=5.5 if at.beyond is not None else 4.5,
            markeredgewidth=2.2 if at.beyond is not None else 0.9,
            linestyle="none",
            clip_on=False,
            transform=axes.get_xaxis_transform(),
            gid=f"knee {variant}",
        )
    if stacked:
        # Room for the highest stack; constrained layout does not see what is clipped off.
        axes.set_title(" ", fontsize=6.5 * max(stacked.values()), pad=2)
