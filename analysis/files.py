"""A figure as PNG and PDF that are equal from run to run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from analysis import style

# `style` chooses the backend without a display; pyplot must come after it.
import matplotlib.pyplot as plt  # isort: skip


def write(figure: Figure, folder: Path, stem: str) -> list[Path]:
    """Writes `<stem>.png` and `.pdf`, closes the figure, returns the paths in this order."""
    folder.mkdir(parents=True, exist_ok=True)
    # Laid out once: the solver takes longer than the drawing, and both files come out alike.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    paths = [folder / f"{stem}.png", folder / f"{stem}.pdf"]
    for path in paths:
        # A fixed date keeps the files equal from run to run.
        stamp: dict[str, Any] = {"CreationDate": None} if path.suffix == ".pdf" else {}
        with plt.rc_context(style.RC):
            figure.savefig(path, metadata=stamp)
    plt.close(figure)
    return paths


def write_all(figures: Mapping[str, Figure], folder: Path) -> list[Path]:
    """`write` for each stem; the paths of all."""
    return [path for stem, figure in figures.items() for path in write(figure, folder, stem)]


def wide(png: bytes) -> bool:
    """Whether a PNG of `write` is of two columns."""
    pixels = int.from_bytes(png[16:20], "big")  # the width, in the header that every PNG starts with
    return pixels >= 1.5 * style.ONE_COLUMN * style.RC["savefig.dpi"]
