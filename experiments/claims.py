"""Claim files: who is running a cell. They survive a crash and work on NFS.

A claim is made by writing a file under a name of one's own and hard-linking it to the claim's name, which is
atomic on local file systems and on NFS, where O_EXCL is not everywhere. It holds host, process id and the
process's start time. A claim of a process that is gone on this host, of an earlier start of the same Slurm
job, or of a Slurm job that has ended is broken; any other of another host is respected.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from experiments.launch import slurm


@dataclass(frozen=True)
class Claim:
    """A held claim; `release` is safe to call twice and never removes another run's claim."""

    path: Path
    token: str

    def release(self) -> None:
        content = _read(self.path)
        if content is not None and content.get("token") == self.token:
            # Where it cannot be removed (a disk that became read-only), it is stale as soon as this process ends.
            with contextlib.suppress(OSError):
                self.path.unlink()


def acquire(path: Path) -> Claim | None:
    """Claims `path`, breaking a stale claim there; None while a live run holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = {**_identity(), "token": uuid.uuid4().hex}
    if _link(path, mine):
        return Claim(path, mine["token"])
    with _breaking(path.parent):
        found = _read(path)
        if found is not None and is_stale(found):
            _remove(path, found)
    return Claim(path, mine["token"]) if _link(path, mine) else None


def holder(path: Path) -> str | None:
    """The live run that holds `path`, in words; None when free or stale."""
    found = _read(path)
    if found is None or is_stale(found):
        return None
    return f"process {found.get('pid')} on {found.get('host')}"


def is_stale(content: dict[str, Any]) -> bool:
    """Whether the run that wrote this claim is surely gone."""
    job = os.environ.get("SLURM_JOB_ID")
    if job is not None and content.get("slurm_job") == job:
        return content.get("slurm_restart") != os.environ.get("SLURM_RESTART_COUNT", "0") or _gone(content)
    return _gone(content)


def _gone(content: dict[str, Any]) -> bool:
    if content.get("machine") != _machine():
        # Nothing can be seen of another machine's processes, but Slurm knows its jobs.
        job, cluster = content.get("slurm_job"), content.get("slurm_cluster")
        return job is not None and slurm.surely_ended(str(job), cluster)
    try:
        started = psutil.Process(int(content["pid"])).create_time()
    except (psutil.NoSuchProcess, KeyError, ValueError, TypeError):
        return True
    except psutil.Error:
        return False
    # The id may have been given to another process since.
    return abs(started - float(content.get("started", 0.0))) > 1.0


def owner_tag() -> str:
    """This process in a file name: `<machine>.<pid>`."""
    return f"{_machine()}.{os.getpid()}"


def owner_is_dead(tag: str) -> bool:
    """Whether a process named by `owner_tag` lived on this machine and is gone."""
    machine, _, pid = tag.partition(".")
    return machine == _machine() and not psutil.pid_exists(int(pid))


@functools.cache
def _machine() -> str:
    """12 hex digits for this host and process-id space: containers may share a host name but not ids."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{platform.node()} {space}".encode()).hexdigest()[:12]


def _identity() -> dict[str, Any]:
    return {
        "machine": _machine(),
        "host": platform.node(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
        "slurm_cluster": os.environ.get("SLURM_CLUSTER_NAME"),
        "slurm_restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
    }


def _link(path: Path, content: dict[str, Any]) -> bool:
    temporary = path.with_name(f".{content['token']}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        # An NFS server may answer an error for a link that it made: the link count tells.
        return os.stat(temporary).st_nlink == 2
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _remove(path: Path, stale: dict[str, Any]) -> None:
    """Takes a stale claim away, and puts back what another machine has set in its place meanwhile."""
    aside = path.with_name(f".stale-{uuid.uuid4().hex}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    taken = _read(aside)
    if taken is not None and taken.get("token") != stale.get("token"):
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    aside.unlink()


@contextlib.contextmanager
def _breaking(folder: Path) -> Iterator[None]:
    """Lets one process of this machine at a time break claims."""
    with (folder / ".break").open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
