"""What the engine's process makes of the workers' counts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.engine.child import COUNTED_REQUESTS, Server
from experiments.engine.setup import EngineSetup
from tessa.vllm.worker import StepCount, WorkerExtension

COUNTS = {
    "collectives_per_step",
    "all_gathers_per_step",
    "adapter_kernels_per_step",
    "adapter_gemms_per_step",
}


class Workers:
    """Two ranks that answer what a test says."""

    def __init__(self, steps: list[dict[str, Any]], reason: str | None = None) -> None:
        self.answers = {
            "tessa_adapter_bytes": [100, 120],
            "tessa_start_counting": [reason] * 2,
            "tessa_stop_counting": [steps] * 2,
        }

    async def collective_rpc(self, method: str) -> list[Any]:
        return self.answers[method]


def step(tokens: int, collectives: int) -> dict[str, Any]:
    return {**vars(StepCount(tokens, collectives, collectives * 8, collectives)), "adapter_gemms": 3}


def counters(monkeypatch: pytest.MonkeyPatch, workers: Workers, **changes: Any) -> dict[str, Any]:
    setup = {"device": "cpu", "engine_args": {"max_num_seqs": 16}, **changes}
    server = Server(EngineSetup("tessa", "model", (), **setup))
    server.engine = workers

    async def decode(tokens: int) -> None:
        return None

    monkeypatch.setattr(server, "_decode", decode)
    return asyncio.run(server.counters())


def test_a_decode_step_is_counted_and_no_prefill(monkeypatch):
    workers = Workers([step(96, 1), step(COUNTED_REQUESTS, 5), step(4, 2)])
    found = counters(monkeypatch, workers)
    assert found["collectives_per_step"] == 5
    assert found["counted_tokens_per_step"] == COUNTED_REQUESTS
    assert found["adapter_gemms_per_step"] == 3
    assert found["adapter_bytes_per_rank"] == 120
    assert "not_counted" not in found
    # An engine of four seats decodes four requests at a time.
    found = counters(monkeypatch, workers, engine_args={"max_num_seqs": 4})
    assert (found["collectives_per_step"], found["counted_tokens_per_step"]) == (2, 4)


def test_a_latency_is_checked_on_steps_of_as_many_tokens_as_the_engine_takes(monkeypatch):
    class Waiting:
        added_s = 0.0

        async def collective_rpc(self, method: str, args: tuple[float, ...] = ()) -> list[Any]:
            if method == "tessa_add_latency":
                self.added_s = args[0] * 1e-6
            return [{"marks": [[i * (0.02 + 6 * self.added_s), 4, 6 * i, 0.001 * i] for i in range(12)]}]

    async def decode(tokens: int) -> None:
        return None

    server = Server(EngineSetup("tessa", "model", (), device="cpu", engine_args={"max_num_seqs": 4}))
    server.engine = Waiting()
    monkeypatch.setattr(server, "_decode", decode)
    found = asyncio.run(server.add_latency(500.0, check=True))
    assert found["step_collectives"] == 6
    assert found["latency_slope"] == pytest.approx(6)


def test_without_a_decode_step_there_are_no_counts(monkeypatch):
    found = counters(monkeypatch, Workers([step(96, 0)]))
    assert not COUNTS & set(found)
    assert "none of 1 steps" in found["not_counted"]
    assert counters(monkeypatch, Workers([]))["adapter_bytes_per_rank"] == 120


def test_captured_steps_have_no_counts(monkeypatch):
    found = counters(monkeypatch, Workers([step(COUNTED_REQUESTS, 0)], "captured"))
    assert found == {"adapter_bytes_per_rank": 120, "not_counted": "captured"}


def test_a_gpu_counts_collectives_alone(monkeypatch):
    found = counters(monkeypatch, Workers([step(COUNTED_REQUESTS, 5)]), device="cuda")
    assert COUNTS & set(found) == {"collectives_per_step", "all_gathers_per_step"}
    assert "fused ops" in found["not_counted"]


def test_a_worker_counts_eager_steps_alone():
    config = pytest.importorskip("vllm.config.compilation")
    mode, graphs = config.CompilationMode, config.CUDAGraphMode
    for compiled, captured in (
        (mode.VLLM_COMPILE, graphs.FULL_AND_PIECEWISE),
        (mode.NONE, graphs.FULL),
        (mode.DYNAMO_TRACE_ONCE, graphs.NONE),
    ):
        worker = WorkerExtension()
        compilation = SimpleNamespace(mode=compiled, cudagraph_mode=captured)
        worker.vllm_config = SimpleNamespace(compilation_config=compilation)
        assert "enforce_eager=true" in worker.tessa_start_counting()
        assert not hasattr(worker, "tessa_counting")
