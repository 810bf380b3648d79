"""Every adapter op against float64 references on a given device, over ragged batches with poisoned memory.

Poison is NaN (or an index far out of range) in whatever an op must not read, and in whatever it must
overwrite: the gaps of row-strided tensors, the inputs of tokens without adapter, the deltas of slots that no
token uses, rows beyond an adapter's width, and the tail of the metadata.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tessa.ops import custom_ops, reference
from tessa.ops.step import StepMeta, step_buffers, step_meta
from tessa.ops.wide import WideWeight

NAN = float("nan")


@dataclass(frozen=True)
class Shape:
    """One case: T tokens, S slots of at most K rows, at most ``used`` distinct slots in the batch."""

    tokens: int
    slots: int
    k: int
    d_in: int
    d_out: int
    used: int


SMALL = (
    Shape(1, 1, 1, 16, 16, 1),
    Shape(7, 3, 5, 19, 33, 2),
    Shape(40, 5, 17, 70, 45, 5),
    Shape(23, 4, 300, 310, 320, 3),
)
LARGE = (
    Shape(32, 8, 64, 4096, 1536, 8),
    Shape(33, 64, 20, 1024, 3584, 9),
    Shape(301, 8, 384, 2048, 1000, 4),
    Shape(1100, 8, 64, 1024, 4096, 3),
    Shape(2048, 16, 40, 512, 1024, 16),
)


@dataclass
class Case:
    """Tensors of one random case; ``widths`` is None where padding is marked by zero deltas alone."""

    y: Tensor
    x: Tensor
    index: Tensor
    delta: Tensor
    meta: StepMeta
    widths: Tensor | None
    y_storage: Tensor

    @property
    def without_adapter(self) -> Tensor:
        return self.meta.token_slot[: self.x.shape[0]] < 0


def make_case(part: str, shape: Shape, dtype: torch.dtype, device: str, seed: int, widths: bool) -> Case:
    """Random ragged batch; contiguous and scattered slices; poisoned as the module says."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen).to(dtype)

    length = shape.d_out if part == "in" else shape.d_in
    limit = shape.d_in if part == "in" else shape.d_out
    used = torch.randperm(shape.slots, generator=gen)[: shape.used]
    token_slot = random_slots(shape, used, gen)
    used = token_slot[token_slot >= 0].unique()

    width = torch.randint(0, shape.k + 1, (shape.slots,), generator=gen, dtype=torch.int32)
    if len(used):
        width[used[0]] = shape.k
        width[used[-1]] = max(1, shape.k - 2)
    index = torch.zeros(shape.slots, shape.k, dtype=torch.int32)
    delta = torch.full((shape.slots, shape.k, length), NAN, dtype=dtype)
    for s in used.tolist():
        rows = int(width[s])
        if s == used[-1]:
            index[s, :rows] = torch.arange(rows).flip(0)  # a real row at 0, and padding at 0 after it
        elif s % 2:
            index[s, :rows] = torch.randperm(limit, generator=gen)[:rows]  # as packed projections give them
        else:
            first = int(torch.randint(0, limit - rows + 1, (1,), generator=gen))
            index[s, :rows] = torch.arange(first, first + rows)
        delta[s, :rows] = normal(rows, length)
        if not widths:
            delta[s, rows:] = 0

    x_storage = torch.full((shape.tokens, shape.d_in + 5), NAN, dtype=dtype)
    x = x_storage[:, 1 : 1 + shape.d_in]
    x[token_slot >= 0] = normal(int((token_slot >= 0).sum()), shape.d_in)
    y_storage = torch.full((shape.tokens, shape.d_out + 3), NAN, dtype=dtype)
    y = y_storage[:, 2 : 2 + shape.d_out]
    y[:] = normal(shape.tokens, shape.d_out)
    x_storage, y_storage = x_storage.to(device), y_storage.to(device)

    meta = step_meta(
        token_slot.to(device), shape.slots, out=step_buffers(shape.tokens + 6, shape.slots, device)
    )
    meta.order[int(meta.seg_start[-1]) :] = 2**30
    return Case(
        y=y_storage[:, 2 : 2 + shape.d_out],
        x=x_storage[:, 1 : 1 + shape.d_in],
        index=index.to(device),
        delta=delta.to(device),
        meta=meta,
        widths=width.to(device) if widths else None,
        y_storage=y_storage,
    )


def random_slots(shape: Shape, used: Tensor, gen: torch.Generator) -> Tensor:
    """Slots of a batch, int32 [T]: ragged shares of the used slots, one token in eight without adapter."""
    shares = torch.cat([torch.rand(len(used), generator=gen) ** 3 + 1e-3, torch.zeros(1)])
    shares[-1] = shares.sum() / 7
    choice = torch.multinomial(shares, shape.tokens, replacement=True, generator=gen)
    return torch.cat([used, torch.tensor([-1])])[choice].to(torch.int32)


def verdict(got: Tensor, want: Tensor, magnitude: Tensor, terms: int) -> tuple[float, bool]:
    """(largest error relative to the sum of absolute terms, within what rounding explains).

    Allowed: a few roundings to the output's type, and float32 accumulation over ``terms`` terms.
    """
    error = ((got.double() - want).abs() / magnitude.clamp_min(1e-30)).nan_to_num(nan=float("inf"))
    worst = float(error.max()) if error.numel() else 0.0
    return worst, worst <= 4 * torch.finfo(got.dtype).eps + terms * 2.0**-24


def check_segmented(part: str, op: Callable[..., None], case: Case) -> tuple[float, bool]:
    """Run ``segmented_in`` or ``segmented_out`` and look at results, untouched tokens and untouched gaps."""
    slots = case.meta.token_slot[: case.x.shape[0]]
    ref = reference.reference_in if part == "in" else reference.reference_out
    want, magnitude = ref(case.y, case.x, case.index, case.delta, slots, case.widths)
    before = case.y_storage.clone()
    op(case.y, case.x, case.index, case.delta, case.meta.order, case.meta.seg_start, case.widths)
    worst, ok = verdict(case.y, want, magnitude, case.x.shape[1] + case.index.shape[1])
    gaps = torch.cat([case.y_storage[:, :2], case.y_storage[:, 2 + case.y.shape[1] :]], dim=1)
    untouched = torch.equal(case.y_storage[case.without_adapter, 2:-1], before[case.without_adapter, 2:-1])
    return worst, ok and untouched and bool(gaps.isnan().all())


def wide_weight(part: str, case: Case, bias: bool) -> tuple[WideWeight, Tensor]:
    """A `WideWeight` with the case's adapters in their slots, poisoned where nothing may be read; and W."""
    slots, k = case.index.shape
    gen = torch.Generator().manual_seed(k)
    weight = torch.randn(case.y.shape[1], case.x.shape[1], generator=gen).to(case.x)
    vector = torch.randn(case.y.shape[1], generator=gen).to(case.x) if bias else None
    wide = WideWeight(weight, slots, k, "in" if part == "in" else "out", bias=vector)
    live = set(case.meta.token_slot.tolist()) - {-1}
    for s in range(slots):
        if s in live:
            rows = k if case.widths is None else int(case.widths[s])
            wide.set_slot(s, case.delta[s, :rows], case.index[s, :rows])
        elif part == "out":
            wide.delta[s] = NAN
    return wide, weight


def check_wide(part: str, op: Callable[..., Tensor], case: Case, bias: bool) -> tuple[float, bool]:
    """Run ``wide_in`` or ``wide_out`` on a `WideWeight` that holds the case's adapters."""
    slots = case.meta.token_slot[: case.x.shape[0]]
    case.x[case.without_adapter] = 1
    wide, weight = wide_weight(part, case, bias)
    base = case.x.double() @ weight.double().T
    reach = case.x.double().abs() @ weight.double().abs().T
    if wide.bias is not None:
        vector = wide.bias[: wide.d_out].double()
        base, reach = base + vector, reach + vector.abs()
    ref = reference.reference_in if part == "in" else reference.reference_out
    zero = torch.zeros_like(base)
    want, magnitude = ref(zero, case.x, case.index, case.delta, slots, wide.widths)
    extra = () if part == "in" else (wide.d_out,)
    widths = None if case.widths is None else wide.widths
    got = op(case.x, wide.buffer, wide.index, case.meta.token_slot, *extra, wide.bias, widths)
    worst, ok = verdict(got, base + want, reach + magnitude, wide.buffer.shape[1])
    return worst, ok and got.is_contiguous()


def triton_implementation() -> Any:
    """The four ops built from the Triton launchers directly, without the dispatcher."""
    from tessa.ops import triton_kernels as kernels

    return SimpleNamespace(
        segmented_in=kernels.segmented_in,
        segmented_out=kernels.segmented_out,
        wide_in=custom_ops.wide_in_triton,
        wide_out=custom_ops.wide_out_triton,
    )


def replayed(op: Callable[..., Any], batch: StepMeta) -> Callable[..., Any]:
    """``op`` as a CUDA graph: captured with no adapter in the batch, then replayed with the metadata of ``batch``."""

    def run(*arguments: Any) -> Any:
        meta = step_buffers(batch.token_slot.shape[0], batch.seg_start.shape[0] - 1, batch.order.device)
        buffers = {id(value): buffer for value, buffer in zip(batch, meta, strict=True)}
        arguments = tuple(buffers.get(id(value), value) for value in arguments)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            op(*arguments)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = op(*arguments)
        for buffer, value in zip(meta, batch, strict=True):
            buffer.copy_(value)
        graph.replay()
        # The graph's memory goes with it.
        return None if result is None else result.clone()

    return run


def check_graphs(device: str) -> list[tuple[str, float, bool]]:
    """(name, largest relative error, ok) for every op in a CUDA graph whose metadata changes after its capture."""
    results = []
    for part in ("in", "out"):
        case = make_case(part, LARGE[0], torch.bfloat16, device, seed=5, widths=True)
        op = replayed(getattr(custom_ops, f"segmented_{part}"), case.meta)
        results.append((f"graph segmented_{part}", *check_segmented(part, op, case)))
        case = make_case(part, LARGE[0], torch.bfloat16, device, seed=5, widths=True)
        op = replayed(getattr(custom_ops, f"wide_{part}"), case.meta)
        results.append((f"graph wide_{part}", *check_wide(part, op, case, bias=True)))
    return results


def check_kernels(
    device: str, ops: Any = custom_ops, shapes: tuple[Shape, ...] | None = None
) -> list[tuple[str, float, bool]]:
    """(name, largest relative error, ok) for every op, dtype and shape on ``device`` ("cuda", "cpu").

    ops: `tessa.ops.custom_ops` (Triton on CUDA, plain torch on the CPU), or `triton_implementation()`.
    shapes: all small ones by default, and on CUDA the large ones too.
    """
    if shapes is None:
        shapes = SMALL + LARGE if torch.device(device).type == "cuda" else SMALL
    results = []

    def record(name: str, outcome: tuple[float, bool]) -> None:
        results.append((name, *outcome))

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for seed, shape in enumerate(shapes):
            for part in ("in", "out"):
                for widths in (False, True):
                    name = f"{part} {str(dtype).removeprefix('torch.')} {shape} widths={widths}"
                    case = make_case(part, shape, dtype, device, seed, widths)
                    record(
                        f"segmented_{name}", check_segmented(part, getattr(ops, f"segmented_{part}"), case)
                    )
                    case = make_case(part, shape, dtype, device, seed, widths)
                    op = getattr(ops, f"wide_{part}")
                    record(f"wide_{name}", check_wide(part, op, case, bias=widths))
    return results
