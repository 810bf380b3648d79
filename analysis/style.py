"""Colours, order and marks that every figure shares; readable in print and with colour-blind eyes."""

from __future__ import annotations

from typing import Any

import matplotlib
import pandas as pd
from matplotlib.colors import to_hex, to_rgb

matplotlib.use("Agg")

# Okabe and Ito's palette; grey for the ends of the scale, which are no competitors.
COLOURS = {
    "base": "#555555",
    "base_enabled": "#999999",
    "merged": "#000000",
    "plain_lora": "#E69F00",
    "punica": "#56B4E9",
    "slora": "#D55E00",
    "bd_lora": "#CC79A7",
    "tessa": "#009E73",
    # The authors' own code and servers outside: darker relatives of what they stand for.
    "punica_upstream": "#0072B2",
    "slora_upstream": "#8C3B00",
    "openai": "#7F7F00",
}
SPARE_COLOURS = ("#F0E442", "#17BECF", "#8C564B", "#9467BD")
MARKERS = {
    "base": "o",
    "base_enabled": "P",
    "merged": "X",
    "plain_lora": "s",
    "punica": "^",
    "slora": "v",
    "bd_lora": "D",
    "tessa": "*",
    "punica_upstream": "<",
    "slora_upstream": ">",
    "openai": "h",
}
NAMES = {
    "base": "base",
    "base_enabled": "base, LoRA on",
    "merged": "merged",
    "plain_lora": "plain LoRA",
    "punica": "Punica",
    "slora": "S-LoRA",
    "bd_lora": "BD-LoRA",
    "tessa": "TESSA",
    "punica_upstream": "Punica (authors')",
    "slora_upstream": "S-LoRA (authors')",
    "openai": "server",
}
LIGHTER = 0.6
HATCHES = {"measured": "", "emulated": "///", "modelled": "xxx"}
LINES = {"measured": "-", "emulated": "--", "modelled": ":"}
SCHEDULES = {"wide": ("TESSA, wide only", "2"), "segmented": ("TESSA, segmented only", "|")}
"""Label and marker of TESSA with one schedule for all steps; no marker of a backend."""
ONE_COLUMN, TWO_COLUMNS = 3.4, 7.0
RC: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.linewidth": 0.4,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "hatch.linewidth": 0.6,
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
}


def colour(variant: str) -> str:
    """Colour of a backend; its variants have a lighter one (`punica:stock` beside `punica`)."""
    backend, _, rest = variant.partition(":")
    own = COLOURS.get(backend) or SPARE_COLOURS[sum(map(ord, backend)) % len(SPARE_COLOURS)]
    if not rest:
        return own
    red, green, blue = (1 - LIGHTER * (1 - part) for part in to_rgb(own))
    return to_hex((red, green, blue))


def curve(variant: str, kind: str) -> dict[str, Any]:
    """How a line of a variant looks: what was measured is solid and filled, what was not is hollow."""
    return {
        "color": colour(variant),
        "marker": MARKERS.get(variant.partition(":")[0], "o"),
        "markerfacecolor": colour(variant) if kind == "measured" else "white",
        "linestyle": LINES[kind],
        "linewidth": 1.1,
        "markersize": 4.0,
    }


def schedule(which: str, kind: str) -> dict[str, Any]:
    """How a line of TESSA with one of `SCHEDULES` looks: a lighter TESSA with a marker of its own, and its label."""
    label, marker = SCHEDULES[which]
    return {**curve(f"tessa:{which}", kind), "marker": marker, "markersize": 6.0, "label": label}


def name(variant: str) -> str:
    """`S-LoRA`, `Punica (stock)`."""
    backend, _, rest = variant.partition(":")
    shown = NAMES.get(backend, backend)
    return f"{shown} ({rest.replace(':', ', ')})" if rest else shown


def in_order(frame: pd.DataFrame) -> list[str]:
    """The variants of a frame in the fixed order of their backends."""
    known = frame[["backend_order", "variant"]].drop_duplicates().sort_values(["backend_order", "variant"])
    return [str(variant) for variant in known["variant"]]
