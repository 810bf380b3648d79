"""Figures of the quality experiments: curves over the budget, slices at equal budget, target modules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import quality, style
from analysis.figures import marks

import matplotlib.pyplot as plt  # isort: skip

# Methods are trained structures, not serving backends; each takes the colour of the backend that serves it.
BACKENDS = {"lora": "punica", "bd_lora": "bd_lora", "tessa": "tessa", "full": "merged", "base": "base"}
DASHES = ("-", "--", ":", "-.")
COLUMNS = 3
MARGIN = 1.4  # free space beside the smallest and the largest number of parameters, a factor
BARS = "bars: 95 % interval over seeds, cut at 0 and 100 %"


def draw(table: pd.DataFrame) -> dict[str, Figure]:
    """Suffix of the file's name -> figure, for the rows of one experiment: `quality.with_mean(quality.rows(...))`."""
    found = {"": against_budget(table)}
    slices = table[(table["method"] == "tessa") & (table["targets"].isin(["all", _main_targets(table)]))]
    budgets = slices.groupby("rank_equivalent")["structure"].nunique()
    if len(budgets) and budgets.max() > 1 and slices["offset_rule"].nunique() > 1:
        found["_slices"] = side_by_side(
            table, float(np.asarray(budgets.index)[budgets.to_numpy().argmax()]), "slices"
        )
    sets = table.groupby([*_TRAINED, "rank_equivalent"], dropna=False)["targets"].nunique()
    compared = sets[sets > 1].index.get_level_values("rank_equivalent")
    if len(compared):
        found["_targets"] = side_by_side(table, float(compared[0]), "targets")
    return found


_TRAINED = ["method", "placement", "offset_rule"]


def _main_targets(table: pd.DataFrame) -> str:
    """The modules that most were trained on; empty where only the base model and full fine-tuning are there."""
    return str(next(iter(table["targets"].mode()), ""))


def against_budget(table: pd.DataFrame) -> Figure:
    """A panel per task: mean over seeds and 95 % t interval against the trained parameters, a line per structure.

    The base model and full fine-tuning, which have no budget, are lines across. Hollow marks are structures whose
    parameters are not within 5 % of LoRA's.
    """
    found = list(quality.points(table))
    widths = {p.structure: {q.rank_equivalent for q in found if q.structure == p.structure} for p in found}
    most = max(len(v) for v in widths.values())
    curves = [
        k for k in quality.in_order(table["structure"]) if len(widths[k]) == most or widths[k] == {None}
    ]
    tasks = list(dict.fromkeys(p.task for p in found))
    sizes = [p.params for p in found if p.structure in curves and p.rank_equivalent is not None]
    figure, axes = _panels(len(tasks))
    for panel, task in zip(axes, tasks, strict=False):
        for kind in curves:
            mine = [p for p in found if p.task == task and p.structure == kind]
            _curve(panel, kind, mine, curves)
        panel.set_title(task)
        panel.set_xscale("log", base=2)
        ticks = sorted({p.params for p in found if p.structure == "lora"})
        if ticks:
            panel.set_xticks(ticks, [_short(t) for t in ticks])
            panel.minorticks_off()
        # One scale for all, and no zoom into what differs by a few parameters or points.
        panel.set_ylim(-4, 104)
        if sizes:
            panel.set_xlim(min(sizes) / MARGIN, max(sizes) * MARGIN)
    figure.supylabel("right answers (%)", fontsize=8)
    handles = {lab: h for a in axes for h, lab in zip(*a.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3, frameon=False)
    drawn = [p for p in found if p.structure in curves]
    off = ["hollow: parameters more than 5 % off LoRA's"] if any(not p.matched for p in drawn) else []
    figure.supxlabel("\n".join(["trained parameters", note(table, BARS), *off]), fontsize=7)
    return figure


def _short(count: float) -> str:
    return f"{count / 1e6:.3g}M" if count >= 1e6 else f"{count / 1e3:.3g}k"


def _curve(panel: Axes, kind: str, mine: Sequence[quality.Point], curves: Sequence[str]) -> None:
    method = kind.partition(" ")[0]
    colour = style.colour(BACKENDS[method])
    same = [k for k in curves if k.partition(" ")[0] == method]
    line = DASHES[same.index(kind) % len(DASHES)]
    label = quality.name(kind)
    if mine and mine[0].rank_equivalent is None:
        panel.axhline(100 * mine[0].score.centre, color=colour, lw=1.0, ls="-.", label=label)
        return
    if not mine:
        return
    x = [p.params for p in mine]
    centre = np.array([100 * p.score.centre for p in mine])
    panel.errorbar(
        x, centre, yerr=np.transpose([_bars(p) for p in mine]), color=colour, ls=line,
        marker=style.MARKERS[BACKENDS[method]], ms=4, lw=1.1, capsize=1.5, elinewidth=0.7, label=label,
    )  # fmt: skip
    # Several budgets may give one adapter, as with BD-LoRA's least block: it is off only where no budget matches it.
    matched = {p.params for p in mine if p.matched}
    off = [i for i, p in enumerate(mine) if not p.matched and p.params not in matched]
    panel.plot(
        np.array(x)[off],
        centre[off],
        ls="",
        marker=style.MARKERS[BACKENDS[method]],
        ms=4,
        mfc="white",
        mec=colour,
        zorder=3,  # errorbar draws its own marks above 2
        gid="not matched",
    )


def _bars(point: quality.Point) -> tuple[float, float]:
    """Lengths of the interval's two halves in percent, cut where no score can lie; zero without an interval."""
    score = point.score
    if not np.isfinite(score.low):
        return 0.0, 0.0
    return 100 * (score.centre - max(score.low, 0.0)), 100 * (min(score.high, 1.0) - score.centre)


def side_by_side(table: pd.DataFrame, budget: float, what: str) -> Figure:
    """Bars at one budget with 95 % intervals over seeds: what = "slices" compares placements and offsets on the main
    modules beside LoRA and BD-LoRA, "targets" the structures that were trained on several sets of modules."""
    main = _main_targets(table)
    mine = table[table["rank_equivalent"] == budget]
    if what == "slices":
        mine = mine[mine["targets"] == main]
    else:
        counts = mine.groupby(_TRAINED, dropna=False)["targets"].transform("nunique")
        mine = mine[counts > 1]
    found = list(quality.points(mine))
    kinds = quality.in_order(mine["structure"])
    tasks = list(dict.fromkeys(p.task for p in found))
    height = 0.2 * len(kinds) + 0.35
    figure, axes = _panels(len(tasks), height, sharey=True)
    for panel, task in zip(axes, tasks, strict=False):
        for y, kind in enumerate(kinds):
            (point,) = [p for p in found if p.task == task and p.structure == kind]
            colour = style.colour(BACKENDS[kind.partition(" ")[0]])
            panel.barh(
                [y], [100 * point.score.centre], 0.75, xerr=np.transpose([_bars(point)]), color=colour,
                alpha=1.0 if point.matched else 0.5, error_kw={"elinewidth": 0.7, "capsize": 1.5},
            )  # fmt: skip
        panel.set_yticks(range(len(kinds)), [quality.name(kind) for kind in kinds])
        panel.invert_yaxis()
        panel.set_xlim(0, 104)
        panel.grid(axis="x", lw=0.4, color="#dddddd")
        panel.grid(visible=False, axis="y")
        panel.set_title(task)
    off = ["pale: parameters more than 5 % off LoRA's"] if any(not p.matched for p in found) else []
    label = f"right answers (%) at rank-equivalent {budget:g}"
    figure.supxlabel("\n".join([label, note(table, BARS), *off]), fontsize=7)
    return figure


def _panels(count: int, height: float = 1.5, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    rows = -(-count // COLUMNS)
    figure, grid = plt.subplots(
        rows, min(count, COLUMNS), figsize=(style.TWO_COLUMNS, height * rows + 0.9), squeeze=False, sharey=sharey,
        layout="constrained",
    )  # fmt: skip
    axes = list(grid.ravel())
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


def note(table: pd.DataFrame, *more: str) -> str:
    """Provenance, seeds and commits, as figures and tables say them; `more`, which is about intervals, stands before
    the commits where there are any."""
    adapted = table[table["method"] != "base"]
    seeds = adapted.groupby(["structure", "rank_equivalent", "task"], dropna=False)["seed"].nunique()
    ends = sorted({seeds.min(), seeds.max()}) if len(seeds) else []
    count = [f"{' to '.join(map(str, ends))} seed{'s' if ends != [1] else ''}"] if ends else []
    commits = ", ".join(marks.commits(table)) or "unknown"
    said = more if ends and ends[-1] > 1 else ()
    return "; ".join(["measured", *count, *said, f"commit {commits}", *quality.cautions(table)])
