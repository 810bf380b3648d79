"""The GPU's choice between the wide and the segmented products; imports no torch, so that the projection can ask it."""

from __future__ import annotations

from typing import Literal

Mode = Literal["auto", "wide", "segmented"]
MODES: tuple[Mode, ...] = ("auto", "wide", "segmented")


def wide_limit(mode: Mode, slots: int, width: int, length: int) -> int:
    """Tokens up to which a GPU step is wide.

    The wide product reads and multiplies every resident slot. Its extra arithmetic, ``2 T S K L`` operations, and its
    extra reading, ``2 S K L`` bytes, may each cost what the segmented path's extra launch does: 5 microseconds, at 400
    Tflop/s of bfloat16, half of an H100's dense peak, and at its 3.35 TB/s. Figures from data sheets, to be replaced
    by measured ones.
    """
    if mode != "auto":
        return 0 if mode == "segmented" else 2**31 - 1
    elements = slots * width * length
    if 2 * elements > 5e-6 * 3.35e12:
        return 0
    return int(5e-6 * 400e12 / (2 * elements))
