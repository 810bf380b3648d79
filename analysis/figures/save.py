"""A figure's files: PNG and PDF, and the caption that says what is behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis import files, style, tables
from analysis.figures import marks

INTERVALS = (
    "95 % t intervals over rounds; adapter cost from ratios within rounds; cut off at the frame if very wide"
)


def save(figure: Figure, folder: Path, stem: str, about: dict[str, Any]) -> Path:
    """Writes `<stem>.png`, `.pdf` and `.json` (the caption), closes the figure, returns the PNG's path."""
    png, _ = files.write(figure, folder, stem)
    write_caption(folder, stem, about)
    return png


def write_caption(folder: Path, stem: str, about: dict[str, Any]) -> None:
    text = json.dumps({"figure": stem, **about}, indent=1, ensure_ascii=False) + "\n"
    (folder / f"{stem}.json").write_text(text, encoding="utf-8")


def about(part: pd.DataFrame, reference: bool = False, notes: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a reader has to know: how to make and redraw it, settings, provenance, commits, machines, gaps."""
    good = part[part["status"] == "complete"]
    first = part.iloc[0]
    lost = part[part["status"] != "complete"].drop_duplicates("cell")
    return {
        "experiment": str(first["experiment"]),
        "caption": caption(part),
        **commands(part, reference),
        "redraw": "python -m analysis figures" + (" --reference" if reference else ""),
        "settings": [tables.describe(one) for one in tables.settings(part)],
        "provenance": [k for k in style.HATCHES if k in set(part["provenance"])],
        "intervals": INTERVALS,
        "cautions": tables.cautions(part),
        "rounds": sorted({int(n) for n in good.groupby("cell")["repeat"].nunique()}),
        "commits": sorted(str(sha) for sha in part["git_sha"].dropna().unique()),
        "uncommitted_changes": bool(part["git_dirty"].fillna(True).astype(bool).any()),
        "reference": reference,
        "machines": distinct(part, "machine"),
        "packages": distinct(part, "engine"),
        "outputs_checked": distinct(good, "gate") or ["not recorded"],
        "wrong_by_design": sorted(
            part.loc[part["wrong_by_design"].fillna(False).astype(bool), "variant"].unique()
        )
        if "wrong_by_design" in part
        else [],
        "no_result": [
            {
                "cell": row["cell"],
                "backend": row["variant"],
                "tp": int(row["tp"]),
                "status": row["status"],
                "reason": row["reason"],
            }
            for row in lost.to_dict("records")
        ],
        **(notes or {}),
    }


OTHERS = "settings that differ from the experiment's own: in the caption, and all of them in each cell's config.json"


def commands(part: pd.DataFrame, reference: bool = False) -> dict[str, Any]:
    """The commands that made the cells. Where cells from before commands were stored are among them: for reference
    figures the step of `make reference`, else one that leaves out settings other than the experiment's own.
    """
    said = part["command"] if "command" in part else pd.Series([None])
    if said.notna().all():
        return {"commands": sorted(str(command) for command in said.unique())}
    experiment = str(part["experiment"].iloc[0])
    if reference:
        return {"commands": [f"python scripts/reference.py --only {experiment}"]}
    if "method" in part and part["method"].notna().any():  # trained, not served
        return {"commands": [f"python run.py experiment={experiment}"], "other_settings": OTHERS}
    degrees = ",".join(str(int(tp)) for tp in sorted(part["tp"].dropna().unique()))
    sweep = "-m " if "," in degrees else ""
    model = part["model"].iloc[0]
    return {
        "commands": [f"python run.py {sweep}experiment={experiment} model={model} tp={degrees or 1}"],
        "other_settings": OTHERS,
    }


def caption(part: pd.DataFrame) -> str:
    """Setting, provenance and commits in one line."""
    rounds = part.groupby("cell")["repeat"].nunique().max()
    machines = ", ".join(distinct(part, "machine"))
    words = [
        tables.describe(part),
        f"{int(rounds)} rounds",
        f"commit {', '.join(marks.commits(part)) or 'unknown'}",
    ]
    return "; ".join([*words, machines] if machines else words)


def distinct(part: pd.DataFrame, column: str) -> list[str]:
    """The sorted values of a column, as text; none where it is absent."""
    return sorted(str(v) for v in part[column].dropna().unique()) if column in part else []
