"""Faults of the results folder and of the run itself: clear words, nothing finished is lost, a rerun does the rest."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fault_engines import Machines, marked

from analysis import load
from experiments import cli
from experiments.store import Store

pytestmark = [pytest.mark.fake, pytest.mark.fault]

HERE = Path(__file__).parent
REPO = HERE.parents[1]
PATIENCE_S = 900.0
ONE_BY_ONE = ("measure.interleave=off", "backends=[base,tessa]")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
    )
    if mount.returncode:
        pytest.skip(f"no file system can be mounted here: {mount.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def at_the_last_round(fleet: Any, action: Callable[[], object]) -> None:
    """When tessa has run its last round, before its cell is written."""
    fleet.script["tessa", "run"] = lambda engine: action() if engine.runs == 2 else None


def the_rest_is_done(fleet: Any, config: Any, results: Path) -> None:
    fleet.script.clear()
    fleet.calls.clear()
    assert cli.execute(config, factory=fleet) == 0
    assert {backend for backend, _ in fleet.calls} == {"tessa"}, "base was finished before"
    assert (load(results)["status"] == "complete").all()
    hidden = [e.name for e in (results / "tp_scaling").iterdir() if e.name[0] == "." and e.name != ".claims"]
    assert hidden == []


def test_a_full_disk(fleet, tiny_run, small_disk, capsys):
    config = tiny_run(*ONE_BY_ONE, f"paths.results={small_disk}")
    at_the_last_round(fleet, lambda: fill(small_disk))
    assert cli.execute(config, factory=fleet) == cli.EXIT_USER
    assert (
        "the disk is full. Free some space and run again; finished cells are kept" in capsys.readouterr().err
    )
    assert not fleet.alive
    assert load(small_disk)["backend"].unique().tolist() == ["base"]
    (small_disk / "filler").unlink()
    the_rest_is_done(fleet, config, small_disk)


def test_a_disk_that_becomes_read_only(fleet, tiny_run, small_disk, capsys):
    config = tiny_run(*ONE_BY_ONE, f"paths.results={small_disk}")

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(small_disk)], check=True)

    at_the_last_round(fleet, lambda: remount("ro"))
    assert cli.execute(config, factory=fleet) == cli.EXIT_USER
    assert (
        "the file system is read-only. Choose another folder with paths.results=" in capsys.readouterr().err
    )
    assert not fleet.alive
    # Before anything starts, too.
    fleet.calls.clear()
    assert cli.execute(config, factory=fleet) == cli.EXIT_USER
    assert not fleet.calls
    remount("rw")
    # This process lives on, so its claim is not stale by itself.
    for claim in (small_disk / "tp_scaling" / ".claims").glob("*.claim"):
        claim.unlink()
    for folder in (small_disk / "tp_scaling").glob(".tmp-*"):
        folder.rename(small_disk / "left-by-a-living-process")
    the_rest_is_done(fleet, config, small_disk)


def test_a_limit_on_file_sizes(fleet, tiny_run, tmp_path, capsys):
    config = tiny_run(*ONE_BY_ONE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        next((tmp_path / "results" / "tp_scaling").glob(".tmp-logs-*/*.log")).write_text("x" * 400_000)
        for log in (tmp_path / "results" / "tp_scaling").glob(".tmp-logs-*/*.log"):
            log.write_text("x" * 400_000)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))

    at_the_last_round(fleet, limit)
    try:
        assert cli.execute(config, factory=fleet) == cli.EXIT_USER
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "larger than this process may write (ulimit -f)" in capsys.readouterr().err
    assert not fleet.alive
    the_rest_is_done(fleet, config, tmp_path / "results")


def test_a_file_where_the_folder_should_be(fleet, tiny_run, tmp_path, capsys):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "tp_scaling").write_text("mine")
    assert cli.execute(tiny_run(), factory=fleet) == cli.EXIT_USER
    assert "a file is in the way" in capsys.readouterr().err
    assert (tmp_path / "results" / "tp_scaling").read_text() == "mine"
    assert not fleet.calls


def test_results_of_another_schema_version(fleet, tiny_run, tmp_path, capsys):
    cli.execute(tiny_run("backends=[base]"), factory=fleet)
    file = next((tmp_path / "results").rglob("summary.json"))
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": 0}))
    before, _ = file.read_bytes(), fleet.calls.clear()
    for mode in ("run", "status"):
        assert cli.execute(tiny_run(), mode=mode, factory=fleet) == cli.EXIT_USER
        assert "has schema version 0, this code reads and writes" in capsys.readouterr().err
    assert file.read_bytes() == before
    assert not fleet.calls


def test_a_summary_that_is_cut_off(fleet, tiny_run, tmp_path, capsys):
    cli.execute(tiny_run("backends=[base]"), factory=fleet)
    file = next((tmp_path / "results").rglob("summary.json"))
    file.write_text(file.read_text()[:100])
    assert cli.execute(tiny_run(), factory=fleet) == cli.EXIT_USER
    said = capsys.readouterr().err
    assert str(file) in said
    assert "cannot be read" in said


KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
import pandas as pd
import pytest
from test_store import RECORDS, ROUND_STEPS, STEPS, break_at, summary
from experiments.store import Store

class Killed(BaseException):
    def __init__(self):
        os.kill(os.getpid(), signal.SIGKILL)

log = Path({log!r})
for number, step in enumerate(STEPS):
    store = Store({results!r}, f"exp{{number}}")
    child = os.fork()
    if child == 0:
        store.write("c", {{"old": True}}, summary("failed"), RECORDS)
        break_at(pytest.MonkeyPatch(), step, Killed)
        store.write("c", {{"old": False}}, summary("complete"), RECORDS, log)
        os._exit(0)
    print(step, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=":")
for number, step in enumerate(ROUND_STEPS):
    store = Store({results!r}, f"rounds{{number}}")
    child = os.fork()
    if child == 0:
        store.keep_rounds("c", {{"hash": "h", "old": True}}, RECORDS)
        break_at(pytest.MonkeyPatch(), step, Killed)
        store.keep_rounds("c", {{"hash": "h", "old": False}}, RECORDS)
        os._exit(0)
    print("rounds", step, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep=":")
"""


def test_killed_between_any_two_writes(tmp_path):
    """By SIGKILL, in processes of their own: the former cell, or kept rounds, are whole and the rest is cleared."""
    log, results = tmp_path / "live.log", tmp_path / "results"
    log.write_text("x")
    script = KILLED_WRITER.format(paths=[str(HERE), str(REPO)], log=str(log), results=str(results))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    fates = dict(line.rsplit(":", 1) for line in done.stdout.splitlines())
    assert len(fates) == 8 + 6, done.stderr
    assert set(fates.values()) == {str(-signal.SIGKILL)}, fates
    left_over = 0
    for number in range(8):
        left_over += len(list((results / f"exp{number}").glob(".*-c-*")))
        after = Store(results, f"exp{number}")
        assert after.status("c") == "failed"
        assert json.loads((after.path("c") / "config.json").read_text()) == {"old": True}
        assert not list(after.folder.glob(".*-c-*"))
    assert left_over >= 7, "nothing was half written when the writers died"
    for number in range(6):
        after = Store(results, f"rounds{number}")
        kept = after.kept_rounds("c", "h")
        assert kept is not None
        assert kept[0]["old"] is True
        assert [entry.name for entry in after.folder.iterdir()] == [".rounds-c"]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """run.py as another process, with `fault_engines`; what it starts is ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*overrides: str, script: dict[str, str] | None = None) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "TESSA_TEST_ENGINE": "fault_engines:make",
            "TESSA_FAULT": json.dumps(script or {}),
            "TESSA_FAULT_FOLDER": str(tmp_path / "machines"),
            "OMP_NUM_THREADS": "1",
            "MPLCONFIGDIR": str(tmp_path / "matplotlib"),
        }
        command = [
            *(sys.executable, str(REPO / "run.py"), "experiment=tp_scaling", "model=tiny", "measure=smoke"),
            "allow_sha_change=true",
            *(f"paths.results={tmp_path}/results", f"paths.cache={tmp_path}/cache", *overrides),
        ]
        process = subprocess.Popen(
            command, cwd=REPO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def prepared(tmp_path: Path, tiny_run: Any) -> Path:
    """The folder from which the engines of other processes take their records."""
    folder = tmp_path / "machines"
    Machines({}, folder).prepare(cli.plan_run(cli.schema.build(tiny_run()), device="cpu"))
    return folder


def until(condition: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    give_up = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        if process.poll() is not None:
            pytest.fail(f"ended with {process.returncode}: {process.communicate()[0][-3000:]}")
        assert time.monotonic() < give_up
        time.sleep(0.05)
    return value


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
def test_a_run_that_ends_in_the_middle_leaves_nothing_and_the_next_does_the_rest(
    elsewhere, prepared, tiny_run, tmp_path, capsys, number
):
    results = tmp_path / "results"
    first = elsewhere(*ONE_BY_ONE, script={"run": "hang"})
    until((prepared / "once").exists, first)
    logs = list((results / "tp_scaling").glob(".tmp-logs-*/*.log"))
    held = {word for log in logs for word in log.read_text().split() if word.startswith("psm_")}
    assert held
    folders = list(Path(tempfile.gettempdir()).glob(f"tessa-engine-*.{first.pid}-*"))
    assert [bool(marked(str(folder))) for folder in folders] == [True], "base has stopped, tessa hangs"
    first.send_signal(number)
    output = first.communicate(timeout=PATIENCE_S)[0]
    assert first.returncode == (-number if number == signal.SIGKILL else cli.EXIT_INTERRUPTED), output[-3000:]
    give_up = time.monotonic() + PATIENCE_S
    while any(marked(str(folder)) for folder in folders):
        assert time.monotonic() < give_up, "processes are left"
        time.sleep(0.05)
    assert not [name for name in held if Path("/dev/shm", name).exists()]

    assert cli.execute(tiny_run(*ONE_BY_ONE), mode="status") == 0
    assert "total: 1 complete, 1 missing" in capsys.readouterr().out
    before = {file: file.read_bytes() for file in results.glob("tp_scaling/base-*/summary.json")}
    second = elsewhere(*ONE_BY_ONE)
    output = second.communicate(timeout=PATIENCE_S)[0]
    assert second.returncode == 0, output[-3000:]
    assert "1 cells complete; 1 left as they were" in output
    assert {file: file.read_bytes() for file in before} == before
    assert not [folder for folder in folders if folder.exists()], "sockets of the first run are left"
    for file in results.glob("tp_scaling/*/summary.json"):
        given = json.loads(file.read_text())["environment"]["overrides"]
        assert given == [
            *("experiment=tp_scaling", "model=tiny", "measure=smoke", "allow_sha_change=true", *ONE_BY_ONE)
        ]
    experiment = results / "tp_scaling"
    assert {e.name.split("-")[0] for e in experiment.iterdir() if e.name != ".claims"} == {"base", "tessa"}
    assert cli.execute(tiny_run(*ONE_BY_ONE), mode="status") == 0
    assert "total: 2 complete" in capsys.readouterr().out


def test_two_runs_at_once_share_the_cells(elsewhere, prepared, tmp_path):
    runs = [elsewhere("backends=[base,plain_lora,punica,slora,tessa]") for _ in range(2)]
    outputs = [run.communicate(timeout=PATIENCE_S)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], outputs
    frame = load(tmp_path / "results").drop_duplicates("cell")
    assert len(frame) == 5
    assert (frame["status"] == "complete").all()
    last = [next(line for line in reversed(o.splitlines()) if "cells complete" in line) for o in outputs]
    assert sum(int(line.split(" cells complete")[0].split()[-1]) for line in last) == 5, last
    assert not list((tmp_path / "results" / "tp_scaling" / ".claims").glob("*.claim"))
