"""Parameter budgets: how wide a slice is for a rank-equivalent, and what LoRA and BD-LoRA would have spent.

Rank-equivalent ``r`` stands for LoRA's ``r (d_in + d_out)`` parameters per layer. A slice's width is that
divided by the length of the delta's other side, rounded to a step that hardware likes while the count stays
within `TOLERANCE` of LoRA's; where no step can, the layer is marked as not matched.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from tessa.errors import UserError
from tessa.slices import Axis, Parallel, Slice, parallel_of

TOLERANCE = 0.05
MAX_COMPENSATION = 0.25
MAX_COMBINED_KINDS = 12  # 2**12 combinations; a decoder has about five kinds of layer
# Elements: 16 is the side of a tensor core's tile, and two AVX2 registers of float32.
HARDWARE_MULTIPLE = 16


def lora_params(rank: float, d_out: int, d_in: int) -> float:
    """LoRA's parameters for one layer: ``A [r, d_in]`` and ``B [d_out, r]``."""
    return rank * (d_in + d_out)


def bd_lora_params(rank: int, d_out: int, d_in: int, parallel: Parallel, blocks: int) -> int:
    """Block-diagonal LoRA's parameters for one layer (arXiv 2510.23346).

    A column-parallel layer keeps ``A [r, d_in]`` whole and makes B of ``blocks`` blocks ``[d_out/blocks,
    r/blocks]``; a row-parallel layer has blocks ``[r/blocks, d_in/blocks]`` of A and a whole ``B [d_out,
    r]``.

    Raises:
        UserError: where ``blocks`` does not divide the rank or the blocked dimension.
    """
    blocked, whole = (d_out, d_in) if parallel == "column" else (d_in, d_out)
    if rank % blocks or blocked % blocks:
        raise UserError(
            f"block-diagonal LoRA with {blocks} blocks needs a rank and a {parallel}-parallel dimension that "
            f"divide by it, got rank {rank} and dimension {blocked}"
        )
    return rank * whole + rank * blocked // blocks


def width_for(
    rank: float,
    d_out: int,
    d_in: int,
    axis: Axis,
    segments: int = 1,
    multiple: int = HARDWARE_MULTIPLE,
    tolerance: float = TOLERANCE,
) -> int:
    """Width of the slice that spends about ``rank * (d_in + d_out)`` parameters.

    Segments are ``multiple`` wide, or a multiple of the largest halving of it that keeps the count within
    ``tolerance``; if none does, the nearest width with whole segments is taken (see `LayerBudget.matched`).
    Never wider than the layer, never narrower than one position per segment.

    Args:
        multiple: a power of two.

    Raises:
        UserError: for a budget that is not positive or segments that do not divide the sliced dimension.
    """
    dim, other = (d_out, d_in) if axis == "out" else (d_in, d_out)
    if rank <= 0:
        raise UserError(f"rank-equivalent must be positive, got {rank}")
    if multiple < 1 or multiple & (multiple - 1):
        raise UserError(f"multiple must be a power of two, got {multiple}")
    if segments < 1 or dim % segments:
        raise UserError(
            f"{segments} shards do not divide the sliced dimension of {dim} (weight [{d_out}, {d_in}], "
            f"axis {axis}); choose `shards` that divides it, or placement `across`"
        )
    ideal = lora_params(rank, d_out, d_in) / other
    step = multiple
    while True:
        width = step * segments * round(ideal / (step * segments))
        if 0 < width <= dim and abs(width - ideal) <= tolerance * ideal:
            return width
        if step == 1:
            return min(max(width, segments), dim)
        step //= 2


def _candidates(
    rank: float, d_out: int, d_in: int, axis: Axis, segments: int, multiple: int
) -> tuple[int, ...]:
    """Widths that `widths_for` chooses from, nearest to the budget first."""
    width = width_for(rank, d_out, d_in, axis, segments, multiple)
    dim, other = (d_out, d_in) if axis == "out" else (d_in, d_out)
    wanted = lora_params(rank, d_out, d_in)
    if abs(width * other - wanted) <= TOLERANCE * wanted:
        return (width,)
    farther = width + (segments if width * other < wanted else -segments)
    allowed = 0 < farther <= dim and abs(farther * other - wanted) <= MAX_COMPENSATION * wanted
    return (width, farther) if allowed else (width,)


def most_width_for(
    rank: float, d_out: int, d_in: int, axis: Axis, segments: int = 1, multiple: int = HARDWARE_MULTIPLE
) -> int:
    """The widest slice that `widths_for` may give such a layer, whatever other layers an adapter has."""
    return max(_candidates(rank, d_out, d_in, axis, segments, multiple))


def widths_for(
    layers: Mapping[str, tuple[int, int, Axis, int]], rank: float, multiple: int = HARDWARE_MULTIPLE
) -> dict[str, int]:
    """Widths of all layers, such that rounding in one kind of layer makes up for rounding in another.

    Layers that `width_for` matches keep its width. Of the others, each kind (equal sizes, axis and segments, so
    gate and up together) is rounded down or up, in the combination whose total is nearest to LoRA's; the farther
    rounding is open to a kind only while it errs by `MAX_COMPENSATION` at most.

    Args:
        layers: module path -> (d_out, d_in, axis, segments).
    """
    kinds: dict[tuple[int, int, Axis, int], list[str]] = {}
    for module, kind in layers.items():
        kinds.setdefault(kind, []).append(module)
    # Per kind the widths it may have, nearest first, each with the parameters above LoRA's in all its layers.
    choices: list[list[tuple[int, float]]] = []
    for (d_out, d_in, axis, segments), modules in kinds.items():
        try:
            widths = _candidates(rank, d_out, d_in, axis, segments, multiple)
        except UserError as error:
            raise UserError(f"module '{modules[0]}': {error}") from None
        other, wanted = d_in if axis == "out" else d_out, lora_params(rank, d_out, d_in)
        choices.append([(w, len(modules) * (w * other - wanted)) for w in widths])
    undecided = [i for i, options in enumerate(choices) if len(options) > 1]
    for i in sorted(undecided, key=lambda i: -abs(choices[i][0][1]))[MAX_COMBINED_KINDS:]:
        del choices[i][1:]
    best = min(itertools.product(*choices), key=lambda picked: abs(sum(surplus for _, surplus in picked)))
    return {m: width for (width, _), modules in zip(best, kinds.values(), strict=True) for m in modules}


@dataclass(frozen=True)
class LayerBudget:
    """Realised parameters of one layer beside LoRA's and BD-LoRA's (None where blocks do not fit)."""

    module: str
    slice: Slice
    tessa: int
    lora: float
    bd_lora: int | None

    @property
    def ratio(self) -> float:
        return self.tessa / self.lora

    @property
    def matched(self) -> bool:
        return abs(self.ratio - 1) <= TOLERANCE


@dataclass(frozen=True)
class Budget:
    """Realised budget of an adapter at one rank-equivalent.

    ``bd_lora`` is what block-diagonal LoRA spends at the same rank, None where blocks do not divide it.
    ``bd_lora_rank`` is the rank, a multiple of ``blocks`` and one for all layers, at which it spends most
    nearly LoRA's total, and ``bd_lora_matched_params`` what it then spends. All three are None where the
    blocks do not divide some layer's dimension.
    """

    rank: float
    blocks: int
    layers: tuple[LayerBudget, ...]
    bd_lora_rank: int | None
    bd_lora_matched_params: int | None

    @property
    def tessa(self) -> int:
        return sum(layer.tessa for layer in self.layers)

    @property
    def lora(self) -> float:
        return sum(layer.lora for layer in self.layers)

    @property
    def bd_lora(self) -> int | None:
        counts = [layer.bd_lora for layer in self.layers if layer.bd_lora is not None]
        return sum(counts) if len(counts) == len(self.layers) else None

    @property
    def ratio(self) -> float:
        return self.tessa / self.lora

    @property
    def matched(self) -> bool:
        """Whether the total is approximately matched: within `TOLERANCE` of LoRA's."""
        return abs(self.ratio - 1) <= TOLERANCE

    def render(self) -> str:
        """A text table: one line per kind of layer (same name, geometry and counts), then the total."""
        lines = [
            f"{'module':<12} {'layers':>6} {'axis':>4} {'width':>6} {'TESSA':>12} {'LoRA':>12} {'ratio':>6}"
        ]
        kinds: dict[tuple[str, str, int, int], list[LayerBudget]] = {}
        for layer in self.layers:
            name = layer.module.rsplit(".", 1)[-1]
            kinds.setdefault((name, layer.slice.axis, layer.slice.width, layer.tessa), []).append(layer)
        for (name, axis, width, _), group in kinds.items():
            tessa, lora = sum(x.tessa for x in group), sum(x.lora for x in group)
            counts = f"{tessa:>12} {lora:>12.0f} {tessa / lora:>6.3f}"
            mark = "" if group[0].matched else "  not matched"
            lines.append(f"{name:<12} {len(group):>6} {axis:>4} {width:>6} {counts}{mark}")
        verdict = "within" if self.matched else "NOT within"
        lines.append(
            f"total at rank-equivalent {self.rank:g}: TESSA {self.tessa}, LoRA {self.lora:.0f}, ratio "
            f"{self.ratio:.3f} ({verdict} {TOLERANCE:.0%})"
        )
        if self.bd_lora is not None:
            lines.append(f"BD-LoRA of {self.blocks} blocks at rank {self.rank:g}: {self.bd_lora}")
        if self.bd_lora_rank is not None and self.bd_lora_matched_params is not None:
            share = self.bd_lora_matched_params / self.lora
            lines.append(
                f"BD-LoRA at its nearest rank {self.bd_lora_rank}: {self.bd_lora_matched_params}, "
                f"ratio {share:.3f}"
            )
        return "\n".join(lines)


def _bd_lora_unit(s: Slice, module: str, blocks: int) -> float | None:
    """BD-LoRA's parameters per unit of rank in one layer; None where blocks do not divide the dimension."""
    blocked, whole = (s.d_out, s.d_in) if parallel_of(module) == "column" else (s.d_in, s.d_out)
    return None if blocked % blocks else whole + blocked // blocks


def matched_bd_rank(sizes: Mapping[str, tuple[int, int]], rank: int, blocks: int) -> int:
    """The rank, a multiple of `blocks`, at which BD-LoRA spends most nearly LoRA's parameters at `rank`.

    Args:
        sizes: module path -> (d_out, d_in) of every adapted layer.
    """
    lora = sum(lora_params(rank, *size) for size in sizes.values())
    unit = sum(bd_lora_params(blocks, *size, parallel_of(name), blocks) for name, size in sizes.items())
    return blocks * max(1, round(lora / unit))


def budget_of(slices: Mapping[str, Slice], rank: float, blocks: int = 8) -> Budget:
    """Realised budget of slices (module path -> slice) that were made for a rank-equivalent.

    Args:
        blocks: BD-LoRA's number of blocks, the tensor-parallel size it is to be served on.
    """
    if not slices:
        raise UserError("a budget needs at least one adapted layer, got none")
    layers, units = [], []
    for module, s in slices.items():
        unit = _bd_lora_unit(s, module, blocks)
        bd_lora = None if unit is None or rank % blocks else int(rank * unit)
        layers.append(LayerBudget(module, s, s.num_params, lora_params(rank, s.d_out, s.d_in), bd_lora))
        units.append(unit)
    known = [unit for unit in units if unit is not None]
    if len(known) < len(units):
        return Budget(rank, blocks, tuple(layers), None, None)
    matched_rank = max(round(sum(layer.lora for layer in layers) / sum(known) / blocks), 1) * blocks
    return Budget(rank, blocks, tuple(layers), matched_rank, int(matched_rank * sum(known)))
