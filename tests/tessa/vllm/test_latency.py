"""A latency added to collectives: every one waits once, and forward passes are marked."""

from __future__ import annotations

import pytest
import torch

from tessa.errors import UserError
from tessa.vllm import latency


class Communicator:
    """Collectives that note their name; `gather` is made of an all-gather."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append("all_reduce")
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.calls.append("all_gather")
        return torch.cat([x, x], dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        self.calls.append("reduce_scatter")
        return x

    def gather(self, x: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor:
        self.calls.append("gather")
        return self.all_gather(x, dim)


class Model(torch.nn.Module):
    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self.communicator = communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.communicator.all_reduce(self.communicator.all_reduce(x))


@pytest.fixture
def parts() -> tuple[latency.AddedLatency, Communicator, Model, list[float]]:
    communicator, waits = Communicator(), []
    model = Model(communicator)
    added = latency.AddedLatency(model, communicator, wait=lambda tensor, seconds: waits.append(seconds))
    return added, communicator, model, waits


def test_every_collective_waits_once_and_still_does_its_work(parts):
    added, communicator, _, waits = parts
    added.set(150)
    x = torch.ones(2, 3)
    assert communicator.all_reduce(x) is x
    assert communicator.all_gather(x, 0).shape == (4, 3)
    assert communicator.reduce_scatter(x) is x
    assert communicator.calls == ["all_reduce", "all_gather", "reduce_scatter"]
    assert waits == [pytest.approx(150e-6)] * 3
    assert added.counts()["collectives"] == 3


def test_a_collective_made_of_another_one_waits_once(parts):
    added, communicator, _, waits = parts
    added.set(10)
    communicator.gather(torch.ones(2, 2))
    assert communicator.calls == ["gather", "all_gather"]
    assert len(waits) == added.collectives == 1


def test_marks_hold_tokens_and_the_collectives_of_earlier_passes(parts):
    added, communicator, model, _ = parts
    added.set(0)
    for tokens in (7, 2, 2):
        model(torch.ones(tokens))
        communicator.gather(torch.ones(1, 1))
    counts = added.counts()
    assert counts["steps"] == 3
    assert [(tokens, before) for _, tokens, before, _ in counts["marks"]] == [(7, 0), (2, 3), (2, 6)]
    starts, inside = ([mark[i] for mark in counts["marks"]] for i in (0, 3))
    assert starts == sorted(starts)
    assert inside[0] == 0 < inside[1] < inside[2]
    added.set(5)
    assert added.counts() == {"steps": 0, "collectives": 0, "marks": []}


def test_the_wait_is_not_time_inside_a_collective():
    communicator = Communicator()
    clock = iter(range(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency.time, "perf_counter", lambda: next(clock))
        added = latency.AddedLatency(
            Model(communicator), communicator, wait=lambda tensor, seconds: [next(clock) for _ in range(9)]
        )
        communicator.all_gather(torch.ones(1, 1), 0)
    assert added.collective_s == 1


def test_a_failing_collective_does_not_silence_the_next(parts):
    added, communicator, _, waits = parts
    with pytest.raises(TypeError):
        communicator.all_reduce(torch.ones(1), 1, 2, 3)
    communicator.all_reduce(torch.ones(1))
    assert len(waits) == added.collectives == 2


class Clock:
    """Time that passes by sleeping, and by a microsecond with every look at the clock."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, []

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + 100e-6  # a thread wakes up late


@pytest.mark.parametrize("asked", [0.0, 50e-6, 2e-3])
def test_the_wait_lasts_as_long_as_asked_and_ends_busily(monkeypatch, asked):
    clock = Clock()
    monkeypatch.setattr(latency, "time", clock)
    latency.wait_for(torch.ones(1), asked)
    assert asked <= clock.now <= asked + 5e-6
    assert clock.slept == ([pytest.approx(asked - latency.BUSY_S)] if asked > latency.BUSY_S else [])


def test_captured_graphs_are_refused():
    with pytest.raises(UserError, match="enforce_eager"):
        latency.attach(torch.nn.Linear(1, 1), enforce_eager=False)
