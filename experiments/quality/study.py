"""Runs the quality experiment: learning rates first, then the seeds that count, each training a cell of the store."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments import provenance
from experiments.cells import utc_now
from experiments.claims import Claim
from experiments.console import Console, duration
from experiments.quality import spec as trials
from experiments.quality.pool import Event, Job, Pool, Worker
from experiments.quality.spec import QualityCell, QualitySpec, Structure, Trial
from experiments.stopping import StopSignals
from experiments.store import LOG_NAME, Store
from tessa.errors import UserError

EXIT_OK, EXIT_FAILED = 0, 1
COSTS = ("training_s", "training_cpu_s", "evaluation_s", "peak_memory_bytes", "train_loss")
GUESS_GPU_S = 3600.0
"""A training and its evaluation, where no stored cell tells."""
GUESS_EXAMPLE_S = {"skills": 0.004, "smollm2": 0.14}
GUESS_REST_S = 2.0
"""The same on a CPU: an example of a training step by model (an unknown one as the larger), and the evaluation."""


class Study:
    """One experiment's cells and their state.

    Args:
        make: starts a worker, by its number and with its log; tests give scripted ones.
        only, force: as for every experiment: run what failed alone; run complete cells again.
    """

    def __init__(
        self, name: str, spec: QualitySpec, results: Path, device: str, create: bool = True,
        only: str | None = None, force: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.spec, self.device = name, trials.check(spec), device
        self.store = Store(results, name, create=create)
        self.only, self.force = only, force
        self._forced: set[str] = set()

    def cell(self, trial: Trial) -> QualityCell:
        return trials.cell(self.name, self.spec, trial, self.device)

    def search_cells(self) -> list[QualityCell]:
        return [self.cell(trial) for trial in trials.searches(self.spec)]

    def chosen_rate(self, structure: Structure) -> float | None:
        """The learning rate of a structure: its only candidate, or the one with the best mean score on validation
        data (of equal ones the lower loss decides). A candidate whose training diverged has lost. Raises LookupError
        while a search is not complete, and where none of its trainings has a score."""
        candidates = trials.rates(self.spec, structure)
        if len(candidates) == 1:
            return candidates[0]
        found = []
        for rate in candidates:
            cell = self.cell(Trial(structure, rate, self.spec.search_seed, "search"))
            summary = self.store.summary(cell.name, cell.hash)
            if summary is not None and summary["status"] == "invalid":
                continue
            if summary is None or summary["status"] != "complete":
                raise LookupError(cell.name)
            loss = summary["training"].get("train_loss")
            found.append((summary["mean_score"], -(loss if loss is not None else math.inf), rate))
        if not found:
            raise LookupError(structure.name)
        return max(found, key=lambda entry: entry[:2])[2]

    def at_edge(self, structure: Structure) -> str | None:
        """`lowest` or `highest` where the chosen rate ends its grid, so that a better one may lie beyond."""
        candidates = sorted(rate for rate in trials.rates(self.spec, structure) if rate is not None)
        if len(candidates) < 2:
            return None
        chosen = self.chosen_rate(structure)
        return {candidates[0]: "lowest", candidates[-1]: "highest"}.get(chosen or 0.0)

    def test_cells(self) -> tuple[list[QualityCell], list[Structure]]:
        """The cells that count, seed by seed so that an interrupted run has whole comparisons, and the structures
        whose learning rate is not chosen yet."""
        cells: list[list[QualityCell]] = []
        open_: list[Structure] = []
        for structure in trials.structures(self.spec):
            try:
                rate = self.chosen_rate(structure)
            except LookupError:
                open_.append(structure)
                continue
            cells.append([self.cell(t) for t in trials.tests(self.spec, structure, rate)])
        longest = max((len(row) for row in cells), default=0)
        return [row[i] for i in range(longest) for row in cells if i < len(row)], open_

    def status(self, cell: QualityCell) -> str:
        return self.store.status(cell.name, cell.hash)

    def wanted(self, cell: QualityCell) -> bool:
        status = self.status(cell)
        if self.only == "failed":
            return status not in ("complete", "missing")
        # A candidate that diverged would diverge again, and the search has its answer.
        done = status == "complete" or (status == "invalid" and cell.trial.role == "search")
        return not done or (self.force and cell.name not in self._forced)

    def ran(self, cell: QualityCell) -> None:
        self._forced.add(cell.name)


def status_lines(study: Study) -> list[str]:
    """Every cell that is known by now with its status, then the counts and an estimate of what is missing."""
    tests, open_ = study.test_cells()
    cells = [*study.search_cells(), *tests]
    counts: Counter[str] = Counter()
    lines = []
    for cell in cells:
        status = study.status(cell)
        counts[status] += 1
        lines.append(f"  {status:<11} {cell.name:<46} {describe(cell)}")
    later = sum(len(trials.tests(study.spec, structure, None)) for structure in open_)
    total = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    lines.append(f"total: {total}" + (f", {later} once their learning rates are chosen" if later else ""))
    missing = sum(study.wanted(cell) for cell in cells) + later
    lines.append(
        f"roughly {duration(missing * seconds_per_cell(study, cells) / study.spec.workers)} for what is missing"
    )
    return [f"{study.name}: {len(cells) + later} cells in {study.store.folder}", *lines]


def seconds_per_cell(study: Study, cells: Sequence[QualityCell]) -> float:
    """Mean wall time of the complete cells, a guess where there are none."""
    walls = []
    for cell in cells:
        summary = study.store.summary(cell.name, cell.hash)
        if summary and summary["status"] == "complete":
            walls.append(float(summary["rounds"][0]["wall_s"]))
    if walls:
        return sum(walls) / len(walls)
    if study.device != "cpu":
        return GUESS_GPU_S
    spec = study.spec
    per_example = GUESS_EXAMPLE_S.get(spec.model, max(GUESS_EXAMPLE_S.values()))
    return GUESS_REST_S + spec.steps * spec.batch * per_example


def describe(cell: QualityCell) -> str:
    trial = cell.trial
    rate = f" lr={trial.learning_rate:g}" if trial.learning_rate is not None else ""
    return f"{trial.role:<6} seed={trial.seed}{rate}"


@dataclasses.dataclass
class Outcome:
    complete: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)
    elsewhere: int = 0
    left: int = 0


class Run:
    """One run of a study: runs what is missing, within its limits."""

    def __init__(
        self, study: Study, console: Console, cache: Path, keep: Path | None = None,
        make: Callable[[int, Path], Worker] | None = None,
    ) -> None:  # fmt: skip
        self.study, self.console, self.keep = study, console, keep
        self.outcome = Outcome()
        self.start_state = provenance.git_state()
        self.session = uuid.uuid4().hex[:12]
        cards = gpu_names() if study.device == "cuda" else []
        self._make = make or (
            lambda n, log: Worker(study.spec, cache, log, cards[n % len(cards)] if cards else None)
        )
        self._began = time.perf_counter()
        self._started = 0
        self._claims: dict[str, Claim] = {}
        self._times: dict[str, str] = {}
        self._signals = StopSignals()

    def __call__(self) -> Outcome:
        """Raises KeyboardInterrupt on a signal, with all workers ended and what is trained stored."""
        study = self.study
        logs = study.store.scratch("logs")
        pool = Pool(lambda number: self._make(number, logs / f"worker-{number}.log"), study.spec.workers)
        self._log = logs
        with self._signals:
            try:
                searching = [cell for cell in study.search_cells() if study.wanted(cell)]
                later = sum(len(trials.tests(study.spec, s, None)) for s in trials.structures(study.spec))
                self.console.start(len(searching) + later, 0)
                self._pass(pool, searching)
                tests, open_ = study.test_cells()
                for structure in open_:
                    self.console.note(
                        f"{structure.name}: its learning rate is not chosen yet, so nothing to test"
                    )
                done = [cell for cell in tests if not study.wanted(cell)]
                self.console.advance(len(done))
                self._pass(pool, [cell for cell in tests if study.wanted(cell)])
                for structure in trials.structures(study.spec):
                    if structure not in open_ and (edge := study.at_edge(structure)):
                        self.console.note(
                            f"{structure.name}: the chosen learning rate is the {edge} of its grid"
                        )
            finally:
                with self._signals.shielded():
                    pool.stop()
                    for claim in self._claims.values():
                        claim.release()
                    shutil.rmtree(logs, ignore_errors=True)
                    self.console.stop()
        return self.outcome

    def _pass(self, pool: Pool, cells: Sequence[QualityCell]) -> None:
        keep = self.keep
        jobs = [Job(c, keep / c.name if keep is not None and c.trial.role == "test" else None) for c in cells]
        pool.run(jobs, self._begin, self._seen, self._done)

    def _begin(self, job: Job) -> bool:
        """Whether a cell is to be trained now; takes its claim. Called by the pool's threads, one at a time."""
        spec, cell = self.study.spec, job.cell
        late = spec.limit_s is not None and time.perf_counter() - self._began >= spec.limit_s
        full = spec.max_cells is not None and self._started >= spec.max_cells
        if late or full:
            self.outcome.left += 1
            return False
        claim = self.study.store.claim(cell.name)
        if claim is None:
            self.outcome.elsewhere += 1
            return False
        if not self.study.wanted(cell):  # finished by another run since the look
            claim.release()
            return False
        self._claims[cell.name] = claim
        self._times[cell.name] = utc_now()
        self._started += 1
        return True

    def _seen(self, number: int, event: Event) -> None:
        name = "base model" if event["event"] == "base" else event["cell"]
        if self.console.live or event["step"] == event["steps"]:
            self.console.phase(name, f"step {event['step']}/{event['steps']}, loss {event['loss']:.3f}")

    def _done(self, job: Job, event: Event, worker: int) -> None:
        summary = summarise(
            job.cell, event, self.session, self._times.pop(job.cell.name, utc_now()), self.start_state
        )
        failed = summary["status"] != "complete"
        log = self._log / f"worker-{worker}.log"
        if failed and log.is_file():
            summary["log"] = LOG_NAME
        with self._signals.shielded():
            kept = log if summary["log"] else None
            self.study.store.write(job.cell.name, job.cell.identity, summary, None, kept)
        self.study.ran(job.cell)
        if (claim := self._claims.pop(job.cell.name, None)) is not None:
            claim.release()
        self.console.advance()
        if failed:
            self.outcome.failed.append(job.cell.name)
            self.console.note(f"{job.cell.name}: {summary['status']}: {summary['reason']}")
        else:
            self.outcome.complete += 1
            self.console.phase(job.cell.name, f"{describe(job.cell)}, score {summary['mean_score']:.3f}")


def gpu_names() -> list[str]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        return given.split(",")
    return [str(i) for i in range(len(provenance.gpus()))]


def summarise(
    cell: QualityCell, event: Event, session: str, began: str, start_state: dict[str, Any]
) -> dict[str, Any]:
    """The stored summary of a trial: a round per task, and what the training cost."""
    result = event.get("result") or {}
    scores = result.get("scores") or []
    training = {key: value for key, value in result.items() if key != "scores"}
    values = [score["value"] for score in scores]
    loss = training.get("train_loss")
    status, reason = "complete", None
    if event["event"] == "failed":
        status, reason = "failed", f"training: {event['reason']}"
    elif loss is not None and not math.isfinite(loss):
        status, reason = "invalid", f"the loss became {loss} at learning rate {cell.trial.learning_rate:g}"
    elif not scores:
        status, reason = "invalid", "lm-eval gave no score"
    metrics = {key: training.get(key) for key in COSTS}
    mean = sum(values) / len(values) if values else None
    return {
        "hash": cell.hash,
        "cell": cell.name,
        "experiment": cell.experiment,
        "status": status,
        "reason": reason,
        "phase": None if status == "complete" else "training",
        "traceback": event.get("traceback"),
        "log": None,
        "provenance": "measured",
        "labels": {
            **cell.labels,
            "tp": 1,
            "trainable_params": training.get("trainable_params"),
            "total_params": training.get("total_params"),
            "lora_params": training.get("lora_params"),
            "budget_ratio": training.get("budget_ratio"),
        },
        "mean_score": mean,
        "training": training,
        "rounds": [
            {
                "round": i,
                "position": 0,
                "session": session,
                "status": status,
                "reason": reason,
                "wall_s": training.get("wall_s"),
                "metrics": {**score, **metrics},
                "counters": {},
            }
            for i, score in enumerate(scores)
        ],
        "intervals": {},
        "counters": {},
        "gate": None,
        "began": began,
        "ended": utc_now(),
        "environment": provenance.collect(start_state),
    }


def run(
    name: str, spec: QualitySpec, results: Path, cache: Path, device: str, looking: bool,
    only: str | None = None, force: bool = False,
) -> int:  # fmt: skip
    """Runs the experiment, or with `looking` lists its cells. Returns the exit status."""
    chosen = device if spec.device == "auto" else spec.device
    spec = dataclasses.replace(spec, device=chosen)  # the trainings' processes must not choose again
    study = Study(name, spec, results, chosen, create=not looking, only=only, force=force)
    if looking:
        print("\n".join(status_lines(study)))
        return EXIT_OK
    if spec.protocol != "skills" and not (spec.data and Path(spec.data).expanduser().is_dir()):
        raise UserError(
            f"experiment={name} needs the published files: pass study.data=FOLDER (its layout stands in "
            f"experiments/quality/{spec.protocol}.py)"
        )
    console = Console()
    outcome = Run(study, console, cache, keep=cache / "quality" / "adapters" / name)()
    parts = [f"{outcome.complete} trainings complete"]
    if outcome.failed:
        parts.append(f"{len(outcome.failed)} failed; a rerun retries them")
    if outcome.left:
        parts.append(f"{outcome.left} left for a rerun (study.limit_s, study.max_cells)")
    if outcome.elsewhere:
        parts.append(f"{outcome.elsewhere} being run elsewhere")
    console.note("; ".join(parts))
    return EXIT_FAILED if outcome.failed else EXIT_OK
