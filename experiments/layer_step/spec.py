"""What a layer-step run measures: the points of its grid, their order, and their sizes on one rank.

Imports neither torch nor anything that is not in a bare PyTorch image.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from experiments.kinds import check_counts, check_lists
from experiments.projection.shapes import ModelShape, fused_linears, model_shape
from tessa.errors import UserError

PHASES = ("decode", "prefill")
BACKENDS = (
    "base", "plain_lora", "punica", "slora", "bd_lora", "tessa", "tessa:wide", "tessa:segmented",
)  # fmt: skip
DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
CPU_SCALE = 8


@dataclass(frozen=True, slots=True)
class LayerStepSpec:
    """Sweeps start from `batch`, `rank`, ... and vary one axis at a time at `sweep_tp`.

    Attributes:
        backends: names, base among them, or ``tessa:wide`` and ``tessa:segmented`` for one of TESSA's products alone.
        batch, context: sequences that decode one token each, and their length in the KV cache.
        prompts, prompt_tokens: the prefill step's prompts and the tokens of each.
        rank: rank-equivalent budget. distinct: adapters in the step. resident: slots, None for as many as distinct.
        layers: layers in the timed stack; None: so many that their weights exceed the cache three times.
        base_fraction: share of the sequences that use no adapter.
        scale: hidden size, head size, MLP width and prompts' length are divided by it; None: 1 on a GPU, 8 on the CPU.
            The rank stays, so adapters are a `scale` times larger share of the weights.
        interconnect: GPU whose links the collectives' model takes; None: the GPU that is measured, none on a CPU.
        rounds, repeats, round_s: backends take turns for `rounds` rounds, each of at most `repeats` steps and, after
            two, about `round_s` seconds.
        budget_s: seconds after which no further point is begun; None: no limit.
    """

    models: Sequence[str] = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b")
    tps: Sequence[int] = (1, 2, 4, 8)
    backends: Sequence[str] = BACKENDS
    phases: Sequence[str] = PHASES
    batch: int = 32
    context: int = 512
    prompts: int = 4
    prompt_tokens: int = 512
    rank: int = 16
    distinct: int = 8
    resident: int | None = None
    sweep_tp: int = 8
    batches: Sequence[int] = (1, 4, 16, 32, 64, 128, 256)
    ranks: Sequence[int] = (8, 16, 32, 64)
    distincts: Sequence[int] = (1, 2, 4, 8, 16, 32)
    residents: Sequence[int] = (8, 16, 32, 64)
    layers: int | None = None
    base_fraction: float = 0.0
    device: str = "auto"
    dtype: str = "auto"
    scale: int | None = None
    interconnect: str | None = None
    custom_all_reduce: bool = True
    rounds: int = 5
    repeats: int = 20
    round_s: float = 1.0
    budget_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("backends", BACKENDS), ("phases", PHASES)):
            values = getattr(self, name)
            if isinstance(values, str) or not values or set(values) - set(known):
                raise UserError(f"{name}={values!r}: give a list of {', '.join(known)}")
        check_lists(self, "models", "tps", "backends", "phases")
        if "base" not in self.backends:
            raise UserError(
                f"backends={list(self.backends)} lacks base, from which every adapter cost is reckoned; add base to "
                "the list"
            )
        for name, value, allowed in (("device", self.device, DEVICES), ("dtype", self.dtype, DTYPES)):
            if value not in allowed:
                raise UserError(f"{name}={value!r} is unknown; allowed: {', '.join(allowed)}")
        check_counts(
            self, "batch", "context", "prompts", "prompt_tokens", "rank", "distinct", "rounds", "repeats"
        )
        check_counts(self, "sweep_tp", "tps", "batches", "ranks", "distincts", "residents")
        check_counts(self, "resident", "layers", "scale")
        if not 0 <= self.base_fraction < 1:
            raise UserError(f"base_fraction={self.base_fraction} must lie in [0, 1)")
        for model in self.models:
            for tp in {*self.tps, self.sweep_tp}:
                fused_linears(model_shape(model), tp)


@dataclass(frozen=True, slots=True)
class Point:
    """One step to measure with every backend. sequences: decoding ones, or prompts of `length` tokens."""

    model: str
    tp: int
    phase: str
    sequences: int
    length: int
    rank: int
    distinct: int
    resident: int
    sweep: str = "tp"

    @property
    def tokens(self) -> int:
        return self.sequences if self.phase == "decode" else self.sequences * self.length

    @property
    def label(self) -> str:
        return (
            f"{self.model} tp {self.tp} {self.phase} {self.tokens} tokens, rank {self.rank}, "
            f"{self.distinct} of {self.resident} adapters"
        )


def points(spec: LayerStepSpec) -> list[Point]:
    """The points in the order in which they are measured, each once; what matters most comes first."""
    seen: dict[Point, Point] = {}
    for point in _points(spec):
        seen.setdefault(replace(point, sweep=""), point)
    return list(seen.values())


def _points(spec: LayerStepSpec) -> Iterator[Point]:
    start = {model: _start(spec, model, "decode") for model in spec.models}
    prefill = {model: _start(spec, model, "prefill") for model in spec.models}
    if "decode" in spec.phases:
        for model in spec.models:
            yield from (replace(start[model], tp=tp) for tp in reversed(spec.tps))
    if "prefill" in spec.phases:
        for model in spec.models:
            yield from (replace(prefill[model], tp=tp) for tp in reversed(spec.tps))
    if "decode" not in spec.phases:
        return
    for model in spec.models:
        here = start[model]
        for batch in spec.batches:
            yield _fit(replace(here, sweep="batch", sequences=batch), spec)
        for distinct in (d for d in spec.distincts if d <= spec.batch):
            resident = max(distinct, spec.resident or distinct)
            yield replace(here, sweep="distinct", distinct=distinct, resident=resident)
        for resident in (r for r in spec.residents if r >= here.distinct):
            yield replace(here, sweep="resident", resident=resident)
        for rank in spec.ranks:
            yield replace(here, sweep="rank", rank=rank)


def _start(spec: LayerStepSpec, model: str, phase: str) -> Point:
    decode = phase == "decode"
    sequences = spec.batch if decode else spec.prompts
    length = spec.context if decode else spec.prompt_tokens
    point = Point(model, spec.sweep_tp, phase, sequences, length, spec.rank, spec.distinct, 0)
    return _fit(point, spec)


def _fit(point: Point, spec: LayerStepSpec) -> Point:
    """At most one adapter a sequence, and at least as many slots as adapters."""
    distinct = min(spec.distinct, point.sequences)
    return replace(point, distinct=distinct, resident=max(spec.resident or spec.distinct, distinct))


def scaled_shape(name: str, scale: int) -> ModelShape:
    """The model's shape with widths divided by `scale` and its numbers of heads kept."""
    shape = model_shape(name)
    sizes = {"hidden": shape.hidden, "head_dim": shape.head_dim, "ffn": shape.ffn}
    if scale < 1 or any(size % scale for size in sizes.values()):
        raise UserError(
            f"scale={scale} does not divide {name}'s sizes {sizes}; allowed: 1, 2, 4, 8, 16, 32, ..."
        )
    hidden, head_dim, ffn = (size // scale for size in sizes.values())
    return replace(shape, hidden=hidden, head_dim=head_dim, ffn=ffn)


def cell_id(point: Point, backend: str, settings: dict[str, object]) -> str:
    """Twelve hex digits of everything that decides a row: the point, the backend and how it was measured."""
    identity = {**asdict(point), "sweep": "", "backend": backend, **settings}
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:12]
