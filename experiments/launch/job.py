"""One job: `run.py` as a child process, so that it always runs the code on disk and a dying one is an exit
status. A signal before the end (time limit, preemption) stops it in order: finished cells are kept, its engines
end, its claims are released. The job then goes back to the queue and runs what is missing.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from experiments.engine.nodes import meeting_file
from experiments.launch import slurm

REPO = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.2


class JobFailed(RuntimeError):
    """Makes Slurm show the job as FAILED; the cells and their reasons are in the results folder."""


@dataclass
class RunJob:
    """Pickled into the queue. `overrides` are those of run.py; `environment` is added to the job's own.

    stop_patience_s: how long run.py may take to stop after a signal before it is killed.
    nodes: machines of the job, one task on each: the first runs run.py, the others join it (`cache` is the run's).
    """

    overrides: list[str]
    folder: str
    environment: dict[str, str] = field(default_factory=dict)
    stop_patience_s: float = 60.0
    nodes: int = 1
    cache: str = ""

    def __post_init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._stop_ordered = False

    def __call__(self) -> int:
        """Runs to the end and returns run.py's exit status 0. Raises JobFailed for any other."""
        if self.nodes > 1 and int(os.environ.get("SLURM_PROCID", "0")) > 0:
            return self._join()
        self._child = subprocess.Popen(
            [sys.executable, str(REPO / "run.py"), *self.overrides],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            preexec_fn=_prepare_child,
        )
        signal.signal(signal.SIGTERM, self._on_sigterm)
        # Polled: a signal's handler that waits for the child must not find it locked by another wait.
        while (code := self._child.poll()) is None:
            time.sleep(_POLL_S)
        if self._stop_ordered:
            self._after_stop()
        if code:
            told = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            raise JobFailed(f"run.py {told}; finished cells are stored, submitting again runs the rest")
        return code

    def _join(self) -> int:
        """On another machine than the first: ends with the run there, which alone minds the job's signals."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        file = meeting_file(Path(self.cache))
        return subprocess.run(
            [sys.executable, "-m", "experiments.engine.node", str(file)],
            cwd=self.folder,
            env={**os.environ, **self.environment},
            preexec_fn=_prepare_node,
        ).returncode

    def checkpoint(self) -> Any:
        """Called by submitit on its signal, before it queues the job again: the results folder is the
        checkpoint, so stopping in order is all there is to do."""
        from submitit.helpers import DelayedSubmission

        self._stop_child()
        return DelayedSubmission(dataclasses.replace(self))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_child": None, "_stop_ordered": False}

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        # Slurm may have sent it to run.py as well; run.py takes the second one as the first.
        self._stop_ordered = True
        if self._child is not None:
            self._child.send_signal(signal.SIGTERM)

    def _stop_child(self) -> None:
        if self._child is None:
            return
        self._child.send_signal(signal.SIGTERM)
        patient_until = time.monotonic() + self.stop_patience_s
        while self._child.poll() is None and time.monotonic() < patient_until:
            time.sleep(_POLL_S)
        self._child.kill()

    def _after_stop(self) -> None:
        """A job that ends inside its grace period is not queued again by Slurm, so it asks for it."""
        job = os.environ.get("SLURM_JOB_ID")
        if job is not None and slurm.preempted(job):
            print(f"preempted: job {job} goes back to the queue", flush=True)
            slurm.command("scontrol", "requeue", job)
            # Slurm ends what is left of the job; returning would race with it.
            signal.pause()


def _prepare_child() -> None:
    """In the child before exec. Slurm signals every process of a step: submitit's signal is for the parent, and
    would end run.py and its engines on the spot; ignored here it stays ignored in all of them. Should the
    parent be killed, run.py stops in order."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prepare_node() -> None:
    """As `_prepare_child`; SIGTERM, which Slurm sends to all of a step, stays ignored as in the parent."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGINT)
