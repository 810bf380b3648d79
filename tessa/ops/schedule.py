"""Choosing between the wide and the segmented products, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tessa.errors import UserError
from tessa.ops.routing import Routing
from tessa.ops.slots import SlotPart

Mode = Literal["auto", "wide", "segmented"]
MODES: tuple[Mode, ...] = ("auto", "wide", "segmented")


@dataclass(frozen=True)
class Schedule:
    """The cost rule, in multiply-adds; what is fixed in a call is expressed in the multiply-adds it costs as much as.

    wide:       ``T * S * K * L`` for computing every slot for every token, plus copying the widened activations
    segmented:  ``n * K * L`` for the own slots alone, plus a fixed cost per call, per resident slot and per group

    Attributes:
        mode: "auto" applies the rule; the others force one.
        call: fixed cost of the segmented path's extra calls.
        slot: cost of an empty or filled group in the grouped product.
        group: cost of one non-empty group (its operand has to be packed).
        copy: cost of moving one activation element once.
    """

    mode: Mode = "auto"
    call: float = 1.0e6
    slot: float = 6.0e4
    group: float = 3.0e5
    copy: float = 12.0

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
        wide = stacked * part.length + self.copy * (stacked + activations)
        own = routing.rows * part.used * part.length
        segmented = own + self.call + self.slot * part.num_slots + self.group * len(routing.groups)
        return wide < segmented
