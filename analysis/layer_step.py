"""Figures of the layer step: adapter cost of one rank's kernels, from the rows that `experiment=layer_step` wrote, and
where the interconnect is known that of the step with its collectives, and its speed-up over S-LoRA's.

No interconnect belongs to a CPU's kernels: a GPU's links beside them would be a step of no machine. So rows of a CPU
over several ranks have kernels alone, unless `study.interconnect` chose the links.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import files, studies, style, tables
from tessa.budget import TOLERANCE
from tessa.errors import UserError

FOLDER = "layer_step"
WITH_COLLECTIVES = "layer_step_collectives"
"""The figure whose collectives are modelled."""
_ALIKE = ("device", "machine", "dtype", "scale", "base_fraction", "interconnect", "custom_all_reduce")
SIZES = ("sequences", "length", "rank", "distinct", "resident")
"""What a point sets beside its model, TP degree and phase."""
_KEY = ("variant", "model", "tp", "phase", *SIZES)
SHOWN = ("plain_lora", "punica", "slora", "bd_lora", "tessa")
MODES = {f"tessa:{which}": which for which in style.SCHEDULES}
"""Variants of TESSA that use one schedule for all steps."""
NAMED = (*SHOWN, *MODES)
PARTS = {"emulated": "adapters' kernels, emulated", "modelled": "adapters' collectives, modelled"}
AXES = {
    "sequences": "sequences in the batch",
    "distinct": "distinct adapters (as many slots)",
    "resident": "resident adapters",
    "rank": "budget (rank-equivalents)",
}


def read(results_dir: str | Path, reference: bool = False) -> pd.DataFrame:
    """All rows, or those that may be a reference; UserError names the command that makes them."""
    return studies.rows(
        Path(results_dir) / FOLDER, "layer steps", "python run.py experiment=layer_step", reference
    )


def newest(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows measured as the newest one was, so that no curve mixes machines, precisions or settings; the latest of
    each.

    UserError where the rows do not say how they were measured, such as on which machine.
    """
    if unknown := [column for column in (*_ALIKE, "layers") if column not in frame]:
        raise UserError(
            f"the rows in {FOLDER}/rows.csv do not say with which {', '.join(unknown)} they were measured; delete the "
            "file and make it again with: python run.py experiment=layer_step"
        )
    frame = frame.sort_values("measured_at", kind="stable")
    for column in _ALIKE:
        last = frame[column].iloc[-1]
        frame = frame[frame[column].isna() if pd.isna(last) else frame[column] == last]
    # Where `study.layers` is not set, the timed layers depend on model and TP degree.
    layers = frame.groupby(["model", "tp"])["layers"].transform("last")
    return frame[frame["layers"] == layers].drop_duplicates([*_KEY], keep="last")


def _complete(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[(frame.status == "complete") & (frame.variant != "base")]


def start_of(frame: pd.DataFrame, phase: str) -> pd.Series:
    """The setting that the sweeps start from: that of the rows over tp; of several, the latest at the highest TP."""
    rows = frame[(frame.sweep == "tp") & (frame.phase == phase)]
    return rows.sort_values("tp", kind="stable").iloc[-1]


def along(frame: pd.DataFrame, axis: str, phase: str = "decode") -> pd.DataFrame:
    """The rows of one model in which only `axis` differs from the start; x in column `x`."""
    start = start_of(frame, phase)
    rows = frame[frame.phase == phase]
    for column in ("tp", *SIZES):
        free = column == axis or (axis == "sequences" and column == "distinct")
        if not free and not (axis == "distinct" and column == "resident"):
            rows = rows[rows[column] == start[column]]
    if axis == "distinct":
        rows = rows[rows.resident == rows.distinct]
    return rows.assign(x=rows[axis])


def over_tp(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows over tp of every model and phase, each in its one setting; those that the figures over TP take."""
    swept = frame.loc[frame.sweep == "tp", ["model", "phase"]].drop_duplicates()
    parts = [along(frame[frame.model == at.model], "tp", str(at.phase)) for at in swept.itertuples()]
    return pd.concat(parts) if parts else frame.iloc[:0]


def off_budget(rows: pd.DataFrame) -> set[str]:
    """Variants whose parameters are more than `TOLERANCE` off LoRA's in any of the rows."""
    return set(rows[tables.unmatched(rows)].variant)


def off_note(rows: pd.DataFrame) -> str:
    """What † stands for, and which adapters were computed padded by more than `TOLERANCE`; empty where none."""
    off = rows[tables.unmatched(rows)]
    padded = rows[rows["padding_ratio"] > 1 + TOLERANCE] if "padding_ratio" in rows else rows.iloc[:0]
    said = []
    if len(off):
        said.append(
            f"† parameters more than {100 * TOLERANCE:g} % off LoRA's: {_ranges(off, 'budget_ratio')} times"
        )
    if len(padded):
        said.append(f"computed with padding: {_ranges(padded, 'padding_ratio')} times the parameters")
    return "; ".join(said)


def _ranges(rows: pd.DataFrame, column: str) -> str:
    """`BD-LoRA 1.22 to 1.73, TESSA 1.10`; variants of a backend have the same adapters."""
    backends = rows.variant.str.partition(":")[0]
    return ", ".join(
        f"{style.name(b)} {_range(rows.loc[backends == b, column])}" for b in SHOWN if (backends == b).any()
    )


def _with_note(title: str, drawn: pd.DataFrame) -> str:
    return "\n".join([title, *textwrap.wrap(off_note(drawn), 110)])


def _range(values: pd.Series) -> str:
    low, high = f"{values.min():.2f}", f"{values.max():.2f}"
    return low if low == high else f"{low} to {high}"


def label_of(variant: str) -> str:
    return style.SCHEDULES[MODES[variant]][0] if variant in MODES else style.name(variant)


def _curves(axes: Axes, rows: pd.DataFrame) -> None:
    present = [v for v in NAMED if (rows.variant == v).any()]
    for variant in present:
        mine = rows[rows.variant == variant].sort_values("x")
        if variant in MODES:
            look = style.schedule(MODES[variant], "emulated")
        else:
            look = {**style.curve(variant, "emulated"), "label": style.name(variant)}
            low, high = mine.adapter_cost_kernels_low * 100, mine.adapter_cost_kernels_high * 100
            axes.fill_between(mine.x, low, high, color=style.colour(variant), alpha=0.15, linewidth=0)
        axes.plot(mine.x, mine.adapter_cost_kernels * 100, **look)
    ticks = sorted(rows.x.unique())
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.axhline(0.0, color="black", linewidth=0.6)


def _limit(axes: Axes, drawn: Sequence[pd.DataFrame]) -> None:
    """Keeps the band of a disturbed round from flattening the curves of axes that share y: it is cut off at half of
    their span beyond them."""
    costs = 100 * pd.concat(drawn).adapter_cost_kernels.dropna()
    if costs.empty:
        return
    top, bottom = max(costs.max(), 0.0), min(costs.min(), 0.0)
    room = 0.5 * max(top - bottom, 1.0)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, bottom - room), min(high, top + room))


def where(frame: pd.DataFrame) -> str:
    """What was timed, in words."""
    first = frame.iloc[0]
    scale = f", widths divided by {int(first.scale)}" if first["scale"] > 1 else ""
    return f"one rank's kernels on {first.machine}, {first['dtype']}{scale}"


def links(frame: pd.DataFrame) -> str:
    """The GPU whose links the collectives' model takes."""
    return " and ".join(frame.interconnect.dropna().unique())


def _title(frame: pd.DataFrame) -> str:
    return f"Emulated: {where(frame)};\ncollectives left out; bands: least and most of the rounds, cut at the frame"


def cost_over_tp(frame: pd.DataFrame) -> Figure:
    """Adapter cost of the kernels over TP; a row per phase, a column per model."""
    phases = [p for p in ("decode", "prefill") if (frame.phase == p).any()]
    models = list(dict.fromkeys(frame.model))
    with plt.rc_context(style.RC):
        figure, grid = plt.subplots(
            len(phases), len(models), figsize=(style.TWO_COLUMNS, 1.9 * len(phases) + 0.9), sharey="row",
            squeeze=False, layout="constrained",
        )  # fmt: skip
        drawn = []
        for i, phase in enumerate(phases):
            for j, model in enumerate(models):
                axes, rows = grid[i][j], frame[frame.model == model]
                if (rows.phase == phase).any():
                    drawn.append(_complete(along(rows, "tp", phase)))
                    _curves(axes, drawn[-1])
                    start = start_of(rows, phase)
                    axes.set_title(f"{model}, {phase}, {int(start.tokens)} tokens")
                if i == len(phases) - 1:
                    axes.set_xlabel("tensor-parallel ranks")
            grid[i][0].set_ylabel("adapter cost (%)")
            if own := [rows for rows in drawn if (rows.phase == phase).any()]:
                _limit(grid[i][0], own)
        _finish(figure, grid[0][0], _title(frame), pd.concat(drawn))
    return figure


def _finish(figure: Figure, axes: Axes, title: str, drawn: pd.DataFrame) -> None:
    """The legend of the panel's curves, and the title with what is off LoRA's budget."""
    off = {label_of(variant) for variant in off_budget(drawn)}
    handles, labels = axes.get_legend_handles_labels()
    marked = [f"{label} †" if label in off else label for label in labels]
    figure.legend(handles, marked, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(_with_note(title, drawn), fontsize=8)


def sweeps(frame: pd.DataFrame, model: str) -> Figure:
    """Adapter cost of a decode step's kernels over batch, distinct and resident adapters, and budget."""
    rows = frame[frame.model == model]
    with plt.rc_context(style.RC):
        figure, grid = plt.subplots(2, 2, figsize=(style.TWO_COLUMNS, 4.6), sharey=True, layout="constrained")
        drawn = []
        for (axis, label), axes in zip(AXES.items(), grid.flat, strict=True):
            drawn.append(_complete(along(rows, axis)))
            _curves(axes, drawn[-1])
            axes.set_xlabel(label)
        for axes in grid[:, 0]:
            axes.set_ylabel("adapter cost (%)")
        _limit(grid[0][0], drawn)
        title = f"{_title(frame)}\n{model}, TP {int(start_of(rows, 'decode').tp)}, decode"
        _finish(figure, grid[0][0], title, pd.concat(drawn))
    return figure


def knows_collectives(frame: pd.DataFrame) -> bool:
    """Whether a complete decode step over several ranks has a time, and not its kernels alone."""
    if not {"step_s", "adapter_cost", "adapter_comm_s"} <= set(frame.columns):
        return False
    rows = frame[(frame.status == "complete") & (frame.phase == "decode") & (frame.sweep == "tp")]
    return bool(rows[(rows.tp > 1) & (rows.variant != "base")].adapter_cost.notna().any())


def with_collectives(frame: pd.DataFrame) -> Figure:
    """C1, C4 and C6 of a decode step over TP, a column per model. Above: adapter cost, the kernels' part and that of
    the adapters' collectives in one bar. Below: throughput over S-LoRA's."""
    frame = frame[frame.phase == "decode"]
    models = list(dict.fromkeys(frame[frame.sweep == "tp"].model))
    with plt.rc_context(style.RC):
        figure, grid = plt.subplots(
            2, len(models), figsize=(style.TWO_COLUMNS, 4.9), sharey="row", squeeze=False, layout="constrained"
        )  # fmt: skip
        added: dict[str, float] = {}
        drawn = []
        for (top, bottom), model in zip(grid.T, models, strict=True):
            rows = _complete(along(frame[frame.model == model], "tp"))
            drawn.append(rows[rows.variant.isin(SHOWN)])
            degrees = sorted(rows.tp.unique())
            for i, variant in enumerate(v for v in SHOWN if (rows.variant == v).any()):
                mine = rows[rows.variant == variant].set_index("tp").reindex(degrees)
                _cost_bars(top, mine, variant, i)
                layers = mine.adapter_collectives_per_step / mine.model_layers
                added[variant] = max(added.get(variant, 0.0), layers.max())
                other = rows[rows.variant == "slora"].set_index("tp").step_s.reindex(degrees)
                if variant != "slora":
                    bottom.plot(range(len(degrees)), other / mine.step_s, **style.curve(variant, "modelled"))
            top.axhline(0.0, color="black", linewidth=0.6)
            bottom.axhline(1.0, color=style.colour("slora"), linewidth=0.8)
            top.set_title(model)
            for axes in (top, bottom):
                axes.set_xlim(-0.5, len(degrees) - 0.5)
                axes.set_xticks(range(len(degrees)), [f"{tp:g}" for tp in degrees])
            bottom.set_xlabel("tensor-parallel ranks")
        grid[0][0].set_ylabel("adapter cost (%)")
        grid[1][0].set_ylabel("throughput / S-LoRA's")
        off = off_budget(pd.concat(drawn))
        handles = [
            Patch(facecolor=style.colour(v), label=f"{style.name(v)} (+{count:g}){' †' if v in off else ''}")
            for v, count in added.items()
        ]
        handles += [
            Patch(facecolor="white", edgecolor="black", hatch=style.HATCHES[kind], label=label)
            for kind, label in PARTS.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
        title = (
            f"Emulated: {where(frame)}; modelled: collectives over links of {links(frame)};\n"
            "decode; lines: least and most of the rounds; (+n): collectives that the adapters add to a layer"
        )
        figure.suptitle(_with_note(title, pd.concat(drawn)), fontsize=8)
    return figure


def _cost_bars(axes: Axes, mine: pd.DataFrame, variant: str, place: int) -> None:
    """One bar per TP degree in the order of `mine`, with least and most of the rounds; a gap where nothing is known."""
    width = 0.84 / len(SHOWN)
    x = np.arange(len(mine)) + (place - (len(SHOWN) - 1) / 2) * width
    whole = 100 * mine.adapter_cost
    collectives = 100 * mine.adapter_comm_s / mine.step_s
    share = 100 * mine.kernels_s / mine.step_s
    error = [
        share * (mine.adapter_cost_kernels - mine.adapter_cost_kernels_low),
        share * (mine.adapter_cost_kernels_high - mine.adapter_cost_kernels),
    ]
    parts = (("emulated", whole - collectives, 0.0, 1.0), ("modelled", collectives, whole - collectives, 0.5))
    for kind, height, bottom, alpha in parts:
        axes.bar(
            x, height, 0.92 * width, bottom, color=style.colour(variant), hatch=style.HATCHES[kind], alpha=alpha,
            edgecolor="white", linewidth=0.3,
        )  # fmt: skip
    axes.errorbar(x, whole, yerr=error, fmt="none", ecolor="black", elinewidth=0.8, capsize=1.2)


def draw(results_dir: str | Path, out_dir: str | Path, reference: bool = False) -> list[Path]:
    """All figures of the layer step as PNG and PDF, of the `newest` rows; returns the paths."""
    frame, out = newest(read(results_dir, reference)), Path(out_dir)
    figures = {"layer_step_tp": cost_over_tp(frame)}
    if knows_collectives(frame):
        figures[WITH_COLLECTIVES] = with_collectives(frame)
    for model in dict.fromkeys(frame.model):
        mine = frame[frame.model == model]
        if (mine.sweep != "tp").any() and ((mine.sweep == "tp") & (mine.phase == "decode")).any():
            figures[f"layer_step_sweeps_{model}"] = sweeps(frame, model)
    return files.write_all(figures, out)
