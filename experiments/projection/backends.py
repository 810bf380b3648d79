"""Extra work of each backend's adapters, one layer, one rank: bytes, FLOPs, kernels, collectives, seconds.

Budget: every structure holds `rank * (d_in + d_out)` parameters per module (LoRA's count), so BD-LoRA's block
rank and TESSA's slice widths follow from it and all are compared at a matched budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from experiments.projection.hardware import ADAPTER_KERNELS, GPU, AdapterKernelConstants
from experiments.projection.ops import BYTES, FP32_BYTES, adapter_kernel_s, elementwise_s, matmul_s
from experiments.projection.shapes import (
    COLUMN,
    FusedLinear,
    Linear,
    ModelShape,
    fused_linears,
)
from tessa.errors import UserError
from tessa.ops.gpu_schedule import wide_limit
from tessa.slices import ALL_MODULES

ROW_TILE = 16  # rows that a tensor-core tile of a grouped kernel holds at least


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """What one step asks of the adapters.

    tokens: tokens of the step that use an adapter; distinct: adapters among them; resident: slots that hold
    an adapter (None: as many as distinct); rank: rank-equivalent budget; modules: adapted module names.
    """

    tokens: int
    distinct: int
    rank: int
    resident: int | None = None
    modules: tuple[str, ...] = ALL_MODULES

    def __post_init__(self) -> None:
        if min(self.tokens, self.distinct, self.rank) < 1:
            raise UserError(f"tokens, distinct and rank must be at least 1, got {self}")
        unknown = set(self.modules) - set(ALL_MODULES)
        if unknown:
            raise UserError(f"unknown modules {sorted(unknown)}; known: {', '.join(ALL_MODULES)}")

    @property
    def used(self) -> int:
        """Distinct adapters, at most one a token."""
        return min(self.distinct, self.tokens)

    @property
    def slots(self) -> int:
        return max(self.resident or self.distinct, self.used)

    @property
    def padded_tokens(self) -> int:
        """Tokens after each adapter's group is padded to whole tiles."""
        return self.used * math.ceil(self.tokens / self.used / ROW_TILE) * ROW_TILE


@dataclass(slots=True)
class AdapterWork:
    """Totals over one layer on one rank. `eager` says that the step cannot be captured in a graph."""

    seconds: float = 0.0
    moved_bytes: float = 0.0
    flops: float = 0.0
    kernels: int = 0
    read_bytes: float = 0.0  # of adapters' weights, this rank: the distinct ones', or all slots' where wide
    one_bytes: float = 0.0  # parameters of one adapter, this rank
    collectives: list[tuple[str, float]] = field(default_factory=list)
    eager: bool = False
    mode: str = ""

    def add(self, other: AdapterWork) -> None:
        self.seconds += other.seconds
        self.moved_bytes += other.moved_bytes
        self.flops += other.flops
        self.kernels += other.kernels
        self.read_bytes += other.read_bytes
        self.one_bytes += other.one_bytes
        self.collectives += other.collectives
        self.eager = self.eager or other.eager
        self.mode = other.mode if not self.mode or self.mode == other.mode else "mixed"


def _grouped(
    gpu: GPU, constants: AdapterKernelConstants, load: AdapterLoad, weights: float, activations: float
) -> AdapterWork:
    """One grouped kernel: `weights` elements of each distinct adapter, `activations` bytes of the step."""
    moved = load.used * weights * BYTES + activations
    flops = 2 * load.padded_tokens * weights
    seconds = adapter_kernel_s(gpu, constants, moved, flops)
    return AdapterWork(seconds, moved, flops, 1, load.used * weights * BYTES, weights * BYTES)


def _lora_pair(
    gpu: GPU, c: AdapterKernelConstants, load: AdapterLoad, linear: FusedLinear, parts: list[Linear],
    inner: list[float], shrink_in: int, expand_out: list[int], inner_out: list[float] | None = None,
) -> AdapterWork:  # fmt: skip
    """Shrink then expand of one fused product; `inner[i]` rows of part i's A on this rank, fp32 between."""
    tokens = load.tokens
    inner_out = inner_out or inner
    work = _grouped(
        gpu, c, load, sum(inner) * shrink_in, BYTES * tokens * shrink_in + FP32_BYTES * tokens * sum(inner)
    )
    expand_weights = sum(r * out for r, out in zip(inner_out, expand_out, strict=True))
    activations = FP32_BYTES * tokens * sum(inner_out) + 2 * BYTES * tokens * sum(expand_out)
    work.add(_grouped(gpu, c, load, expand_weights, activations))
    return work


def _punica(
    gpu: GPU, c: AdapterKernelConstants, load: AdapterLoad, tp: int, linear: FusedLinear, parts: list[Linear]
) -> AdapterWork:
    """A (column-parallel) or B (row-parallel) is whole on every rank: that factor's work does not shrink."""
    ranks = [float(load.rank)] * len(parts)
    return _lora_pair(gpu, c, load, linear, parts, ranks, linear.rank_in, [p.rank_out for p in parts])


def _slora(
    gpu: GPU, c: AdapterKernelConstants, load: AdapterLoad, tp: int, linear: FusedLinear, parts: list[Linear]
) -> AdapterWork:
    """Both factors sharded; fp32 inner values are gathered (column) or summed (row) between the kernels."""
    whole = [float(load.rank)] * len(parts)
    if linear.kind == COLUMN:
        shard = [r / tp for r in whole]
        work = _lora_pair(
            gpu, c, load, linear, parts, shard, linear.rank_in, [p.rank_out for p in parts], whole
        )
    else:
        work = _lora_pair(
            gpu, c, load, linear, parts, whole, linear.rank_in, [p.rank_out // tp for p in parts]
        )
    if tp > 1:
        kind = "all_gather" if linear.kind == COLUMN else "all_reduce"
        work.collectives.append((kind, FP32_BYTES * load.tokens * sum(whole)))
    return work


def _bd_lora(
    gpu: GPU, c: AdapterKernelConstants, load: AdapterLoad, tp: int, linear: FusedLinear, parts: list[Linear]
) -> AdapterWork:
    """One block per rank: its rows of A and the matching block of B; block rank from the matched budget."""
    inner = [load.rank * (p.d_in + p.d_out) / tp / (p.rank_in + p.rank_out) for p in parts]
    return _lora_pair(gpu, c, load, linear, parts, inner, linear.rank_in, [p.rank_out for p in parts])


def slice_width(part: Linear, rank: int) -> float:
    """Width c of the slice placed across the sharded dimension, from the matched budget."""
    return rank * (part.d_in + part.d_out) / (part.d_out if part.kind == COLUMN else part.d_in)


def _tessa_segmented(
    gpu: GPU, c: AdapterKernelConstants, load: AdapterLoad, tp: int, linear: FusedLinear, parts: list[Linear]
) -> AdapterWork:
    """One single-stage grouped kernel per fused product that adds into the base output."""
    widths = [slice_width(p, load.rank) for p in parts]
    if linear.kind == COLUMN:
        weights = sum(w * p.rank_out for w, p in zip(widths, parts, strict=True))
        elements = sum(widths) + 2 * sum(p.rank_out for p in parts)
    else:
        weights, elements = widths[0] * linear.rank_in, linear.rank_in + 2 * widths[0]
    work = _grouped(gpu, c, load, weights, BYTES * load.tokens * elements)
    work.mode = "segmented"
    return work


def _tessa_wide(
    gpu: GPU, c: AdapterKernelConstants, load: AdapterLoad, tp: int, linear: FusedLinear, parts: list[Linear]
) -> AdapterWork:
    """The base product grows by all resident slots; one small routing kernel before (column) or after (row).

    Fused column-parallel parts share one widened product, padded to the widest part's slice.
    """
    widths = [slice_width(p, load.rank) for p in parts]
    base_out, base_in = linear.rank_out, linear.rank_in
    if linear.kind == COLUMN:
        extra = load.slots * max(widths)
        grown = matmul_s(gpu, load.tokens, base_out, base_in + extra)
        weights, routed = extra * base_out, base_in + extra
        one = sum(w * p.rank_out for w, p in zip(widths, parts, strict=True))
    else:
        extra = load.slots * widths[0]
        grown = matmul_s(gpu, load.tokens, base_out + extra, base_in)
        weights, routed = extra * base_in, widths[0]
        one = widths[0] * base_in
    route = max(c.small_s, float(elementwise_s(gpu, "add", load.tokens, routed)))
    seconds = float(grown - matmul_s(gpu, load.tokens, base_out, base_in)) + route
    moved = BYTES * (weights + 3 * load.tokens * routed)
    flops = 2 * load.tokens * weights
    return AdapterWork(max(seconds, route), moved, flops, 1, BYTES * weights, BYTES * one, mode="wide")


def _tessa(
    gpu: GPU, c: AdapterKernelConstants, load: AdapterLoad, tp: int, linear: FusedLinear, parts: list[Linear]
) -> AdapterWork:
    """Wide or segmented, by the rule that serves on GPUs (`tessa.ops.gpu_schedule.wide_limit`)."""
    width = math.ceil(max(slice_width(part, load.rank) for part in parts))
    length = linear.rank_out if linear.kind == COLUMN else linear.rank_in
    wide = load.tokens <= wide_limit("auto", load.slots, width, length)
    return (_tessa_wide if wide else _tessa_segmented)(gpu, c, load, tp, linear, parts)


def _plain_lora(
    gpu: GPU, c: AdapterKernelConstants, load: AdapterLoad, tp: int, linear: FusedLinear, parts: list[Linear]
) -> AdapterWork:
    """Per distinct adapter and module: gather rows, two products, scatter-add. No graph: shapes vary."""
    each = max(1, round(load.tokens / load.used))
    total = AdapterWork(eager=True)
    for part in parts:
        weights = load.rank * (part.rank_in + part.rank_out)
        seconds = float(
            matmul_s(gpu, each, load.rank, part.rank_in)
            + matmul_s(gpu, each, part.rank_out, load.rank)
            + elementwise_s(gpu, "add", each, part.rank_in)
            + elementwise_s(gpu, "add", each, part.rank_out)
        )
        moved = BYTES * (weights + each * (3 * part.rank_in + 4 * part.rank_out))
        total.add(
            AdapterWork(
                load.used * seconds,
                load.used * moved,
                load.used * 2 * each * weights,
                load.used * 4,
                load.used * BYTES * weights,
                BYTES * weights,
                eager=True,
            )
        )
    return total


def _enabled(
    gpu: GPU, c: AdapterKernelConstants, load: AdapterLoad, tp: int, linear: FusedLinear, parts: list[Linear]
) -> AdapterWork:
    """Adapter support on, no adapter used: the two kernels start and leave at once."""
    return AdapterWork(seconds=2 * c.small_s, kernels=2)


_Rule = Callable[[GPU, AdapterKernelConstants, AdapterLoad, int, FusedLinear, list[Linear]], AdapterWork]
_RULES: dict[str, _Rule | None] = {
    "base": None,
    "base_enabled": _enabled,
    "merged": None,
    "plain_lora": _plain_lora,
    "punica": _punica,
    "slora": _slora,
    "bd_lora": _bd_lora,
    "tessa": _tessa,
    "tessa_wide": _tessa_wide,
    "tessa_segmented": _tessa_segmented,
}
BACKENDS = tuple(_RULES)


def layer_work(
    backend: str,
    gpu: GPU,
    shape: ModelShape,
    tp: int,
    load: AdapterLoad,
    constants: AdapterKernelConstants = ADAPTER_KERNELS,
) -> AdapterWork:
    """Adapter work of one layer on one of `tp` ranks. Seconds exclude collectives and kernel gaps."""
    if backend not in _RULES:
        raise UserError(f"unknown backend {backend!r}; known: {', '.join(BACKENDS)}")
    rule, total = _RULES[backend], AdapterWork()
    if rule is None:
        return total
    for linear in fused_linears(shape, tp):
        parts = [part for part in linear.parts if part.name in load.modules]
        if parts:
            total.add(rule(gpu, constants, load, tp, linear, parts))
    return total


def bound_s(gpu: GPU, shape: ModelShape, tp: int, load: AdapterLoad) -> float:
    """Least time of any structure of this budget in one layer: its distinct bytes over the bandwidth."""
    parts = [p for linear in fused_linears(shape, 1) for p in linear.parts if p.name in load.modules]
    elements = sum(load.rank * (p.d_in + p.d_out) for p in parts) / tp
    return load.used * elements * BYTES / gpu.memory_bandwidth
