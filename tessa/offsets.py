"""Where a slice lies: the rules that choose offsets, and the plan of all slices of a model.

`first` puts every slice at position 0, `random` draws from the seed and the parent module's name, `weight`
and `gradient` take the contiguous window with the most energy (squared weights, or squared gradients of the
loss). Offsets are multiples of ``offset_multiple``. Modules that serving fuses into one product and that
are sliced on their common input (q, k, v; gate, up) get one offset, so that a server gathers the same
columns once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tessa.budget import HARDWARE_MULTIPLE, widths_for
from tessa.errors import UserError
from tessa.slices import Axis, Placement, Slice, axis_of, fused_siblings

OffsetRule = Literal["first", "random", "weight", "gradient"]
OFFSET_RULES: tuple[OffsetRule, ...] = ("first", "random", "weight", "gradient")
OFFSET_MULTIPLE = 8


def best_window(energy: npt.ArrayLike, segments: int, segment_width: int, multiple: int = 1) -> int:
    """Offset of the window with the most energy, the lowest of equals.

    Args:
        energy: [dim], not negative; cut into ``segments`` equal parts whose energies are summed position by
            position, since every part holds a segment at the same offset.
        segment_width: positions in the window.
        multiple: only offsets 0, multiple, 2 * multiple, ... are considered.
    """
    profile = np.asarray(energy, dtype=np.float64).reshape(segments, -1).sum(axis=0)
    prefix = np.concatenate([[0.0], np.cumsum(profile)])
    starts = np.arange(0, profile.size - segment_width + 1, multiple)
    return int(starts[np.argmax(prefix[starts + segment_width] - prefix[starts])])


def random_offset(seed: int, name: str, part: int, segment_width: int, multiple: int = 1) -> int:
    """A uniform draw of the allowed offsets that depends on nothing but the arguments.

    Taken from a hash and not from a library's generator, whose streams may change between versions: adapters
    trained anywhere with one seed share their columns.
    """
    number = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big")
    return multiple * (number % ((part - segment_width) // multiple + 1))


def placement_of(module: str, placement: str | Mapping[str, str]) -> Placement:
    """Placement of one module from one word for all or a mapping by module name (``q_proj``) or full path."""
    if isinstance(placement, str):
        return placement  # type: ignore[return-value]  # checked by axis_of
    name = module.rsplit(".", 1)[-1]
    chosen = placement.get(module, placement.get(name))
    if chosen is None:
        raise UserError(f"placement has no entry for '{module}' or '{name}', only for {sorted(placement)}")
    return chosen  # type: ignore[return-value]


def plan_slices(
    shapes: Mapping[str, tuple[int, int]],
    *,
    rank: float,
    placement: str | Mapping[str, str] = "across",
    shards: int = 8,
    rule: str = "random",
    seed: int = 0,
    multiple: int = HARDWARE_MULTIPLE,
    offset_multiple: int = OFFSET_MULTIPLE,
    energy: Mapping[str, npt.ArrayLike] | None = None,
) -> dict[str, Slice]:
    """Slices of all target modules.

    Args:
        shapes: module path -> (d_out, d_in).
        rank: rank-equivalent, see `tessa.budget`.
        placement: "across", "along", or a mapping from module name or path to one of them.
        shards: P, the number of segments of slices along the sharded dimension; the tensor-parallel size of
            serving must divide it.
        rule: one of `OFFSET_RULES`.
        multiple: preferred multiple of a segment's width, a power of two.
        offset_multiple: offsets are multiples of it.
        energy: module path -> energy of each position of its sliced dimension; needed by `weight`,
            `gradient`.

    Raises:
        UserError: for settings that do not fit the layers.
    """
    if rule not in OFFSET_RULES:
        raise UserError(f"offset rule '{rule}' is unknown; allowed: {', '.join(OFFSET_RULES)}")
    if offset_multiple < 1:
        raise UserError(f"offset_multiple must be at least 1, got {offset_multiple}")
    geometry: dict[str, tuple[int, int, Axis, int]] = {}
    for module, (d_out, d_in) in shapes.items():
        where = placement_of(module, placement)
        axis = axis_of(module, where)
        segments = shards if where == "along" else 1
        geometry[module] = d_out, d_in, axis, segments
    widths = widths_for(geometry, rank, multiple)

    slices: dict[str, Slice] = {}
    for module, (d_out, d_in) in shapes.items():
        axis, segments = geometry[module][2:]
        group = [module]
        if axis == "in":
            group = [m for m in fused_siblings(module) if m in geometry and geometry[m][2] == "in"]
        widest = max(widths[m] // geometry[m][3] for m in group)
        part = (d_out if axis == "out" else d_in) // segments
        if rule == "first":
            offset = 0
        elif rule == "random":
            # Siblings share the parent's name, so they draw the same number.
            name = module.rpartition(".")[0] if len(group) > 1 else module
            offset = random_offset(seed, name, part, widest, offset_multiple)
        else:
            offset = best_window(
                _group_energy(group, energy, part * segments, rule), segments, widest, offset_multiple
            )
        slices[module] = Slice(axis, offset, widths[module], segments, d_out, d_in)
    return slices


def _group_energy(
    group: Sequence[str], energy: Mapping[str, npt.ArrayLike] | None, dim: int, rule: str
) -> npt.NDArray[Any]:
    total = np.zeros(dim)
    for module in group:
        if energy is None or module not in energy:
            raise UserError(
                f"offset rule '{rule}' needs the energy of every position of '{module}', got none"
            )
        values = np.asarray(energy[module], dtype=np.float64)
        if values.shape != (dim,) or not np.isfinite(values).all() or (values < 0).any():
            raise UserError(
                f"energy of '{module}' must be {dim} finite numbers that are not negative, "
                f"got shape {values.shape}"
            )
        total += values
    return total
