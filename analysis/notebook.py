"""What the notebooks share: which results they read, and tables and figures shown in place."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pandas as pd

from analysis import claims, figures, projection, tables
from analysis.load import load
from tessa.errors import UserError

REPO = Path(__file__).resolve().parents[1]
REFERENCE = REPO / "results" / "reference"


class Results:
    """A results folder with its frame, as a notebook shows it.

    `folder` None: $TESSA_RESULTS, else the reference results that come with the project, else `results/` of the
    project. A folder without results is no error: every method says what is missing.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = _chosen(folder)
        self.frame = load(self.folder)
        served = self.frame["experiment"].dropna().nunique()
        if self.frame.empty:
            print(
                f"No cells are stored below {_short(self.folder)}. Make some, for example with\n"
                "    python run.py experiment=tp_scaling tp=2 model=small\n"
                "or set RESULTS (or $TESSA_RESULTS) to a folder that has results."
            )
        else:
            cells = self.frame.drop_duplicates(["experiment", "cell"])
            print(f"{len(cells)} cells of {served} experiments in {_short(self.folder)}")

    def overview(self) -> pd.DataFrame:
        """A row per experiment: cells by status, TP degrees, provenance, commits."""
        rows = []
        for experiment, part in self.frame.groupby("experiment", sort=False):
            cells = part.drop_duplicates("cell")
            rows.append(
                {
                    "experiment": experiment,
                    **cells["status"].value_counts().to_dict(),
                    "tp": ", ".join(str(tp) for tp in sorted(cells["tp"].dropna().unique())),
                    "provenance": ", ".join(sorted(cells["provenance"].dropna().unique())),
                    "commits": ", ".join(sorted(str(sha)[:7] for sha in cells["git_sha"].dropna().unique())),
                }
            )
        table = pd.DataFrame(rows)
        counts = table.select_dtypes("number").columns
        table[counts] = table[counts].fillna(0).astype(int)
        return table

    def claims(self) -> pd.DataFrame:
        """The paper's claims beside these results."""
        rows = claims.table(self.frame, self.folder)
        shown = ("id", "claim", "paper", "provenance", "verdict", "note")
        return pd.DataFrame([{**{k: row[k] for k in shown}, "ours": claims.shown(row)} for row in rows])

    def table(self, experiment: str) -> pd.DataFrame:
        """The table of an experiment, a row per setting, degree and backend; empty where there is none."""
        table = tables.end_table(self.frame[self.frame["experiment"] == experiment])
        table.columns = [str(column).replace("\n", " ") for column in table.columns]
        return table

    def modelled_claims(self) -> pd.DataFrame:
        """The projection's claims with their bands; empty where it was not run."""
        try:
            return projection.claims(projection.read(self.folder))
        except UserError as error:
            print(error)
            return pd.DataFrame()

    def show(self, *experiments: str) -> None:
        """Draws the figures of these experiments below the cell, or says what is missing.

        What the reference set lacks is taken from the set of another machine, `<its name>_<machine>`, and that is said.
        """
        from IPython.display import Image, display

        for experiment in experiments:
            place = self._place(experiment)
            frame = self.frame
            if place != self.folder:
                print(f"{experiment} is from {_short(place)}:")
                frame = load(place)
            with tempfile.TemporaryDirectory() as folder:
                drawn = figures.draw_all(frame, place, Path(folder), experiments=(experiment,))
                for path in drawn.paths:
                    said = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
                    print(said.get("caption") or f"{said['experiment']}: {', '.join(said['provenance'])}")
                    display(Image(data=path.read_bytes()))  # type: ignore[no-untyped-call]
            for text in drawn.missing:
                print(f"missing: {text}")

    def _place(self, experiment: str) -> Path:
        others = sorted(REFERENCE.parent.glob(f"{REFERENCE.name}_*")) if self.folder == REFERENCE else []
        return next((p for p in (self.folder, *others) if (p / experiment).is_dir()), self.folder)


def _chosen(folder: str | Path | None) -> Path:
    given = folder or os.environ.get("TESSA_RESULTS")
    if given:
        # A notebook's working folder is its own; what a user writes is meant from the project.
        path = Path(given).expanduser()
        return path if path.is_absolute() else REPO / path
    return REFERENCE if any(REFERENCE.glob("*/*")) else REPO / "results"


def _short(path: Path) -> str:
    return str(path.relative_to(REPO)) if path.is_relative_to(REPO) else str(path)
