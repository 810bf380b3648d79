"""Sizes of each structure's adapters in one fused product on one rank, at a matched budget."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from experiments.projection.shapes import COLUMN, FusedLinear
from tessa.budget import width_for
from tessa.slices import Axis


@dataclass(frozen=True, slots=True)
class LoraGeometry:
    """Factors of the n projections of one fused product on one rank.

    inner: rows of each projection's A on this rank. whole: columns of its B, more than `inner` where the inner
    values are gathered from all ranks between the two products. outs: rows of each B, which add to the first
    columns of the fused output, one projection after the other. d_in: columns of A.
    """

    inner: int
    whole: int
    outs: tuple[int, ...]
    d_in: int

    @property
    def gathered(self) -> bool:
        return self.whole != self.inner

    @property
    def starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.outs))

    @property
    def params(self) -> int:
        """Parameters of one adapter on this rank."""
        return len(self.outs) * self.inner * self.d_in + sum(self.outs) * self.whole


@dataclass(frozen=True, slots=True)
class SliceGeometry:
    """TESSA's slice across the sharded dimension, fused projections sharing one window of `width` rows.

    axis "in": delta ``[width, sum(outs)]``, projection p's part zero beyond `widths[p]`; "out": ``[width, d_in]``.
    """

    axis: Axis
    widths: tuple[int, ...]
    outs: tuple[int, ...]
    d_in: int

    @property
    def width(self) -> int:
        return max(self.widths)

    @property
    def params(self) -> int:
        if self.axis == "in":
            return sum(width * out for width, out in zip(self.widths, self.outs, strict=True))
        return self.width * self.d_in

    def stored(self, multiple: int = 1) -> int:
        """Parameters of a slot: fused projections share the widest one's window, rounded up to `multiple` rows."""
        rows = -(-self.width // multiple) * multiple
        return rows * (sum(self.outs) if self.axis == "in" else self.d_in)


def lora_geometry(backend: str, linear: FusedLinear, rank: int, tp: int, multiple: int = 1) -> LoraGeometry:
    """`multiple`: B's columns are rounded up to it, as grouped products on the CPU ask; 1 for the adapter itself."""
    outs = tuple(part.rank_out for part in linear.parts)

    def rounded(value: int) -> int:
        return -(-value // multiple) * multiple

    if backend in ("plain_lora", "punica"):
        return LoraGeometry(rounded(rank), rounded(rank), outs, linear.rank_in)
    if backend == "slora":
        if linear.kind == COLUMN:
            inner = -(-rank // tp)
            whole = rounded(inner * tp)
            return LoraGeometry(whole if tp == 1 else inner, whole, outs, linear.rank_in)
        return LoraGeometry(
            rounded(rank), rounded(rank), tuple(part.rank_out // tp for part in linear.parts), linear.rank_in
        )
    if backend == "bd_lora":
        # One block a rank; its rank spends over the fused projections what LoRA's rank does.
        spent = rank * sum(part.d_in + part.d_out for part in linear.parts) / tp
        block = max(1, round(spent / sum(part.rank_in + part.rank_out for part in linear.parts)))
        return LoraGeometry(rounded(block), rounded(block), outs, linear.rank_in)
    raise ValueError(f"{backend} has no LoRA factors")


def slice_geometry(linear: FusedLinear, rank: int) -> SliceGeometry:
    axis: Axis = "in" if linear.kind == COLUMN else "out"
    widths = tuple(width_for(rank, part.d_out, part.d_in, axis) for part in linear.parts)
    return SliceGeometry(axis, widths, tuple(part.rank_out for part in linear.parts), linear.rank_in)
