"""What Slurm's commands say: nodes, states of jobs, preemption. Needs no accounting (`sacct`)."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from tessa.errors import UserError

ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "REVOKED",
        "TIMEOUT",
    }
)
"""States that a job does not leave. PREEMPTED is not one of them: the job may be queued again."""

GONE = "GONE"
"""Our name for a job that Slurm no longer knows, so it has ended."""

_PATIENCE_S = 60
_GPUS = re.compile(r"\bgpu(?::[\w.-]+)?:(\d+)")


class SlurmError(RuntimeError):
    """A Slurm command that failed; the message is its own."""


def command(*arguments: str) -> str:
    """Output of a Slurm command. Raises SlurmError when it is missing, fails or does not answer in a minute."""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{arguments[0]}: {error}") from error
    if done.returncode:
        raise SlurmError((done.stderr or done.stdout).strip() or f"{arguments[0]} failed")
    return done.stdout


def require() -> None:
    """Raises UserError where this machine cannot submit Slurm jobs."""
    missing = [name for name in ("sbatch", "srun", "squeue") if shutil.which(name) is None]
    if missing:
        raise UserError(
            f"hydra/launcher=slurm needs Slurm's commands, not found here: {', '.join(missing)}. Run it on a "
            "login node of the cluster, or use hydra/launcher=local_jobs on this machine."
        )


@dataclass(frozen=True)
class Node:
    """One node in one partition, as `sinfo` describes it."""

    name: str
    partition: str
    default: bool
    cpus: int
    memory_mb: int
    gpus: int
    features: frozenset[str]
    limit_min: float


def nodes() -> list[Node]:
    """Every node of every partition that is up. Raises SlurmError."""
    listed = command("sinfo", "--noheader", "--Node", "--format=%N|%P|%c|%m|%G|%f|%l|%a")
    found = []
    for line in listed.splitlines():
        name, partition, cpus, memory, gres, features, limit, up = (part.strip() for part in line.split("|"))
        if up != "up":
            continue
        found.append(
            Node(
                name=name,
                partition=partition.rstrip("*"),
                default=partition.endswith("*"),
                cpus=int(cpus.rstrip("+")),
                memory_mb=int(memory.rstrip("+")),
                gpus=sum(int(count) for count in _GPUS.findall(gres)),
                features=frozenset(features.split(",")) - {"(null)"},
                limit_min=minutes(limit),
            )
        )
    return found


def minutes(limit: str) -> float:
    """Slurm's `[days-]hours:minutes:seconds`, `minutes:seconds`, `infinite` or `n/a` in minutes."""
    if limit.lower() in ("infinite", "unlimited", "n/a"):
        return float("inf")
    days, _, clock = limit.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    while len(parts) < 3:
        parts.insert(0, 0)
    return int(days or 0) * 1440 + parts[0] * 60 + parts[1] + parts[2] / 60


def states(job_ids: Iterable[str]) -> dict[str, tuple[str, str]]:
    """`{job id: (state, reason)}` from `squeue`; a job that Slurm has forgotten is `GONE`.

    Ids as submitit writes them: `12`, or `12_3` for element 3 of an array; or as SLURM_JOB_ID has them, where
    elements have numbers of their own. Raises SlurmError when Slurm does
    not answer.
    """
    wanted = list(job_ids)
    roots = sorted({job.split("_")[0] for job in wanted})
    listed = ""
    for root in roots:
        # One call each: a forgotten job makes squeue refuse the whole list.
        try:
            listed += command(
                "squeue", "--noheader", "--array", "--states=all", "--format=%i|%A|%T|%r", f"--jobs={root}"
            )
        except SlurmError as error:
            if "Invalid job id" not in str(error):
                raise
    found = {}
    for line in listed.splitlines():
        job, raw, state, reason = (part.strip() for part in line.split("|", 3))
        found[job] = found[raw] = (state, reason)
    return {job: found.get(job, (GONE, "")) for job in wanted}


def has_ended(state: str) -> bool:
    return state in ENDED or state == GONE


@functools.cache
def cluster_name() -> str | None:
    """The name of the cluster whose commands are used here; None where there is none."""
    with contextlib.suppress(SlurmError):
        for line in command("scontrol", "show", "config").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "ClusterName":
                return value.strip()
    return None


def surely_ended(job_id: str, cluster: str | None) -> bool:
    """Whether Slurm says that a job of this cluster is over; False where it does not answer or is another's."""
    if cluster is None or cluster != cluster_name():
        return False
    try:
        state, _ = states([job_id])[job_id]
    except SlurmError:
        return False
    return has_ended(state)


def preempted(job_id: str) -> bool:
    """Whether a running job's end was ordered by preemption rather than by its user or its time limit."""
    try:
        shown = command("scontrol", "--oneliner", "show", "job", job_id)
    except SlurmError:
        return False
    fields = dict(part.split("=", 1) for part in shown.split() if "=" in part)
    ordered = fields.get("PreemptTime", "None") not in ("None", "Unknown", "N/A")
    return ordered and not fields.get("JobState", "").startswith("CANCELLED")
