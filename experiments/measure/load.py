"""Sends a workload to a client on one absolute clock and records every token.

An open loop sleeps to each scheduled time, never for a gap, so a late request does not push the later ones.
The sleep is asyncio's own: with epoll it wakes at most about 1 ms late and costs no CPU, which is needed here
because the engine shares the machine; spinning would be more exact and would take a core from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.measure.types import (
    ABORTED,
    ERROR,
    OK,
    TIMEOUT,
    WRONG_LENGTH,
    Client,
    LoadResult,
    RequestRecord,
)
from experiments.workload.types import Request, Workload
from tessa.errors import UserError

MODES = ("open_loop", "closed_loop", "all_at_once")


@dataclass(frozen=True)
class LoadOptions:
    """How to send. Times in seconds; None switches a limit off.

    adapter_names: name of each adapter id. base_only: send every request to the base model whatever its
    adapter (backends without adapters). mode and concurrency: None takes the workload's. request_timeout_s:
    per request, from its sending. stall_timeout_s: without a token for any request in flight for so long, all
    are aborted and the load ends as "stalled". max_duration_s: the same for the whole load, as "timeout".
    max_consecutive_errors: so many failed requests in a row, with no success between, end it as "failed".
    abort_grace_s: how long an abort may take before it is left behind. spin_s: the last so many seconds
    before a scheduled time are spent polling, which takes out the rounding of the sleep for that much CPU per
    request.
    """

    adapter_names: Sequence[str] | None = None
    base_only: bool = False
    mode: str | None = None
    concurrency: int | None = None
    request_timeout_s: float | None = 600.0
    stall_timeout_s: float | None = 120.0
    max_duration_s: float | None = None
    max_consecutive_errors: int | None = 20
    abort_grace_s: float = 10.0
    spin_s: float = 0.0


async def run_load(
    client: Client,
    workload: Workload,
    options: LoadOptions | None = None,
    *,
    stop: asyncio.Event | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """Send all requests, wait for their ends, return what happened.

    Setting `stop` aborts what is in flight and returns status "cancelled". Cancelling the coroutine aborts
    too and raises CancelledError. `clock` must run at the pace of the event loop.
    """
    run = _Load(client, workload, options or LoadOptions(), clock)
    gc.collect()
    gc.freeze()  # the workload and the imports need no scanning while requests are being timed
    try:
        return await run.execute(stop)
    finally:
        gc.unfreeze()


class _Load:
    def __init__(
        self, client: Client, workload: Workload, options: LoadOptions, clock: Callable[[], float]
    ) -> None:
        self.client, self.workload, self.options, self.clock = client, workload, options, clock
        self.mode = options.mode or workload.load_mode["mode"]
        self.concurrency = options.concurrency or workload.load_mode["concurrency"]
        self.names = _adapter_names(workload, options)
        if self.mode not in MODES:
            raise UserError(f"load mode is {self.mode!r}; choose one of {', '.join(MODES)}")
        if self.mode == "closed_loop" and not (self.concurrency and self.concurrency > 0):
            raise UserError(f"closed loop with concurrency {self.concurrency}; give at least 1")
        for name in ("request_timeout_s", "stall_timeout_s", "max_duration_s", "max_consecutive_errors"):
            value = getattr(options, name)
            if value is not None and not value > 0:
                raise UserError(f"{name} is {value}; give a number above 0, or null for no limit")
        open_loop = self.mode == "open_loop"
        lengths = workload.prompt_lengths
        self.records = [
            RequestRecord(
                request_id=i,
                adapter=None if workload.adapter[i] < 0 else int(workload.adapter[i]),
                prompt_tokens=int(lengths[i]),
                requested_output_tokens=int(workload.output_tokens[i]),
                scheduled_s=float(workload.arrival_s[i]) if open_loop else 0.0,
                error="never sent",
            )
            for i in range(len(workload))
        ]
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.expired: set[int] = set()
        self.in_flight = 0
        self.errors_in_a_row = 0
        self.last_progress = 0.0
        self.start = 0.0

    def now(self) -> float:
        return self.clock() - self.start

    async def execute(self, stop: asyncio.Event | None) -> LoadResult:
        loop = asyncio.get_running_loop()
        self.given_up: asyncio.Future[tuple[str, str]] = loop.create_future()
        self.start = self.clock()
        waited: set[asyncio.Future[Any]]
        sender = asyncio.create_task(self._send())
        helpers = [asyncio.create_task(self._watch())]
        if stop is not None:
            helpers.append(asyncio.create_task(self._wait_for_stop(stop)))
        waited = {sender, self.given_up}
        status: str = "ok"
        reason: str | None = None
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            wall = self.now()
            if self.given_up.done():
                status, reason = self.given_up.result()
            else:
                await sender  # raises what went wrong in the generator itself
        finally:
            for task in (sender, *helpers):
                task.cancel()
            await asyncio.gather(sender, *helpers, return_exceptions=True)
            left = await self._abort_all()
            self.given_up.cancel()
        if left and reason is not None:
            reason += f"; {left} requests did not react to their abort"
        lag = np.array(
            [r.sent_s - r.scheduled_s for r in self.records if r.sent_s is not None], dtype=np.float64
        )
        return LoadResult(self.records, lag, wall, status, reason, self.mode)

    async def _send(self) -> None:
        requests = self.workload.requests
        if self.mode == "closed_loop":
            queue = iter(range(len(requests)))
            places = min(int(self.concurrency), len(requests))
            await asyncio.gather(*(self._keep_one_in_flight(queue) for _ in range(places)))
            return
        for i, record in enumerate(self.records):
            request = requests[i]  # made before the wait, so that its cost is not lag
            await asyncio.sleep(max(0.0, record.scheduled_s - self.now() - self.options.spin_s))
            while self.options.spin_s and self.now() < record.scheduled_s:
                await asyncio.sleep(0)
            self._start(i, request)
        while self.tasks:
            await asyncio.wait(list(self.tasks.values()))

    async def _keep_one_in_flight(self, queue: Any) -> None:
        for i in queue:
            request = self.workload.requests[i]
            self.records[i].scheduled_s = self.now()
            await asyncio.wait({self._start(i, request)})

    def _start(self, i: int, request: Request) -> asyncio.Task[None]:
        task = asyncio.create_task(self._one(i, request))
        self.tasks[i] = task
        task.add_done_callback(lambda _: self.tasks.pop(i, None))
        return task

    async def _one(self, i: int, request: Request) -> None:
        record, options = self.records[i], self.options
        timer = None
        if options.request_timeout_s is not None:
            timer = asyncio.get_running_loop().call_later(options.request_timeout_s, self._expire, i)
        if self.in_flight == 0:
            self.last_progress = self.now()
        self.in_flight += 1
        record.error = None
        record.sent_s = self.now()
        try:
            await self._consume(request, record)
        except asyncio.CancelledError:
            timed_out = i in self.expired
            record.status = TIMEOUT if timed_out else ABORTED
            record.error = (
                f"no end within {options.request_timeout_s} s" if timed_out else "aborted in flight"
            )
        except Exception as exc:
            record.status, record.error = ERROR, f"{type(exc).__name__}: {exc}"
        finally:
            self.in_flight -= 1
            if timer is not None:
                timer.cancel()
        if record.status in (ERROR, TIMEOUT, ABORTED):
            record.end_s = None
            await self._abort(request.request_id)
        self._count_errors(record)

    async def _consume(self, request: Request, record: RequestRecord) -> None:
        name = None if record.adapter is None or self.names is None else self.names[record.adapter]
        stream = self.client.generate(request, name)
        async with contextlib.AsyncExitStack() as stack:
            if hasattr(stream, "aclose"):
                stack.push_async_callback(stream.aclose)
            async for event in stream:
                now = self.now()
                count = len(event.token_ids)
                if count:
                    if record.end_s is not None:
                        raise RuntimeError(f"{count} tokens after the request was finished")
                    self.last_progress = now
                    if record.first_token_s is None:
                        record.first_token_s = now
                    record.output_tokens += count
                    record.token_times_s.extend([now] * count)
                if event.finished and record.end_s is None:
                    record.end_s = now
        if record.end_s is None:
            raise RuntimeError(
                f"the stream ended after {record.output_tokens} of {record.requested_output_tokens} tokens "
                "without saying that the request is finished"
            )
        if record.output_tokens == record.requested_output_tokens:
            record.status = OK
        else:
            record.status = WRONG_LENGTH
            record.error = f"{record.output_tokens} tokens instead of {record.requested_output_tokens}"

    def _expire(self, i: int) -> None:
        if i in self.tasks:
            self.expired.add(i)
            self.tasks[i].cancel()

    def _count_errors(self, record: RequestRecord) -> None:
        limit = self.options.max_consecutive_errors
        if record.status == OK:
            self.errors_in_a_row = 0
        elif record.status == ERROR:
            self.errors_in_a_row += 1
            if limit is not None and self.errors_in_a_row >= limit:
                self._give_up("failed", f"{limit} requests failed in a row; the last: {record.error}")

    def _give_up(self, status: str, reason: str) -> None:
        if not self.given_up.done():
            self.given_up.set_result((status, reason))

    async def _watch(self) -> None:
        stall, limit = self.options.stall_timeout_s, self.options.max_duration_s
        while stall is not None or limit is not None:
            now = self.now()
            until_stall = (
                np.inf if stall is None else stall - (now - self.last_progress if self.in_flight else 0.0)
            )
            until_limit = np.inf if limit is None else limit - now
            if until_limit <= 0:
                self._give_up("timeout", f"the load was not through after {limit} s")
                return
            if stall is not None and until_stall <= 0:
                seen = self.last_progress
                await asyncio.sleep(
                    stall / 20
                )  # if this process was blocked, tokens may be waiting to be read
                if self.in_flight and self.last_progress == seen:
                    self._give_up(
                        "stalled", f"no token from any of {self.in_flight} requests in flight for {stall} s"
                    )
                    return
                continue
            await asyncio.sleep(min(until_stall, until_limit))

    async def _wait_for_stop(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._give_up("cancelled", "stopped on request")

    async def _abort(self, request_id: int) -> None:
        # An engine that has died cannot abort; that must not hide why the request ended.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.client.abort(request_id), self.options.abort_grace_s)

    async def _abort_all(self) -> int:
        """Cancel what is in flight; the number of requests that would not end in time."""
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        if not tasks:
            return 0
        _, pending = await asyncio.wait(tasks, timeout=2 * self.options.abort_grace_s)
        return len(pending)


def _adapter_names(workload: Workload, options: LoadOptions) -> list[str] | None:
    if options.base_only:
        return None
    used = int(workload.adapter.max()) + 1
    names = list(options.adapter_names or [])
    if used > len(names):
        raise UserError(
            f"the workload uses adapter ids up to {used - 1} but {len(names)} adapter names were given; "
            "give one name per adapter, or base_only=True to send everything to the base model"
        )
    return names
