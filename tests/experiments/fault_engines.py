"""Engines whose process is `fault_child`, for runs in this process and, as `fault_engines:make`, in others.

In other processes the folder of `Machines` is $TESSA_FAULT_FOLDER, and $TESSA_FAULT is ``{command: behaviour}``.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil

from experiments.engine import parent
from experiments.engine.parent import DEFAULT_TIMEOUT_S, EngineProcess
from experiments.engine.setup import EngineSetup
from experiments.measure.types import RequestRecord, records_to_frame
from experiments.workload.types import Workload

HERE = Path(__file__).parent
HANGING = ("hang", "stubborn", "stopped")


class FaultEngine(EngineProcess):
    """`fault_child` as an engine."""

    child_module = "fault_child"
    script: dict[str, str]

    def _call(self, command: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, **arguments: Any) -> Any:
        # Only what hangs is not waited for.
        short = 0.5 if self.script.get(command) in HANGING else timeout_s
        return super()._call(command, timeout_s=short, **arguments)

    def park(self) -> None:
        super().park()
        if self.script.pop("park", None) == "kill" and self._process is not None:
            Path(self.setup.env["ONCE"]).touch()
            os.kill(self._process.pid, signal.SIGKILL)


class Machines:
    """Makes the engines of a run; tessa's has the fault. Keeps what they held, to look for it afterwards."""

    def __init__(self, script: dict[str, str], folder: Path) -> None:
        self.script, self.folder = script, folder
        self.made: list[FaultEngine] = []
        self.marks: list[str] = []
        (folder / "records").mkdir(parents=True, exist_ok=True)

    def __call__(self, group: Any, log: Path) -> FaultEngine:
        faulty = group.backend == "tessa"
        script = self.script if faulty else {}
        environment = {
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "RECORDS": str(self.folder / "records"),
            "FAULT": json.dumps(script),
            "ONCE": str(self.folder / "once"),
        }
        if not faulty:
            del environment["ONCE"]
        engine = FaultEngine(EngineSetup(group.backend, "model", (), {}, env=environment), log)
        engine.script = script if not (self.folder / "once").exists() else {}
        self.made.append(engine)
        self.marks.append(engine._scratch.name)
        return engine

    def prepare(self, plan: Any) -> None:
        """The records that engines hand back for each workload, in each of the forms that a fault asks for."""
        for workload in plan.workloads.values():
            path = workload.save(self.folder / "workloads")
            for form in ("", "error", "timeout", "short", "missing", "backwards", "stalled", "failing"):
                name = f"{form}-{path.name}" if form else path.name
                records_to_frame(records(workload, form)).to_parquet(self.folder / "records" / name)


def records(workload: Workload, form: str) -> list[RequestRecord]:
    """What a perfect engine of 100 tokens/s would record, but for the form."""
    rows, now = [], 0.0
    for request in workload.requests:
        times = [now + (i + 1) / 100 for i in range(request.output_tokens)]
        now = times[-1]
        row = RequestRecord(
            request.request_id,
            request.adapter,
            len(request.prompt_token_ids),
            request.output_tokens,
            request.arrival_s,
            request.arrival_s,
            times[0],
            now,
            times,
            len(times),
            "ok",
        )
        rows.append(row)
    first = rows[0]
    if form in ("error", "timeout"):
        first.status, first.error, first.end_s = form, "boom", None
    elif form == "short":
        first.status, first.error = "wrong_length", "1 token short"
    elif form == "missing":
        rows.pop()
    elif form == "backwards":
        first.token_times_s.reverse()
        first.first_token_s = first.token_times_s[0]
    elif form in ("stalled", "failing"):
        rows[-1].status, rows[-1].end_s = "aborted", None
    return rows


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that descend from an engine."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(parent.MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def make(group: Any, log: Path) -> FaultEngine:
    """The engine factory of a run in another process."""
    return Machines(json.loads(os.environ["TESSA_FAULT"]), Path(os.environ["TESSA_FAULT_FOLDER"]))(group, log)
