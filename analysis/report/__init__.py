"""A report to open from a file: an index and one page per experiment, each a single HTML file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pandas as pd

from analysis import benchmarks, claims, figures
from analysis.report import html, own_tables
from experiments.disk import disk_errors

LOG_LINES = 25

__all__ = ["write"]


def write(frame: pd.DataFrame, results: Path, out: Path, reference: bool = False) -> list[Path]:
    """Writes `index.html` and a page per experiment into `out`, and returns their paths, the index first.

    Figures are drawn anew and embedded. Raises UserError if `out` cannot be written.
    """
    with disk_errors(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            drawn = figures.draw_all(frame, results, Path(folder), reference)
            by_experiment = _by_experiment(drawn.paths)
            shown = figures.only_reference(frame) if reference else frame
            own = {e: found for e in figures.STUDIES if (found := own_tables.study(e, results, reference))}
            present = [
                e for e in _order(shown) if e in by_experiment or e in own or (shown["experiment"] == e).any()
            ]
            pages = []
            for experiment in present:
                part = shown[shown["experiment"] == experiment]
                images = [_image(path) for path in by_experiment.get(experiment, [])]
                page = out / f"{experiment}.html"
                text = html.experiment_page(
                    experiment, part, images, _logs(part, results), own.get(experiment)
                )
                page.write_text(text, "utf-8")
                pages.append(page)
        rows = claims.table(frame, results, reference)
        index = out / "index.html"
        text = html.index_page(
            shown, present, rows, drawn.missing, reference, own, benchmarks.tables(results, reference)
        )
        index.write_text(text, encoding="utf-8")
    return [index, *pages]


def _order(frame: pd.DataFrame) -> list[str]:
    own = [str(e) for e in dict.fromkeys(frame["experiment"].dropna()) if e not in figures.EXPERIMENTS]
    return [*figures.EXPERIMENTS, *own]


def _by_experiment(paths: list[Path]) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in paths:
        caption = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        found.setdefault(caption["experiment"], []).append(path)
    return found


def _image(path: Path) -> html.Image:
    return html.Image(path.stem, path.read_bytes(), json.loads(path.with_suffix(".json").read_text("utf-8")))


def _logs(part: pd.DataFrame, results: Path) -> dict[str, str]:
    """The last lines of the logs of cells without a result, by cell."""
    found = {}
    for row in part[part["status"] != "complete"].drop_duplicates("cell").itertuples():
        file = results / str(row.log)
        if isinstance(row.log, str) and file.is_file():
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            found[str(row.cell)] = "\n".join(lines[-LOG_LINES:])
    return found
