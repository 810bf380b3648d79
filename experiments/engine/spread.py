"""An engine over several machines: rank 0 in a child of this process, the others through `experiments.engine.nodes`."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.engine.nodes import NodeError, Nodes, meeting_file, network_env, nodes_of
from experiments.engine.parent import EngineError, EngineProcess
from experiments.engine.setup import EngineSetup

NEWS_S = 10.0
"""So long after a failure a node's end is still taken for its cause: the driving ranks often notice first."""


class SpreadEngine(EngineProcess):
    """Starts, parks and stops all machines' parts together; a lost machine ends the engine with a reason."""

    def __init__(self, setup: EngineSetup, log_path: Path, nodes: Nodes) -> None:
        super().__init__(setup, log_path)
        self._nodes = nodes
        self._name: str | None = None

    def start(self, timeout_s: float) -> None:
        try:
            self._nodes.gather(timeout_s)
            arguments = {**self.setup.engine_args, "distributed_executor_backend": "mp"}
            port = _free_port(self._nodes.address)
            self._name = self._nodes.start(
                replace(self.setup, engine_args=arguments, gate=None).to_json(), port
            )
        except NodeError as error:
            raise EngineError("failed", str(error), self.log_path) from error
        arguments |= {
            "nnodes": self._nodes.count,
            "node_rank": 0,
            "master_addr": self._nodes.address,
            "master_port": port,
        }
        self.setup = replace(
            self.setup, engine_args=arguments, env={**self.setup.env, **network_env(self._nodes.address)}
        )
        super().start(timeout_s)

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """What the other machines say of themselves, by rank from 1."""
        return [{"rank": node.rank, **node.about} for node in self._nodes.nodes]

    def park(self) -> None:
        super().park()
        self._tell("park")

    def resume(self) -> None:
        self._tell("resume")
        super().resume()

    def stop(self) -> None:
        super().stop()
        self._tell("stop")
        self._name = None

    def _tell(self, command: str) -> None:
        if self._name is not None:
            self._nodes.tell(command, self._name)

    def _watched(self) -> list[socket.socket]:
        return self._nodes.connections()

    def _look(self, command: str) -> None:
        trouble = self._nodes.trouble(self._name or "")
        if trouble is not None:
            raise EngineError("failed", f"{command}: {trouble}", self.log_path)

    def _call(self, command: str, **arguments: Any) -> Any:
        try:
            return super()._call(command, **arguments)
        except EngineError as error:
            if self._name is None or command == "stop":
                raise
            trouble = self._nodes.trouble(self._name, NEWS_S if error.kind == "failed" else 0.0)
            if trouble is None:
                raise
            self._keep_logs(self._nodes.logs(self._name))
            raise EngineError("failed", f"{command}: {trouble}", self.log_path, error.traceback) from error

    def _keep_logs(self, logs: Mapping[str, str]) -> None:
        with self.log_path.open("a") as file:
            for node, text in logs.items():
                file.write(f"\n[the end of the log of {node}]\n{text}\n")


def spread(setup: EngineSetup, log_path: Path, cache: Path, settings: Any) -> SpreadEngine:
    """The engine for `settings` (an `experiments.config.EngineConfig`)."""
    nodes = nodes_of(int(settings.nnodes), settings.master_addr, settings.master_port, meeting_file(cache))
    return SpreadEngine(setup, log_path, nodes)


def _free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
