"""One cell while it is measured: its rounds, its failure, and the summary that is stored."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from experiments import provenance
from experiments.config import MeasureConfig
from experiments.grid import BuiltWorkload, Cell, Plan
from experiments.measure import stats
from experiments.measure.metrics import MetricOptions
from experiments.measure.summary import summarise
from experiments.measure.types import RequestRecord, records_from_frame, records_to_frame
from experiments.store import LOG_NAME, Store

if TYPE_CHECKING:
    from experiments.slots import Slot

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
        reason = str(reason).removeprefix(f"{phase}: ")  # the engine's own words may name its command
        detail = getattr(error, "traceback", None) or "".join(traceback.format_exception(error))
        return Failure(kind if kind in ("failed", "timeout") else "failed", phase, reason, str(detail))


@dataclass
class CellRun:
    """A cell in progress on one engine slot."""

    slot: Slot
    cell: Cell
    rounds: list[dict[str, Any]] = field(default_factory=list)
    frames: list[pd.DataFrame] = field(default_factory=list)
    failure: Failure | None = None
    began: str = field(default_factory=lambda: utc_now())
    engine: dict[str, Any] | None = None
    """What an earlier run stored of the engine (see `of_engine`), until this run measures a round of its own."""

    def resume(self, summary: dict[str, Any], records: pd.DataFrame | None) -> None:
        """Takes the rounds that an earlier run measured, from its `summarise_cell`."""
        self.rounds, self.began = summary["rounds"], summary["began"]
        self.frames = [] if records is None else [records]
        self.engine = {name: summary[name] for name in of_engine(self.slot)}

    def add_round(
        self,
        result: Mapping[str, Any],
        index: int,
        position: int,
        session: str,
        interleave: str,
        workload: BuiltWorkload,
        measure: MeasureConfig,
    ) -> None:
        """Takes one round's records and turns them into metrics, or into the cell's failure."""
        records = read_records(result["records"])
        row = summarise(
            records,
            mode=result.get("mode") or workload.meta["load"]["mode"],
            load_status=result.get("status", "ok"),
            load_reason=result.get("reason"),
            options=MetricOptions(
                slo_ttft_s=measure.slo.ttft_s,
                slo_tpot_s=measure.slo.tpot_s,
                lag_tolerance_s=measure.lag_tolerance_s,
            ),
        )
        status, reason = row.pop("status"), row.pop("status_reason")
        if status == "complete" and len(records) != len(workload):
            status, reason = "invalid", f"{len(records)} records for {len(workload)} requests"
        self.frames.append(records_to_frame(records).assign(round=index))
        self.engine = None
        self.rounds.append(
            {
                "round": index,
                "position": position,
                "session": session,
                "interleave": interleave,
                "status": status,
                "reason": reason,
                "wall_s": result.get("wall_s"),
                "metrics": row,
                "counters": dict(result.get("counters") or {}),
            }
        )
        if status != "complete" and self.failure is None:
            self.failure = Failure(status, f"round {index + 1}", reason or "")

    def keep_records(self, source: Any, index: int) -> None:
        """The requests of a round that failed, where the engine still had them: stored, never measured."""
        if source is not None:
            with contextlib.suppress(OSError, ValueError):
                self.frames.append(records_to_frame(read_records(source)).assign(round=index))


def add_costs(rounds: list[dict[str, Any]], base: list[dict[str, Any]]) -> None:
    """adapter_cost of every round that has none yet and that is among the rounds of base too; its basis says how
    close in time the two were."""
    throughput, by_round = base_throughput(base), {entry["round"]: entry for entry in base}
    for entry in rounds:
        own, reference = entry["metrics"].get(THROUGHPUT), throughput.get(entry["round"])
        if "adapter_cost" in entry or own is None or not reference:
            continue
        entry["adapter_cost"] = 1.0 - own / reference
        entry["base_throughput"] = reference
        entry["adapter_cost_basis"] = _basis(entry, by_round[entry["round"]])


def _basis(entry: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    if entry["session"] != base["session"]:
        return "other_session"
    return "not_interleaved" if entry["interleave"] == "off" else "same_round"


def base_throughput(rounds: list[dict[str, Any]]) -> dict[int, float]:
    """Throughput of base by round, complete rounds only."""
    return {
        entry["round"]: entry["metrics"][THROUGHPUT]
        for entry in rounds
        if entry["status"] == "complete" and entry["metrics"].get(THROUGHPUT)
    }


def stored_base(plan: Plan, store: Store, cell: Cell, hardware: Mapping[str, Any]) -> dict[str, Any] | None:
    """The summary of the finished base cell that a cell measured on `hardware` (see `provenance.hardware`) is
    compared with; None where there is none from such a machine."""
    for point in plan.points:
        cells = [c for group in point.groups for c in group.cells]
        if cell in cells:
            for other in cells:
                if other.backend == "base" and other.case == cell.case:
                    summary = store.summary(other.name, other.hash)
                    if summary is None or summary["status"] != "complete":
                        return None
                    return summary if same_machine(summary["environment"]["hardware"], hardware) else None
    return None


def same_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two machines are alike in CPU, usable cores and GPUs, so that their throughputs can be compared."""

    def parts(hardware: Mapping[str, Any]) -> list[Any]:
        return [
            hardware.get("cpu"),
            hardware.get("cores"),
            [g.get("name") for g in hardware.get("gpus") or ()],
        ]

    return parts(one) == parts(other)


def same_environment(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether rounds from two environments (see `provenance.collect`) may stand in one cell: the same code and
    packages, on machines that are alike."""
    alike = all(one[part] == other[part] for part in ("git_start", "packages"))
    return alike and same_machine(one["hardware"], other["hardware"])


def fill_costs(plan: Plan, store: Store) -> int:
    """Forms the adapter costs that stored complete cells lack and whose base is stored by now; returns how many.

    A cell lacks its cost when base failed, or was another run's, while the cell was measured. Raises UserError
    when the store cannot be written.
    """
    filled = 0
    for cell in plan.cells:
        if not _lacks_cost(plan, store, cell) or (claim := store.claim(cell.name)) is None:
            continue
        try:
            # Looked at again: another run may have replaced the cell before it was claimed.
            if (found := _lacks_cost(plan, store, cell)) is not None:
                summary, base = found
                add_costs(summary["rounds"], base["rounds"])
                summary["intervals"] = intervals(summary["rounds"])
                store.amend(cell.name, summary)
                filled += 1
        finally:
            claim.release()
    return filled


def _lacks_cost(plan: Plan, store: Store, cell: Cell) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The summaries of a complete cell without adapter cost and of its base; None where nothing is to be done."""
    summary = store.summary(cell.name, cell.hash)
    if summary is None or summary["status"] != "complete":
        return None
    if any("adapter_cost" in entry for entry in summary["rounds"]):
        return None
    base = stored_base(plan, store, cell, summary["environment"]["hardware"])
    return None if base is None else (summary, base)


def summarise_cell(run: CellRun, start_state: dict[str, Any]) -> tuple[dict[str, Any], pd.DataFrame | None]:
    """The stored summary of a finished or failed cell, and all its request records."""
    failure, slot = run.failure, run.slot
    complete = [entry for entry in run.rounds if entry["status"] == "complete"]
    summary = {
        "hash": run.cell.hash,
        "cell": run.cell.name,
        "experiment": run.cell.experiment,
        "status": failure.status if failure else "complete",
        "reason": f"{failure.phase}: {failure.reason}" if failure else None,
        "phase": failure.phase if failure else None,
        "traceback": failure.traceback if failure else None,
        "log": LOG_NAME if slot.log.exists() else None,
        # Real ranks and engines, but an interconnect that is made slower on purpose.
        "provenance": "measured" if run.cell.added_latency_us is None else "emulated",
        "labels": run.cell.labels,
        "rounds": run.rounds,
        "intervals": {} if failure else intervals(complete),
        "counters": complete[-1]["counters"] if complete else {},
        **(of_engine(slot) if failure or run.engine is None else run.engine),
        "began": run.began,
        "ended": utc_now(),
        "environment": provenance.collect(start_state),
    }
    return summary, pd.concat(run.frames, ignore_index=True) if run.frames else None


def of_engine(slot: Slot) -> dict[str, Any]:
    """What a cell's summary says about its engine."""
    return {"gate": slot.gate, "nodes": slot.nodes, "engine_start_s": slot.start_s}


def read_records(source: Any) -> list[RequestRecord]:
    """Request records from a parquet file's path, or from rows as dicts or objects."""
    if isinstance(source, str | Path):
        return records_from_frame(pd.read_parquet(source))
    return [row if isinstance(row, RequestRecord) else RequestRecord(**row) for row in source]


def intervals(rounds: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Centre and 95 % t interval of every metric over the rounds; adapter cost from ratios within rounds."""
    found: dict[str, stats.Interval] = {}
    for name in rounds[0]["metrics"] if rounds else ():
        values = [entry["metrics"][name] for entry in rounds]
        if all(value is not None and math.isfinite(value) for value in values):
            found[name] = stats.t_interval(values)
    paired = [entry for entry in rounds if entry.get("base_throughput")]
    if paired:
        own = [entry["metrics"][THROUGHPUT] for entry in paired]
        found["adapter_cost"] = stats.adapter_cost(own, [entry["base_throughput"] for entry in paired])
    return {name: dataclasses.asdict(interval) for name, interval in found.items()}


def utc_now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
