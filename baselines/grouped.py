"""LoRA ops for the CPU, segmented by adapter, for vLLM's LoRA layers.

vLLM's own CPU ops gather a float32 copy of the weights per token and give tokens without adapter the last slot's.
These group the step's tokens by slot (`tessa.ops.routing`) and run one compiled kernel or one grouped product per
factor, exactly as TESSA's ops do and with the same kernels; tokens without adapter are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from baselines import grouped_ops
from tessa.vllm.wrapper import RoutingWrapper


class GroupedWrapper(RoutingWrapper):
    """Shrink and expand over rows grouped by adapter; shapes and in-place semantics are those of vLLM's wrapper."""

    per_adapter = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._joint: dict[int, torch.Tensor] = {}

    def register_joint(self, joint: torch.Tensor) -> None:
        """Make the A factors of a fused layer, views of ``joint [S, n, r, d_in]``, known as one operand."""
        self._joint[joint.data_ptr()] = joint.flatten(1, 2)

    def _shrunk(self, x: torch.Tensor, lora_a: Sequence[torch.Tensor]) -> torch.Tensor:
        """All projections side by side, ``[n, parts * r]`` in slot order."""
        joint = self._joint.get(lora_a[0].data_ptr())
        if joint is not None:
            return grouped_ops.shrink(x, joint, self.step, self.per_adapter)
        shrunk = (grouped_ops.shrink(x, a.squeeze(1), self.step, self.per_adapter) for a in lora_a)
        return torch.cat(list(shrunk), dim=1)

    def _expand_all(
        self,
        y: torch.Tensor,
        values: torch.Tensor,
        lora_b: Sequence[torch.Tensor],
        sizes: Sequence[int],
        start: int,
    ) -> None:
        rank = values.shape[1] // len(lora_b)
        for i, (b, size) in enumerate(zip(lora_b, sizes, strict=True)):
            grouped_ops.expand(y, start, values, i * rank, b.squeeze(1), self.step, self.per_adapter)
            start += size

    def add_shrink(
        self, y: Any, x: torch.Tensor, lora_a_stacked: Sequence[torch.Tensor], scale: float, **kwargs: Any
    ) -> None:
        if not self.step.rows:
            return
        values = self._shrunk(x.view(-1, x.shape[-1]), lora_a_stacked)
        if scale != 1.0:
            values = values * scale
        parts = len(lora_a_stacked)
        if isinstance(y, torch.Tensor):  # [parts, T, r], all at once
            shaped = values.unflatten(1, (parts, -1)).transpose(0, 1).to(y.dtype)
            y.index_add_(1, self.step.order, shaped)
            return
        for out, own in zip(y, values.chunk(parts, dim=1), strict=True):
            self.step.add_rows(out, own.to(out.dtype))

    def add_expand(
        self,
        y: torch.Tensor,
        x: Any,
        lora_b_stacked: Sequence[torch.Tensor],
        output_slices: Sequence[int],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        if not self.step.rows:
            return
        rows = [self.step.gather(xi).to(y.dtype) for xi in x]
        values = rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)
        self._expand_all(y.view(-1, y.shape[-1]), values, lora_b_stacked, output_slices, offset_start)

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Sequence[torch.Tensor],
        lora_b_stacked: Sequence[torch.Tensor],
        scale: float,
        output_slices: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Both steps at once: the intermediate stays in slot order, so it is neither scattered nor gathered."""
        if not self.step.rows:
            return
        values = self._shrunk(x, lora_a_stacked)
        if scale != 1.0:
            values = values * scale
        self._expand_all(y, values, lora_b_stacked, output_slices, 0)


class PerAdapterWrapper(GroupedWrapper):
    """One pair of dense products per distinct adapter, as PEFT runs a mixed batch."""

    per_adapter = True


class NoComputeWrapper(GroupedWrapper):
    """Leaves every adapter product out; what remains is what adapters cost without their arithmetic."""

    def add_shrink(self, *args: Any, **kwargs: Any) -> None:
        return None

    def add_expand(self, *args: Any, **kwargs: Any) -> None:
        return None

    def add_lora_linear(self, *args: Any, **kwargs: Any) -> None:
        return None
