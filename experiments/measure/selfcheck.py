"""How late the load generator is on this machine, with an engine that costs nothing.

``python -m experiments.measure.selfcheck [--rate 100] [--seconds 10] [--out FOLDER]`` sends Poisson arrivals, prints
the schedule lag (sent - scheduled) and exits 1 if its p99 is above 5 ms (``--tolerance``), 2 on a wrong argument.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from experiments import provenance
from experiments.bench_rows import out_folder, store, user_errors_in_a_line
from experiments.measure import metrics
from experiments.measure.arrays import MetricOptions, RunArrays
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
    """Poisson arrivals at `rate` requests/s for `seconds`, prompts of 512 tokens.

    Raises UserError where that is no request.
    """
    spec = {
        "seed": seed,
        "duration_s": seconds,
        "arrivals": {"kind": "poisson", "rate": rate},
        "prompt_tokens": {"kind": "fixed", "value": 512},
        "output_tokens": {"kind": "fixed", "value": 16},
        "num_adapters": 0,
    }
    return asyncio.run(run_load(NullClient(), build(spec, vocab_size=32000), LoadOptions(spin_s=spin_s)))


def row(result: LoadResult, tolerance_s: float) -> dict[str, float | int | bool]:
    """Requests, the rate sent (1/s), schedule lag (seconds), and whether its p99 is within the tolerance."""
    p50, p99, worst = (float(lag) for lag in np.percentile(result.schedule_lag, [50, 99, 100]))
    values = metrics.compute(RunArrays(result.records, MetricOptions()))
    return {
        "requests": len(result.schedule_lag),
        "sent_rate": values["sent_rate"],
        "schedule_lag_s_p50": p50,
        "schedule_lag_s_p99": p99,
        "schedule_lag_s_max": worst,
        "tolerance_s": tolerance_s,
        "within": p99 <= tolerance_s,
    }


@user_errors_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.measure.selfcheck",
        description="Schedule lag of the load generator with an engine that costs nothing.",
    )
    parser.add_argument("--rate", type=float, default=100.0, help="requests/s (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="default %(default)s")
    parser.add_argument(
        "--tolerance", type=float, default=0.005, help="seconds, on the p99 (default %(default)s)"
    )
    parser.add_argument(
        "--spin", type=float, default=0.0, help="seconds of polling before each send (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="also write the numbers to rows.csv in this folder")
    arguments = parser.parse_args(argv)
    out, git = out_folder(arguments.out, Path(), quick=True), provenance.git_state()
    found = row(measure(arguments.rate, arguments.seconds, arguments.spin), arguments.tolerance)
    p50, p99, worst = (found[f"schedule_lag_s_{name}"] * 1e3 for name in ("p50", "p99", "max"))
    verdict = "within" if found["within"] else "ABOVE"
    print(f"{found['requests']} requests at {found['sent_rate']:.1f}/s")
    print(f"schedule lag p50 {p50:.2f} ms, p99 {p99:.2f} ms, max {worst:.2f} ms")
    print(f"p99 {verdict} the tolerance of {arguments.tolerance * 1e3:g} ms")
    if out is not None:
        setting = {"rate": arguments.rate, "seconds": arguments.seconds, "spin_s": arguments.spin}
        store(pd.DataFrame([setting | found]), "schedule_lag", out, git)
    return 0 if found["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
