"""Geometry of a slice: the rows or columns of a linear layer that an adapter trains, and each rank's part.

A linear layer is ``y = W x`` with ``W: [d_out, d_in]``. A slice of width ``c`` is a set of rows
(``axis="out"``, delta ``[c, d_in]``, ``y[indices] += delta @ x``) or of columns (``axis="in"``, delta
``[d_out, c]``, ``y += delta @ x[indices]``). It consists of ``segments`` equal contiguous windows, one at the
same offset inside each of ``segments`` equal parts of the sliced dimension; one segment is one block.

Nothing here imports torch: `LocalSlice.take` works on any two-dimensional array that can be sliced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeVar

from tessa.errors import UserError

Axis = Literal["in", "out"]
Parallel = Literal["column", "row"]
Placement = Literal["across", "along"]
Array = TypeVar("Array")

COLUMN_PARALLEL = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_PARALLEL = ("o_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL_MODULES = (*ATTENTION, *MLP)
PLACEMENTS: tuple[Placement, ...] = ("across", "along")
# Projections that serving engines compute as one product; each group reads the same input.
FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def parallel_of(module: str) -> Parallel:
    """How tensor parallelism shards a module, from the last part of its path (``...self_attn.q_proj``)."""
    name = module.rsplit(".", 1)[-1]
    if name in COLUMN_PARALLEL:
        return "column"
    if name in ROW_PARALLEL:
        return "row"
    raise UserError(
        f"target module '{module}' is not one that TESSA knows how to shard; allowed are "
        f"{', '.join(COLUMN_PARALLEL)} (column-parallel) and {', '.join(ROW_PARALLEL)} (row-parallel)"
    )


def axis_of(module: str, placement: Placement) -> Axis:
    """Which dimension is sliced: `across` slices the one that is not sharded, `along` the sharded one."""
    if placement not in PLACEMENTS:
        raise UserError(f"placement '{placement}' of '{module}' is unknown; allowed: {', '.join(PLACEMENTS)}")
    column = parallel_of(module) == "column"
    if placement == "across":
        return "in" if column else "out"
    return "out" if column else "in"


def fused_siblings(module: str) -> tuple[str, ...]:
    """Paths of the modules computed in one product with this one, itself included (q, k, v or gate, up)."""
    parent, _, name = module.rpartition(".")
    for group in FUSED_GROUPS:
        if name in group:
            return tuple(f"{parent}.{sibling}" if parent else sibling for sibling in group)
    return (module,)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@dataclass(frozen=True)
class LocalSlice:
    """What one tensor-parallel rank holds of a slice.

    Its part of the unsharded delta is ``delta[rows[0]:rows[1], cols[0]:cols[1]]``. ``ranges`` are half-open
    windows of local positions, in the order of the delta's sliced side: inside the rank's input for
    ``axis="in"`` (``y_local += part @ x_local[indices]``), inside its output for ``axis="out"``
    (``y_local[indices] += part @ x_local``). ``d_out`` and ``d_in`` are the sizes of the rank's shard of W.
    """

    axis: Axis
    rows: tuple[int, int]
    cols: tuple[int, int]
    ranges: tuple[tuple[int, int], ...]
    d_out: int
    d_in: int

    @property
    def width(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the rank's part of the delta."""
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(i for start, stop in self.ranges for i in range(start, stop))

    def take(self, delta: Array) -> Array:
        """The rank's part of the unsharded delta, a view where the array type makes views."""
        return delta[self.rows[0] : self.rows[1], self.cols[0] : self.cols[1]]  # type: ignore[index]

    def shifted(self, by: int) -> LocalSlice:
        """The same slice, positions moved by ``by``: such as k's inside the fused output of q, k, v."""
        ranges = tuple((start + by, stop + by) for start, stop in self.ranges)
        return LocalSlice(self.axis, self.rows, self.cols, ranges, self.d_out, self.d_in)


@dataclass(frozen=True)
class Slice:
    """A slice of one layer, in unsharded sizes.

    Args:
        axis: "out" slices rows (outputs), "in" slices columns (inputs).
        offset: first position of each segment, counted from the start of its part of the sliced dimension.
        width: positions in all segments together; a multiple of ``segments``.
        segments: number of equal parts, each with one segment (1, or the shards P of placement `along`).
        d_out, d_in: sizes of the layer's weight ``[d_out, d_in]``.

    Raises:
        UserError: where the numbers do not describe a slice of the layer.
    """

    axis: Axis
    offset: int
    width: int
    segments: int
    d_out: int
    d_in: int

    def __post_init__(self) -> None:
        if self.axis not in ("in", "out"):
            raise UserError(f"slice axis must be 'in' or 'out', got {self.axis!r}")
        for name in ("offset", "width", "segments", "d_out", "d_in"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UserError(f"slice {name} must be an integer, got {value!r}")
            least, bound = (0, "at least 0") if name == "offset" else (1, "positive")
            if value < least:
                raise UserError(f"slice {name} must be {bound}, got {value}")
        if self.dim % self.segments:
            raise UserError(
                f"{self.segments} segments do not divide the sliced dimension of {self.dim} "
                f"(axis {self.axis}); choose a number of shards that divides it"
            )
        if self.width % self.segments:
            raise UserError(f"slice width {self.width} is not a multiple of its {self.segments} segments")
        if self.offset + self.segment_width > self.part:
            raise UserError(
                f"a segment of {self.segment_width} at offset {self.offset} leaves its part of {self.part} "
                f"(axis {self.axis}, {self.segments} segments over {self.dim}); "
                f"the segment may be at most {self.part} and this one's offset at most "
                f"{max(self.part - self.segment_width, 0)}"
            )

    @property
    def dim(self) -> int:
        """Size of the sliced dimension."""
        return self.d_out if self.axis == "out" else self.d_in

    @property
    def part(self) -> int:
        """Size of the part of the sliced dimension that holds one segment."""
        return self.dim // self.segments

    @property
    def segment_width(self) -> int:
        return self.width // self.segments

    @property
    def delta_shape(self) -> tuple[int, int]:
        return (self.width, self.d_in) if self.axis == "out" else (self.d_out, self.width)

    @property
    def num_params(self) -> int:
        return self.delta_shape[0] * self.delta_shape[1]

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Half-open windows of the sliced dimension, in ascending order, which is also the delta's order."""
        starts = range(self.offset, self.dim, self.part)
        return tuple((start, start + self.segment_width) for start in starts)

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(i for start, stop in self.ranges for i in range(start, stop))

    def along(self, parallel: Parallel) -> bool:
        """Whether the sliced dimension is the one that tensor parallelism shards."""
        return (self.axis == "out") == (parallel == "column")

    def allowed_worlds(self, parallel: Parallel) -> list[int] | None:
        """Tensor-parallel sizes that never cut a segment; None where every size will do."""
        return divisors(self.segments) if self.along(parallel) else None

    def local(self, rank: int, world: int, parallel: Parallel, *, replicas: int = 1) -> LocalSlice:
        """What rank ``rank`` of ``world`` holds.

        Args:
            replicas: ranks that share one shard of the weight, for K and V with fewer KV heads than
                ranks. Rank r then holds shard ``r // replicas`` of ``world // replicas``.

        Raises:
            UserError: where the weight does not shard evenly, or where a rank would hold part of a segment;
                the message names the tensor-parallel sizes that fit.
        """
        if parallel not in ("column", "row"):
            raise UserError(f"parallel must be 'column' or 'row', got {parallel!r}")
        if world < 1 or not 0 <= rank < world or replicas < 1 or world % replicas:
            raise UserError(
                f"rank {rank} of {world} with {replicas} replicas is not a tensor-parallel rank; "
                f"0 <= rank < world, and replicas divide world"
            )
        if parallel == "row" and replicas != 1:
            raise UserError("only column-parallel K and V are replicated, got replicas with 'row'")
        shards, shard = world // replicas, rank // replicas
        sharded = self.d_out if parallel == "column" else self.d_in
        if sharded % shards:
            raise UserError(
                f"a dimension of {sharded} does not shard over {shards} ranks (tensor parallel size {world})"
            )
        start, size = shard * (sharded // shards), sharded // shards
        d_out, d_in = (size, self.d_in) if parallel == "column" else (self.d_out, size)

        if not self.along(parallel):
            if parallel == "column":
                rows, cols = (start, start + size), (0, self.width)
            else:
                rows, cols = (0, self.width), (start, start + size)
            return LocalSlice(self.axis, rows, cols, self.ranges, d_out, d_in)

        if self.segments % shards:
            raise UserError(
                f"tensor parallel size {world} does not divide the slice's {self.segments} segments along "
                f"the sharded dimension; allowed tensor parallel sizes: {self.allowed_worlds(parallel)}. "
                f"Train with `shards` a multiple of {shards}, or with placement `across`, which fits any size"
            )
        count = self.segments // shards
        held = (shard * count * self.segment_width, (shard + 1) * count * self.segment_width)
        ranges = tuple((a - start, b - start) for a, b in self.ranges[shard * count : (shard + 1) * count])
        if self.axis == "out":
            return LocalSlice(self.axis, held, (0, self.d_in), ranges, d_out, d_in)
        return LocalSlice(self.axis, (0, self.d_out), held, ranges, d_out, d_in)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "slice") -> Slice:
        """Rebuild from `to_dict`; unknown or missing keys are errors that name ``where``."""
        if not isinstance(data, Mapping):
            raise UserError(f"{where}: a slice must be a mapping, got {type(data).__name__}")
        known = {f.name for f in fields(cls)}
        if set(data) != known:
            missing, extra = sorted(known - set(data)), sorted(set(data) - known)
            raise UserError(
                f"{where}: slice keys must be {sorted(known)}; missing {missing}, unknown {extra}"
            )
        try:
            return cls(**data)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
