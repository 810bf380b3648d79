"""Collectives of this machine's ranks beside the alpha-beta model: errors and figure."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from analysis import files, studies, style
from experiments.projection.links import per_layer, predict
from tessa.errors import UserError

# `style` chooses the backend without a display; pyplot must come after it.
import matplotlib.pyplot as plt  # isort: skip

FOLDER = "collectives"
COMMAND = "python -m experiments.bench_collectives"
COLOURS = {"all_reduce": "#0072B2", "all_gather": "#E69F00", "gather": "#009E73"}
NAMES = {"shm": "shared memory", "gloo": "gloo, loopback", "gloo_netns": "gloo, two network namespaces"}


def read(results_dir: str | Path, reference: bool = False) -> pd.DataFrame:
    """The stored rows, or those that may be a reference; UserError names the command that makes them."""
    return studies.rows(Path(results_dir) / FOLDER, "timed collectives", COMMAND, reference)


def errors(results_dir: str | Path) -> dict[str, float | int | None]:
    """Relative errors on held-out sizes and messages, of ranks that have a core each, and of a layer's collectives.

    All None where nothing is stored.
    """
    out: dict[str, float | int | None] = dict.fromkeys(
        (
            "collectives_median_error",
            "collectives_worst_error",
            "collectives_rows",
            "collectives_layer_median_error",
            "collectives_layer_worst_error",
            "collectives_oversubscribed_median_error",
        )
    )
    try:
        found = predict(read(results_dir))
    except UserError:
        return out
    shared = found.oversubscribed.astype(bool)
    off = (found.ratio - 1).abs()[found.held_out.astype(bool)]
    own, crowded = off[~shared], off[shared]
    layers = per_layer(found[~shared])
    if len(own):
        layer_off = (layers.ratio - 1).abs()
        out |= {
            "collectives_median_error": float(own.median()),
            "collectives_worst_error": float(own.max()),
            "collectives_rows": len(own),
            "collectives_layer_median_error": float(layer_off.median()),
            "collectives_layer_worst_error": float(layer_off.max()),
        }
    if len(crowded):
        out["collectives_oversubscribed_median_error"] = float(crowded.median())
    return out


def over_size(rows: pd.DataFrame) -> Figure:
    """Time over message size, a panel per transport and a row per number of ranks; lines are the fits."""
    found = predict(rows)
    transports = [name for name in NAMES if (found.transport == name).any()]
    ranks = sorted(found.ranks.unique())
    figure, grid = plt.subplots(
        len(ranks),
        len(transports),
        figsize=(style.TWO_COLUMNS, 2.0 * len(ranks) + 0.8),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for i, n in enumerate(ranks):
        for j, transport in enumerate(transports):
            axes = grid[i][j]
            mine = found[(found.ranks == n) & (found.transport == transport) & (found.backend == "sweep")]
            for kind, colour in COLOURS.items():
                one = mine[mine.kind == kind].sort_values("message_bytes")
                axes.plot(one.message_bytes / 1024, one.predicted_s * 1e6, color=colour, lw=1)
                held = one.held_out.astype(bool)
                for some, face in ((one[~held], colour), (one[held], "white")):
                    ends = some.seconds - some.seconds_low, some.seconds_high - some.seconds
                    axes.errorbar(
                        some.message_bytes / 1024, some.seconds * 1e6, yerr=[end * 1e6 for end in ends], fmt="o",
                        mfc=face, color=colour, ms=4, elinewidth=0.7,
                    )  # fmt: skip
            crowded = ", which share cores" if bool(mine.oversubscribed.astype(bool).any()) else ""
            axes.set_title(f"{NAMES[transport]}\n{n} ranks{crowded}")
            axes.set(xscale="log", yscale="log")
            # Half decades: a range may hold one power of ten alone.
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(NullFormatter())
            if i == len(ranks) - 1:
                axes.set_xlabel("message (KiB)")
            if j == 0:
                axes.set_ylabel("µs")
    handles = [Line2D([], [], color=c, label=kind.replace("_", "-")) for kind, c in COLOURS.items()]
    for face, label in (("black", "timed, fitted"), ("white", "timed, held out")):
        handles.append(Line2D([], [], color="black", marker="o", ms=4, ls="none", mfc=face, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(
        f"Measured on {rows.machine.iloc[0]}; medians, bars: least and most of the rounds;\n"
        "lines: alpha-beta model fitted robustly to the filled points",
        fontsize=8,
    )
    return figure


def draw(results_dir: str | Path, out_dir: str | Path, reference: bool = False) -> list[Path]:
    """The figure as PNG and PDF; returns the paths."""
    rows = read(results_dir, reference)
    with plt.rc_context(style.RC):
        figure = over_size(rows)
    return files.write(figure, Path(out_dir), "collectives")
