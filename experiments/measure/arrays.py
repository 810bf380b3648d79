"""The records of a run as arrays, and the limits they are judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.measure.types import OK, RequestRecord
from tessa.errors import UserError


@dataclass(frozen=True)
class MetricOptions:
    """slo_*: limits in seconds, None for none. ramp and drain: shares of the output tokens that steady state
    leaves out at the start and at the end. lag_tolerance_s: on the p99 of the schedule lag, open loop only.
    rate_tolerance: on |sent rate / scheduled rate - 1|, open loop only. max_failed_fraction: share of
    requests that may fail, time out or be aborted before the run counts as failed.
    """

    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    ramp: float = 0.1
    drain: float = 0.1
    lag_tolerance_s: float = 0.05
    rate_tolerance: float = 0.05
    max_failed_fraction: float = 0.0

    def __post_init__(self) -> None:
        for name in ("slo_ttft_s", "slo_tpot_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} is {value}; give seconds above 0, or null for no limit")
        if not (self.ramp >= 0 and self.drain >= 0 and self.ramp + self.drain < 1):
            raise UserError(
                f"ramp {self.ramp} and drain {self.drain} must be 0 or more and leave something between"
            )
        if not (self.lag_tolerance_s > 0 and self.rate_tolerance > 0):
            raise UserError("lag_tolerance_s and rate_tolerance must be above 0")
        if not 0 <= self.max_failed_fraction < 1:
            raise UserError(
                f"max_failed_fraction is {self.max_failed_fraction}; give a share from 0 to below 1"
            )


class RunArrays:
    """The records of one run as arrays over its requests. `ok` selects those that count for speed.

    scheduled, sent, first, end: float64 [n], NaN where it did not happen. prompt, output, adapter: int64 [n],
    adapter -1 for none. duration_s: from the start of the load to the last end. steady: (start, end) seconds.
    """

    def __init__(self, records: Sequence[RequestRecord], options: MetricOptions) -> None:
        self.options = options
        self.n = len(records)
        self.ok = np.array([r.status == OK for r in records], dtype=bool)
        self.scheduled = _floats([r.scheduled_s for r in records])
        self.sent = _floats([r.sent_s for r in records])
        self.first = _floats([r.first_token_s for r in records])
        self.end = _floats([r.end_s for r in records])
        self.last_token = _floats([r.token_times_s[-1] if r.token_times_s else None for r in records])
        self.prompt = np.array([r.prompt_tokens for r in records], dtype=np.int64)
        self.output = np.array([r.output_tokens for r in records], dtype=np.int64)
        self.adapter = np.array([-1 if r.adapter is None else r.adapter for r in records], dtype=np.int64)
        done = [r for r in records if r.status == OK]
        self.gaps = [np.diff(r.token_times_s) for r in done]
        self.token_times = (
            np.sort(np.concatenate([np.asarray(r.token_times_s) for r in done])) if done else np.empty(0)
        )
        self.duration_s = float(np.max(self.end[self.ok], initial=0.0))
        self.steady = self._steady_window()

    @property
    def ttft(self) -> np.ndarray:
        return self.first - self.scheduled

    @property
    def tpot(self) -> np.ndarray:
        """NaN for requests of one token."""
        steps = np.where(self.output > 1, self.output - 1, np.nan)
        return (self.last_token - self.first) / steps

    def meets_slo(self) -> np.ndarray:
        """bool [n]; a failed request never does."""
        o = self.options
        good = self.ok.copy()
        if o.slo_ttft_s is not None:
            good &= self.ttft <= o.slo_ttft_s
        if o.slo_tpot_s is not None:
            good &= (self.output <= 1) | (self.tpot <= o.slo_tpot_s)
        return good

    def in_steady(self, times: np.ndarray) -> np.ndarray:
        return (times > self.steady[0]) & (times <= self.steady[1])

    def per_steady_second(self, amount: float) -> float:
        seconds = self.steady[1] - self.steady[0]
        return float(amount) / seconds if seconds > 0 else np.nan

    def per_second(self, amount: float) -> float:
        return float(amount) / self.duration_s if self.duration_s > 0 else np.nan

    def _steady_window(self) -> tuple[float, float]:
        total = len(self.token_times)
        if total == 0:
            return (np.nan, np.nan)
        first = int(self.options.ramp * total)
        last = max(first, int(np.ceil((1 - self.options.drain) * total)) - 1)
        return (float(self.token_times[first]), float(self.token_times[last]))


def _floats(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)
