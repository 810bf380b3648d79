"""The rows of a layer-step run in one CSV file, and the short table that closes a run. Needs pandas alone."""

from __future__ import annotations

import argparse
import fcntl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.layer_step.spec import Point, cell_id
from tessa.errors import UserError

NAME = "rows.csv"


class RowFile:
    """`rows.csv` of a folder; a row replaces the one with the same `cell`. Always written as a whole.

    Several runs may add to one file: each addition takes up what the others have stored.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._rows = self._stored()

    def _stored(self) -> dict[str, dict[str, Any]]:
        if not self.path.is_file():
            return {}
        frame = pd.read_csv(self.path, dtype={"cell": str, "git_sha": str})  # hex digits may read as a number
        if "cell" not in frame:
            raise UserError(f"{self.path} is not a layer_step table; move it away or choose another folder")
        return {row["cell"]: row for row in frame.to_dict("records")}  # type: ignore[misc]

    def complete(self, point: Point, backends: Sequence[str], settings: dict[str, object]) -> bool:
        """Whether every backend of a point has a complete row that was measured with these settings."""
        cells = [self._rows.get(cell_id(point, backend, settings)) for backend in backends]
        return all(row is not None and row["status"] == "complete" for row in cells)

    def add(self, rows: list[dict[str, Any]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_name(f".{NAME}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._rows = self._stored() | {row["cell"]: row for row in rows}
            part = self.path.with_suffix(".part")
            self.frame().to_csv(part, index=False)
            part.replace(self.path)

    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(list(self._rows.values()))


def table(frame: pd.DataFrame) -> str:
    """One line per point: microseconds of one layer for base, and each backend's time over base's, kernels alone."""
    if frame.empty:
        return "no rows"
    good = frame[frame.status == "complete"]
    lines = [
        "one layer on one rank, kernels alone (no collectives): base in us, then time over base",
        f"{'model':<14}{'tp':>3} {'phase':<8}{'tokens':>6}{'rank':>5}{'adapters':>9} {'base us':>9}",
    ]
    variants = [v for v in dict.fromkeys(frame.variant) if v != "base"]
    lines[1] += "".join(f"{v.replace('segmented', 'seg'):>12}" for v in variants)
    keys = ["model", "tp", "phase", "tokens", "rank", "distinct", "resident"]
    for key, group in good.groupby(keys, sort=False):
        times = group.drop_duplicates("variant", keep="last").set_index("variant").layer_s
        base = times.get("base", float("nan"))
        model, tp, phase, tokens, rank, distinct, resident = key  # type: ignore[misc]
        line = f"{model:<14}{tp:>3} {phase:<8}{tokens:>6}{rank:>5}{f'{distinct}/{resident}':>9} {base * 1e6:>9.1f}"
        ratios = [times.get(v, float("nan")) / base for v in variants]
        lines.append(
            line + "".join(f"{ratio:>12.3f}" if ratio == ratio else f"{'-':>12}" for ratio in ratios)
        )
    bad = frame[frame.status != "complete"]
    counts = f"{len(good)} rows complete"
    lines.append(counts + (f", {len(bad)} not: {', '.join(sorted(set(bad.variant)))}" if len(bad) else ""))
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m experiments.layer_step.rows", description=table.__doc__)
    parser.add_argument("folder", type=Path, help="folder with rows.csv")
    print(table(RowFile(parser.parse_args().folder).frame()))
