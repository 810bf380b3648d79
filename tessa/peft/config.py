"""Settings of a TESSA adapter, in the form PEFT saves and loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peft.config import PeftConfig
from peft.utils.peft_types import PeftType

from tessa.budget import HARDWARE_MULTIPLE
from tessa.errors import UserError
from tessa.offsets import OFFSET_MULTIPLE, OFFSET_RULES
from tessa.slices import COLUMN_PARALLEL, PLACEMENTS, ROW_PARALLEL, Slice

DEFAULT_TARGETS = (*COLUMN_PARALLEL, *ROW_PARALLEL)


@dataclass
class TessaConfig(PeftConfig):
    """Configuration of a TESSA adapter.

    Args:
        rank_equivalent: budget; each layer gets about the parameters of a LoRA of this rank.
        target_modules: names, a regular expression, or "all-linear" as in PEFT; by default the seven
            projections of a Llama-like decoder.
        exclude_modules, layers_to_transform, layers_pattern, modules_to_save: as in PEFT's other methods.
            Modules saved whole are for evaluation in PEFT; the server takes deltas only.
        placement: "across" or "along" the dimension that tensor parallelism shards, or a mapping from module
            name (or full path) to one of the two.
        shards: P, segments of a slice placed along; the tensor-parallel size of serving must divide it.
        offset_rule: "first", "random", "weight" or "gradient" (the last needs `tessa.peft.choose_slices`).
        seed: of "random" offsets.
        width_multiple: preferred multiple of a segment's width, a power of two.
        offset_multiple: offsets are multiples of it.
        init_weights: True starts from the base model (zero deltas); False draws small random deltas, for
            tests.
        slices: realised geometry, module path -> `Slice` fields. Filled in when the adapter is created, and
            saved, so that neither a reload nor a server needs the base model or the rules to know it. If
            given, it decides which modules are adapted and how.
    """

    rank_equivalent: float = field(default=16)
    target_modules: list[str] | set[str] | str | None = field(default=None)
    exclude_modules: list[str] | set[str] | str | None = field(default=None)
    layers_to_transform: list[int] | int | None = field(default=None)
    layers_pattern: list[str] | str | None = field(default=None)
    modules_to_save: list[str] | None = field(default=None)
    placement: str | dict[str, str] = field(default="across")
    shards: int = field(default=8)
    offset_rule: str = field(default="random")
    seed: int = field(default=0)
    width_multiple: int = field(default=HARDWARE_MULTIPLE)
    offset_multiple: int = field(default=OFFSET_MULTIPLE)
    init_weights: bool = field(default=True)
    slices: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType["TESSA"]
        # Sets, as in PEFT's own configs: it looks module names up in them.
        if isinstance(self.target_modules, list | tuple):
            self.target_modules = set(self.target_modules)
        if isinstance(self.exclude_modules, list | tuple):
            self.exclude_modules = set(self.exclude_modules)
        placements = self.placement.values() if isinstance(self.placement, dict) else [self.placement]
        for placement in placements:
            if placement not in PLACEMENTS:
                raise UserError(f"placement '{placement}' is unknown; allowed: {', '.join(PLACEMENTS)}")
        if self.offset_rule not in OFFSET_RULES:
            raise UserError(
                f"offset_rule '{self.offset_rule}' is unknown; allowed: {', '.join(OFFSET_RULES)}"
            )
        if self.rank_equivalent is not None and self.rank_equivalent <= 0:
            raise UserError(f"rank_equivalent must be positive, got {self.rank_equivalent}")
        if self.shards < 1:
            raise UserError(f"shards must be at least 1, got {self.shards}")
        self.set_slices(
            {m: s if isinstance(s, Slice) else Slice.from_dict(s, m) for m, s in self.slices.items()}
        )

    def set_slices(self, slices: dict[str, Slice]) -> None:
        """Store geometry in the form that goes into ``adapter_config.json``."""
        self.slices = {module: s.to_dict() for module, s in slices.items()}

    def get_slices(self) -> dict[str, Slice]:
        return {module: Slice.from_dict(s, module) for module, s in self.slices.items()}

    def to_dict(self) -> dict[str, Any]:
        """Fields as plain data; sets become sorted lists, so that equal adapters have equal files."""
        return {k: sorted(v) if isinstance(v, set) else v for k, v in super().to_dict().items()}
