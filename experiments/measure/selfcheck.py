"""How late the load generator is on this machine, with a client that costs nothing.

`python -m experiments.measure.selfcheck [--rate 100] [--seconds 10]` prints the schedule lag and exits 1 if
its p99 is above the tolerance.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator

import numpy as np

from experiments.measure.load import LoadOptions, run_load
from experiments.measure.types import LoadResult, TokenEvent
from experiments.workload.spec import build
from experiments.workload.types import Request


class NullClient:
    """Every token at once, as soon as the request is sent."""

    async def generate(self, request: Request, adapter_name: str | None) -> AsyncIterator[TokenEvent]:
        yield TokenEvent(token_ids=[0] * request.output_tokens, finished=True)

    async def abort(self, request_id: int) -> None:
        pass


def measure(rate: float, seconds: float, spin_s: float = 0.0, seed: int = 0) -> LoadResult:
    """Poisson arrivals at `rate` requests/s for `seconds`, prompts of 512 tokens."""
    spec = {
        "seed": seed,
        "duration_s": seconds,
        "arrivals": {"kind": "poisson", "rate": rate},
        "prompt_tokens": {"kind": "fixed", "value": 512},
        "output_tokens": {"kind": "fixed", "value": 16},
        "num_adapters": 0,
    }
    return asyncio.run(run_load(NullClient(), build(spec, vocab_size=32000), LoadOptions(spin_s=spin_s)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.measure.selfcheck", description=__doc__)
    parser.add_argument("--rate", type=float, default=100.0, help="requests/s (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="default %(default)s")
    parser.add_argument(
        "--tolerance", type=float, default=0.005, help="seconds, on the p99 (default %(default)s)"
    )
    parser.add_argument("--spin", type=float, default=0.0, help="LoadOptions.spin_s (default %(default)s)")
    args = parser.parse_args(argv)
    result = measure(args.rate, args.seconds, args.spin)
    p50, p99, worst = np.percentile(result.schedule_lag, [50, 99, 100]) * 1e3
    sent = len(result.schedule_lag) / result.wall_s
    print(f"{len(result.schedule_lag)} requests at {sent:.1f}/s")
    print(f"lag p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {worst:.2f} ms")
    return int(p99 > args.tolerance * 1e3)


if __name__ == "__main__":
    sys.exit(main())
