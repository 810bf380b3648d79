"""Claims: one holder at a time, gone with its process, never taken from the living."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import claims


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "claims" / "cell.claim"


def test_only_one_holds_it(path):
    first = claims.acquire(path)
    assert first is not None
    assert claims.acquire(path) is None
    assert claims.holder(path) == f"process {os.getpid()} on {os.uname().nodename}"
    first.release()
    first.release()
    assert claims.holder(path) is None
    assert claims.acquire(path) is not None
    assert [p.name for p in path.parent.iterdir() if p.name != ".break"] == [path.name]


def test_release_leaves_another_claim(path):
    first = claims.acquire(path)
    path.unlink()
    second = claims.acquire(path)
    first.release()
    assert claims.acquire(path) is None
    assert second is not None


def test_a_claim_of_a_killed_process_is_broken(path):
    code = (
        "import sys, os; from pathlib import Path; from experiments import claims;"
        f"assert claims.acquire(Path({str(path)!r})); os.kill(os.getpid(), 9)"
    )
    repo = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=repo).returncode == -9
    assert path.exists()
    assert claims.holder(path) is None
    assert claims.acquire(path) is not None


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_recycled_process_id_does_not_keep_it(path):
    claims.acquire(path)
    rewrite(path, started=1.0)
    assert claims.acquire(path) is not None


def test_another_machine_is_respected(path):
    claims.acquire(path)
    rewrite(path, machine="f" * 12, host="elsewhere", pid=1)
    assert claims.acquire(path) is None
    assert claims.holder(path) == "process 1 on elsewhere"


def test_a_requeued_job_takes_its_own_claims_back(path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    claims.acquire(path)
    rewrite(path, machine="f" * 12, host="elsewhere")
    assert claims.acquire(path) is None
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert claims.acquire(path) is not None


def _try(path: str, gate: object, won: object) -> None:
    gate.wait()
    if claims.acquire(Path(path)) is not None:
        won.put(os.getpid())
    gate.wait()


def test_many_processes_break_a_stale_claim_and_one_wins(path):
    claims.acquire(path)
    rewrite(path, started=1.0)
    context = multiprocessing.get_context("fork")
    gate, won = context.Barrier(8), context.Queue()
    children = [context.Process(target=_try, args=(str(path), gate, won)) for _ in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert won.get() in {child.pid for child in children}
    assert won.empty()
