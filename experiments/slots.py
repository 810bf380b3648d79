"""What a run drives: engines behind one protocol, each in the slot of its group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from experiments.cells import Failure
from experiments.grid import Cell, EngineGroup


class Engine(Protocol):
    """An engine in its own process group. Every method but `stop` may raise an error that has `kind`
    ("failed" | "timeout"), `reason` and perhaps `traceback` and `records`; any other exception counts as "failed"."""

    def start(self, timeout_s: float) -> None: ...
    def gate(self, options: dict[str, Any]) -> dict[str, Any]:
        """`{"passed": bool | None, "max_abs_error": float | None, "detail": str}`; passed is None where the outputs
        could not be checked."""
        ...

    def warmup(self, workload_path: Path) -> None: ...
    def run(self, workload_path: Path, options: dict[str, Any]) -> dict[str, Any]:
        """`{"records": parquet path or list of rows, "wall_s": float, "counters": dict}` of one round, with the load's
        `"mode"` where it was not the workload's own."""
        ...

    def counters(self) -> dict[str, Any]: ...
    def add_latency(self, microseconds: float) -> None:
        """Every collective waits so long from now on; asked only of cells that add latency, 0 included."""
        ...

    def park(self) -> None:
        """Takes all processor time from the engine until `resume`."""
        ...

    def resume(self) -> None: ...
    def stop(self) -> None:
        """Ends every process of the engine; harmless when it is not running."""
        ...


EngineFactory = Callable[[EngineGroup, Path], Engine]


@dataclass
class Slot:
    """One engine group of the point that is running."""

    group: EngineGroup
    log: Path
    pending: dict[str, Cell]
    recorded: bool = True
    engine: Engine | None = None
    gate: dict[str, Any] | None = None
    failure: Failure | None = None
    crashes: int = 0
    start_s: float | None = None
    nodes: list[dict[str, Any]] = field(default_factory=list)
    """The other machines of the engine, where it spans several."""


@dataclass
class Outcome:
    """What a run did, by cell name."""

    done: dict[str, str] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    skipped: int = 0

    @property
    def failed(self) -> list[str]:
        return [cell for cell, status in self.done.items() if status != "complete"]


def rotated(items: Sequence[Any], by: int) -> list[Any]:
    """The items in order, starting `by` places later each round, so that no backend is always first."""
    shift = by % len(items) if items else 0
    return [*items[shift:], *items[:shift]]
