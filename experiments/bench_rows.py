"""What the benchmarks share: where their rows go, on which device they ran, and how they refuse a wrong setting.

The rows go into one CSV beside the store's cells, each row with its machine and commit.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments import provenance
from experiments.disk import check_writable, disk_errors
from tessa.errors import UserError


def store(rows: pd.DataFrame, name: str, out: Path, git: dict[str, Any], device: str = "cpu") -> pd.DataFrame:
    """Writes ``out/rows.csv``, whole or not at all, and returns what it holds.

    Args:
        name: the `experiment` column's value.
        git: `provenance.git_state()` of when the measurement began.
        device: "cpu" or "cuda", whatever the measured work ran on.
    """
    rows = rows.assign(
        experiment=name,
        provenance="measured",
        **measured_on(device),
        git_sha=git["sha"],
        git_dirty=git["dirty"],
        command=provenance.command(),
    )
    with disk_errors(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
        part = out / "rows.csv.part"
        rows.to_csv(part, index=False)
        part.replace(out / "rows.csv")
    return rows


def measured_on(device: str) -> dict[str, str]:
    """The columns `device` ("cpu" or the GPU's name) and `machine` (the processor or the GPU), as the layer step has
    them."""
    if device == "cpu":
        return {"device": "cpu", "machine": provenance.machine()}
    import torch

    name = torch.cuda.get_device_properties(0).name
    return {"device": name, "machine": name}


def out_folder(given: Path | None, full: Path, quick: bool) -> Path | None:
    """Where the rows go: the folder that was given, else ``full``; a quick run does not replace the full table.

    Asked before anything is measured: UserError where that folder cannot be written to.
    """
    out = given or (None if quick else full)
    return None if out is None else check_writable(out, "--out")


def check_least(arguments: argparse.Namespace, **least: int) -> None:
    """Raises UserError for the first option that is below its least value."""
    for name, minimum in least.items():
        if (value := getattr(arguments, name)) < minimum:
            raise UserError(f"--{name.replace('_', '-')} is {value}; give {minimum} or more")


def user_errors_in_a_line(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """``main`` whose UserError becomes one line on standard error and exit status 2."""

    @functools.wraps(main)
    def wrapped(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return wrapped
