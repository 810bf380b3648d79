"""Work that needs torch, in a child process as a run's own never imports it, and where its result goes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tessa.errors import UserError


def run_module(failure: str, module: str, *arguments: Path) -> None:
    """`python -m module arguments`, to its end.

    Raises:
        UserError: with ``failure`` and the last line that the module printed to stderr.
    """
    child = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if child.returncode:
        lines = child.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"{failure}: {lines[-1]}")


def publish(made: Path, target: Path) -> None:
    """Move a finished folder to its place in the cache; where another run was first, its folder stays."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise
