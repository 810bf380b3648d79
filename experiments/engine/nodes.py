"""The other machines of an engine, seen from the run: who they are, what they are told, and when one is lost.

The run listens on one address and writes it, with a secret, to a file in the cache folder, which all machines see.
On every other machine `experiments.engine.node` reads the file, connects, and starts its share of each engine. The
connection is also the sign of life: when it closes, the node counts as lost.

Messages are JSON lines. To a node: ``{"command": "start" | "park" | "resume" | "stop", "engine": id, ...}`` and
``{"command": "end"}``. From a node: its introduction, then ``{"engine": id, "answer": ...}`` to each command, and
``{"engine": id, "ended": reason, "log": tail}`` when its part of an engine ends by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import json
import os
import secrets
import select
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tessa.errors import UserError

ANSWER_S = 60.0
INTRODUCTION_S = 30.0
MODULE = "experiments.engine.node"
# A machine that vanishes without closing its connection is noticed after about 40 s.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}


class NodeError(RuntimeError):
    """A node that is missing, lost, or refuses; the message is for the cell's row."""


def meeting_file(cache: Path) -> Path:
    """Where the run says how to reach it: one file per Slurm job, else one per cache folder.

    ``$TESSA_NODES_FILE`` names another, for several such runs by hand at once.
    """
    chosen = os.environ.get("TESSA_NODES_FILE")
    name = f"job-{os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else "by-hand"
    return Path(chosen) if chosen else cache / "nodes" / f"{name}.json"


def own_address() -> str:
    """The address from which this machine reaches others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # an address kept for documentation
        return str(probe.getsockname()[0])
    raise UserError("this machine has no network address; set engine.master_addr to one that the nodes reach")


def interface_of(address: str) -> str:
    """The network interface that has the address. Raises UserError where none has."""
    found = {a.address: name for name, addresses in psutil.net_if_addrs().items() for a in addresses}
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(address)
    if address not in found:
        known = ", ".join(sorted(a for a in found if a.count(".") == 3))
        raise UserError(f"engine.master_addr={address} is no address of this machine; it has {known}")
    return found[address]


def network_env(address: str) -> dict[str, str]:
    """Makes vLLM, gloo and NCCL use the interface that the nodes share; a user's own choice stays."""
    name = interface_of(address)
    chosen = {"VLLM_HOST_IP": address, "GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {key: os.environ.get(key, value) for key, value in chosen.items()}


def keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Lines:
    """JSON lines over a connection, read without blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._rest = b""

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises OSError when the other side is gone."""
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        """The messages that came with the next piece of data. Raises EOFError at the end of the connection."""
        try:
            data = self.connection.recv(1 << 16)
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("the connection was closed")
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError as error:
            raise EOFError(f"a message that is not JSON: {error}") from error


@dataclass
class Node:
    """One other machine. `about` is what it said of itself: host, address, hardware, code."""

    lines: Lines
    about: dict[str, Any]
    rank: int = 0
    lost: str | None = None
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"node {self.rank} ({self.about['host']}, {self.about['address']})"


class Nodes:
    """The run's side. `count` is the number of machines with this one."""

    def __init__(self, count: int, address: str, port: int, file: Path) -> None:
        self.count, self.address, self.file = count, address, file
        self.nodes: list[Node] = []
        self._was_complete = False
        self._engines = 0
        self._token = secrets.token_hex(16)
        interface_of(address)
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((address, port))
        except OSError as error:
            raise UserError(f"engine.master_port={port}: {address}:{port} cannot be used: {error}") from error
        self._listener.listen()
        self._publish()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _publish(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        scratch.touch(mode=0o600)
        scratch.write_text(json.dumps({"address": self.address, "port": self.port, "token": self._token}))
        os.replace(scratch, self.file)

    def gather(self, timeout_s: float) -> None:
        """Wait until all nodes are there. Raises NodeError; at once where one was lost during the run."""
        self.poll()
        lost = [node for node in self.nodes if node.lost]
        self.nodes = [node for node in self.nodes if not node.lost]
        deadline = time.monotonic() + (0.0 if self._was_complete else timeout_s)
        if len(self.nodes) < self.count - 1 and not self._was_complete:
            print(
                f"waiting for {self.count - 1 - len(self.nodes)} of {self.count} nodes: on each of them run "
                f"python -m {MODULE} {self.file}",
                file=sys.stderr,
                flush=True,
            )
        while len(self.nodes) < self.count - 1:
            left = max(0.0, deadline - time.monotonic())
            if select.select([self._listener], [], [], left)[0]:
                self._welcome(*self._listener.accept())
            elif left <= 0:
                if lost:
                    raise NodeError(f"{lost[0].name} was lost before: {lost[0].lost}")
                raise NodeError(
                    f"only {1 + len(self.nodes)} of {self.count} nodes came within {timeout_s:.0f} s; on each "
                    f"of the others run python -m {MODULE} {self.file}"
                )
        if not self._was_complete:
            for rank, node in enumerate(sorted(self.nodes, key=lambda node: str(node.about["host"])), 1):
                node.rank = rank
        else:  # one that came back takes the place of the lost one
            free = sorted(set(range(1, self.count)) - {node.rank for node in self.nodes})
            for node in self.nodes:
                node.rank = node.rank or free.pop(0)
        self.nodes.sort(key=lambda node: node.rank)
        self._was_complete = True

    def _welcome(self, connection: socket.socket, address: tuple[str, int]) -> None:
        connection.settimeout(INTRODUCTION_S)
        lines = Lines(connection)
        about: dict[str, Any] = {}
        with contextlib.suppress(EOFError):
            while not (messages := lines.read()):
                pass
            about = messages[0]
        if not hmac.compare_digest(str(about.pop("token", "")), self._token):
            connection.close()
            return
        connection.settimeout(ANSWER_S)
        keep_alive(connection)
        self.nodes.append(Node(lines, {"host": "?", **about, "address": address[0]}))

    def start(self, setup: str, port: int) -> str:
        """Every node starts its share of an engine; returns the engine's name for the other calls.

        Raises NodeError when one refuses or is lost; the shares that did start are ended then.
        """
        self._engines += 1
        engine = f"engine-{self._engines}"
        for node in self.nodes:
            self._send(
                node,
                {
                    "command": "start",
                    "engine": engine,
                    "setup": setup,
                    "nnodes": self.count,
                    "node_rank": node.rank,
                    "master_addr": self.address,
                    "master_port": port,
                },
            )
        try:
            self._await(engine)
        except NodeError:
            self.tell("stop", engine)
            raise
        return engine

    def tell(self, command: str, engine: str) -> None:
        """`park`, `resume` or `stop` an engine on every node that is still there; returns when it is done."""
        for node in self.nodes:
            self._send(node, {"command": command, "engine": engine})
        with contextlib.suppress(NodeError):
            self._await(engine)

    def trouble(self, engine: str, wait_s: float = 0.0) -> NodeError | None:
        """Why an engine cannot go on: a node was lost, or its part there ended. Waits so long for the news."""
        deadline = time.monotonic() + wait_s
        self.poll()
        while True:
            for node in self.nodes:
                if node.lost is not None:
                    return NodeError(f"{node.name} was lost: {node.lost}")
                if (ended := node.ended.get(engine)) is not None:
                    return NodeError(f"{node.name}: the engine's part there {ended['ended']}")
            if time.monotonic() >= deadline:
                return None
            self.poll(max(0.0, deadline - time.monotonic()))

    def logs(self, engine: str) -> dict[str, str]:
        """The ends of the logs of an engine's parts that have ended, by node."""
        return {n.name: n.ended[engine].get("log", "") for n in self.nodes if engine in n.ended}

    def connections(self) -> list[socket.socket]:
        """To be watched: `poll` takes what they bring."""
        return [node.lines.connection for node in self.nodes if node.lost is None]

    def poll(self, wait_s: float = 0.0) -> None:
        """Take in what nodes have sent, waiting so long for the first of it."""
        by_connection = {n.lines.connection: n for n in self.nodes if n.lost is None}
        if not by_connection:
            time.sleep(min(wait_s, 0.1))
            return
        for connection in select.select(list(by_connection), [], [], wait_s)[0]:
            node = by_connection[connection]
            try:
                for message in node.lines.read():
                    kind = node.ended if "ended" in message else node.answers
                    kind[message["engine"]] = message
            except EOFError as error:
                self._lose(node, str(error))

    def close(self) -> None:
        """Tell the nodes that the run is over."""
        for node in self.nodes:
            with contextlib.suppress(OSError):
                if node.lost is None:
                    node.lines.send({"command": "end"})
            node.lines.connection.close()
        self._listener.close()
        with contextlib.suppress(OSError, ValueError):
            if json.loads(self.file.read_text())["token"] == self._token:
                self.file.unlink()

    def _send(self, node: Node, message: dict[str, Any]) -> None:
        if node.lost is not None:
            return
        node.answers.pop(message["engine"], None)
        try:
            node.lines.send(message)
        except OSError as error:
            self._lose(node, str(error))

    def _await(self, engine: str) -> None:
        """Until every node has answered. Raises NodeError for one that is lost, silent or refuses."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            waiting = [n for n in self.nodes if n.lost is None and engine not in n.answers]
            if not waiting:
                break
            if time.monotonic() > deadline:
                self._lose(waiting[0], f"no answer within {ANSWER_S:.0f} s")
            self.poll(1.0)
        for node in self.nodes:
            if node.lost is not None:
                raise NodeError(f"{node.name} was lost: {node.lost}")
            if "refused" in node.answers[engine]:
                raise NodeError(f"{node.name} refused: {node.answers[engine]['refused']}")

    def _lose(self, node: Node, why: str) -> None:
        node.lost = why
        node.lines.connection.close()


_open: dict[Path, Nodes] = {}


def nodes_of(count: int, address: str | None, port: int | None, file: Path) -> Nodes:
    """The run's nodes; they stay connected from one engine to the next until the process ends."""
    if file not in _open:
        _open[file] = Nodes(count, address or own_address(), port or 0, file)
        atexit.register(_open[file].close)
    return _open[file]
