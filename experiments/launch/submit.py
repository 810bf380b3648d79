"""Submitting through submitit and waiting for the end, without trusting what a job hands back."""

from __future__ import annotations

import shlex
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError

from experiments.launch import slurm
from experiments.launch.job import REPO
from experiments.stopping import StopSignals
from tessa.errors import UserError

if TYPE_CHECKING:
    from experiments.launch.sweep import SweepJob

_POLL_S, _POLL_MOST_S = 1.0, 15.0
_SILENCE_S = 600.0
_LOCAL_POLL_S = 0.5
# Reasons for which a job waits until somebody acts.
_STUCK = ("BadConstraints", "PartitionNodeLimit", "PartitionTimeLimit", "AssocGrp", "QOSMax", "held", "Held")


def on_slurm(jobs: list[SweepJob]) -> bool:
    """One submission per group of equal resources. True when all jobs have ended, False when not waited for.

    Raises UserError when sbatch refuses.
    """
    groups: dict[str, list[SweepJob]] = defaultdict(list)
    for job in jobs:
        groups[job.params.group_key()].append(job)
    for group in groups.values():
        _submit_group(group)
        params = group[0].params
        ids = ", ".join(str(job.handle.job_id) for job in group if job.handle)
        gpus = f"{params.gpus_per_node} GPUs" + (
            f" on each of {params.nodes} nodes" if params.nodes > 1 else ""
        )
        print(f"submitted {ids}: {gpus}, {params.timeout_min} minutes each", flush=True)
    if not jobs or jobs[0].params.wait:
        return _wait_for_slurm(jobs)
    print("not waiting for the jobs; `run.py status` with the same settings shows what is done", flush=True)
    return False


def _submit_group(group: list[SweepJob]) -> None:
    params = group[0].params
    executor = submitit.SlurmExecutor(
        folder=group[0].folder / "%j", max_num_timeout=params.max_requeues, python=params.python
    )
    options = params.submitit()
    options["setup"] = [*options["setup"], _python_path()]
    if params.cpus is not None:
        # Since Slurm 22.05 a job's srun takes one CPU for its task unless it is told again.
        options["setup"].append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK")
    try:
        executor.update_parameters(**options)
        with executor.batch():
            for job in group:
                job.handle = executor.submit(job.run)
    except (FailedJobError, FailedSubmissionError, ValueError) as error:
        raise UserError(
            f"Slurm refused the jobs: {str(error).strip()}. Jobs of this sweep that were submitted before go on "
            "(squeue --me, scancel)."
        ) from error


def _python_path() -> str:
    """Line of the job script with which jobs find the code that submits them."""
    return f"export PYTHONPATH={shlex.quote(str(REPO))}${{PYTHONPATH:+:$PYTHONPATH}}"


def _wait_for_slurm(jobs: list[SweepJob]) -> bool:
    """Until Slurm says that every job has ended; `squeue` tells that without accounting.

    False when Slurm has been silent for ten minutes.
    """
    open_jobs = {str(job.handle.job_id): job for job in jobs if job.handle is not None}
    pause, heard, told = _POLL_S, time.monotonic(), set()
    try:
        with StopSignals():
            while open_jobs:
                try:
                    states = slurm.states(open_jobs)
                    heard = time.monotonic()
                except slurm.SlurmError as error:
                    if time.monotonic() - heard > _SILENCE_S:
                        print(f"Slurm does not answer ({error}); the jobs go on without being watched")
                        return False
                    states = {}
                for job_id, (state, reason) in states.items():
                    open_jobs[job_id].state = state
                    if slurm.has_ended(state):
                        del open_jobs[job_id]
                    elif state == "PENDING" and job_id not in told and any(word in reason for word in _STUCK):
                        told.add(job_id)
                        print(
                            f"job {job_id} waits: {reason}. It may wait for ever: scancel {job_id}",
                            flush=True,
                        )
                if open_jobs:
                    time.sleep(pause)
                    pause = min(pause * 1.3, _POLL_MOST_S)
    except KeyboardInterrupt:
        print(f"no longer watching; the jobs go on: scancel {' '.join(open_jobs)} ends them", flush=True)
        raise
    return True


def on_this_machine(jobs: list[SweepJob]) -> bool:
    """Each job in processes of its own, `parallel` at a time. True when all have ended."""
    queue = list(jobs)
    running: list[SweepJob] = []
    try:
        with StopSignals():
            while queue or running:
                while queue and len(running) < queue[0].params.parallel:
                    job = queue.pop(0)
                    _start_here(job)
                    running.append(job)
                for job in [job for job in running if job.handle is not None and job.handle.done()]:
                    job.state = "ended"
                    running.remove(job)
                time.sleep(_LOCAL_POLL_S if running else 0)
    except KeyboardInterrupt:
        for job in running:
            if job.handle is not None:
                job.handle.cancel()
        raise
    return True


def _start_here(job: SweepJob) -> None:
    params = job.params
    executor = submitit.LocalExecutor(
        folder=job.folder / "%j", max_num_timeout=params.max_requeues, python=params.python
    )
    executor.update_parameters(
        timeout_min=params.timeout_min,
        gpus_per_node=params.gpus_per_node,
        tasks_per_node=1,
        signal_delay_s=params.signal_delay_s,
        stderr_to_stdout=True,
        setup=[*params.setup, _python_path()],
    )
    job.handle = executor.submit(job.run)
    job.state = "running"
    print(f"started job {job.handle.job_id} [{job.label}], log {job.handle.paths.stdout}", flush=True)
