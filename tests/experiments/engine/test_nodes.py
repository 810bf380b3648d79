"""The run and its other machines, with scripted processes in place of engines."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from experiments.engine import node as node_module
from experiments.engine import parent, spread
from experiments.engine.node import Agent, Share, connect
from experiments.engine.nodes import NodeError, Nodes, interface_of, meeting_file, network_env
from experiments.engine.parent import EngineError
from experiments.engine.setup import EngineSetup
from experiments.engine.spread import SpreadEngine
from tessa.errors import UserError

pytestmark = pytest.mark.fake

HERE = Path(__file__).parent
SETUP = EngineSetup("base", "hub/model", (), {"tensor_parallel_size": 2})


class Machine:
    """A node of the run in a thread; its part of an engine is `scripted_follower`."""

    def __init__(self, file: Path) -> None:
        lines = connect(file, 30.0)
        assert lines is not None
        self.lines, self.agent = lines, Agent(lines, "127.0.0.1")
        self.over: bool | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self.over = self.agent.serve()

    def share(self, engine: str) -> Share:
        return self.agent.shares[engine]

    def vanish(self) -> None:
        self.lines.connection.shutdown(socket.SHUT_RDWR)

    def join(self) -> bool | None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.over


@pytest.fixture(autouse=True)
def follower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "FOLLOWER", "scripted_follower")
    monkeypatch.setattr(spread, "NEWS_S", 30.0)  # only how long news are awaited
    monkeypatch.setattr(parent, "STOP_GRACE_S", 0.5)  # what hangs here never stops by itself
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(2, "127.0.0.1", 0, tmp_path / "nodes" / "run.json")
    yield made
    made.close()


@pytest.fixture
def machine(nodes: Nodes) -> Iterator[Machine]:
    joined = Machine(nodes.file)
    nodes.gather(30.0)
    yield joined
    nodes.close()
    joined.join()


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_node_starts_parks_and_ends_its_share(nodes: Nodes, machine: Machine) -> None:
    engine = nodes.start(SETUP.to_json(), 1234)
    share = machine.share(engine)
    process = psutil.Process(share.process.pid)
    arguments = json.loads((Path(share._scratch.name) / "arguments.json").read_text())
    assert arguments == {
        "tensor_parallel_size": 2,
        "nnodes": 2,
        "node_rank": 1,
        "master_addr": "127.0.0.1",
        "master_port": 1234,
    }
    nodes.tell("park", engine)
    assert process.status() == psutil.STATUS_STOPPED
    nodes.tell("resume", engine)
    assert process.status() != psutil.STATUS_STOPPED
    assert nodes.trouble(engine) is None
    nodes.tell("stop", engine)
    assert ended(process)
    assert not Path(share._scratch.name).exists()
    nodes.close()
    assert machine.join() is True, "the end of the run is no loss"


def test_the_meeting_file_is_private_and_goes_with_the_run(nodes: Nodes) -> None:
    assert nodes.file.stat().st_mode & 0o077 == 0
    nodes.close()
    assert not nodes.file.exists()


@pytest.mark.fault
def test_a_stranger_is_turned_away(nodes: Nodes) -> None:
    meeting = json.loads(nodes.file.read_text())
    nodes.file.write_text(json.dumps({**meeting, "token": "guessed"}))
    stranger = connect(nodes.file, 5.0)
    assert stranger is not None
    with pytest.raises(NodeError, match=r"only 1 of 2 nodes came within 1 s; .*experiments\.engine\.node"):
        nodes.gather(1.0)
    with pytest.raises(EOFError):
        stranger.read()


@pytest.mark.fault
def test_no_run_is_an_error_after_the_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stale = tmp_path / "stale.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        stale.write_text(json.dumps({"address": "127.0.0.1", "port": free.getsockname()[1], "token": "x"}))
    command = [sys.executable, "-m", "experiments.engine.node", str(stale), "--wait", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == node_module.EXIT_USER
    assert "no run came within 1 s" in done.stderr


@pytest.mark.fault
def test_a_node_without_the_model_refuses(nodes: Nodes, machine: Machine) -> None:
    with pytest.raises(
        NodeError, match=r"node 1 \(.*\) refused: /no/model does not exist here; keep the cache"
    ):
        nodes.start(EngineSetup("base", "/no/model", (), {"tensor_parallel_size": 2}).to_json(), 1)


@pytest.mark.fault
def test_a_refusal_ends_the_shares_that_did_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = Nodes(3, "127.0.0.1", 0, tmp_path / "run.json")
    machines = [Machine(nodes.file), Machine(nodes.file)]
    try:
        nodes.gather(30.0)
        told: list[str] = []
        started, refuse = machines[0].agent._do, {"refused": "no room"}

        def do(message: dict[str, str]) -> dict[str, str]:
            told.append(message["command"])
            return started(message)

        monkeypatch.setattr(machines[0].agent, "_do", do)
        monkeypatch.setattr(machines[1].agent, "_do", lambda message: refuse)
        with pytest.raises(NodeError, match="refused: no room"):
            nodes.start(EngineSetup("base", "hub/model", (), {"tensor_parallel_size": 3}).to_json(), 1)
        assert told == ["start", "stop"]
        assert machines[0].agent.shares == {}
    finally:
        nodes.close()
        for machine in machines:
            machine.join()


class ScriptedSpread(SpreadEngine):
    child_module = "scripted_child"


@pytest.fixture
def engine(nodes: Nodes, tmp_path: Path) -> Iterator[Callable[..., ScriptedSpread]]:
    made: list[ScriptedSpread] = []

    def make(**script: str) -> ScriptedSpread:
        setup = EngineSetup(
            "base", "hub/model", (), {"tensor_parallel_size": 2}, env={"SCRIPT": json.dumps(script)}
        )
        made.append(ScriptedSpread(setup, tmp_path / "engine.log", nodes))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def test_both_machines_run_park_and_stop_together(
    engine: Callable[..., ScriptedSpread], machine: Machine
) -> None:
    one = engine()
    one.start(60)
    assert one._name is not None
    assert one._process is not None
    here, there = psutil.Process(one._process.pid), psutil.Process(machine.share(one._name).process.pid)
    assert [node["rank"] for node in one.nodes] == [1]
    assert one.gate({}) == {"command": "gate"}
    one.park()
    assert {here.status(), there.status()} == {psutil.STATUS_STOPPED}
    one.resume()
    one.gate({})
    one.stop()
    assert ended(here)
    assert ended(there)


@pytest.mark.fault
def test_the_end_of_a_share_ends_the_engine_with_its_cause(
    engine: Callable[..., ScriptedSpread], machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FOLLOWER", "fail")
    one = engine(start="hang")
    with pytest.raises(EngineError) as caught:
        one.start(600)
    assert caught.value.kind == "failed"
    assert "start: node 1 (" in caught.value.reason
    assert "ended with status 1: torch.OutOfMemoryError: no room on the second machine" in caught.value.reason
    assert "[the end of the log of node 1 (" in (tmp_path / "engine.log").read_text()


@pytest.mark.fault
@pytest.mark.parametrize("fate", ["killed", "vanished", "noticed by the driving ranks first"])
def test_a_lost_node_ends_the_engine_at_once(
    engine: Callable[..., ScriptedSpread], machine: Machine, fate: str
) -> None:
    one = engine(gate="raise" if fate.startswith("noticed") else "hang")
    one.start(60)
    assert one._name is not None
    share = machine.share(one._name)
    threading.Timer(
        0.2, machine.vanish if fate == "vanished" else lambda: os.kill(share.process.pid, signal.SIGKILL)
    ).start()
    with pytest.raises(EngineError) as caught:
        one.gate({})
    lost = "was lost: the connection was closed" if fate == "vanished" else "was ended by SIGKILL"
    assert "gate: node 1 (" in caught.value.reason
    assert lost in caught.value.reason
    assert caught.value.kind == "failed"
    one.stop()
    share.process.wait(60)


@pytest.mark.fault
def test_after_a_loss_the_next_engine_fails_at_once_until_the_node_is_back(
    engine: Callable[..., ScriptedSpread], nodes: Nodes, machine: Machine
) -> None:
    engine().start(60)
    machine.vanish()
    assert machine.join() is False
    with pytest.raises(EngineError, match=r"node 1 \(.*\) was lost before"):
        engine().start(600)
    back = Machine(nodes.file)
    one = engine()
    one.start(60)
    assert one.gate({}) == {"command": "gate"}
    one.stop()
    nodes.close()
    back.join()


@pytest.mark.fault
def test_an_address_that_is_not_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"engine\.master_addr=192\.0\.2\.7 is no address of this machine; it has"
    ):
        Nodes(2, "192.0.2.7", 0, tmp_path / "run.json")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"engine\.master_port={port}: .* cannot be used"):
            Nodes(2, "127.0.0.1", port, tmp_path / "run.json")


def test_the_network_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert interface_of("127.0.0.1") == "lo"
    assert network_env("127.0.0.1") == {
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "ib0",
    }


def test_each_job_has_its_meeting_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TESSA_NODES_FILE", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert meeting_file(tmp_path) == tmp_path / "nodes" / "by-hand.json"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert meeting_file(tmp_path) == tmp_path / "nodes" / "job-77.json"
    monkeypatch.setenv("TESSA_NODES_FILE", "/x/y.json")
    assert meeting_file(tmp_path) == Path("/x/y.json")
