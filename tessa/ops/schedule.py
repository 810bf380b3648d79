"""Choosing between the wide and the segmented products, step by step."""

from __future__ import annotations

from dataclasses import dataclass

from tessa.errors import UserError
from tessa.ops import compiled
from tessa.ops.gpu_schedule import MODES, Mode
from tessa.ops.routing import Routing
from tessa.ops.slots import SlotPart


@dataclass(frozen=True)
class Schedule:
    """The CPU's cost rule, in multiply-adds; what is fixed is expressed in the multiply-adds it costs as much as.

    wide:       ``T * S * K * L`` for computing every slot for every token, ``copy`` for each element of the widened
                activations, and ``widen`` for the calls that make and route them
    segmented:  ``n * K * L`` for the own slots alone, and ``compiled`` for the one kernel call, or, where only
                library products apply, ``call`` plus a cost per resident slot and per non-empty group

    The constants are fits to `python -m experiments.bench_schedules` on one core of an AMD EPYC without AVX-512
    (about 29e9 multiply-adds/s in the base products). There the segmented products were the faster ones wherever
    the compiled kernels apply, so the rule turns to wide only for very few tokens over very few slots.
    """

    mode: Mode = "auto"
    widen: float = 2.0e6
    copy: float = 12.0
    compiled: float = 3.0e5
    call: float = 1.0e6
    slot: float = 6.0e4
    group: float = 3.0e5

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"schedule '{self.mode}' is unknown; allowed: {', '.join(MODES)}")

    def wide(self, routing: Routing, part: SlotPart, activations: int) -> bool:
        """Whether this step's products over `part` should be wide.

        Args:
            activations: elements of the layer's input, ``T * d_in``.
        """
        if self.mode != "auto":
            return self.mode == "wide"
        stacked = routing.num_tokens * part.num_slots * part.used
        wide = stacked * part.length + self.copy * (stacked + activations) + self.widen
        own = routing.rows * part.used * part.length
        if compiled.usable(routing.rows, part.widest, part.delta):
            return wide < own + self.compiled
        library = self.call + self.slot * part.num_slots + self.group * len(routing.groups)
        return wide < own + library
