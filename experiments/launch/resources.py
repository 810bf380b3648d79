"""What one job asks of the cluster, and whether any node can give it.

Slurm accepts jobs that ask for more than any node has, and leaves them pending for ever; so the request is
held against `sinfo` before anything is submitted.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from experiments.launch.slurm import Node
from tessa.errors import UserError


@dataclass
class LaunchParams:
    """The keys of `conf/hydra/launcher/{slurm,local_jobs}.yaml`, resolved for one job of the sweep.

    Times in minutes unless named otherwise, memory in GB. A None is left to Slurm's own default.
    """

    timeout_min: int = 240
    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    mem_gb: float | None = None
    mem_gb_per_gpu: float | None = None
    tasks_per_node: int = 1
    signal_delay_s: int = 120
    max_requeues: int = 20
    array_parallelism: int = 256
    parallel: int = 1
    wait: bool = True
    device: str = "auto"
    folder: str = "results/.jobs"
    name: str = "tessa"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    setup: list[str] = field(default_factory=list)
    python: str | None = None
    sbatch: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, values: dict[str, Any]) -> LaunchParams:
        """From the launcher's section of a composed config. Raises UserError for a key or value out of range."""
        given = {key: value for key, value in values.items() if not key.startswith("_")}
        known = {item.name for item in dataclasses.fields(cls)}
        if unknown := sorted(set(given) - known):
            raise UserError(
                f"unknown setting hydra.launcher.{unknown[0]}. Known settings there: {', '.join(sorted(known))}"
            )
        given["nodes"] = given.get("nodes") or 1
        params = cls(**given)
        if params.tasks_per_node != 1:
            raise UserError(
                f"hydra.launcher.tasks_per_node={params.tasks_per_node} must be 1: an engine starts its own workers"
            )
        if params.device not in ("auto", "cpu", "cuda"):
            raise UserError(f"hydra.launcher.device={params.device} is not known: auto, cpu or cuda")
        for key in ("timeout_min", "nodes", "array_parallelism", "parallel"):
            if getattr(params, key) < 1:
                raise UserError(f"hydra.launcher.{key}={getattr(params, key)} is too small: give 1 or more")
        if params.signal_delay_s >= params.timeout_min * 60:
            raise UserError(
                f"hydra.launcher.signal_delay_s={params.signal_delay_s} must be shorter than the time limit of "
                f"{params.timeout_min} minutes: jobs would be stopped as they start"
            )
        return params

    @property
    def cpus(self) -> int | None:
        if self.cpus_per_task is None and self.cpus_per_gpu is not None and self.gpus_per_node:
            return self.cpus_per_gpu * self.gpus_per_node
        return self.cpus_per_task

    @property
    def memory_gb(self) -> float | None:
        if self.mem_gb is None and self.mem_gb_per_gpu is not None and self.gpus_per_node:
            return self.mem_gb_per_gpu * self.gpus_per_node
        return self.mem_gb

    @property
    def runs_on(self) -> str | None:
        """The device that the job will find: None means that of this machine."""
        if self.device != "auto":
            return self.device
        return "cuda" if self.gpus_per_node else "cpu"

    def submitit(self) -> dict[str, Any]:
        """Parameters of submitit's Slurm executor. One task a node: the engine starts its own workers."""
        chosen = {
            "job_name": self.name,
            "time": self.timeout_min,
            "nodes": self.nodes,
            "ntasks_per_node": 1,
            "gpus_per_node": self.gpus_per_node or None,
            "cpus_per_task": self.cpus,
            "mem": None if self.memory_gb is None else f"{round(self.memory_gb * 1024)}MB",
            "signal_delay_s": self.signal_delay_s,
            "array_parallelism": self.array_parallelism,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "exclude": self.exclude,
            "stderr_to_stdout": True,
            "setup": list(self.setup),
            "additional_parameters": {"requeue": True, **self.sbatch},
        }
        return {key: value for key, value in chosen.items() if value is not None}

    def group_key(self) -> str:
        """Jobs with the same key go into one array."""
        return repr((self.submitit(), self.max_requeues, self.python, self.folder))


def check(params: LaunchParams, nodes: list[Node]) -> None:
    """Raises UserError unless as many nodes of the partition as the job has can run it."""
    partitions = sorted({node.partition for node in nodes})
    if params.partition is None:
        within = [node for node in nodes if node.default]
        if not within:
            raise UserError(
                f"this cluster has no default partition: set partition in conf/site. Known: {', '.join(partitions)}"
            )
    else:
        asked = params.partition.split(",")
        for name in asked:
            if name not in partitions:
                raise UserError(
                    f"partition {name!r} is not known or not up. Known here: {', '.join(partitions)}. Set it in "
                    "conf/site, or with hydra.launcher.partition=..."
                )
        within = [node for node in nodes if node.partition in asked]
    if params.constraint is not None:
        within = _with_features(params.constraint, within)
    needs = {
        "gpus_per_node": (params.gpus_per_node, "GPUs", max(node.gpus for node in within)),
        "cpus_per_task": (params.cpus or 1, "CPUs", max(node.cpus for node in within)),
        "mem_gb": (params.memory_gb or 0, "GB of memory", max(node.memory_mb for node in within) / 1024),
        "timeout_min": (params.timeout_min, "minutes", max(node.limit_min for node in within)),
    }
    where = f"partition {params.partition}" if params.partition else "the default partition"
    for key, (wanted, unit, most) in needs.items():
        if wanted > most:
            raise UserError(
                f"{where} offers at most {most:g} {unit} to a job on one node, this job asks for {wanted:g} "
                f"(hydra.launcher.{key}); Slurm would let it wait for ever"
            )
    fitting = {node.name for node in within if _fits(params, node)}
    if fitting and len(fitting) < params.nodes:
        found = "1 node that fits" if len(fitting) == 1 else f"{len(fitting)} nodes that fit"
        raise UserError(
            f"{where} has {found}, this job asks for {params.nodes} (hydra.launcher.nodes, from engine.nnodes); "
            "Slurm would let it wait for ever"
        )
    if not fitting:
        raise UserError(
            f"no single node of {where} has {params.gpus_per_node} GPUs, {params.cpus or 1} CPUs and "
            f"{params.memory_gb or 0:g} GB together; Slurm would let the job wait for ever"
        )


def _fits(params: LaunchParams, node: Node) -> bool:
    return (
        node.gpus >= params.gpus_per_node
        and node.cpus >= (params.cpus or 1)
        and node.memory_mb >= (params.memory_gb or 0) * 1024
        and node.limit_min >= params.timeout_min
    )


def _with_features(constraint: str, nodes: list[Node]) -> list[Node]:
    """Nodes that match; a constraint with more than `&` is only checked for unknown features."""
    known = frozenset().union(*(node.features for node in nodes))
    words = re.findall(r"[\w.-]+", re.sub(r"\*\d+", "", constraint))
    for word in words:
        if word not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise UserError(f"constraint {word!r} is a feature of no node there. Known features: {listed}")
    if set(re.sub(r"[\w.&-]", "", constraint)):
        return nodes
    matching = [node for node in nodes if node.features.issuperset(words)]
    if not matching:
        raise UserError(f"constraint {constraint!r}: no single node has all of these features")
    return matching
