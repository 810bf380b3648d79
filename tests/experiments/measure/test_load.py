"""The load generator against a scripted engine on virtual time: what it records is what the engine did."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from fake_engine import FakeEngine, Step, make, play, run_virtual, steady

from experiments.measure.load import LoadOptions, run_load
from experiments.measure.selfcheck import measure
from tessa.errors import UserError

pytestmark = pytest.mark.fake


def finish(steps):
    last = steps[-1]
    return [*steps[:-1], Step(last.delay, last.tokens, "finish")]


def assert_matches_log(result, engine, start):
    for r in result.records:
        assert r.token_times_s == pytest.approx([t - start for t in engine.tokens[r.request_id]], abs=1e-9)
        assert r.output_tokens == len(engine.tokens[r.request_id])
        assert r.sent_s == pytest.approx(engine.sent[r.request_id] - start, abs=1e-9)
        if r.request_id in engine.finished:
            assert r.end_s == pytest.approx(engine.finished[r.request_id] - start, abs=1e-9)


def test_open_loop_sends_on_the_schedule_and_records_every_token():
    workload = make(arrivals={"kind": "poisson", "rate": 50.0}, n=40)
    result, engine, start = play(workload, steady(0.2, 0.03))
    assert (result.status, result.reason, result.mode) == ("ok", None, "open_loop")
    assert_matches_log(result, engine, start)
    for r, arrival in zip(result.records, workload.arrival_s, strict=True):
        assert r.status == "ok"
        assert r.error is None
        assert r.scheduled_s == arrival
        assert r.sent_s == pytest.approx(arrival, abs=1e-9)
        assert r.first_token_s == pytest.approx(arrival + 0.2, abs=1e-9)
        assert r.end_s == pytest.approx(arrival + 0.2 + 3 * 0.03, abs=1e-9)
    assert result.wall_s == pytest.approx(workload.arrival_s[-1] + 0.29, abs=1e-9)
    assert engine.names == {i: f"a{i % 2}" for i in range(40)}


def test_a_late_request_does_not_push_the_ones_after_it():
    # Request 0 keeps the process busy for 2.2 s, so those due meanwhile (1.0, 1.5, 2.0, 2.5 s) are sent late.
    def script(request):
        first = [Step(2.2, 0, "block")] if request.request_id == 0 else []
        return [*first, *finish([Step(0.1, 4)])]

    result, _, _ = play(make(), script)
    assert result.schedule_lag == pytest.approx([0, 1.7, 1.2, 0.7, 0.2, 0], abs=1e-9)
    assert result.records[5].sent_s == pytest.approx(3.0, abs=1e-9)
    # Latency counts from the schedule, so the wait is in it.
    assert result.records[1].first_token_s - result.records[1].scheduled_s == pytest.approx(1.8, abs=1e-9)


def test_closed_loop_keeps_its_concurrency():
    workload = make(n=7, arrivals={"kind": "closed_loop", "concurrency": 3})
    result, engine, start = play(workload, steady(1.0, 1.0))
    assert engine.most_in_flight == 3
    assert [r.sent_s for r in result.records] == pytest.approx([0, 0, 0, 4, 4, 4, 8], abs=1e-9)
    assert [r.scheduled_s for r in result.records] == pytest.approx(
        [r.sent_s for r in result.records], abs=1e-9
    )
    assert result.mode == "closed_loop"
    assert_matches_log(result, engine, start)


def test_all_at_once_sends_everything_at_the_start():
    result, engine, _ = play(make(n=9, arrivals={"kind": "all_at_once"}), steady(1.0, 1.0))
    assert engine.most_in_flight == 9
    assert {r.scheduled_s for r in result.records} == {0.0}
    assert result.wall_s == pytest.approx(4.0, abs=1e-9)


def test_options_can_override_the_workloads_load():
    options = LoadOptions(base_only=True, mode="closed_loop", concurrency=1)
    result, engine, _ = play(make(n=3), steady(1.0, 1.0), options)
    assert engine.most_in_flight == 1
    assert result.mode == "closed_loop"
    assert set(engine.names.values()) == {None}
    assert [r.adapter for r in result.records] == [0, 1, 0]


def test_bundled_tokens_share_their_time():
    script = lambda request: finish([Step(0.5, 3), Step(0.5, 0), Step(1.0, 1)])  # noqa: E731
    result, engine, start = play(make(n=2), script)
    assert_matches_log(result, engine, start)
    r = result.records[0]
    assert [t - r.sent_s for t in r.token_times_s] == pytest.approx([0.5, 0.5, 0.5, 2.0], abs=1e-9)
    assert r.status == "ok"


def test_requests_may_finish_in_any_order():
    result, engine, start = play(make(n=5), lambda r: finish([Step(5.0 - r.request_id, 1), Step(0.1, 3)]))
    ends = [r.end_s for r in result.records]
    assert ends == sorted(ends, reverse=True)
    assert_matches_log(result, engine, start)


@pytest.mark.parametrize(
    ("steps", "status", "error", "tokens"),
    [
        (finish([Step(0.1, 1), Step(0.1, 1)]), "wrong_length", "2 tokens instead of 4", 2),
        (finish([Step(0.1, 9)]), "wrong_length", "9 tokens instead of 4", 9),
        ([Step(0.1, 2), Step(0.1, 0, "raise")], "error", "ConnectionError: the script says so", 2),
        ([Step(0.1, 0, "raise")], "error", "ConnectionError: the script says so", 0),
        ([Step(0.1, 3), Step(0.1, 0, "end")], "error", "ended after 3 of 4 tokens", 3),
        ([Step(0.1, 4), Step(0.1, 0, "end")], "error", "ended after 4 of 4 tokens", 4),
        ([Step(0.1, 4, "finish"), Step(0.1, 1)], "error", "1 tokens after the request was finished", 4),
        ([Step(0.1, 1), Step(0.0, 0, "hang")], "timeout", "no end within 3.0 s", 1),
    ],
)
def test_one_bad_request_among_good_ones(steps, status, error, tokens):
    good = steady(0.2, 0.1)
    options = LoadOptions(base_only=True, request_timeout_s=3.0)
    result, engine, _ = play(make(), lambda r: steps if r.request_id == 2 else good(r), options)
    assert result.status == "ok"
    bad = result.records[2]
    assert bad.status == status
    assert error in bad.error
    assert bad.output_tokens == len(bad.token_times_s) == tokens
    assert (bad.end_s is None) == (status != "wrong_length")
    assert engine.aborted == ([] if status == "wrong_length" else [2])
    assert [r.status for r in result.records if r.request_id != 2] == ["ok"] * 5
    assert engine.in_flight == 0


def test_stalled_engine_is_given_up_and_everything_aborted():
    hang = [Step(0.1, 1), Step(0.0, 0, "hang")]
    good = steady(0.1, 0.1)
    options = LoadOptions(base_only=True, stall_timeout_s=10.0)
    script = lambda r: good(r) if r.request_id < 2 else hang  # noqa: E731
    result, engine, _ = play(make(n=4), script, options)
    assert result.status == "stalled"
    assert "no token from any of 2 requests in flight for 10.0 s" in result.reason
    assert [r.status for r in result.records] == ["ok", "ok", "aborted", "aborted"]
    assert sorted(engine.aborted) == [2, 3]
    assert engine.in_flight == 0
    # The last token came at 2.1 s; the check itself may take a twentieth more.
    assert 12.1 <= result.wall_s <= 12.7


def test_a_quiet_spell_without_requests_is_no_stall():
    # Sent every 95 s; the wait for the first token of each reaches over a check of the watchdog.
    workload = make(n=3, arrivals={"kind": "constant", "rate": 1 / 95})
    result, _, _ = play(workload, steady(9.0, 0.1), LoadOptions(base_only=True, stall_timeout_s=10.0))
    assert result.status == "ok"


def test_slow_tokens_are_no_stall_as_long_as_they_come():
    result, _, _ = play(
        make(n=1, output=5), steady(9.0, 9.0), LoadOptions(base_only=True, stall_timeout_s=10.0)
    )
    assert result.status == "ok"


def test_whole_load_can_be_limited():
    options = LoadOptions(base_only=True, max_duration_s=1.6)
    result, _, _ = play(make(), steady(0.1, 0.1), options)
    assert (result.status, result.reason) == ("timeout", "the load was not through after 1.6 s")
    assert [r.status for r in result.records] == ["ok", "ok", "aborted", "aborted", "aborted", "aborted"]
    assert [r.error for r in result.records[3:]] == ["never sent"] * 3
    assert [r.sent_s is None for r in result.records] == [False, False, False, True, True, True]
    assert len(result.schedule_lag) == 3


def test_dead_engine_ends_the_load_early():
    options = LoadOptions(base_only=True, max_consecutive_errors=3)
    result, engine, _ = play(make(n=50), lambda r: [Step(0.01, 0, "raise")], options)
    assert result.status == "failed"
    assert "3 requests failed in a row" in result.reason
    assert "the script says so" in result.reason
    assert len(engine.sent) == 3


def test_stop_event_cancels_and_keeps_what_was_done():
    async def main(loop):
        engine, stop = FakeEngine(steady(0.1, 0.1), loop.time), asyncio.Event()
        loop.call_later(1.2, stop.set)
        options = LoadOptions(base_only=True)
        return await run_load(engine, make(), options, stop=stop, clock=loop.time), engine

    result, engine = run_virtual(main)
    assert result.status == "cancelled"
    assert [r.status for r in result.records] == ["ok"] + ["aborted"] * 5
    assert engine.aborted == [1]
    assert engine.in_flight == 0


def test_cancelling_the_coroutine_aborts_and_propagates():
    async def main(loop):
        engine = FakeEngine(steady(50.0, 0.1), loop.time)
        task = asyncio.create_task(run_load(engine, make(), LoadOptions(base_only=True), clock=loop.time))
        loop.call_later(1.7, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        return engine, [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    engine, left = run_virtual(main)
    assert sorted(engine.aborted) == [0, 1, 2]
    assert engine.in_flight == 0
    assert left == []


def test_an_abort_that_never_returns_is_left_behind():
    class Deaf(FakeEngine):
        async def abort(self, request_id):
            await asyncio.get_running_loop().create_future()

    async def main(loop):
        engine = Deaf(lambda r: [Step(0.0, 0, "hang")], loop.time)
        options = LoadOptions(base_only=True, request_timeout_s=1.0, abort_grace_s=2.0)
        return await run_load(engine, make(n=2), options, clock=loop.time)

    assert [r.status for r in run_virtual(main).records] == ["timeout", "timeout"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (LoadOptions(), "give one name per adapter"),
        (LoadOptions(adapter_names=["a0"]), "adapter ids up to 1 but 1 adapter names"),
        (LoadOptions(base_only=True, mode="bursty"), "choose one of open_loop"),
        (LoadOptions(base_only=True, mode="closed_loop"), "concurrency None"),
        (LoadOptions(base_only=True, request_timeout_s=0), "request_timeout_s is 0"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UserError, match=message):
        play(make(), steady(0.1, 0.1), options)


def test_real_clock_records_the_lag_of_every_request():
    result = measure(rate=400.0, seconds=0.25)
    assert result.status == "ok"
    assert len(result.schedule_lag) == 100
    assert np.isfinite(result.schedule_lag).all()
    assert (result.schedule_lag >= -1e-4).all()
    sent = [r.sent_s for r in result.records]
    assert sent == sorted(sent)
