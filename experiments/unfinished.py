"""Rounds of unfinished cells: kept after each round of all backends, continued by the next run.

A round that an interruption cut short is measured again by all, so that ratios within a round stay those of one
session. Kept rounds count for the same cell only, of the same code and packages on a machine that is alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import provenance
from experiments.cells import CellRun, add_costs, same_environment, summarise_cell
from experiments.store import Store, jsonable


def resume(store: Store, runs: Sequence[CellRun], start_state: dict[str, Any]) -> int:
    """Gives the cells the rounds that an interrupted run kept of them; returns how many.

    `start_state` is the code's state as of `provenance.git_state`. Rounds of another environment are discarded.
    """
    present, found = jsonable(provenance.collect(start_state)), 0
    for run in runs:
        kept = store.kept_rounds(run.cell.name, run.cell.hash) if run.slot.recorded else None
        if kept is None:
            continue
        if same_environment(kept[0]["environment"], present):
            run.resume(*kept)
            found += len(run.rounds)
        else:
            store.drop_rounds(run.cell.name)
    return found


def due(runs: Sequence[CellRun], index: int) -> list[CellRun]:
    """The cells that lack round `index`, and the base reference that is measured beside them."""
    lacking = [run for run in runs if all(entry["round"] != index for entry in run.rounds)]
    cases = {run.cell.case for run in lacking if run.slot.recorded}
    return [run for run in lacking if run.cell.case in cases]


def keep(store: Store, runs: Sequence[CellRun], start_state: dict[str, Any]) -> None:
    """Keeps the rounds that the cells have by now; a failed cell starts anew in the next run, so it keeps none."""
    references = {run.cell.case: run for run in runs if not run.slot.recorded and run.failure is None}
    for run in runs:
        if not run.slot.recorded:
            continue
        if run.failure is not None:
            store.drop_rounds(run.cell.name)
            continue
        if (reference := references.get(run.cell.case)) is not None:
            # The reference's own rounds are stored nowhere.
            add_costs(run.rounds, reference.rounds)
        store.keep_rounds(run.cell.name, *summarise_cell(run, start_state))
