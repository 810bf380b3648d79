"""Slope of a decode step against the latency added to its collectives."""

from __future__ import annotations

import pytest

from experiments.engine.latency import slope_of_steps, step_times


def marks(step_s: float, steps: int = 12, collectives: int = 6, tokens: int = 8) -> list[list[float]]:
    """A prefill pass, then decode steps of equal length."""
    found, now, count = [[0.0, 128, 0]], 0.5, collectives
    for _ in range(steps):
        found.append([now, tokens, count])
        now, count = now + step_s, count + collectives
    return found


def test_prefill_and_the_last_step_are_left_out():
    seconds, collectives = step_times(marks(0.01, steps=4), 8)
    assert seconds == pytest.approx([0.01] * 3)
    assert collectives == [6, 6, 6]
    assert step_times(marks(0.01), 7) == ([], [])


def test_the_slope_is_the_number_of_waits():
    seen = {0.0: [{"marks": marks(0.020)}], 500.0: [{"marks": marks(0.020 + 6 * 500e-6)}]}
    found = slope_of_steps(seen, 8)
    assert found["step_collectives"] == 6
    assert found["latency_slope"] == pytest.approx(6)
    assert (found["step_s_plain"], found["step_s_added"]) == (pytest.approx(0.020), pytest.approx(0.023))


def test_steps_held_up_by_other_work_do_not_count():
    slow = marks(0.023, steps=8)
    slow[-1][0] += 0.2
    seen = {0.0: [{"marks": marks(0.020)}], 500.0: [{"marks": slow}, {"marks": marks(0.05, steps=3)}]}
    assert slope_of_steps(seen, 8)["latency_slope"] == pytest.approx(6)


def test_without_an_added_latency_there_is_no_slope():
    found = slope_of_steps({0.0: [{"marks": marks(0.02)}]}, 8)
    assert found["latency_slope"] is None
    assert found["step_collectives"] == 6
    assert slope_of_steps({0.0: [{"marks": []}], 9.0: [{"marks": []}]}, 8)["latency_slope"] is None
