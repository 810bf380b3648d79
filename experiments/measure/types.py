"""What the load generator sends to, and what it writes down."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pandas as pd

from experiments.workload.types import Request

OK, ERROR, TIMEOUT, ABORTED, WRONG_LENGTH = "ok", "error", "timeout", "aborted", "wrong_length"
REQUEST_STATUSES = (OK, ERROR, TIMEOUT, ABORTED, WRONG_LENGTH)


@dataclass(slots=True)
class TokenEvent:
    """New tokens of one request, in order; several when the engine hands over several at once."""

    token_ids: list[int]
    finished: bool
    finish_reason: str | None = None


class Client(Protocol):
    """An engine in this process, an HTTP server, or a scripted engine.

    `generate` streams the request's tokens, each once, and ends after an event with `finished`; it raises
    when the request fails. `adapter_name` None means the base model. `abort` makes the engine drop a request;
    it must accept ids that have ended already.
    """

    def generate(self, request: Request, adapter_name: str | None) -> AsyncIterator[TokenEvent]: ...

    async def abort(self, request_id: int) -> None: ...


@dataclass(slots=True)
class RequestRecord:
    """One request as it went. Times are seconds on one clock, 0 being the start of the load.

    scheduled_s: when it was to be sent (closed loop: when its place became free). sent_s: when `generate` was
    called, None if it never was. token_times_s: one per token; tokens that came together share a time.
    end_s: arrival of the event that ended a request of status ok or wrong_length, else None.
    """

    request_id: int
    adapter: int | None
    prompt_tokens: int
    requested_output_tokens: int
    scheduled_s: float
    sent_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    status: str = ABORTED
    error: str | None = None


@dataclass
class LoadResult:
    """Outcome of one load. schedule_lag: sent - scheduled of the requests that were sent, float64, seconds.

    status: "ok" (every request was sent and ended somehow), "stalled", "timeout", "cancelled" or "failed";
    reason says why unless ok. mode: open_loop, closed_loop or all_at_once. wall_s: from the start to the end
    of the last request, or to the moment the load was given up.
    """

    records: list[RequestRecord]
    schedule_lag: np.ndarray
    wall_s: float
    status: str
    reason: str | None
    mode: str


_FIELDS = tuple(f.name for f in dataclasses.fields(RequestRecord))


def records_to_frame(records: Iterable[RequestRecord]) -> pd.DataFrame:
    """One row per request, columns as in RequestRecord; adapter is a nullable integer."""
    frame = pd.DataFrame([[getattr(r, name) for name in _FIELDS] for r in records], columns=list(_FIELDS))
    frame["adapter"] = frame["adapter"].astype("Int64")
    for name in ("scheduled_s", "sent_s", "first_token_s", "end_s"):
        frame[name] = frame[name].astype("float64")
    return frame


def records_from_frame(frame: pd.DataFrame) -> list[RequestRecord]:
    """The inverse of `records_to_frame`, also after a parquet round trip."""
    rows = []
    for values in frame[list(_FIELDS)].to_dict("records"):
        times = [float(t) for t in values.pop("token_times_s")]
        clean: dict[str, Any] = {str(k): None if pd.isna(v) else v for k, v in values.items()}
        for name in ("request_id", "prompt_tokens", "requested_output_tokens", "output_tokens"):
            clean[name] = int(clean[name])
        if clean["adapter"] is not None:
            clean["adapter"] = int(clean["adapter"])
        rows.append(RequestRecord(**clean, token_times_s=times))
    return rows
