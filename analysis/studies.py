"""Tables that studies keep of their own, beside the cells: which of their rows count, and where they come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from tessa.errors import UserError


def environment(folder: Path) -> dict[str, Any]:
    """What a study's `environment.json` says; empty where it is absent or damaged."""
    try:
        said = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def rows(folder: Path, what: str, command: str, reference: bool = False) -> pd.DataFrame:
    """`rows.csv` of a study's folder, see `counted`; where it is absent, UserError says `what` is missing and how it
    is made."""
    path = folder / "rows.csv"
    if not path.is_file():
        raise UserError(f"no {what} at {path}; make them with: {command}")
    return counted(pd.read_csv(path, dtype={"git_sha": str}), folder, reference)


def unclean(frame: pd.DataFrame) -> pd.Series:
    """True for each row whose tree had uncommitted changes or whose commit is unknown."""
    return frame["git_sha"].isna() | frame["git_dirty"].fillna(True).astype(bool)


def counted(table: pd.DataFrame, folder: Path, reference: bool = False) -> pd.DataFrame:
    """A study's table with `git_sha`, `git_dirty` and `command`; where it lacks them, `environment.json` says them.

    With `reference`, `unclean` rows are left out; UserError where that leaves none.
    """
    if not {"git_sha", "git_dirty"} <= set(table.columns):
        said = environment(folder)
        trees = [said.get(key) or {} for key in ("git_start", "git_submit")]
        flags = [tree["dirty"] for tree in trees if tree.get("dirty") is not None]
        table = table.assign(
            git_sha=trees[0].get("sha"), git_dirty=any(flags) if flags else None, command=said.get("command")
        )
    if not reference:
        return table
    kept = table[~unclean(table)]
    if kept.empty:
        raise UserError(
            f"none of the {len(table)} rows in {folder} comes from a clean tree with a known commit; commit, "
            "delete that folder and make it again"
        )
    return kept
