"""Runs a plan: starts engines, gates them, measures rounds, stores cells; one failure stops no other."""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments import provenance, unfinished
from experiments.cells import (
    CellRun,
    Failure,
    add_costs,
    fill_costs,
    stored_base,
    summarise_cell,
)
from experiments.claims import Claim
from experiments.config import MeasureConfig
from experiments.console import Console
from experiments.estimate import interleaving, reference_groups
from experiments.grid import Cell, EngineGroup, Plan, Point
from experiments.loggers import Logger
from experiments.slots import Engine, EngineFactory, Outcome, Slot, rotated
from experiments.stopping import StopSignals
from experiments.store import Store, to_run

MOST_CRASHES = 2
"""After so many deaths with no round measured in between an engine is not started again; its remaining cells fail
at once."""


class Runner:
    """Drives one plan against one store.

    workload_paths: for each workload hash the file of the load and the file of its warm-up.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        measure: MeasureConfig,
        factory: EngineFactory,
        workload_paths: Callable[[str], tuple[Path, Path]],
        console: Console,
        logger: Logger,
        only: str | None = None,
        force: bool = False,
    ) -> None:
        self.plan, self.store, self.measure = plan, store, measure
        self.factory, self.workload_paths = factory, workload_paths
        self.console, self.logger = console, logger
        self.only, self.force = only, force
        self.session = uuid.uuid4().hex[:12]
        self.start_state = provenance.git_state()
        self.outcome = Outcome()
        self.interleave = measure.interleave
        self._claims: dict[str, Claim] = {}
        self._slots: list[Slot] = []
        self._signals = StopSignals()

    def wanted(self, cell: Cell) -> bool:
        """Whether this run is to measure the cell."""
        return to_run(self.store.status(cell.name, cell.hash), self.only, self.force)

    def run(self) -> Outcome:
        """Measures every wanted cell. Raises KeyboardInterrupt on SIGINT, SIGTERM and SIGHUP, with all
        engines stopped and the claims released."""
        todo = [cell for cell in self.plan.cells if self.wanted(cell)]
        self.outcome.skipped = len(self.plan.cells) - len(todo)
        self.console.start(len(todo) * self.measure.rounds, self.outcome.skipped)
        logs = self.store.scratch("logs")
        with self._signals:
            try:
                for point in self.plan.points:
                    self._run_point(point, logs)
                self._fill_costs()
            finally:
                with self._signals.shielded():
                    self._stop_all()
                    for claim in self._claims.values():
                        claim.release()
                    self._claims.clear()
                    shutil.rmtree(logs, ignore_errors=True)
                    self.logger.close()
                    self.console.stop()
        return self.outcome

    def _fill_costs(self) -> None:
        with self._signals.shielded():
            filled = fill_costs(self.plan, self.store)
        if filled:
            self.console.note(f"{filled} stored cells got the adapter cost that they had lacked a base for")

    def _run_point(self, point: Point, logs: Path) -> None:
        self._slots = [slot for group in point.groups if (slot := self._slot(group, logs)) is not None]
        if not any(slot.pending for slot in self._slots):
            return
        self._add_base_reference(point, logs)
        self.interleave, reason = interleaving(self.measure, [slot.group for slot in self._slots])
        if reason is not None:
            self.console.note(f"{reason}, so each round starts its engines anew (interleave=restart)")
        cases = [c for c in point.cases if any(c in slot.pending for slot in self._slots)]
        mode = {"resident": self._resident, "restart": self._restart, "off": self._one_by_one}
        try:
            mode[self.interleave](cases)
        finally:
            with self._signals.shielded():
                self._stop_all()

    def _slot(self, group: EngineGroup, logs: Path) -> Slot | None:
        pending: dict[str, Cell] = {}
        for cell in group.cells:
            if not self.wanted(cell):
                continue
            claim = self.store.claim(cell.name)
            if claim is None:
                holder = self.store.claimed_by(cell.name) or "another run"
                self.outcome.elsewhere[cell.name] = holder
                self.console.note(f"{cell.name} is being run by {holder}; left to it")
                self.console.advance(self.measure.rounds)
                continue
            if not self.wanted(cell):  # finished by another run between the look and the claim
                claim.release()
                continue
            self._claims[cell.name] = claim
            if self.force:
                self.store.drop_rounds(cell.name)
            pending[cell.case] = cell
        return Slot(group, logs / f"{group.key[:16]}.log", pending) if pending else None

    def _add_base_reference(self, point: Point, logs: Path) -> None:
        """Measures a finished base again beside late cells, so that their ratios come from one round."""
        wanted = {case for slot in self._slots for case in slot.pending}
        for group in reference_groups(self.measure, point, [slot.group for slot in self._slots]):
            cells = {cell.case: cell for cell in group.cells if cell.case in wanted}
            self._slots.insert(0, Slot(group, logs / f"{group.key[:16]}.log", cells, recorded=False))

    # Schedules: who runs when.

    def _resident(self, cases: Sequence[str]) -> None:
        """All engines up at once, parked while another is measured; rounds rotate through them."""
        for slot in self._slots:
            self._ensure(slot)
        for case in cases:
            runs = [CellRun(slot, slot.pending[case]) for slot in self._slots if case in slot.pending]
            for run in runs:
                self._warm(run)
            for index in range(self.measure.rounds):
                for position, run in enumerate(rotated(runs, index)):
                    self._round(run, index, position)
            self._finish(runs)

    def _restart(self, cases: Sequence[str]) -> None:
        """A fresh engine for each backend and round, where memory does not hold all of them."""
        runs = [
            CellRun(slot, slot.pending[case])
            for slot in self._slots
            for case in cases
            if case in slot.pending
        ]
        if kept := unfinished.resume(self.store, runs, self.start_state):
            self.console.note(f"{kept} rounds that an interrupted run has measured are kept")
            self.console.advance(kept)
        for index in range(self.measure.rounds):
            due = unfinished.due(runs, index)
            for position, slot in enumerate(rotated(self._slots, index)):
                for run in due:
                    if run.slot is slot:
                        self._warm(run)
                        self._round(run, index, position)
                self._stop(slot)
            if due:
                with self._signals.shielded():
                    unfinished.keep(self.store, runs, self.start_state)
        for case in cases:
            self._finish([run for run in runs if run.cell.case == case])

    def _one_by_one(self, cases: Sequence[str]) -> None:
        """One backend after the other, all its rounds together; base comes first."""
        finished: list[CellRun] = []
        for slot in self._slots:
            for case in cases:
                if case not in slot.pending:
                    continue
                run = CellRun(slot, slot.pending[case])
                self._warm(run)
                for index in range(self.measure.rounds):
                    self._round(run, index, 0)
                finished.append(run)
                self._finish([run], finished)
            self._stop(slot)

    # Steps: each turns an exception of one engine into a failure of its cells.

    def _ensure(self, slot: Slot) -> bool:
        """Starts and gates the slot's engine if it is not up; False when it cannot be used."""
        if slot.engine is not None:
            return True
        if slot.failure is not None or slot.crashes >= MOST_CRASHES:
            return False
        self.console.phase(slot.group.variant, "start")
        began = time.perf_counter()
        phase = "start"
        try:
            slot.engine = self.factory(slot.group, slot.log)
            slot.engine.start(self.measure.start_timeout_s)
            slot.start_s = time.perf_counter() - began
            slot.nodes = getattr(slot.engine, "nodes", [])
            if self.measure.gate.enabled and slot.gate is None:
                phase = "gate"
                self.console.phase(slot.group.variant, phase)
                slot.gate = slot.engine.gate(
                    {"requests": self.measure.gate.requests, "tolerance": self.measure.gate.tolerance}
                )
        except Exception as error:
            slot.failure = Failure.of(error, phase)
            self._stop(slot)
            return False
        if slot.gate is not None and slot.gate["passed"] is False:
            slot.failure = Failure(
                "incorrect",
                "gate",
                f"wrong outputs: {slot.gate.get('detail', 'the correctness gate failed')}",
            )
            self._stop(slot)
            return False
        self._park(slot)
        return True

    def _warm(self, run: CellRun) -> None:
        if self.measure.warmup:
            self._step(run, "warm-up", lambda engine, paths: engine.warmup(paths[1]))

    def _round(self, run: CellRun, index: int, position: int) -> None:
        options = {
            "round": index,
            "max_in_flight": self.measure.max_in_flight,
            "lag_tolerance_s": self.measure.lag_tolerance_s,
            "request_timeout_s": self.measure.request_timeout_s,
            "stall_timeout_s": self.measure.stall_timeout_s,
        }

        def measure(engine: Engine, paths: tuple[Path, Path]) -> None:
            try:
                result = engine.run(paths[0], options)
            except Exception as error:
                run.keep_records(getattr(error, "records", None), index)
                raise
            workload = self.plan.workloads[run.cell.workload_hash]
            run.add_round(result, index, position, self.session, self.interleave, workload, self.measure)
            run.slot.crashes = 0

        self._step(run, f"round {index + 1}/{self.measure.rounds}", measure)
        self.console.advance(1 if run.slot.recorded else 0)

    def _step(self, run: CellRun, phase: str, action: Callable[[Engine, tuple[Path, Path]], None]) -> None:
        slot = run.slot
        if run.failure is not None:
            return
        if not self._ensure(slot):
            reason = f"the engine died {slot.crashes} times in a row and was not started again"
            run.failure = slot.failure or Failure("failed", phase, reason)
            return
        assert slot.engine is not None
        self.console.phase(slot.group.variant, phase)
        try:
            if self._parks:
                slot.engine.resume()
            if (added := run.cell.added_latency_us) is not None:
                slot.engine.add_latency(added)
            action(slot.engine, self.workload_paths(run.cell.workload_hash))
            self._park(slot)
        except Exception as error:
            run.failure = Failure.of(error, phase)
            slot.crashes += 1
            self._stop(slot)

    def _finish(self, runs: list[CellRun], reference: list[CellRun] | None = None) -> None:
        """Stores the cells of one case; ratios to base are formed here, round by round."""
        bases = [run for run in reference or runs if run.slot.group.backend == "base"]
        for run in runs:
            if not run.slot.recorded:
                continue
            for base in bases:
                if base.cell.case == run.cell.case and base.failure is None:
                    add_costs(run.rounds, base.rounds)
            if any("adapter_cost" not in entry for entry in run.rounds):
                stored = stored_base(self.plan, self.store, run.cell, provenance.hardware())
                add_costs(run.rounds, [] if stored is None else stored["rounds"])
            summary, records = summarise_cell(run, self.start_state)
            with self._signals.shielded():  # what is measured is stored, even on the way out
                self.store.write(run.cell.name, run.cell.identity, summary, records, run.slot.log)
            self.outcome.done[run.cell.name] = summary["status"]
            if (claim := self._claims.pop(run.cell.name, None)) is not None:
                claim.release()
            if summary["status"] != "complete":
                self.console.failed(run.cell, summary, self.store.path(run.cell.name))
            self.logger.log_cell(run.cell, summary)

    # Engines up and down.

    @property
    def _parks(self) -> bool:
        return self.interleave == "resident" and len(self._slots) > 1

    def _park(self, slot: Slot) -> None:
        if self._parks and slot.engine is not None:
            slot.engine.park()

    def _stop(self, slot: Slot) -> None:
        if slot.engine is not None:
            with contextlib.suppress(Exception):
                slot.engine.stop()
            # Only now: a signal that arrives while the engine stops must find it again.
            slot.engine = None

    def _stop_all(self) -> None:
        for slot in self._slots:
            self._stop(slot)
