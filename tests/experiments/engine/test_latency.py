"""Slope of a decode step against the latency added to its collectives."""

from __future__ import annotations

import pytest

from experiments.engine.latency import decode_steps, slope_of_steps

INSIDE_S = 0.004  # of a step, in its collectives


def marks(
    step_s: float, steps: int = 12, collectives: int = 6, tokens: int = 8, inside_s: float = INSIDE_S
) -> list[list[float]]:
    """A prefill pass, then decode steps of equal length."""
    found, now, count, inside = [[0.0, 128, 0, 0.0]], 0.5, collectives, 0.1
    for _ in range(steps):
        found.append([now, tokens, count, inside])
        now, count, inside = now + step_s, count + collectives, inside + inside_s
    return found


def test_prefill_and_the_last_step_are_left_out():
    found = decode_steps(marks(0.01, steps=4), 8)
    assert [s.seconds for s in found] == pytest.approx([0.01] * 3)
    assert [s.collectives for s in found] == [6, 6, 6]
    assert [s.collective_s for s in found] == pytest.approx([INSIDE_S] * 3)
    assert decode_steps(marks(0.01), 7) == []


def test_the_slope_is_the_number_of_waits():
    seen = {0.0: [{"marks": marks(0.020)}], 500.0: [{"marks": marks(0.020 + 6 * 500e-6)}]}
    found = slope_of_steps(seen, 8)
    assert found["step_collectives"] == 6
    assert found["latency_slope"] == pytest.approx(6)
    assert (found["step_s_plain"], found["step_s_added"]) == (pytest.approx(0.020), pytest.approx(0.023))


def test_what_collectives_take_longer_after_a_wait_is_told_apart():
    seen = {
        0.0: [{"marks": marks(0.020)}],
        500.0: [{"marks": marks(0.020 + 6 * 500e-6 + 0.001, inside_s=INSIDE_S + 0.001)}],
    }
    found = slope_of_steps(seen, 8)
    assert found["latency_slope"] == pytest.approx(8)
    assert found["step_rest_s_plain"] == pytest.approx(0.016)
    assert found["step_rest_s_added"] == pytest.approx(0.019)


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
