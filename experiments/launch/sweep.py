"""A sweep: checks every job, submits those that have something to run, and reads the results folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from experiments import cli, launch, provenance
from experiments import config as schema
from experiments.config import RunConfig
from experiments.grid import Plan
from experiments.launch import resources, slurm
from experiments.launch.job import RunJob
from experiments.launch.resources import LaunchParams
from experiments.store import Store, to_run
from tessa.errors import UserError

if TYPE_CHECKING:
    import submitit

# Hydra overrides that are about the sweep itself; its jobs are single runs.
_NOT_FOR_JOBS = (
    "hydra/launcher",
    "hydra.launcher",
    "hydra/sweeper",
    "hydra.sweeper",
    "hydra.sweep",
    "hydra.mode",
)
_LOG_TAIL = 4000


@dataclass
class SweepJob:
    """One combination of the sweep: what it runs, what it asks for, and where it went."""

    overrides: list[str]
    config: RunConfig
    plan: Plan
    params: LaunchParams
    run: RunJob
    label: str
    handle: submitit.Job[int] | None = None
    state: str = "nothing to run"

    @property
    def folder(self) -> Path:
        """Absolute: Slurm reads it on another machine."""
        return Path(self.params.folder).expanduser().absolute()

    def statuses(self) -> dict[str, str]:
        """Status of each of the job's cells in the results folder."""
        store = Store(Path(self.config.paths.results).expanduser(), self.plan.experiment, create=False)
        return {cell.name: store.status(cell.name, cell.hash) for cell in self.plan.cells}

    def to_run(self) -> list[str]:
        """Names of the cells that the job would measure now."""
        only, force = self.config.only, self.config.force
        return [name for name, status in self.statuses().items() if to_run(status, only, force)]

    def last_words(self) -> str:
        """The last line of the job's log, or where it is."""
        if self.handle is None:
            return ""
        path = self.handle.paths.stdout
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _LOG_TAIL))
                lines = file.read().decode("utf-8", errors="replace").splitlines()
        except OSError:
            return f"no log at {path}"
        # submitit's own lines and the traceback it prints say less than run.py's last one.
        own = [line for line in lines if line.startswith(("error:", "interrupted:", "slurmstepd:"))]
        return f"{own[-1]} ({path})" if own else f"log: {path}"


def start(
    where: str,
    context: HydraContext,
    task: TaskFunction,
    config: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    first: int,
) -> Sequence[JobReturn]:
    """Hydra's `launch`; `where` is `slurm` or `local`.

    Raises UserError, before anything is submitted, when one of the jobs could not run.
    """
    if launch.looking or config.get("dry_run"):
        return _in_place(context, task, config, job_overrides, first)
    from experiments.launch import submit  # imports submitit

    if where == "slurm":
        slurm.require()
    shared = set.intersection(*(set(overrides) for overrides in job_overrides))
    jobs = [_plan(where, context, config, list(overrides), shared) for overrides in job_overrides]
    if where == "slurm":
        _check_nodes(jobs)
    for job in jobs:
        Store(Path(job.config.paths.results).expanduser(), job.plan.experiment)  # can be written
    waiting = [job for job in jobs if job.to_run()]
    ended = submit.on_slurm(waiting) if where == "slurm" else submit.on_this_machine(waiting)
    code = _report(jobs) if ended else cli.EXIT_OK
    launch.exit_codes.append(code)
    return [
        JobReturn(overrides=job.overrides, status=JobStatus.COMPLETED, _return_value=code) for job in jobs
    ]


def _in_place(
    context: HydraContext, task: TaskFunction, config: DictConfig, jobs: Sequence[Sequence[str]], first: int
) -> Sequence[JobReturn]:
    """A sweep that only looks is done here, by Hydra's own launcher."""
    from hydra._internal.core_plugins.basic_launcher import BasicLauncher

    basic = BasicLauncher()
    basic.setup(hydra_context=context, task_function=task, config=config)
    return basic.launch(jobs, first)


def _plan(
    where: str, context: HydraContext, config: DictConfig, overrides: list[str], shared: set[str]
) -> SweepJob:
    composed = context.config_loader.load_sweep_config(config, overrides)
    section = OmegaConf.to_container(composed.hydra.launcher, resolve=True)
    assert isinstance(section, dict)
    params = LaunchParams.of({str(key): value for key, value in section.items()})
    run_config = schema.build(
        OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    )
    if where == "slurm" and params.nodes != (run_config.engine.nnodes or 1):
        raise UserError(
            f"hydra.launcher.nodes={params.nodes} and engine.nnodes={run_config.engine.nnodes or 1} must be the same; "
            "give engine.nnodes alone"
        )
    if where == "local" and (run_config.engine.nnodes or 1) > 1:
        raise UserError(
            f"engine.nnodes={run_config.engine.nnodes} needs several machines and hydra/launcher=local_jobs has this "
            "one; use hydra/launcher=slurm, or one run without -m"
        )
    # A login node has no GPU, so what the jobs will find is said by what they ask for.
    device = params.runs_on if where == "slurm" or params.device != "auto" else None
    plan = cli.plan_run(run_config, device=device)
    passed_on = [
        str(item)
        for item in config.hydra.overrides.hydra
        if not str(item).lstrip("+~").startswith(_NOT_FOR_JOBS)
    ]
    marks = (provenance.SUBMIT_SHA, provenance.SUBMIT_DIRTY)
    run = RunJob(
        overrides=[*overrides, *passed_on],
        folder=os.getcwd(),
        # Some sites do not hand the submitter's environment to jobs.
        environment={name: os.environ[name] for name in marks if name in os.environ},
        stop_patience_s=max(5.0, params.signal_delay_s * 0.8),
        nodes=params.nodes,
        cache=str(cli.cache_folder(run_config)),
    )
    label = " ".join(item for item in overrides if item not in shared) or run_config.name or ""
    return SweepJob(overrides, run_config, plan, params, run, label)


def _check_nodes(jobs: list[SweepJob]) -> None:
    try:
        nodes = slurm.nodes()
    except slurm.SlurmError as error:
        print(f"sinfo does not tell what the nodes have ({error}); submitting unchecked", flush=True)
        return
    for job in jobs:
        resources.check(job.params, nodes)


def _report(jobs: list[SweepJob]) -> int:
    """Prints what the results folder holds for each job; the exit status of the sweep."""
    all_complete = True
    for job in jobs:
        statuses = job.statuses()
        incomplete = {name: status for name, status in statuses.items() if status != "complete"}
        name = f"job {job.handle.job_id}" if job.handle is not None else "no job"
        print(f"{name} [{job.label}] {job.state}: {_count(statuses)}", flush=True)
        if incomplete:
            all_complete = False
            for cell, status in incomplete.items():
                print(f"    {status}: {cell}", flush=True)
            print(f"    {job.last_words()}", flush=True)
    if not all_complete:
        print("the same command runs what is missing or failed", flush=True)
    return cli.EXIT_OK if all_complete else cli.EXIT_FAILED


def _count(statuses: dict[str, Any]) -> str:
    complete = sum(status == "complete" for status in statuses.values())
    return f"{complete} of {len(statuses)} cells complete"
