"""The collectives of a step, which are not run here: counted exactly, their times from the alpha-beta model."""

from __future__ import annotations

import math
from typing import Any

from experiments.layer_step.spec import LayerStepSpec, Point
from experiments.layer_step.stack import Stack
from experiments.projection.backends import AdapterLoad, layer_work
from experiments.projection.collectives import collective_s
from experiments.projection.hardware import GPU, gpu_named
from tessa.errors import UserError

KNOWN = {"H200": "h200", "H100": "h100", "A100": "a100-80"}
COUNTED_ON = "h100"  # the counts and bytes of collectives depend on no GPU


class Collectives:
    """Counts and bytes are always there; times are NaN where no interconnect is known (as on a CPU) or chosen."""

    def __init__(self, spec: LayerStepSpec, device_name: str, itemsize: int) -> None:
        found = next((name for part, name in KNOWN.items() if part in device_name), None)
        self.gpu_name = spec.interconnect or found
        self.gpu: GPU | None = gpu_named(self.gpu_name) if self.gpu_name else None
        self.custom, self.itemsize = spec.custom_all_reduce, itemsize

    def of(self, backend: str, point: Point, stack: Stack) -> dict[str, Any]:
        """Columns of one row, over all layers of the model: `base_comm_s` and `adapter_comm_s` in seconds, and the
        adapters' collectives and their bytes."""
        name, layers = backend.partition(":")[0], stack.shape.layers
        load = AdapterLoad(point.tokens, point.distinct, point.rank, point.resident)
        extra = layer_work(name, gpu_named(COUNTED_ON), stack.shape, point.tp, load).collectives
        reduced = float(self.itemsize * point.tokens * stack.shape.hidden)
        base = [("all_reduce", reduced)] * 2 if point.tp > 1 else []
        return {
            "base_comm_s": layers * self._seconds(base, point.tp),
            "adapter_comm_s": layers * self._seconds(extra, point.tp),
            "comm_provenance": "modelled",
            "adapter_collectives_per_step": layers * len(extra),
            "adapter_collective_bytes_per_step": layers * sum(size for _, size in extra),
        }

    def _seconds(self, collectives: list[tuple[str, float]], tp: int) -> float:
        if not collectives:
            return 0.0
        if self.gpu is None:
            return math.nan
        try:
            return sum(collective_s(self.gpu, tp, kind, size, self.custom) for kind, size in collectives)
        except UserError:
            return math.nan
