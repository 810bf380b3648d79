"""Punica's runner without Punica: its scheduler, its batches, and the records that it writes."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from experiments.measure.types import RequestRecord, records_from_frame, records_to_frame
from experiments.workload import build


def load(name: str) -> ModuleType:
    """A file of baselines/upstream as its environment runs it: on its own, not as part of a package."""
    path = Path(__file__).resolve().parents[3] / "baselines" / "upstream" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


runner: Any = load("punica_runner")


class Clock:
    """Virtual time: a step takes ``step_s``, a sleep what it is asked for."""

    def __init__(self, step_s: float = 0.25) -> None:
        self.now, self.step_s = 100.0, step_s
        self.sleeps: list[float] = []
        self.batches: list[tuple[int | None, list[int]]] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds

    def step(self, new: Any, running: Any) -> list[tuple[int, float]]:
        self.now += self.step_s
        self.batches.append((None if new is None else new.index, [s.index for s in running]))
        batch = ([] if new is None else [new]) + list(running)
        return [(token(s), -1.0) for s in batch]


def token(sequence: Any) -> int:
    """Depends on the sequence's adapter and on everything before, so a mix-up shows."""
    return (
        sum(sequence.prompt) + 3 * sum(sequence.tokens) + 7 * sequence.adapter + len(sequence.tokens)
    ) % 97


def served(*rows: tuple[int, int, float]) -> list[Any]:
    """(tokens wanted, adapter, arrival) of each."""
    return [runner.Served(i, [i + 1, 2], wanted, adapter, at) for i, (wanted, adapter, at) in enumerate(rows)]


def play(sequences: list[Any], mode: str, **more: Any) -> Clock:
    clock = Clock(more.pop("step_s", 0.25))
    settings = {"concurrency": None, "max_batch": 8, **more}
    batcher = runner.Batcher(sequences, mode, step=clock.step, clock=clock, sleep=clock.sleep, **settings)
    clock.result = batcher.run()  # type: ignore[attr-defined]
    return clock


def test_all_at_once_admits_one_request_a_step_and_keeps_adapters_together() -> None:
    sequences = served((4, 1, 0.0), (4, 0, 0.0), (4, 1, 0.0))
    clock = play(sequences, "all_at_once")
    # Request 1 joins 0; then 2 joins, and stands beside 0, whose adapter it has.
    assert clock.batches[:4] == [(0, []), (1, [0]), (2, [1, 0]), (None, [1, 2, 0])]
    assert [s.times for s in sequences] == [
        [0.25, 0.5, 0.75, 1.0],
        [0.5, 0.75, 1.0, 1.25],
        [0.75, 1.0, 1.25, 1.5],
    ]
    assert clock.result == (1.5, None)  # type: ignore[attr-defined]
    for s in sequences:
        alone = runner.Served(s.index, s.prompt, s.wanted, s.adapter)
        play([alone], "all_at_once")
        assert s.tokens == alone.tokens


def test_a_full_batch_makes_the_next_request_wait() -> None:
    sequences = served((2, 0, 0.0), (2, 0, 0.0), (2, 0, 0.0))
    clock = play(sequences, "all_at_once", max_batch=1)
    assert clock.batches == [(0, []), (None, [0]), (1, []), (None, [1]), (2, []), (None, [2])]


def test_open_loop_waits_for_arrivals_and_never_shifts_them() -> None:
    sequences = served((1, 0, 1.0), (1, 0, 1.1), (1, 0, 5.0))
    clock = play(sequences, "open_loop")
    assert clock.sleeps == pytest.approx([1.0, 3.5])
    assert [s.scheduled_s for s in sequences] == [1.0, 1.1, 5.0]
    assert [s.times[0] for s in sequences] == pytest.approx([1.25, 1.5, 5.25])


def test_closed_loop_keeps_so_many_in_flight() -> None:
    sequences = served(*[(2, 0, 0.0)] * 5)
    clock = play(sequences, "closed_loop", concurrency=2)
    assert max(len(running) + (new is not None) for new, running in clock.batches) == 2
    assert [s.scheduled_s for s in sequences] == pytest.approx([0.0, 0.0, 0.5, 0.75, 1.0])
    assert all(s.finished for s in sequences)


def test_a_step_that_takes_too_long_gives_the_load_up() -> None:
    sequences = served((3, 0, 0.0), (3, 0, 0.0))
    clock = play(sequences, "all_at_once", step_s=2.0, stall_s=1.0)
    assert clock.result == (2.0, "one step took 2.0 s")  # type: ignore[attr-defined]
    columns = runner.record_columns(sequences, None)
    assert columns["status"] == ["aborted", "aborted"]
    assert columns["end_s"] == [None, None]


def test_segments_join_neighbours_only() -> None:
    assert runner.segments([(2, 7), (0, 1), (0, 1), (2, 1)]) == ([2, 0, 2], [7, 2, 1])
    assert runner.segments([(1, 5), (1, 1)]) == ([1], [6])


def test_records_are_those_of_the_harness(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sequences = served((2, 3, 0.5), (1, runner.BASE, 1.0), (2, 0, 1.0))
    play(sequences, "open_loop")
    pq.write_table(pa.table(runner.record_columns(sequences, 0.6)), tmp_path / "r.parquet")
    own = records_from_frame(pd.read_parquet(tmp_path / "r.parquet"))
    assert own[0] == RequestRecord(0, 3, 2, 2, 0.5, 0.5, 0.75, 1.0, [0.75, 1.0], 2, "ok", None)
    assert own[1] == RequestRecord(1, None, 2, 1, 1.0, 1.0, 1.25, 1.25, [1.25], 1, "ok", None)
    assert (own[2].status, own[2].end_s, own[2].error) == ("timeout", None, "no end within 0.6 s")
    assert tuple(records_to_frame(own).columns) == runner.RECORD_COLUMNS


@pytest.mark.parametrize(
    "arrivals", [{"kind": "poisson", "rate": 5.0}, {"kind": "closed_loop", "concurrency": 3}]
)
def test_the_workload_file_is_read_as_it_is(tmp_path: Path, arrivals: dict[str, Any]) -> None:
    work = build(
        {
            "num_requests": 20,
            "num_adapters": 3,
            "arrivals": arrivals,
            "prompt_tokens": {"kind": "uniform", "low": 2, "high": 9},
            "output_tokens": {"kind": "uniform", "low": 1, "high": 5},
            "popularity": {"kind": "uniform"},
            "base_fraction": 0.3,
        },
        vocab_size=400,
    )
    sequences, mode, concurrency = runner.read_workload(str(work.save(tmp_path)))
    assert {"mode": mode, "concurrency": concurrency} == work.load_mode
    for s, r in zip(sequences, work.requests, strict=True):
        assert tuple(s.prompt) == r.prompt_token_ids
        assert (s.index, s.wanted, s.scheduled_s) == (r.request_id, r.output_tokens, r.arrival_s)
        assert s.adapter == (runner.BASE if r.adapter is None else r.adapter)


def test_factors_are_stacked_by_layer_for_all_seven_projections() -> None:
    tensors = {
        f"base_model.model.model.layers.{layer}.{block}.{name}_proj.lora_{factor}.weight": f"{name}.{factor}.{layer}"
        for layer in (1, 0)
        for block, names in (("self_attn", "q k v o"), ("mlp", "gate up down"))
        for name in names.split()
        for factor in "AB"
    }
    stacked = runner.stack_factors(tensors, 2)
    assert len(stacked) == 14
    assert stacked["gate.B"] == ["gate.B.0", "gate.B.1"]
    del tensors["base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"]
    with pytest.raises(KeyError):
        runner.stack_factors(tensors, 2)


def test_the_protocol_answers_errors_as_data_and_ends() -> None:
    server = runner.Server(
        {"engine_args": {"max_batch": 2}}, SimpleNamespace(step=Clock().step, release=print)
    )
    answers = io.StringIO()
    commands = [
        {"command": "counters"},
        {"command": "score", "arguments": {"requests": [{"prompt": [1], "adapter": None}], "new_tokens": 3}},
        {"command": "run", "arguments": {"workload": "/no/such.parquet", "options": {}, "records": "x"}},
        {"command": "_serve"},
        {"command": "stop"},
        {"command": "counters"},
    ]
    runner.serve(server, [json.dumps(c) for c in commands], answers)
    lines = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert [line["ok"] for line in lines] == [True, True, False, False]
    assert len(lines[1]["value"][0]["tokens"]) == 3
    assert lines[2]["error"] == "FileNotFoundError"
    assert "unknown command _serve" in lines[3]["message"]


# The forward pass, with Punica's classes replaced by ones that keep what they are given


class Weight:
    def __init__(self, adapter: int) -> None:
        self.adapter = adapter


def fake_model(torch: Any) -> Any:
    """A `PunicaModel` whose logits single out a token that depends on each row's own history and adapter."""
    pool: dict[str, int] = {"caches": 0}

    class KvCache:
        def __init__(self, owner: Any, length: int) -> None:
            owner["caches"] += 1
            self.owner, self.length, self.history, self.filled = owner, length, 0, 0

        def acquire_one(self) -> None:
            self.length += 1

        def release(self) -> None:
            self.owner["caches"] -= 1

    def forward(input_ids: Any, lengths: Any, prefill: Any, decode: Any, lora: Any) -> tuple[Any, None]:
        weights, runs = lora
        rows = [w.adapter for w, n in zip(weights, runs, strict=True) for _ in range(n)]
        prefills, decodes = lengths
        assert len(rows) == len(input_ids) == sum(prefills) + decodes
        logits = torch.zeros(len(rows), 97)
        position = 0
        for cache, length in zip(prefill or [], prefills, strict=True):
            cache.history, cache.filled = int(input_ids[:length].sum()), length
            position += length
            logits[position - 1, (cache.history + 7 * rows[position - 1]) % 97] = 5.0
        for cache in decode or []:
            cache.history, cache.filled = 3 * cache.history + int(input_ids[position]), cache.filled + 1
            assert cache.length == cache.filled, "a place for the new token is reserved before the step"
            logits[position, (cache.history + 7 * rows[position] + cache.length) % 97] = 5.0
            position += 1
        return logits, None

    model = object.__new__(runner.PunicaModel)
    model.torch, model.device, model.pool, model.model = torch, "cpu", pool, forward
    model.adapters = {i: Weight(i) for i in (-1, 0, 1, 2)}
    model.punica = SimpleNamespace(
        KvCache=KvCache,
        BatchedKvCache=list,
        BatchLenInfo=lambda prefills, decode, device: (prefills, decode),
        BatchedLlamaLoraWeight=lambda weights, lens: (weights, lens),
    )
    return model


def test_every_request_gets_its_own_adapter_in_prefill_and_decode() -> None:
    torch = pytest.importorskip("torch")
    adapters = [1, 0, runner.BASE, 1, 2, 0, 1]

    def run(which: list[int]) -> dict[int, list[int]]:
        model = fake_model(torch)
        sequences = [runner.Served(i, list(range(i, i + 3 + i % 3)), 3 + i % 4, adapters[i]) for i in which]
        runner.Batcher(sequences, "all_at_once", None, 4, model.step, model.release).run()
        assert model.pool["caches"] == 0, "every cache is given back"
        assert all(len(s.logprobs) == s.wanted and max(s.logprobs) < 0 for s in sequences)
        return {s.index: s.tokens for s in sequences}

    together = run(list(range(7)))
    for i in range(7):
        assert together[i] == run([i])[i], f"request {i} differs in a batch"
    assert len({tuple(tokens) for tokens in together.values()}) == 7
