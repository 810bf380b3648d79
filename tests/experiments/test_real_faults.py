"""Faults on real engines: an interrupted run, and a killed worker."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from omegaconf import DictConfig

from analysis import load
from experiments import cli
from experiments.engine.parent import EngineProcess, make_engine
from experiments.engine.processes import mapped
from experiments.grid import EngineGroup

pytestmark = [pytest.mark.engine, pytest.mark.fault, pytest.mark.timeout(3600)]

PATIENCE_S = 1500.0
SMOKE = ("model=tiny", "measure=smoke", "measure.rounds=1", "allow_sha_change=true")
TWO_ENGINES_GIB = 7


def of_sessions(sessions: set[int]) -> set[psutil.Process]:
    """Living processes of these sessions."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def sessions_below(run: subprocess.Popen[bytes]) -> set[int]:
    """The sessions of a run and of its engines."""
    found = {run.pid}
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(run.pid).children(recursive=True):
            with contextlib.suppress(OSError):
                found.add(os.getsid(process.pid))
    return found


def stored(results: Path) -> list[str]:
    return sorted(file.parent.name for file in results.glob("tp_scaling/[!.]*/summary.json"))


def test_an_interrupted_run_leaves_no_process_and_no_half_written_cell(
    cache: Path, tmp_path: Path, repo_root: Path
) -> None:
    """SIGINT in the second of two workloads, with one engine at work and another parked."""
    if psutil.virtual_memory().available < TWO_ENGINES_GIB * 2**30:
        pytest.skip(f"two engines side by side need {TWO_ENGINES_GIB} GiB of free memory")
    results, output = tmp_path / "results", tmp_path / "output"
    command = [
        *(sys.executable, str(repo_root / "run.py"), "experiment=tp_scaling", "tp=1", *SMOKE),
        *("backends=[base,tessa]", f"paths.results={results}", f"paths.cache={cache}"),
        # The second workload takes long enough to be interrupted in its middle.
        *("+grid.workload.output_tokens.value=[4,400]", "measure.caps.output_tokens=400"),
    ]
    with output.open("wb") as out:
        run = subprocess.Popen(command, cwd=repo_root, stdout=out, stderr=out, start_new_session=True)
    sessions: set[int] = set()
    try:
        give_up = time.monotonic() + PATIENCE_S
        while len(stored(results)) < 2:
            assert run.poll() is None, f"the run ended too early:\n{output.read_text()[-3000:]}"
            assert time.monotonic() < give_up, output.read_text()[-3000:]
            sessions |= sessions_below(run)
            time.sleep(0.05)
        living = {os.getsid(process.pid) for process in of_sessions(sessions)}
        assert len(living) == 3, "the run and two engines"
        segments = mapped(of_sessions(sessions))
        scratch = {word for process in of_sessions(sessions) for word in folder_of(process)}
        assert scratch
        run.send_signal(signal.SIGINT)
        assert run.wait(PATIENCE_S) == cli.EXIT_INTERRUPTED, output.read_text()[-3000:]
        while of_sessions(sessions):
            assert time.monotonic() < give_up, "processes are left"
            time.sleep(0.05)
    finally:
        for left in of_sessions(sessions | {run.pid}):
            left.kill()
        run.wait()

    assert "interrupted: finished cells are stored" in output.read_text()
    assert not [name for name in segments if Path(name).exists()]
    assert not [folder for folder in scratch if Path(folder).exists()], "sockets are left"
    first = stored(results)
    assert len(first) == 2
    folders = {entry.name for entry in (results / "tp_scaling").iterdir() if entry.name != ".claims"}
    assert folders == set(first)
    assert not list((results / "tp_scaling" / ".claims").glob("*.claim"))
    assert set(load(results)["status"]) == {"complete"}
    status = subprocess.run(
        [*command[:2], "status", *command[2:]], cwd=repo_root, capture_output=True, text=True, check=True
    ).stdout
    assert "total: 2 complete, 2 missing" in status


def folder_of(process: psutil.Process) -> list[str]:
    """The temporary folder that an engine's process was given, where its environment can still be read."""
    try:
        mark = process.environ().get("TESSA_ENGINE")
    except psutil.Error:
        return []
    return [mark] if mark else []


class WorkerKilled(EngineProcess):
    """One of its workers is killed as the load begins."""

    def run(self, workload_path: Path, options: dict[str, Any]) -> dict[str, Any]:
        assert self._tree is not None
        workers = [p for p in self._tree.members() if "Worker" in " ".join(p.cmdline())]
        assert len(workers) == 2, [p.cmdline() for p in self._tree.members()]
        workers[1].kill()
        return super().run(workload_path, options)


def test_a_killed_worker_is_a_row(cache: Path, tmp_path: Path, composed: Callable[..., DictConfig]) -> None:
    made: list[EngineProcess] = []

    def factory(group: EngineGroup, log: Path) -> EngineProcess:
        made.append(WorkerKilled(make_engine(group, log, cache).setup, log))
        return made[-1]

    config = composed(
        *("experiment=tp_scaling", "tp=2", *SMOKE, "backends=[base]"),
        *("measure.gate.enabled=false", f"paths.cache={cache}"),
    )
    assert cli.execute(config, factory=factory) == cli.EXIT_FAILED
    (row,) = load(tmp_path / "results").drop_duplicates("cell").to_dict("records")
    assert row["status"] == "failed"
    assert row["reason"].startswith("round 1/1: ")
    assert "EngineDead" in row["reason"], row["reason"]
    assert (tmp_path / "results" / row["log"]).stat().st_size > 0
    (engine,) = made
    assert engine._tree is not None
    assert engine._tree._segments, "an engine of two ranks without shared memory?"
    assert not engine._tree.members()
    assert not [name for name in engine._tree._segments if Path(name).exists()]
    assert not Path(engine._scratch.name).exists()
