"""A scripted engine, and runs composed from the shipped configs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from experiments import config as schema
from experiments import provenance
from experiments.measure.types import RequestRecord
from experiments.workload.types import Workload

CONF = Path(__file__).resolve().parents[2] / "conf"
SPEEDS = {"base": 100.0, "plain_lora": 80.0, "punica": 75.0, "slora": 50.0, "tessa": 90.0}


class ScriptedError(RuntimeError):
    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


class Fleet:
    """Makes scripted engines and keeps the log of everything that was asked of them.

    script[(backend, step)] is called with the engine before the step, and may raise; steps are start, gate,
    warmup, run, park, resume, stop. gates[backend] replaces a gate's answer.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.alive: set[str] = set()
        self.script: dict[tuple[str, str], Callable[[FakeEngine], Any]] = {}
        self.gates: dict[str, dict[str, Any]] = {}
        self.paths: dict[str, set[str]] = {}
        self.added: dict[str, float] = {}
        self.speeds = dict(SPEEDS)

    def __call__(self, group: Any, log: Path) -> FakeEngine:
        return FakeEngine(self, group.backend, log)

    def count(self, backend: str, step: str) -> int:
        return self.calls.count((backend, step))


class FakeEngine:
    """Every request runs alone, one token each 1 / speed seconds, so all metrics are known exactly."""

    def __init__(self, fleet: Fleet, backend: str, log: Path) -> None:
        self.fleet, self.backend, self.log = fleet, backend, log
        self.runs = 0
        self.parked = False

    def _do(self, step: str) -> None:
        self.fleet.calls.append((self.backend, step))
        if step in ("gate", "warmup", "run"):
            assert self.backend in self.fleet.alive
            assert not self.parked, f"{step} on a parked engine"
        action = self.fleet.script.get((self.backend, step))
        if action is not None:
            action(self)

    def start(self, timeout_s: float) -> None:
        self.log.write_text(f"starting {self.backend}\nready\n")
        self.fleet.alive.add(self.backend)
        self._do("start")

    def gate(self, options: dict[str, Any]) -> dict[str, Any]:
        self._do("gate")
        answer = {"passed": True, "max_abs_error": 1e-6, "detail": "equal"}
        return self.fleet.gates.get(self.backend, answer)

    def warmup(self, workload_path: Path) -> None:
        Workload.load(workload_path)
        self._do("warmup")

    def run(self, workload_path: Path, options: dict[str, Any]) -> dict[str, Any]:
        self.runs += 1
        self._do("run")
        self.fleet.paths.setdefault(self.backend, set()).add(str(workload_path))
        step, now, rows = 1.0 / self.fleet.speeds[self.backend], 0.0, []
        step += 2.0 * self.fleet.added.get(self.backend, 0.0) * 1e-6
        for request in Workload.load(workload_path).requests:
            times = [now + step * (i + 1) for i in range(request.output_tokens)]
            now = times[-1]
            rows.append(
                RequestRecord(
                    request_id=request.request_id,
                    adapter=request.adapter,
                    prompt_tokens=len(request.prompt_token_ids),
                    requested_output_tokens=request.output_tokens,
                    scheduled_s=request.arrival_s,
                    sent_s=request.arrival_s,
                    first_token_s=times[0],
                    end_s=now,
                    token_times_s=times,
                    output_tokens=request.output_tokens,
                    status="ok",
                )
            )
        return {"records": rows, "wall_s": now, "counters": {"collectives_per_step": 2.0}}

    def add_latency(self, microseconds: float) -> None:
        assert not self.parked
        self.fleet.added[self.backend] = microseconds
        self._do(f"add {microseconds:g}us")

    def counters(self) -> dict[str, Any]:
        return {}

    def park(self) -> None:
        self.parked = True
        self._do("park")

    def resume(self) -> None:
        self.parked = False
        self._do("resume")

    def stop(self) -> None:
        self._do("stop")
        self.fleet.alive.discard(self.backend)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture(scope="session")
def scripted_error() -> type[ScriptedError]:
    return ScriptedError


@pytest.fixture
def composed(tmp_path: Path) -> Callable[..., DictConfig]:
    """Composes the shipped configs as run.py does; results and cache lie in a temporary folder."""
    schema.register()

    def make(*overrides: str) -> DictConfig:
        with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            return compose(
                "config",
                overrides=[
                    f"paths.results={tmp_path}/results",
                    f"paths.cache={tmp_path}/cache",
                    *overrides,
                ],
            )

    return make


@pytest.fixture
def tiny_run(composed: Callable[..., DictConfig]) -> Callable[..., DictConfig]:
    """tp_scaling at its smallest."""
    return lambda *more: composed("experiment=tp_scaling", "model=tiny", "measure=smoke", *more)


@pytest.fixture(autouse=True)
def room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted engines need no memory: what is free on this machine must not change how a run interleaves."""
    monkeypatch.setattr("experiments.estimate.side_by_side", lambda groups: None)


@pytest.fixture(autouse=True)
def own_submit_state() -> Iterator[None]:
    """A run notes the code's state in the environment for later jobs; one test's note must not reach the next."""
    names = (provenance.SUBMIT_SHA, provenance.SUBMIT_DIRTY)
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
