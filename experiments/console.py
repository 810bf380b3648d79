"""What a run shows while it works: one progress bar on a terminal, plain lines elsewhere. All on stderr."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from experiments.grid import Cell

TAIL_LINES = 12
LINE_WIDTH = 300
SETUP = ("start", "gate", "warm-up")


class Console:
    """Progress over rounds, with the backend and phase at work."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._rich = RichConsole(file=stream if stream is not None else sys.stderr)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._done = self._total = 0
        self._began: float | None = None

    def start(self, rounds: int, skipped: int) -> None:
        """`rounds` of work lie ahead; `skipped` cells are complete already."""
        self._total, self._done, self._began = rounds, 0, None
        if skipped:
            self.note(f"{skipped} cells are left as they are; force=true runs complete ones again")
        if rounds and self._rich.is_terminal:
            self._progress = Progress(
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self._rich,
            )
            self._task = self._progress.add_task("", total=rounds)
            self._progress.start()

    @property
    def live(self) -> bool:
        """Whether there is a bar to show small steps in; elsewhere each would be a line."""
        return self._progress is not None

    def phase(self, backend: str, phase: str) -> None:
        """The time left counts from the first phase that is none of SETUP: what these take says nothing of a round."""
        if self._began is None and phase not in SETUP:
            self._began = time.perf_counter()
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=escape(f"{backend}: {phase}"))
        else:
            self.note(f"[{self._done}/{self._total}, {self._left()}] {backend}: {phase}")

    def advance(self, rounds: int = 1) -> None:
        self._done += rounds
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, rounds)

    def note(self, text: str) -> None:
        self._rich.print(text, markup=False, highlight=False, soft_wrap=True)

    def failed(self, cell: Cell, summary: dict[str, Any], folder: Path) -> None:
        """One cell did not complete: why, the end of its log, and where the rest is."""
        self.note(f"{cell.variant} at tp={cell.identity['tp']}: {summary['status']}: {summary['reason']}")
        for line in tail(folder / (summary["log"] or "")):
            self.note(f"    | {line[:LINE_WIDTH]}")
        self.note(f"    log: {folder / summary['log'] if summary['log'] else 'none'}")

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _left(self) -> str:
        if not self._done or self._began is None:
            return "time left unknown"
        seconds = (time.perf_counter() - self._began) / self._done * (self._total - self._done)
        return f"about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """`45 s`, `3 min`, `2 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log that say something; empty where there is none."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]
