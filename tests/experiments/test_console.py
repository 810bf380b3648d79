"""What a run says while it works."""

from __future__ import annotations

import io

import pytest

from experiments import console


def test_time_left_counts_rounds_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([])
    monkeypatch.setattr(console.time, "perf_counter", lambda: next(clock))
    out = io.StringIO()
    shown = console.Console(out)
    shown.start(4, 0)
    for phase in ("start", "gate", "warm-up"):  # ask for no time: the clock has none
        shown.phase("base", phase)
    clock = iter([100.0])
    shown.phase("base", "round 1/2")
    shown.advance()
    clock = iter([110.0])
    shown.phase("tessa", "round 1/2")
    said = [line.partition("] ")[0] for line in out.getvalue().splitlines()]
    assert said == [*["[0/4, time left unknown"] * 4, "[1/4, about 30 s left"]
