"""Hydra's launchers of this project; Hydra finds them because they are in the namespace `hydra_plugins`.

Hydra imports this module at every start, so the work lies in `experiments.launch` and is imported when used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class JobsLauncher(Launcher):
    """Hands a sweep's jobs to `experiments.launch.sweep`. Parameters are read per job, not from `__init__`:
    they may depend on the sweep, as `gpus_per_node: ${tp}` does."""

    where = ""

    def __init__(self, **_params: Any) -> None:
        self.context: HydraContext | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from experiments.launch import sweep

        if not self.where:
            raise TypeError("choose hydra/launcher=slurm or hydra/launcher=local_jobs")
        assert self.context is not None
        return sweep.start(
            self.where, self.context, self.task_function, self.config, job_overrides, initial_job_idx
        )


class SlurmLauncher(JobsLauncher):
    where = "slurm"


class LocalJobsLauncher(JobsLauncher):
    where = "local"
