"""`build`: from a spec to a workload.

Four random streams, each `numpy.random.default_rng([seed, stream])`: arrivals 0, lengths 1 (one child each
for prompts and outputs), tokens 2, adapters 3. Changing one part of a spec leaves what the others draw as it
was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.workload import arrivals, lengths, popularity, slora_compat
from experiments.workload.schema import ArrivalSpec, LengthSpec, PopularitySpec, WorkloadSpec
from experiments.workload.tokens import make_prompts
from experiments.workload.traces import TraceData, read_trace
from experiments.workload.types import FORMAT_VERSION, Workload
from tessa.errors import UserError

__all__ = ["ArrivalSpec", "LengthSpec", "PopularitySpec", "WorkloadSpec", "build"]

ARRIVALS_STREAM, LENGTHS_STREAM, TOKENS_STREAM, ADAPTERS_STREAM = range(4)


def build(spec: WorkloadSpec | Mapping[str, Any], vocab_size: int) -> Workload:
    """Draw the workload. The same spec and vocabulary always give the same columns and hash."""
    if not isinstance(spec, WorkloadSpec):
        spec = WorkloadSpec.from_mapping(spec)
    meta: dict[str, Any] = {}
    if spec.slora is not None:
        when, prompts, outputs, adapter = slora_compat.draw(spec.slora, spec.num_adapters or 0, spec.seed)
        num_adapters = spec.num_adapters or 0
        load = {"mode": "open_loop", "concurrency": None}
    else:
        trace = _read_trace(spec)
        n = _count(spec, trace)
        when, load = _arrivals(spec, n, trace)
        prompt_rng, output_rng = np.random.default_rng([spec.seed, LENGTHS_STREAM]).spawn(2)
        prompts, clipped_in = _lengths(spec.prompt_tokens, n, prompt_rng, trace and trace.prompt_tokens)
        outputs, clipped_out = _lengths(spec.output_tokens, n, output_rng, trace and trace.output_tokens)
        meta["clipped_lengths"] = {"prompt_tokens": clipped_in, "output_tokens": clipped_out}
        adapter, num_adapters, notes = _adapters(spec, n, trace)
        meta |= notes
        if trace is not None:
            meta["trace"] = trace.meta
    tokens_rng = np.random.default_rng([spec.seed, TOKENS_STREAM])
    flat, offsets, prefix = make_prompts(prompts, vocab_size, tokens_rng, spec.min_token_id)
    meta["prefixes"] = prefix
    meta["realised"] = popularity.realised_shares(adapter) | _realised_load(when, prompts, outputs)
    meta["spec"] = _resolved(spec, vocab_size, num_adapters, meta)
    meta["load"] = load
    return Workload(when, flat, offsets, outputs, adapter, meta)


# Below, specs and traces are Any: which of their parameters are there follows from `kind`, which the schema
# checks.


def _read_trace(spec: WorkloadSpec) -> TraceData | None:
    if spec.trace is None:
        return None
    by_column = spec.popularity is not None and spec.popularity.kind == "trace" and spec.num_adapters != 0
    return read_trace(spec.trace, with_adapter=by_column, limit=spec.num_requests)


def _count(spec: Any, trace: TraceData | None) -> int:
    if trace is not None:
        return len(trace.arrival_s)
    if spec.num_requests is not None:
        return spec.num_requests
    return int(spec.arrivals.rate * spec.duration_s)


def _arrivals(spec: Any, n: int, trace: Any) -> tuple[np.ndarray, dict[str, Any]]:
    a = spec.arrivals
    rng = np.random.default_rng([spec.seed, ARRIVALS_STREAM])
    if a.kind == "all_at_once":
        return arrivals.all_at_once(n), {"mode": "all_at_once", "concurrency": None}
    if a.kind == "closed_loop":
        return arrivals.closed_loop(n), {"mode": "closed_loop", "concurrency": a.concurrency}
    when = {
        "constant": lambda: arrivals.constant(n, a.rate),
        "poisson": lambda: arrivals.poisson(n, a.rate, rng),
        "gamma": lambda: arrivals.gamma(n, a.rate, a.cv, rng),
        "trace": lambda: trace.arrival_s,
    }[a.kind]()
    return when, {"mode": "open_loop", "concurrency": None}


def _lengths(spec: Any, n: int, rng: np.random.Generator, traced: Any) -> tuple[np.ndarray, int]:
    if spec.kind == "trace":
        return traced, 0
    if spec.kind == "fixed":
        return lengths.fixed(n, spec.value)
    if spec.kind == "uniform":
        return lengths.uniform(n, spec.low, spec.high, rng)
    return lengths.lognormal(n, spec.median, spec.sigma, spec.low, spec.high, rng)


def _adapters(spec: Any, n: int, trace: Any) -> tuple[np.ndarray, int, dict[str, Any]]:
    """Adapter ids int32 [n], the number of adapters, and notes for meta."""
    if spec.num_adapters == 0:
        return np.full(n, -1, dtype=np.int32), 0, {}
    p, known = spec.popularity, spec.num_adapters
    rng = np.random.default_rng([spec.seed, ADAPTERS_STREAM])
    if p.kind == "trace":
        if spec.base_fraction:
            raise UserError(
                "base_fraction cannot be combined with popularity.kind=trace; the column says which use none"
            )
        found = len(trace.meta["adapter_labels"])
        if known is not None and known < found:
            raise UserError(
                f"the trace's window names {found} adapters but num_adapters is {known}; raise it or set null"
            )
        return trace.adapter, found if known is None else known, {}
    m = n - round(n * spec.base_fraction)
    notes: dict[str, Any] = {}
    if p.kind == "identical":
        ids, derived = popularity.identical(m), 1
    elif p.kind == "distinct":
        ids, derived = popularity.distinct(m, known or max(m, 1)), m
    elif p.kind == "uniform":
        ids, derived = popularity.uniform(m, known, rng), 0
    elif p.kind == "zipf":
        ids, derived = popularity.zipf(m, known, p.s, rng), 0
    elif p.kind == "slora_power":
        ids, derived = popularity.slora_power(m, known, p.alpha, rng), 0
    elif m == 0:
        ids, derived = popularity.identical(0), 0
    else:
        ids, notes["punica_counts"] = popularity.punica_geometric(m, p.ratio, known, rng)
        derived = int(ids.max()) + 1
    if m < n:
        ids = popularity.interleave_base(ids, n, rng)
    return ids, derived if known is None else known, notes


def _realised_load(when: np.ndarray, prompts: np.ndarray, outputs: np.ndarray) -> dict[str, Any]:
    span = float(when[-1])
    return {
        "requests": len(when),
        "last_arrival_s": span,
        "request_rate": len(when) / span if span > 0 else None,
        "mean_prompt_tokens": float(prompts.mean()),
        "mean_output_tokens": float(outputs.mean()),
        "total_prompt_tokens": int(prompts.sum()),
        "total_output_tokens": int(outputs.sum()),
    }


def _resolved(spec: WorkloadSpec, vocab_size: int, num_adapters: int, meta: dict[str, Any]) -> dict[str, Any]:
    """The spec as it enters the hash: where a trace lies does not matter, what it holds does."""
    out = dataclasses.asdict(spec) | {
        "vocab_size": vocab_size,
        "num_adapters": num_adapters,
        "version": FORMAT_VERSION,
    }
    if spec.trace is not None:
        del out["trace"]["path"]
        out["trace"]["sha256"] = meta["trace"]["sha256"]
    if spec.slora is not None:
        out["slora"] = {k: list(v) if isinstance(v, tuple) else v for k, v in out["slora"].items()}
    return out
