"""What a workload is made from, and `build`, which makes it.

Four random streams, each `numpy.random.default_rng([seed, stream])`: arrivals 0, lengths 1 (one child each
for prompts and outputs), tokens 2, adapters 3. Changing one part of a spec leaves what the others draw as it was.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.workload import arrivals, lengths, popularity, slora_compat
from experiments.workload.slora_compat import SLoraSpec
from experiments.workload.tokens import make_prompts
from experiments.workload.traces import TraceData, TraceSpec, read_trace
from experiments.workload.types import FORMAT_VERSION, Workload
from tessa.errors import UserError

ARRIVALS_STREAM, LENGTHS_STREAM, TOKENS_STREAM, ADAPTERS_STREAM = range(4)

ARRIVALS: dict[str, tuple[str, ...]] = {
    "all_at_once": (),
    "closed_loop": ("concurrency",),
    "constant": ("rate",),
    "poisson": ("rate",),
    "gamma": ("rate", "cv"),
    "trace": (),
}
LENGTHS: dict[str, tuple[str, ...]] = {
    "fixed": ("value",),
    "uniform": ("low", "high"),
    "lognormal": ("median", "sigma", "low", "high"),
    "trace": (),
}
POPULARITY: dict[str, tuple[str, ...]] = {
    "identical": (),
    "distinct": (),
    "uniform": (),
    "zipf": ("s",),
    "punica_geometric": ("ratio",),
    "slora_power": ("alpha",),
    "trace": (),
}


@dataclass(frozen=True)
class ArrivalSpec:
    """rate in requests/s; cv is the coefficient of variation of the gaps; concurrency in requests."""

    kind: str
    rate: float | None = None
    cv: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        _check_kind("arrivals", self, ARRIVALS)
        _positive("arrivals", self, "rate", "cv", "concurrency")


@dataclass(frozen=True)
class LengthSpec:
    """Token counts; see `lengths` for the formulas. low and high are both included."""

    kind: str
    value: int | None = None
    low: int | None = None
    high: int | None = None
    median: float | None = None
    sigma: float | None = None

    def __post_init__(self) -> None:
        _check_kind("lengths", self, LENGTHS)
        _positive("lengths", self, "value", "low", "high", "median")
        if self.sigma is not None and not self.sigma >= 0:
            raise UserError(f"lengths.sigma is {self.sigma}; give 0 or more")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise UserError(f"lengths.low {self.low} is above lengths.high {self.high}; swap them")


@dataclass(frozen=True)
class PopularitySpec:
    """See `popularity` for the formulas. ratio defaults to Punica's 1.5, s and alpha to 1."""

    kind: str
    s: float | None = None
    ratio: float | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        defaults = {"zipf": ("s", 1.0), "punica_geometric": ("ratio", 1.5), "slora_power": ("alpha", 1.0)}
        if self.kind in defaults and getattr(self, defaults[self.kind][0]) is None:
            object.__setattr__(self, *defaults[self.kind])
        _check_kind("popularity", self, POPULARITY)
        _positive("popularity", self, "alpha")
        if self.s is not None and not (math.isfinite(self.s) and self.s >= 0):
            raise UserError(f"popularity.s is {self.s}; give 0 or more")
        if self.ratio is not None and not (math.isfinite(self.ratio) and self.ratio > 1):
            raise UserError(f"popularity.ratio is {self.ratio}; give a number above 1 (Punica uses 1.5)")


@dataclass(frozen=True)
class WorkloadSpec:
    """Everything that determines a workload but the vocabulary.

    num_requests or duration_s says how many requests (duration_s: int(rate * duration_s), as S-LoRA counts);
    with a trace num_requests keeps the first rows and may be left out. num_adapters is how many exist; 0
    means none is used, None is allowed where the popularity itself settles it (identical, distinct,
    punica_geometric, trace). base_fraction of the requests, rounded to whole ones, use no adapter.
    `slora` replaces arrivals, lengths and popularity by S-LoRA's generator.
    """

    seed: int = 0
    num_requests: int | None = None
    duration_s: float | None = None
    arrivals: ArrivalSpec | None = None
    prompt_tokens: LengthSpec | None = None
    output_tokens: LengthSpec | None = None
    popularity: PopularitySpec | None = None
    num_adapters: int | None = None
    base_fraction: float = 0.0
    min_token_id: int = 0
    trace: TraceSpec | None = None
    slora: SLoraSpec | None = None

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError(f"seed is {self.seed}; give 0 or more")
        if not 0 <= self.base_fraction <= 1:
            raise UserError(f"base_fraction is {self.base_fraction}; give a share from 0 to 1")
        if self.num_adapters is not None and self.num_adapters < 0:
            raise UserError(f"num_adapters is {self.num_adapters}; give 0 (base model alone) or more")
        if self.min_token_id < 0:
            raise UserError(f"min_token_id is {self.min_token_id}; give 0 or more")
        _positive("workload", self, "num_requests", "duration_s")
        parts = ("arrivals", "prompt_tokens", "output_tokens", "popularity")
        if self.slora is not None:
            given = [
                n for n in (*parts, "trace", "num_requests", "duration_s") if getattr(self, n) is not None
            ]
            if given or self.base_fraction:
                raise UserError(
                    f"slora draws everything itself; remove {', '.join(given) or 'base_fraction'}"
                )
            if self.num_adapters is None:
                raise UserError("slora needs num_adapters (0 for the base model alone)")
            return
        missing = [
            n
            for n in parts
            if getattr(self, n) is None and not (n == "popularity" and self.num_adapters == 0)
        ]
        if missing:
            raise UserError(f"the workload has no {', '.join(missing)}; give each a kind")
        self._check_count()
        self._check_trace()
        kind = self.popularity.kind if self.popularity else "identical"
        if self.num_adapters is None and kind in ("uniform", "zipf", "slora_power"):
            raise UserError(f"popularity {kind!r} needs num_adapters")

    @property
    def uses_trace(self) -> bool:
        parts = (self.arrivals, self.prompt_tokens, self.output_tokens, self.popularity)
        return any(p is not None and p.kind == "trace" for p in parts)

    def _check_count(self) -> None:
        if self.num_requests is not None and self.duration_s is not None:
            raise UserError("num_requests and duration_s are both set; keep one")
        if self.duration_s is not None:
            rate = self.arrivals.rate if self.arrivals else None
            if rate is None:
                raise UserError(
                    "duration_s needs arrivals with a rate; set num_requests instead (trace: trace.window_s)"
                )
            if int(rate * self.duration_s) < 1:
                raise UserError(f"{rate} requests/s for {self.duration_s} s is no request; raise one of them")
        if self.num_requests is None and self.duration_s is None and not self.uses_trace:
            raise UserError("set num_requests or duration_s")

    def _check_trace(self) -> None:
        if self.uses_trace and self.trace is None:
            raise UserError(
                "a part of the workload has kind trace but trace is not set; give trace.format and trace.path"
            )
        if self.trace is not None and not self.uses_trace:
            raise UserError(
                "trace is set but no part of the workload has kind trace; set arrivals.kind=trace"
            )

    @staticmethod
    def from_mapping(mapping: Mapping[str, Any]) -> WorkloadSpec:
        """Build from nested mappings (a YAML file). Unknown keys and wrong types are UserErrors."""
        return _from_mapping(WorkloadSpec, mapping, "workload")


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
        trace = (
            read_trace(
                spec.trace,
                with_adapter=spec.num_adapters != 0
                and spec.popularity is not None
                and spec.popularity.kind == "trace",
                limit=spec.num_requests,
            )
            if spec.trace
            else None
        )
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


def _count(spec: WorkloadSpec, trace: TraceData | None) -> int:
    if trace is not None:
        return len(trace.arrival_s)
    if spec.num_requests is not None:
        return spec.num_requests
    return int(spec.arrivals.rate * spec.duration_s)


def _arrivals(spec: WorkloadSpec, n: int, trace: TraceData | None) -> tuple[np.ndarray, dict[str, Any]]:
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


def _lengths(
    spec: LengthSpec, n: int, rng: np.random.Generator, traced: np.ndarray | None
) -> tuple[np.ndarray, int]:
    if spec.kind == "trace":
        return traced, 0
    if spec.kind == "fixed":
        return lengths.fixed(n, spec.value)
    if spec.kind == "uniform":
        return lengths.uniform(n, spec.low, spec.high, rng)
    return lengths.lognormal(n, spec.median, spec.sigma, spec.low, spec.high, rng)


def _adapters(spec: WorkloadSpec, n: int, trace: TraceData | None) -> tuple[np.ndarray, int, dict[str, Any]]:
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


def _check_kind(where: str, spec: Any, kinds: dict[str, tuple[str, ...]]) -> None:
    if spec.kind not in kinds:
        raise UserError(f"{where}.kind is {spec.kind!r}; choose one of {', '.join(kinds)}")
    wanted = kinds[spec.kind]
    for f in dataclasses.fields(spec):
        if f.name == "kind":
            continue
        value = getattr(spec, f.name)
        if f.name in wanted and value is None:
            raise UserError(f"{where} of kind {spec.kind!r} needs {f.name}; set {where}.{f.name}")
        if f.name not in wanted and value is not None:
            uses = ", ".join(wanted) or "no parameter"
            raise UserError(
                f"{where} of kind {spec.kind!r} does not use {f.name} (it uses {uses}); set it to null"
            )


def _positive(where: str, spec: Any, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UserError(f"{where}.{name} is {value}; give a number above 0")


def _from_mapping(cls: type, mapping: Mapping[str, Any], where: str) -> Any:
    if not isinstance(mapping, Mapping):
        raise UserError(f"{where} is {mapping!r}; give a mapping with keys {', '.join(_field_names(cls))}")
    hints = typing.get_type_hints(cls)
    unknown = [k for k in mapping if k not in hints]
    if unknown:
        raise UserError(f"{where} has no key {unknown[0]!r}; the keys are {', '.join(_field_names(cls))}")
    absent = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in mapping
    ]
    if absent:
        raise UserError(f"{where} needs {', '.join(absent)}")
    return cls(**{key: _typed(hints[key], value, f"{where}.{key}") for key, value in mapping.items()})


def _typed(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type: whole numbers are fine for floats, nothing else is converted."""
    options = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
    if value is None and type(None) in options:
        return None
    kind = next(o for o in options if o is not type(None))
    origin = typing.get_origin(kind) or kind
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else _from_mapping(kind, value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(value)
    if origin is dict and isinstance(value, Mapping):
        return {str(k): str(v) for k, v in value.items()}
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, origin) and not (origin is int and isinstance(value, bool)):
        return value
    names = {int: "a whole number", float: "a number", str: "text", tuple: "a list", dict: "a mapping"}
    raise UserError(f"{where} is {value!r}; give {names.get(origin, origin.__name__)}")


def _field_names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]
