"""A scripted engine whose token times are known exactly, and an event loop on virtual time to run it on."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from experiments.measure.load import LoadOptions, run_load
from experiments.measure.types import LoadResult, TokenEvent
from experiments.workload import build
from experiments.workload.types import Request, Workload


@dataclass(frozen=True)
class Step:
    """After `delay` seconds: hand over `tokens` tokens, then perhaps do something.

    do: "finish" marks the event as the last; "raise" fails instead of handing over; "end" closes the stream
    without a finished event; "hang" waits for ever; "block" advances the clock as if the process had been busy.
    """

    delay: float
    tokens: int = 0
    do: str = ""


Script = Callable[[Request], list[Step]]


def steady(ttft: float, gap: float) -> Script:
    """One token after `ttft`, then one every `gap`."""

    def script(request: Request) -> list[Step]:
        steps = [Step(ttft, 1)] + [Step(gap, 1)] * (request.output_tokens - 1)
        return [*steps[:-1], Step(steps[-1].delay, 1, "finish")]

    return script


@dataclass
class FakeEngine:
    """Plays `script` for every request and logs what it did: the truth that the records are held against."""

    script: Script
    clock: Callable[[], float]
    sent: dict[int, float] = field(default_factory=dict)
    names: dict[int, str | None] = field(default_factory=dict)
    tokens: dict[int, list[float]] = field(default_factory=dict)
    finished: dict[int, float] = field(default_factory=dict)
    aborted: list[int] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    block: Callable[[float], None] | None = None

    async def generate(self, request: Request, adapter_name: str | None) -> AsyncIterator[TokenEvent]:
        i = request.request_id
        self.sent[i], self.names[i], self.tokens[i] = self.clock(), adapter_name, []
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            for step in self.script(request):
                if step.do == "block":
                    assert self.block is not None
                    self.block(step.delay)
                    continue
                await asyncio.sleep(step.delay)
                if step.do == "raise":
                    raise ConnectionError("the script says so")
                if step.do == "end":
                    return
                if step.do == "hang":
                    await asyncio.get_running_loop().create_future()
                self.tokens[i] += [self.clock()] * step.tokens
                if step.do == "finish":
                    self.finished[i] = self.clock()
                yield TokenEvent([7] * step.tokens, step.do == "finish", "length" if step.do else None)
        finally:
            self.in_flight -= 1

    async def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self._now = 1000.0
        wait = self._selector.select

        def select(timeout: float | None = None) -> list[Any]:
            if timeout is None:
                raise RuntimeError("deadlock: nothing is scheduled and nothing can happen")
            self._now += max(timeout, 0.0)
            return wait(0)

        self._selector.select = select  # type: ignore[method-assign]

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """As if a callback had kept the process busy for so long."""
        self._now += seconds


def run_virtual(main: Callable[[VirtualLoop], Coroutine[Any, Any, Any]]) -> Any:
    """Run `main(loop)` to its end on virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main(loop))
    finally:
        loop.close()


def play(
    workload: Workload, script: Script, options: LoadOptions | None = None
) -> tuple[LoadResult, FakeEngine, float]:
    """Load a scripted engine with the workload: (result, the engine with its log, clock at the start)."""
    options = options or LoadOptions(adapter_names=[f"a{i}" for i in range(workload.num_adapters)])

    async def main(loop: VirtualLoop) -> tuple[LoadResult, FakeEngine, float]:
        engine = FakeEngine(script, loop.time, block=loop.advance)
        start = loop.time()
        return await run_load(engine, workload, options, clock=loop.time), engine, start

    return run_virtual(main)


def make(
    n: int = 6, arrivals: dict[str, Any] | None = None, output: int = 4, num_adapters: int = 2, **over: Any
) -> Workload:
    """n requests, two a second by default, prompts of 5 tokens, adapters in turn."""
    spec: dict[str, Any] = {
        "num_requests": n,
        "arrivals": arrivals or {"kind": "constant", "rate": 2.0},
        "prompt_tokens": {"kind": "fixed", "value": 5},
        "output_tokens": {"kind": "fixed", "value": output},
        "popularity": {"kind": "distinct"},
        "num_adapters": num_adapters,
    }
    return build(spec | over, vocab_size=100)
