"""What a workload is made from, as dataclasses that refuse what makes no sense."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.workload.mapping import from_mapping
from experiments.workload.slora_compat import SLoraSpec
from experiments.workload.traces import TraceSpec
from tessa.errors import UserError

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
        return from_mapping(WorkloadSpec, mapping, "workload")


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
