"""The gates: a run that did not go as it should has a status and a reason, and no number."""

from __future__ import annotations

import dataclasses
import math

import pytest
from fake_engine import Step, make, play, steady

from experiments.measure import metrics
from experiments.measure.arrays import MetricOptions
from experiments.measure.load import LoadOptions
from experiments.measure.summary import DIAGNOSTICS, contradiction, summarise

pytestmark = pytest.mark.fake


def run(script, options=None, metric_options=None, **workload):
    options = options or LoadOptions(base_only=True)
    result, _, _ = play(make(**workload), script, options)
    return summarise(
        result.records,
        mode=result.mode,
        load_status=result.status,
        load_reason=result.reason,
        options=metric_options,
    )


def assert_no_number(row):
    for name in metrics.columns():
        assert name in DIAGNOSTICS or math.isnan(row[name]), name
    assert math.isnan(row["duration_s"])


def test_a_good_run_is_complete_and_exact():
    row = run(steady(0.2, 0.1), metric_options=MetricOptions(slo_ttft_s=0.3))
    assert (row["status"], row["status_reason"]) == ("complete", None)
    assert row["requests_total"] == row["requests_ok"] == 6
    assert row["duration_s"] == pytest.approx(3.5)
    assert row["requests_per_s"] == pytest.approx(6 / 3.5)
    assert row["output_tokens_per_s"] == pytest.approx(24 / 3.5)
    assert row["total_tokens_per_s"] == pytest.approx(54 / 3.5)
    assert row["ttft_s_p99"] == pytest.approx(0.2)
    assert row["tpot_s_mean"] == pytest.approx(0.1)
    assert row["e2e_s_mean"] == pytest.approx(0.5)
    assert row["slo_attainment"] == 1.0
    assert row["scheduled_rate"] == pytest.approx(2.0)
    assert row["sent_rate"] == pytest.approx(2.0)
    assert row["mean_in_flight"] == pytest.approx(6 * 0.5 / 3.5)
    assert set(metrics.columns()) <= set(row)


def test_no_records_no_number():
    row = summarise([], mode="open_loop")
    assert (row["status"], row["status_reason"]) == ("invalid", "no request was recorded")
    assert_no_number(row)
    assert set(metrics.columns()) <= set(row)


BROKEN = {
    "error": ([Step(0.1, 1), Step(0.1, 0, "raise")], "failed", "first error: ConnectionError"),
    "early end": ([Step(0.1, 3), Step(0.1, 0, "end")], "failed", "ended after 3 of 4 tokens"),
    "hang": ([Step(0.1, 1), Step(0.0, 0, "hang")], "timeout", "first timeout: no end within"),
    "short": ([Step(0.1, 3, "finish")], "invalid", "3 tokens instead of 4"),
    "long": ([Step(0.1, 5, "finish")], "invalid", "5 tokens instead of 4"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("everyone", [True, False])
def test_a_broken_request_spoils_the_run(case, everyone):
    steps, status, reason = BROKEN[case]
    good = steady(0.2, 0.1)
    options = LoadOptions(base_only=True, request_timeout_s=3.0, max_consecutive_errors=None)
    row = run(lambda r: steps if everyone or r.request_id == 2 else good(r), options)
    assert row["status"] == status
    assert reason in row["status_reason"]
    assert row["requests_total"] == 6
    assert row["requests_ok"] == (0 if everyone else 5)
    assert_no_number(row)


def test_a_stated_share_of_failures_can_be_allowed():
    good, bad = steady(0.2, 0.1), [Step(0.1, 0, "raise")]
    script = lambda r: bad if r.request_id == 2 else good(r)  # noqa: E731
    row = run(script, metric_options=MetricOptions(max_failed_fraction=0.2, slo_ttft_s=1.0))
    assert row["status"] == "complete"
    assert row["requests_error"] == 1
    assert row["requests_per_s"] == pytest.approx(5 / 3.5)
    assert row["slo_attainment"] == pytest.approx(5 / 6)


def test_allowing_failures_does_not_let_a_run_without_success_through():
    row = run(
        lambda r: [Step(0.1, 0, "raise")],
        LoadOptions(base_only=True, max_consecutive_errors=None),
        MetricOptions(max_failed_fraction=0.99),
    )
    assert row["status"] == "failed"
    assert_no_number(row)


def test_stalled_load_is_a_timeout():
    options = LoadOptions(base_only=True, stall_timeout_s=5.0)
    row = run(lambda r: [Step(0.0, 0, "hang")], options)
    assert row["status"] == "timeout"
    assert "load stalled: no token from any" in row["status_reason"]
    assert_no_number(row)


def test_late_generator_is_invalid_and_says_how_late():
    block = [Step(0.4, 0, "block")]
    good = steady(0.2, 0.1)
    row = run(
        lambda r: block + good(r) if r.request_id % 2 == 0 else good(r),
        n=20,
        arrivals={"kind": "constant", "rate": 10.0},
    )
    assert row["status"] == "invalid"
    assert "schedule lag p99" in row["status_reason"]
    assert row["schedule_lag_s_p99"] > 0.05
    assert_no_number(row)


def test_wrong_sending_rate_is_invalid():
    result, _, _ = play(make(n=20), steady(0.2, 0.1), LoadOptions(base_only=True))
    stretched = [dataclasses.replace(r, sent_s=r.sent_s + 0.002 * i) for i, r in enumerate(result.records)]
    options = MetricOptions(rate_tolerance=0.001)
    assert summarise(result.records, mode="open_loop", options=options)["status"] == "complete"
    row = summarise(stretched, mode="open_loop", options=options)
    assert row["status"] == "invalid"
    assert "requests/s, scheduled were" in row["status_reason"]
    assert summarise(stretched, mode="closed_loop", options=options)["status"] == "complete"


@pytest.mark.parametrize(
    "change",
    [
        {"sent_s": None},
        {"first_token_s": None},
        {"end_s": None},
        {"end_s": 0.0},
        {"sent_s": 99.0},
        {"scheduled_s": 99.0},
        {"output_tokens": 3},
        {"token_times_s": [0.7, 0.9, 0.8, 1.0]},
        {"token_times_s": [0.7, 0.8, 0.9]},
    ],
)
def test_records_that_contradict_themselves_are_invalid(change):
    result, _, _ = play(make(n=1), steady(0.2, 0.1), LoadOptions(base_only=True))
    good = result.records[0]
    assert contradiction(good) is None
    bad = dataclasses.replace(good, **change)
    assert contradiction(bad) is not None
    row = summarise([bad], mode="closed_loop")
    assert row["status"] == "invalid"
    assert_no_number(row)


def test_a_run_in_no_time_is_invalid():
    row = run(lambda r: [Step(0.0, 4, "finish")], arrivals={"kind": "all_at_once"})
    assert row["status"] == "invalid"
    assert_no_number(row)
