"""Another machine's share of a run whose engines span several machines.

    python run.py experiment=tp_scaling tp=16 engine.nnodes=2     # on the first machine
    python -m experiments.engine.node                             # on each other one, in either order

Both need the same code, environment and, with the same path on all machines, the cache folder (``paths.cache``). The
run says where it listens in a file of that folder (see `experiments.engine.nodes`); this program waits for the file,
connects, starts its share of every engine that the run starts, and ends with the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from experiments import models, provenance
from experiments.engine.nodes import Lines, keep_alive, meeting_file, network_env
from experiments.engine.parent import root_cause
from experiments.engine.processes import MARK, ProcessTree
from experiments.engine.setup import COMMON_ENV, EngineSetup, cpu_env, new_scratch, scratch_env

FOLLOWER = "experiments.engine.follower"
TAIL_LINES = 40
RETRY_S = 0.5
EXIT_OK, EXIT_LOST, EXIT_USER = 0, 1, 2


class Share:
    """The part of one engine on this machine: `experiments.engine.follower` and its workers."""

    def __init__(self, message: dict[str, Any], address: str) -> None:
        self.name = message["engine"]
        self._scratch = new_scratch()
        folder = Path(self._scratch.name)
        setup = EngineSetup.from_json(message["setup"])
        for needed in (setup.model, *setup.adapters):
            if os.path.isabs(needed) and not Path(needed).exists():
                raise FileNotFoundError(
                    f"{needed} does not exist here; keep the cache folder on a file system that all nodes share"
                )
        arguments = {
            **setup.engine_args,
            **{key: message[key] for key in ("nnodes", "node_rank", "master_addr", "master_port")},
        }
        local = local_ranks(arguments)
        environment = {
            **os.environ,
            **scratch_env(self._scratch.name),
            **COMMON_ENV,
            **setup.env,
            **(cpu_env(local) if setup.device == "cpu" else {}),
            **network_env(address),
            MARK: self._scratch.name,
        }
        (folder / "arguments.json").write_text(json.dumps(arguments))
        self.log = folder / "node.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", FOLLOWER, str(folder / "arguments.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self.tree = ProcessTree(self.process.pid, self._scratch.name)
        self.descriptor = os.pidfd_open(self.process.pid)

    def how_it_ended(self) -> dict[str, str]:
        code = self.process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        cause = root_cause(self.log)
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return {"ended": f"{how}: {cause}" if cause else how, "log": "\n".join(lines)}

    def end(self) -> None:
        self.tree.kill()
        self.process.wait()
        os.close(self.descriptor)
        self._scratch.cleanup()


def local_ranks(arguments: dict[str, Any]) -> int:
    """Ranks of an engine on each of its machines."""
    return int(arguments["tensor_parallel_size"]) // int(arguments["nnodes"])


class Agent:
    """Does what the run says until the connection ends."""

    def __init__(self, lines: Lines, address: str) -> None:
        self.lines, self.address = lines, address
        self.shares: dict[str, Share] = {}

    def serve(self) -> bool:
        """True when the run said that it is over, False when the connection broke."""
        try:
            while True:
                descriptors: dict[Any, Share] = {share.descriptor: share for share in self.shares.values()}
                ready = select.select([self.lines.connection, *descriptors], [], [])[0]
                for descriptor in ready:
                    if descriptor in descriptors:
                        share = self.shares.pop(descriptors[descriptor].name)
                        self.lines.send({"engine": share.name, **share.how_it_ended()})
                        share.end()
                if self.lines.connection not in ready:
                    continue
                for message in self.lines.read():
                    if message["command"] == "end":
                        return True
                    self.lines.send({"engine": message["engine"], **self._do(message)})
        except (EOFError, OSError):
            return False
        finally:
            for share in self.shares.values():
                share.end()

    def _do(self, message: dict[str, Any]) -> dict[str, Any]:
        command, name = message["command"], message["engine"]
        if command == "start":
            try:
                self.shares[name] = Share(message, self.address)
            except (OSError, ValueError) as error:
                return {"refused": str(error)}
            say(f"{name}: {len(self.shares)} at work here")
        elif (share := self.shares.get(name)) is not None:
            if command == "park":
                share.tree.park()
            elif command == "resume":
                share.tree.send(signal.SIGCONT)
            else:
                self.shares.pop(name).end()
        return {"answer": command}


def connect(file: Path, patience_s: float) -> Lines | None:
    """The connection to the run that `file` describes; None when none came in time.

    A file of an earlier run leads nowhere, so it is read again until it does.
    """
    give_up = time.monotonic() + patience_s
    while time.monotonic() < give_up:
        with contextlib.suppress(OSError, ValueError, KeyError):
            meeting = json.loads(file.read_text())
            connection = socket.create_connection((meeting["address"], meeting["port"]), timeout=10)
            connection.settimeout(None)
            keep_alive(connection)
            lines = Lines(connection)
            lines.send(
                {
                    "token": meeting["token"],
                    "host": platform.node(),
                    "code": provenance.git_state(),
                    "hardware": provenance.hardware(),
                }
            )
            return lines
        time.sleep(RETRY_S)
    return None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.engine.node", description=__doc__)
    parser.add_argument(
        "file", nargs="?", help="the file that the run writes; default: in the default cache folder"
    )
    parser.add_argument("--wait", type=float, default=3600.0, help="seconds to wait for the run")
    options = parser.parse_args(argv)
    file = Path(options.file) if options.file else meeting_file(models.default_cache())

    def stop(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a job may leave signals to the run
            signal.signal(number, stop)
    say(f"waiting for a run at {file}")
    lines = connect(file, options.wait)
    if lines is None:
        say(f"error: no run came within {options.wait:.0f} s; start it with engine.nnodes=2 or more")
        return EXIT_USER
    own, other = lines.connection.getsockname()[0], lines.connection.getpeername()
    say(f"joined the run at {other[0]}:{other[1]} as {own}")
    if Agent(lines, own).serve():
        say("the run is over")
        return EXIT_OK
    say("error: the connection to the run broke; its engines here are ended")
    return EXIT_LOST


if __name__ == "__main__":
    sys.exit(main())
