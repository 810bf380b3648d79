"""Engines that are forked from a process that has vLLM loaded, for tests of what engines answer.

Importing vLLM takes eleven seconds of processor time, which is half of a start on a CPU. One process of each test
process imports it once and forks the engines; their own processes are forked as well (`EngineSetup.fork`). Such
engines are not for numbers, and how an engine ends is tested on `EngineProcess` itself.
"""

from __future__ import annotations

import array
import atexit
import dataclasses
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from experiments.engine.parent import EngineProcess
from experiments.engine.setup import COMMON_ENV, EngineSetup, cpu_env

LARGEST = 1 << 20
LOADED = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "experiments.engine.child",
)


class WarmEngine(EngineProcess):
    """An `EngineProcess` whose child is forked from the loaded process."""

    def __init__(self, setup: EngineSetup, log_path: Path) -> None:
        super().__init__(dataclasses.replace(setup, fork=True), log_path)

    def launch(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes], pipes: tuple[int, int]
    ) -> subprocess.Popen[bytes]:
        pid = loaded().fork(arguments, environment, (log.fileno(), *pipes))
        return cast("subprocess.Popen[bytes]", Forked(pid))


class Forked:
    """What `EngineProcess` needs of a `subprocess.Popen`, for a process that another one has forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """0 once it has ended: how, only its parent knows."""
        return 0 if select.select([self._descriptor], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return 0


class Loaded:
    """The loaded process, seen from the test process."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, **COMMON_ENV, **cpu_env(1)}
        self.process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(other.fileno())],  # tests/ has an `experiments` too
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
            pass_fds=[other.fileno()],
            cwd=Path(__file__).resolve().parents[1],
        )
        other.close()

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[int]) -> int:
        """Process id of a child that runs `experiments.engine.child` with these arguments, environment and log file."""
        message = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        self._socket.sendmsg([message], rights)
        answer = self._socket.recv(LARGEST)
        assert answer, "the process that forks engines has ended"
        return int(answer)

    def end(self) -> None:
        self._socket.close()
        self.process.wait()


@functools.cache
def loaded() -> Loaded:
    """Started at its first use; it ends with the test process."""
    made = Loaded()
    atexit.register(made.end)
    return made


def serve(connection: socket.socket) -> None:
    """Forks a child for each message, until the other end is closed."""
    import importlib

    for name in LOADED:
        importlib.import_module(name)
    # A rank waits for its next step busily, for up to a second, on cores that other engines want meanwhile. Not at all
    # is too short: ZeroMQ drops a wake-up that follows another within about a millisecond, and a reader that was asleep
    # by then stays so.
    waiting = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast").SpinCondition
    waiting.__init__.__defaults__ = (0.02,)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    while True:
        message, files, _, _ = socket.recv_fds(connection, LARGEST, 3)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            run_child(connection, json.loads(message), files)
        connection.send(str(pid).encode())
        for descriptor in files:
            os.close(descriptor)


def run_child(connection: socket.socket, message: dict[str, Any], files: list[int]) -> None:
    """The engine's process, with a session, an environment and a log of its own; does not return."""
    from experiments.engine import child

    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.close()
        os.setsid()
        log, commands, answers = files
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(message["environment"])
        tempfile.tempdir = None  # it may have been looked up in the old environment
        status = child.main([*message["arguments"], str(commands), str(answers)])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
