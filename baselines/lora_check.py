"""The LoRA kernels against float64 over ragged batches with poisoned memory; on a GPU or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tessa.ops.selfcheck import NAN, Shape, random_slots
from tessa.ops.step import StepMeta, step_buffers, step_meta


@dataclass(frozen=True)
class LoraShape:
    """T tokens, S slots of rank r of which at most ``used`` occur; ``outs`` are the fused projections' widths."""

    tokens: int
    slots: int
    used: int
    rank: int
    d_in: int
    outs: tuple[int, ...]


SMALL = (
    LoraShape(1, 1, 1, 1, 16, (16,)),
    LoraShape(9, 3, 2, 5, 70, (33, 17, 17)),
    LoraShape(40, 5, 5, 16, 300, (70, 45)),
)
LARGE = (
    LoraShape(32, 8, 8, 16, 4096, (512, 128, 128)),
    LoraShape(33, 64, 9, 8, 1792, (4096,)),
    LoraShape(300, 8, 4, 64, 4096, (3584, 3584)),
    LoraShape(2500, 4, 3, 16, 1024, (1000,)),
)


def check_lora(shape: LoraShape, dtype: torch.dtype, device: str, seed: int = 0) -> tuple[float, bool]:
    """(largest error relative to the sum of absolute terms, whether all is within rounding and nothing else touched).

    Allowed: roundings of the output, of the factors between the kernels (cast to B's type), and float32 sums.
    """
    from baselines.lora_kernels import expand, shrink

    gen = torch.Generator().manual_seed(seed)
    parts, width = len(shape.outs), sum(shape.outs)
    used = torch.randperm(shape.slots, generator=gen)[: shape.used]
    batch = Shape(shape.tokens, shape.slots, shape.rank, shape.d_in, width, shape.used)
    slot = random_slots(batch, used, gen)
    live = slot >= 0

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen).to(dtype)

    x = torch.full((shape.tokens, shape.d_in + 3), NAN, dtype=dtype)
    x[live, 1:-2] = normal(int(live.sum()), shape.d_in)
    y = torch.full((shape.tokens, width + 4), NAN, dtype=dtype)
    y[:, 2:-2] = normal(shape.tokens, width)
    a = torch.full((shape.slots, parts * shape.rank, shape.d_in), NAN, dtype=dtype)
    b = torch.full((shape.slots, width, shape.rank), NAN, dtype=dtype)
    for s in slot[live].unique().tolist():
        a[s], b[s] = normal(*a.shape[1:]), normal(*b.shape[1:])
    starts = torch.tensor([0, *shape.outs]).cumsum(0)

    want, reach = y[:, 2:-2].double(), y[:, 2:-2].double().abs()
    for t in live.nonzero().flatten().tolist():
        s, row = int(slot[t]), x[t, 1:-2].double()
        inner, bound = a[s].double() @ row, a[s].double().abs() @ row.abs()
        for p in range(parts):
            lo, hi = int(starts[p]), int(starts[p + 1])
            own = slice(p * shape.rank, (p + 1) * shape.rank)
            want[t, lo:hi] += b[s, lo:hi].double() @ inner[own]
            reach[t, lo:hi] += b[s, lo:hi].double().abs() @ bound[own]

    meta = _meta(slot, shape.slots, device)
    x, y, a, b = x.to(device), y.to(device), a.to(device), b.to(device)
    before = y.clone()
    inner32 = torch.full((shape.tokens, parts * shape.rank), NAN, dtype=torch.float32, device=device)
    shrink(inner32, x[:, 1:-2], a, meta.order, meta.seg_start)
    part_start = starts.to(torch.int32).to(device)
    expand(y[:, 2:-2], inner32, b, meta.order, meta.seg_start, part_start, max(shape.outs))

    error = ((y[:, 2:-2].cpu().double() - want).abs() / reach.clamp_min(1e-30)).nan_to_num(nan=float("inf"))
    worst = float(error.max())
    untouched = torch.equal(y[~live.to(device), 2:-2], before[~live.to(device), 2:-2])
    gaps = torch.cat([y[:, :2], y[:, -2:]], dim=1)
    allowed = 4 * torch.finfo(dtype).eps + (shape.d_in + shape.rank) * 2.0**-24
    return worst, worst <= allowed and untouched and bool(gaps.isnan().all())


def _meta(slot: Tensor, slots: int, device: str) -> StepMeta:
    """Metadata whose unread tail is poisoned."""
    meta = step_meta(slot.to(device), slots, out=step_buffers(slot.shape[0] + 5, slots, device))
    meta.order[int(meta.seg_start[-1]) :] = 2**30
    return meta


def check_lora_kernels(
    device: str, shapes: tuple[LoraShape, ...] | None = None
) -> list[tuple[str, float, bool]]:
    """(name, largest relative error, ok) for every dtype and shape; on a GPU the large shapes too."""
    if shapes is None:
        shapes = SMALL + LARGE if torch.device(device).type == "cuda" else SMALL
    return [
        (f"lora {str(dtype).removeprefix('torch.')} {shape}", *check_lora(shape, dtype, device, seed))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for seed, shape in enumerate(shapes)
    ]
