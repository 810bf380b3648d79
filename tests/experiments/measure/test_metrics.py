"""Metrics of records whose times are known, computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fake_engine import make, play, steady
from hypothesis import given
from hypothesis import strategies as st

from experiments.measure import metrics
from experiments.measure.arrays import MetricOptions, RunArrays
from experiments.measure.types import RequestRecord
from tessa.errors import UserError


def record(i, scheduled, times, *, adapter=None, prompt=10, sent=None, status="ok", end=None):
    ok = status == "ok"
    return RequestRecord(
        request_id=i,
        adapter=adapter,
        prompt_tokens=prompt,
        requested_output_tokens=len(times),
        scheduled_s=scheduled,
        sent_s=scheduled if sent is None else sent,
        first_token_s=times[0] if times else None,
        end_s=(times[-1] if end is None else end) if ok else None,
        token_times_s=list(times),
        output_tokens=len(times),
        status=status,
    )


def values(records, **options):
    return metrics.compute(RunArrays(records, MetricOptions(**options)))


TWO = [
    record(0, 1.0, [2.0, 2.5, 3.5], adapter=0, sent=1.25),
    record(1, 2.0, [2.5], adapter=1, prompt=30, end=4.0),
]


def test_throughputs_count_from_the_start_of_the_load_to_the_last_end():
    v = values(TWO)
    assert v["requests_per_s"] == 2 / 4
    assert v["output_tokens_per_s"] == 4 / 4
    assert v["total_tokens_per_s"] == 44 / 4


def test_latencies_count_from_the_schedule():
    v = values(TWO)
    assert v["ttft_s_mean"] == (1.0 + 0.5) / 2
    assert v["e2e_s_mean"] == (2.5 + 2.0) / 2
    assert v["e2e_s_p50"] == 2.25
    assert v["schedule_lag_s_mean"] == 0.125


def test_tpot_needs_two_tokens_and_itl_pools_all_gaps():
    v = values(TWO)
    assert v["tpot_s_mean"] == v["tpot_s_p99"] == 0.75
    assert v["itl_s_mean"] == 0.75
    assert v["itl_s_p50"] == 0.75
    bundled = values([record(0, 0.0, [1.0, 1.0, 1.0, 2.0])])
    assert bundled["itl_s_mean"] == pytest.approx(1 / 3)
    assert bundled["itl_s_p50"] == 0.0


def test_percentiles_are_numpys_linear_ones():
    lag = [record(i, 0.0, [float(i + 1)]) for i in range(10)]
    assert values(lag)["ttft_s_p90"] == pytest.approx(9.1)
    assert values(lag)["ttft_s_p95"] == pytest.approx(9.55)


def test_steady_window_leaves_ramp_and_drain_out():
    # One token a second at 1..10 s, then a lonely straggler at 100 s.
    r = [record(0, 0.0, [float(t) for t in range(1, 10)]), record(1, 0.0, [100.0])]
    arrays = RunArrays(r, MetricOptions(ramp=0.2, drain=0.2))
    assert arrays.steady == (3.0, 8.0)
    v = metrics.compute(arrays)
    assert v["output_tokens_per_s_steady"] == 1.0
    assert v["requests_per_s_steady"] == 0.0
    assert v["output_tokens_per_s"] == 10 / 100
    assert v["total_tokens_per_s_steady"] == 1.0
    with_prompt = [*r, record(2, 0.0, [4.5, 4.6], prompt=50)]
    v = values(with_prompt, ramp=0.2, drain=0.2)
    assert v["total_tokens_per_s_steady"] - v["output_tokens_per_s_steady"] == pytest.approx(50 / 5)


@pytest.mark.fake
def test_steady_throughput_of_a_steady_engine_is_its_rate():
    # 8 in flight, each a token every 0.1 s: 80 tokens/s between ramp and drain.
    workload = make(n=64, arrivals={"kind": "closed_loop", "concurrency": 8}, output=50)
    result, _, _ = play(workload, steady(0.1, 0.1))
    v = metrics.compute(RunArrays(result.records, MetricOptions()))
    assert v["output_tokens_per_s_steady"] == pytest.approx(80.0, rel=0.01)
    assert v["mean_in_flight"] == pytest.approx(8.0)


def test_slo_goodput_and_failures_as_misses():
    r = [*TWO, record(2, 0.0, [9.0, 9.1], status="error")]
    v = values(r, slo_ttft_s=1.0, slo_tpot_s=0.5)
    assert v["slo_attainment"] == 1 / 3  # request 0 misses TPOT, request 1 has none, request 2 failed
    assert v["goodput_requests_per_s"] == 1 / 4
    assert values(r, slo_ttft_s=0.5)["slo_attainment"] == 1 / 3
    assert values(r, slo_tpot_s=0.75)["slo_attainment"] == 2 / 3
    assert math.isnan(values(r)["slo_attainment"])
    assert math.isnan(values(r)["goodput_requests_per_s"])


def test_slora_satisfaction_is_its_published_polynomial():
    r = [
        record(0, 0.0, [3.0]),
        record(1, 0.0, [6.0]),
        record(2, 0.0, [9.0]),
        record(3, 0.0, [1.0], status="error"),
    ]
    v = values(r)
    assert v["slora_satisfaction"] == (1 - 0.25) / 4
    assert v["slora_attainment"] == 1 / 4


def test_failed_requests_do_not_count_towards_throughput():
    v = values(
        [*TWO, record(2, 0.0, [50.0], status="timeout"), record(3, 0.0, [60.0], status="wrong_length")]
    )
    assert v["requests_per_s"] == 0.5
    assert v["ttft_s_mean"] == 0.75


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30))
def test_jain_lies_between_one_over_k_and_one(x):
    assert 1 / len(x) - 1e-9 <= metrics.jain_index(x) <= 1 + 1e-9


def test_jain_known_values():
    assert metrics.jain_index([2.0, 2.0, 2.0]) == 1.0
    assert metrics.jain_index([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert math.isnan(metrics.jain_index([]))


def test_fairness_compares_the_speed_of_adapters_not_their_popularity():
    fast, slow = [1.0, 2.0], [2.0, 4.0]
    even = [record(i, 0.0, fast, adapter=0) for i in range(9)] + [record(9, 0.0, fast, adapter=1)]
    assert values(even)["fairness_jain"] == 1.0
    uneven = [record(0, 0.0, fast, adapter=0), record(1, 0.0, slow, adapter=1), record(2, 0.0, slow)]
    assert values(uneven)["fairness_jain"] == pytest.approx((1.0 + 0.5) ** 2 / (2 * (1.0 + 0.25)))


def test_per_adapter_throughputs_add_up_to_the_runs():
    r = [*TWO, record(2, 0.5, [1.0, 1.5])]
    frame = metrics.per_adapter(r)
    assert frame["adapter"].tolist() == [-1, 0, 1]
    assert frame["output_tokens_per_s"].sum() == values(r)["output_tokens_per_s"]
    assert frame.set_index("adapter")["ttft_s_mean"].to_dict() == {-1: 0.5, 0: 1.0, 1: 0.5}


def test_empty_values_have_no_statistics():
    assert all(math.isnan(v) for v in metrics.statistics(np.empty(0)).values())


def test_wire_names_are_those_of_the_result_frame():
    expected = {"requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "schedule_lag_s_p99"}
    expected |= {
        f"{m}_s_{s}" for m in ("ttft", "tpot", "itl", "e2e") for s in ("mean", "p50", "p90", "p95", "p99")
    }
    assert expected <= set(metrics.columns())
    assert list(values(TWO)) == metrics.columns()


def test_every_column_has_a_definition():
    assert metrics.lookup("adapter_cost")[1] is None
    for column in metrics.columns():
        assert metrics.lookup(column)[0].definition
    metric, stat = metrics.lookup("ttft_s_p99")
    assert (metric.label, metric.unit, stat) == ("TTFT", "s", "p99")
    with pytest.raises(UserError, match="choose one of requests_per_s"):
        metrics.lookup("ttft")
    with pytest.raises(UserError):
        metrics.lookup("requests_per_s_p99")


@pytest.mark.parametrize(
    "options",
    [
        {"slo_ttft_s": 0},
        {"ramp": 0.6, "drain": 0.4},
        {"lag_tolerance_s": 0},
        {"max_failed_fraction": 1},
        {"ramp": -1},
    ],
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(UserError):
        MetricOptions(**options)
