"""The engine's process seen from its parent: every way to fail becomes an `EngineError`, nothing is left running."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from experiments.engine import parent
from experiments.engine.parent import EngineError, EngineProcess, root_cause
from experiments.engine.setup import EngineSetup

HERE = Path(__file__).parent


class ScriptedEngine(EngineProcess):
    child_module = "scripted_child"


@pytest.fixture
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ScriptedEngine]:
    script = {**request.param, "orphan_pid": str(tmp_path / "orphan")}
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    setup = EngineSetup("base", "model", (), {}, env={"SCRIPT": json.dumps(script), "PYTHONPATH": paths})
    made = ScriptedEngine(setup, tmp_path / "engine.log")
    yield made
    made.stop()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("engine", [{}], indirect=True)
def test_a_healthy_engine_answers_parks_and_stops(engine: ScriptedEngine) -> None:
    engine.start(30)
    assert engine._process is not None
    process = psutil.Process(engine._process.pid)
    engine.park()
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # returns once the child has stopped
    assert process.status() == psutil.STATUS_STOPPED
    engine.resume()
    assert engine.gate({}) == {"command": "gate"}
    engine.park()
    engine.stop()
    assert gone(process.pid), "a parked engine must stop as well"
    engine.stop()


@pytest.mark.parametrize("engine", [{"gate": "slow"}], indirect=True)
def test_signs_of_life_are_no_answer(engine: ScriptedEngine) -> None:
    engine.start(30)
    assert engine.gate({}) == {"command": "gate"}


@pytest.mark.parametrize(("command", "answered"), [("run", True), ("warmup", True), ("gate", False)])
def test_signs_of_life_extend_only_what_limits_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, answered: bool
) -> None:
    """A sign of life after 6 and 12 s and the answer after 18 s, where 10 s are allowed."""
    now, lines = 0.0, [b'{"alive": true}', b'{"alive": true}', b'{"ok": true, "value": 7}']
    answers, child = os.pipe()

    def select(*_: object) -> tuple[list[int], list[int], list[int]]:
        nonlocal now
        now += 6.0
        os.write(child, lines.pop(0) + b"\n")
        return [answers], [], []

    monkeypatch.setattr(parent, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(parent, "select", SimpleNamespace(select=select))
    engine = ScriptedEngine(EngineSetup("base", "m", (), {}), tmp_path / "log")
    engine._process, engine._commands, engine._answers_fd = SimpleNamespace(), io.StringIO(), answers  # type: ignore[assignment]
    try:
        if answered:
            assert engine._call(command, timeout_s=10.0) == 7
        else:
            with pytest.raises(EngineError, match="gate: no answer from the engine within 10 s"):
                engine._call(command, timeout_s=10.0)
    finally:
        os.close(answers)
        os.close(child)


@pytest.mark.fault
@pytest.mark.parametrize("engine", [{}], indirect=True)
def test_an_interrupt_while_the_engine_stops_leaves_nothing(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start(30)
    process = engine._process
    assert process is not None
    wait = process.wait

    def interrupted(timeout: float | None = None) -> int:
        monkeypatch.setattr(process, "wait", wait)
        raise KeyboardInterrupt

    monkeypatch.setattr(process, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.stop()
    assert gone(process.pid)
    assert not Path(engine._scratch.name).exists()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("engine", "command", "kind", "reason"),
    [
        ({"start": "die"}, "start", "failed", "SIGKILL: torch.OutOfMemoryError: no room left"),
        ({"start": "exit"}, "start", "failed", "status 3"),
        ({"start": "hang"}, "start", "timeout", "no answer from the engine within 1 s"),
        ({"start": "raise"}, "start", "failed", "ValueError: no such thing"),
        ({"gate": "die"}, "gate", "failed", "gate: the engine's process ended with signal SIGKILL"),
        ({"gate": "raise"}, "gate", "failed", "gate: ValueError: no such thing"),
        ({"gate": "garbage"}, "gate", "failed", "gate: an answer that is not JSON"),
        ({"gate": "orphan"}, "gate", "failed", "signal SIGKILL"),
    ],
    indirect=["engine"],
)
def test_faults_become_errors_and_leave_nothing(
    engine: ScriptedEngine, tmp_path: Path, command: str, kind: str, reason: str
) -> None:
    def act() -> None:
        engine.start(1.0 if kind == "timeout" else 30.0)
        if command == "gate":
            engine.gate({})

    with pytest.raises(EngineError) as caught:
        act()
    assert caught.value.kind == kind
    assert reason in caught.value.reason
    assert engine._process is not None
    pids = [engine._process.pid]
    if (tmp_path / "orphan").exists():
        pids.append(int((tmp_path / "orphan").read_text()))
    engine.stop()
    assert [pid for pid in pids if not gone(pid)] == []


@pytest.mark.parametrize("engine", [{"gate": "raise"}], indirect=True)
def test_the_childs_traceback_comes_back_as_data(engine: ScriptedEngine) -> None:
    engine.start(30)
    with pytest.raises(EngineError) as caught:
        engine.gate({})
    assert caught.value.traceback == "Traceback: here"


def test_a_command_without_engine_is_an_error(tmp_path: Path) -> None:
    engine = ScriptedEngine(EngineSetup("base", "m", (), {}), tmp_path / "log")
    with pytest.raises(EngineError, match="not running"):
        engine.gate({})


def test_root_cause_skips_what_vllm_says_about_other_processes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "INFO starting\n"
        "(Worker_TP0 pid=7) ERROR 11-29 [multiproc.py:9] tessa.errors.UserError: adapter 'a' is bad\n"
        "(EngineCore pid=6) ERROR 11-29 [core.py:1] RuntimeError: Engine core initialization failed. See above.\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
    )
    assert root_cause(log) == "tessa.errors.UserError: adapter 'a' is bad"
    assert root_cause(tmp_path / "absent") == ""
