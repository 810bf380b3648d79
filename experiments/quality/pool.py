"""Training processes as the parent sees them: one thread each that feeds trials and takes the results.

The parent imports no torch. Every worker is the leader of its own session, so that it ends with all it started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.provenance import REPO
from experiments.quality.spec import QualityCell, QualitySpec
from tessa.errors import UserError

Event = dict[str, Any]


@dataclass(frozen=True)
class Job:
    cell: QualityCell
    keep: Path | None = None


class WorkerDied(RuntimeError):
    """A training process ended without an answer, or could not begin."""


class Worker:
    """One training process. `log` takes what it prints; `gpu` is the only one it sees, None leaves all visible."""

    def __init__(
        self,
        spec: QualitySpec,
        cache: Path,
        log: Path,
        gpu: str | None = None,
        module: str = "experiments.quality.worker",
    ) -> None:
        self.log = log
        # Trainer would spread each batch over all the GPUs it sees.
        seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        threads = {k: str(spec.threads) for k in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        path = os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **threads, **quiet, **seen, "PYTHONPATH": path},
                start_new_session=True,
            )
        self._first = {"spec": dataclasses.asdict(spec), "cache": str(cache)}

    def start(self, seen: Callable[[Event], None]) -> None:
        """Waits until data and base model are there. Raises UserError or WorkerDied."""
        self._send(self._first)
        event = self._until(("ready", "broken"), seen)
        if event["event"] == "broken":
            raise UserError(event["reason"]) if event.get("user") else WorkerDied(event["traceback"])

    def run(self, job: Job, number: int, seen: Callable[[Event], None]) -> Event:
        """The `done` or `failed` event of one trial. Raises WorkerDied."""
        keep = str(job.keep) if job.keep is not None else None
        self._send({"id": number, "trial": dataclasses.asdict(job.cell.trial), "keep": keep})
        return self._until(("done", "failed"), seen)

    def stop(self) -> None:
        """Ends the process and what it started; harmless when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError, ValueError):
                stream.close()  # type: ignore[union-attr]

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise WorkerDied(f"the training process is gone ({error})") from error

    def _until(self, kinds: tuple[str, ...], seen: Callable[[Event], None]) -> Event:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event: Event = json.loads(line)
            if event["event"] in kinds:
                return event
            seen(event)
        code = self._process.wait()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        raise WorkerDied(f"the training process ended {how} before it answered")


class Pool:
    """Runs jobs on some workers at once; results come in the order in which they are ready.

    make: a new worker, by its number. A worker that dies fails its job, and another takes its place for the next.
    """

    def __init__(self, make: Callable[[int], Worker], size: int) -> None:
        self._make, self._size = make, size
        self._idle: list[Worker | None] = [None] * size
        self._lock = threading.Lock()
        self._stopped = False

    def run(
        self,
        jobs: Sequence[Job],
        begin: Callable[[Job], bool],
        seen: Callable[[int, Event], None],
        done: Callable[[Job, Event, int], None],
    ) -> None:
        """All jobs that `begin` does not refuse. `seen` and `done` are called in this thread, with the worker's number.

        Raises:
            UserError: where a worker finds the settings wrong; nothing further is begun.
        """
        waiting = list(reversed(jobs))
        events: queue.Queue[tuple[str, int, Any]] = queue.Queue()

        def work(number: int) -> None:
            try:
                while (job := self._next(waiting, begin)) is not None:
                    events.put(("done", number, (job, self._one(number, job, events))))
            except BaseException as error:
                events.put(("error", number, error))
            events.put(("end", number, None))

        count = min(self._size, len(jobs))
        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(count)]
        for thread in threads:
            thread.start()
        ended, trouble = 0, None
        while ended < len(threads):
            kind, number, content = events.get()
            if kind == "end":
                ended += 1
            elif kind == "error":
                trouble = trouble or content
                with self._lock:
                    waiting.clear()
            elif kind == "done":
                job, event = content
                done(job, event, number)
            else:
                seen(number, content)
        if trouble is not None:
            raise trouble

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            workers = [w for w in self._idle if w is not None]
        for worker in workers:
            worker.stop()

    def _next(self, waiting: list[Job], begin: Callable[[Job], bool]) -> Job | None:
        with self._lock:
            while waiting and not self._stopped:
                job = waiting.pop()
                if begin(job):
                    return job
        return None

    def _one(self, number: int, job: Job, events: queue.Queue[tuple[str, int, Any]]) -> Event:
        def seen(event: Event) -> None:
            events.put(("seen", number, {**event, "cell": job.cell.name}))

        try:
            worker = self._idle[number]
            if worker is None:
                with self._lock:
                    if self._stopped:
                        raise WorkerDied("the run was stopped")
                    worker = self._idle[number] = self._make(number)
                worker.start(seen)
            return worker.run(job, number, seen)
        except WorkerDied as error:
            dead, self._idle[number] = self._idle[number], None
            if dead is not None:
                dead.stop()
            return {"event": "failed", "reason": str(error).strip().splitlines()[-1], "traceback": str(error)}
