"""From records to one row: the validity gates first, the metrics only if they hold."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.measure import metrics
from experiments.measure.arrays import MetricOptions, RunArrays
from experiments.measure.types import (
    ABORTED,
    ERROR,
    OK,
    REQUEST_STATUSES,
    TIMEOUT,
    WRONG_LENGTH,
    RequestRecord,
)

# Shown in every row, whatever its status: they say how the run went, not how fast the engine was.
DIAGNOSTICS = (*(f"schedule_lag_s_{s}" for s in metrics.STATS), "scheduled_rate", "sent_rate")
_MIN_REQUESTS_FOR_RATE = 10
_CLOCK_SLACK_S = 1e-3  # the event loop may keep its own clock and wake a little early


def summarise(
    records: Sequence[RequestRecord],
    *,
    mode: str,
    load_status: str = "ok",
    load_reason: str | None = None,
    options: MetricOptions | None = None,
) -> dict[str, Any]:
    """All columns of one run: status and reason, request counts, duration, steady window, metrics.

    `status`: "complete", or "failed", "timeout" or "invalid"; then every metric but DIAGNOSTICS is NaN, so a
    run that did not go as it should cannot pass for a number.
    """
    options = options or MetricOptions()
    counts = Counter(r.status for r in records)
    row: dict[str, Any] = {"status": "invalid", "status_reason": "no request was recorded"}
    row |= {"requests_total": len(records)} | {f"requests_{s}": counts.get(s, 0) for s in REQUEST_STATUSES}
    row |= {"duration_s": np.nan, "steady_start_s": np.nan, "steady_end_s": np.nan}
    row |= dict.fromkeys(metrics.columns(), np.nan)
    if not records:
        return row
    arrays = RunArrays(records, options)
    values = metrics.compute(arrays)
    row |= {name: values[name] for name in DIAGNOSTICS}
    row["status"], row["status_reason"] = judge(records, values, mode, load_status, load_reason, options)
    if row["status"] == "complete":
        row |= values
        row |= dict(
            duration_s=arrays.duration_s, steady_start_s=arrays.steady[0], steady_end_s=arrays.steady[1]
        )
    return row


def judge(
    records: Sequence[RequestRecord],
    values: dict[str, float],
    mode: str,
    load_status: str,
    load_reason: str | None,
    options: MetricOptions,
) -> tuple[str, str | None]:
    """The first gate that does not hold decides: (status, reason); ("complete", None) if all do.

    Order: the load gave up; requests failed; wrong output lengths; records that contradict themselves; the
    generator was late (open loop: lag, then rate); a throughput or latency that is not a finite number.
    """
    if load_status != "ok":
        status = "timeout" if load_status in ("stalled", "timeout") else "failed"
        return status, f"load {load_status}: {load_reason}"
    n = len(records)
    failed = {s: [r for r in records if r.status == s] for s in (ERROR, TIMEOUT, ABORTED)}
    bad = sum(map(len, failed.values()))
    if bad > options.max_failed_fraction * n:
        kind = next(s for s in (ERROR, TIMEOUT, ABORTED) if failed[s])
        status = "timeout" if kind == TIMEOUT else "failed"
        return status, f"{bad} of {n} requests did not finish; first {kind}: {failed[kind][0].error}"
    wrong = [r for r in records if r.status == WRONG_LENGTH]
    if wrong:
        return (
            "invalid",
            f"{len(wrong)} of {n} outputs have the wrong length; first: {wrong[0].error}",
        )
    for r in records:
        problem = contradiction(r) if r.status == OK else None
        if problem:
            return "invalid", f"request {r.request_id}: {problem}"
    if mode == "open_loop":
        lag = values["schedule_lag_s_p99"]
        if not lag <= options.lag_tolerance_s:
            return (
                "invalid",
                f"schedule lag p99 {lag:.4f} s is above the tolerance of {options.lag_tolerance_s} s",
            )
        ratio = values["sent_rate"] / values["scheduled_rate"]
        if n >= _MIN_REQUESTS_FOR_RATE and abs(ratio - 1) > options.rate_tolerance:
            return "invalid", (
                f"sent {values['sent_rate']:.4g} requests/s, scheduled were {values['scheduled_rate']:.4g} "
                f"(tolerance {options.rate_tolerance:.0%})"
            )
    for name in ("requests_per_s", "output_tokens_per_s", "ttft_s_mean", "e2e_s_mean"):
        if not (np.isfinite(values[name]) and values[name] > 0):
            return "invalid", f"{name} came out as {values[name]}"
    return "complete", None


def contradiction(r: RequestRecord) -> str | None:
    """What is impossible about a record of status ok, or None."""
    times = r.token_times_s
    if r.sent_s is None or r.first_token_s is None or r.end_s is None:
        return "finished without having been sent, without a first token or without an end"
    if len(times) != r.output_tokens or r.output_tokens != r.requested_output_tokens:
        return f"{len(times)} token times, {r.output_tokens} tokens, {r.requested_output_tokens} requested"
    if times[0] != r.first_token_s or any(b < a for a, b in itertools.pairwise(times)):
        return "token times are not in order"
    if not r.scheduled_s <= r.sent_s + _CLOCK_SLACK_S or not r.sent_s <= times[0] or not times[-1] <= r.end_s:
        return "scheduled, sent, first token and end are not in order"
    return None
