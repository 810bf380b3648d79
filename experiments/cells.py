"""One cell while it is measured: its rounds, its failure, and the summary that is stored."""

from __future__ import annotations

import dataclasses
import datetime
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from experiments import provenance
from experiments.config import MeasureConfig
from experiments.grid import BuiltWorkload, Cell
from experiments.measure import metrics, stats
from experiments.measure.types import RequestRecord
from experiments.store import LOG_NAME

if TYPE_CHECKING:
    from experiments.runner import Slot

THROUGHPUT = "output_tokens_per_s"
"""The throughput that adapter cost compares. Every backend gets the same requests, so the ratio is the same
for requests/s and total tokens/s."""


@dataclass(frozen=True)
class Failure:
    """Why a cell has no result. status: one of the store's, phase: what the engine was doing."""

    status: str
    phase: str
    reason: str
    traceback: str | None = None

    @staticmethod
    def of(error: Exception, phase: str) -> Failure:
        kind = getattr(error, "kind", "failed")
        reason = getattr(error, "reason", None) or f"{type(error).__name__}: {error}"
        detail = getattr(error, "traceback", None) or "".join(traceback.format_exception(error))
        return Failure(kind if kind in ("failed", "timeout") else "failed", phase, str(reason), str(detail))


@dataclass
class CellRun:
    """A cell in progress on one engine slot."""

    slot: Slot
    cell: Cell
    rounds: list[dict[str, Any]] = field(default_factory=list)
    frames: list[pd.DataFrame] = field(default_factory=list)
    failure: Failure | None = None
    began: str = field(default_factory=lambda: utc_now())

    def add_round(
        self,
        result: Mapping[str, Any],
        index: int,
        position: int,
        session: str,
        workload: BuiltWorkload,
        measure: MeasureConfig,
    ) -> None:
        """Takes one round's records and turns them into metrics, or into the cell's failure."""
        records = read_records(result["records"])
        evaluation = metrics.evaluate(
            records,
            slo=dataclasses.asdict(measure.slo),
            lag_tolerance_s=measure.lag_tolerance_s,
            expected=len(workload),
        )
        self.frames.append(record_frame(records).assign(round=index))
        self.rounds.append(
            {
                "round": index,
                "position": position,
                "session": session,
                "status": evaluation.status,
                "reason": evaluation.reason,
                "wall_s": result.get("wall_s"),
                "metrics": evaluation.metrics,
                "counters": dict(result.get("counters") or {}),
            }
        )
        if evaluation.status != "complete" and self.failure is None:
            self.failure = Failure(evaluation.status, f"round {index + 1}", evaluation.reason or "")

    def add_costs(self, base: Mapping[int, float], basis: str) -> None:
        """adapter_cost of every round that base has too; `basis` says how close in time the two were."""
        for entry in self.rounds:
            own, reference = entry["metrics"].get(THROUGHPUT), base.get(entry["round"])
            if own is None or not reference:
                continue
            entry["adapter_cost"] = 1.0 - own / reference
            entry["base_throughput"] = reference
            entry["adapter_cost_basis"] = basis


def base_throughput(rounds: list[dict[str, Any]]) -> dict[int, float]:
    """Throughput of base by round, complete rounds only."""
    return {
        entry["round"]: entry["metrics"][THROUGHPUT]
        for entry in rounds
        if entry["status"] == "complete" and entry["metrics"].get(THROUGHPUT)
    }


def summarise_cell(run: CellRun, start_state: dict[str, Any]) -> tuple[dict[str, Any], pd.DataFrame | None]:
    """The stored summary of a finished or failed cell, and all its request records."""
    failure, slot = run.failure, run.slot
    complete = [entry for entry in run.rounds if entry["status"] == "complete"]
    series: dict[str, list[float]] = {}
    if failure is None:
        for entry in complete:
            measured = {**entry["metrics"], "adapter_cost": entry.get("adapter_cost")}
            for name, value in measured.items():
                if value is not None:
                    series.setdefault(name, []).append(value)
    summary = {
        "hash": run.cell.hash,
        "cell": run.cell.name,
        "experiment": run.cell.experiment,
        "status": failure.status if failure else "complete",
        "reason": f"{failure.phase}: {failure.reason}" if failure else None,
        "phase": failure.phase if failure else None,
        "traceback": failure.traceback if failure else None,
        "log": LOG_NAME if slot.log.exists() else None,
        "provenance": "measured",
        "labels": run.cell.labels,
        "rounds": run.rounds,
        "intervals": {name: dataclasses.asdict(stats.interval(values)) for name, values in series.items()},
        "counters": complete[-1]["counters"] if complete else {},
        "gate": slot.gate,
        "engine_start_s": slot.start_s,
        "began": run.began,
        "ended": utc_now(),
        "environment": provenance.collect(start_state),
    }
    return summary, pd.concat(run.frames, ignore_index=True) if run.frames else None


def read_records(source: Any) -> list[RequestRecord]:
    """Request records from a parquet file's path, or from rows as dicts or objects."""
    if isinstance(source, str | Path):
        source = pd.read_parquet(source).to_dict("records")
    return [row if isinstance(row, RequestRecord) else RequestRecord(**row) for row in source]


def record_frame(records: list[RequestRecord]) -> pd.DataFrame:
    return pd.DataFrame([dataclasses.asdict(record) for record in records])


def utc_now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
