"""One engine over two machines, for real: two network namespaces with addresses of their own, joined by a cable.

Where namespaces cannot be made (no root, no `ip`), both are processes of this machine that meet on its loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from analysis import load
from experiments import cli, models
from experiments.engine.processes import mapped

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

PATIENCE_S = 1500.0
TINY = ("experiment=tp_scaling", "model=tiny", "measure=smoke", "backends=[tessa]", "allow_sha_change=true")


@dataclass
class Host:
    """A machine: the prefix of commands that run on it, and its address."""

    prefix: tuple[str, ...]
    address: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str, output: Path, cwd: Path) -> subprocess.Popen[bytes]:
        with output.open("ab") as out:
            process = subprocess.Popen(
                [*self.prefix, sys.executable, *command],
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def living(self) -> set[int]:
        """Processes on this machine; without a namespace, those of the sessions that were started here."""
        if self.prefix:
            listed = subprocess.run(
                ["ip", "netns", "pids", self.prefix[-1]], capture_output=True, text=True, check=True
            )
            found = {int(pid) for pid in listed.stdout.split()}
        else:
            sessions = {process.pid for process in self.started}
            found = set()
            for process in psutil.process_iter():
                with contextlib.suppress(OSError):
                    if os.getsid(process.pid) in sessions:
                        found.add(process.pid)
        return {pid for pid in found if not is_gone(pid)}


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    mark = uuid.uuid4().hex[:6]
    names, cable = [f"tessa-{mark}-{i}" for i in (0, 1)], [f"ts{mark}{i}" for i in (0, 1)]
    addresses = ["10.213.7.1", "10.213.7.2"]
    able = os.geteuid() == 0 and shutil.which("ip") is not None and ip("netns", "add", names[0])
    if able:
        steps = [
            ("netns", "add", names[1]),
            ("link", "add", cable[0], "type", "veth", "peer", "name", cable[1]),
        ]
        for name, end, address in zip(names, cable, addresses, strict=True):
            steps += [
                ("link", "set", end, "netns", name),
                ("-n", name, "addr", "add", f"{address}/24", "dev", end),
                ("-n", name, "link", "set", end, "up"),
                ("-n", name, "link", "set", "lo", "up"),
            ]
        able = all(ip(*step) for step in steps)
    prefixes: list[tuple[str, ...]] = [("ip", "netns", "exec", name) if able else () for name in names]
    made = [Host(p, a if able else "127.0.0.1") for p, a in zip(prefixes, addresses, strict=True)]
    try:
        yield made[0], made[1]
    finally:
        for host in made:
            for pid in host.living():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in host.started:
                process.wait()
        for name in names:
            ip("netns", "del", name)


class Watch:
    """Waits for conditions on two machines, and notes the shared memory that their processes use meanwhile."""

    def __init__(self, hosts: tuple[Host, Host]) -> None:
        self.hosts = hosts
        self.segments: set[str] = set()

    def until(self, condition: Callable[[], object], process: subprocess.Popen[bytes], output: Path) -> None:
        """Fails when `process` ends before the condition holds."""
        give_up = time.monotonic() + PATIENCE_S
        while not condition():
            if process.poll() is not None and not condition():
                pytest.fail(f"ended with {process.returncode}:\n{output.read_text()[-4000:]}")
            assert time.monotonic() < give_up, output.read_text()[-4000:]
            for pid in self.hosts[0].living() | self.hosts[1].living():
                with contextlib.suppress(psutil.Error):
                    self.segments |= mapped([psutil.Process(pid)])
            time.sleep(0.1)

    def nothing_is_left(self) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while self.hosts[0].living() | self.hosts[1].living():
            assert time.monotonic() < give_up, "processes are left"
            time.sleep(0.1)
        assert self.segments, "an engine without shared memory?"
        assert not [name for name in self.segments if Path(name).exists()]


@pytest.mark.fault
def test_two_machines_answer_as_one_until_the_second_dies(
    hosts: tuple[Host, Host], cache: Path, tmp_path: Path, repo_root: Path
) -> None:
    """TESSA at TP 2 over both gives the outputs of merged weights, with the collectives of one machine.

    The second dies in the second of two workloads: the first keeps its result, the second has the reason.
    """
    first, second = hosts
    watch = Watch(hosts)
    results, output, meeting = tmp_path / "results", tmp_path / "out", tmp_path / "run.json"
    os.environ["TESSA_NODES_FILE"] = str(meeting)
    try:
        other = second.start(
            "-m", "experiments.engine.node", str(meeting), output=tmp_path / "node", cwd=repo_root
        )
        run = first.start(
            *(str(repo_root / "run.py"), *TINY, "tp=2", f"paths.results={results}", f"paths.cache={cache}"),
            *("engine.nnodes=2", f"engine.master_addr={first.address}"),
            # The second workload is long, so that it is under way when the machine dies.
            *("+grid.workload.output_tokens.value=[4,400]", "measure.caps.output_tokens=400"),
            output=output,
            cwd=repo_root,
        )
    finally:
        del os.environ["TESSA_NODES_FILE"]
    watch.until(lambda: list(results.glob("tp_scaling/[!.]*/summary.json")), run, output)
    other.send_signal(signal.SIGKILL)
    assert run.wait(PATIENCE_S) == cli.EXIT_FAILED, output.read_text()[-4000:]
    other.wait()

    frame = load(results).drop_duplicates("cell").set_index("status")
    assert sorted(frame.index) == ["complete", "failed"], output.read_text()[-4000:]
    assert (frame["nnodes"] == 2).all()
    row = frame.loc["complete"]
    summary = json.loads((results / "tp_scaling" / row["cell"] / "summary.json").read_text())
    assert summary["gate"]["passed"], summary["gate"]
    assert summary["gate"]["max_abs_error"] < 1e-4
    assert [(node["rank"], node["address"]) for node in summary["nodes"]] == [(1, second.address)]
    # The base model's alone: after the embedding, and after o and down of each layer.
    assert row["collectives_per_step"] == 1 + 2 * models.load_named("tiny").num_layers
    # Over two machines the ranks cannot meet in shared memory.
    assert "falling back to torch.distributed" in (results / row["log"]).read_text()

    row = frame.loc["failed"]
    assert "node 1 (" in row["reason"]
    assert second.address in row["reason"]
    assert "was lost: the connection was closed" in row["reason"]
    assert (results / row["log"]).stat().st_size > 0
    watch.nothing_is_left()
    assert not list((results / "tp_scaling" / ".claims").glob("*.claim"))
