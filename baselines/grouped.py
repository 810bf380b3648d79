"""LoRA ops for the CPU, segmented by adapter, for vLLM's LoRA layers.

vLLM's own CPU ops gather a float32 copy of the weights per token and give tokens without adapter the last slot's.
These group the step's tokens by slot (`tessa.ops.routing`), exactly as TESSA's ops do, and run one grouped
product per factor; tokens without adapter are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from baselines.grouped_ops import grouped_product, per_adapter_product
from tessa.vllm.wrapper import RoutingWrapper


class GroupedWrapper(RoutingWrapper):
    """Shrink and expand as grouped products; shapes and in-place semantics are those of vLLM's wrapper."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._joint: dict[int, torch.Tensor] = {}

    def register_joint(self, joint: torch.Tensor) -> None:
        """Make the A factors of a fused layer, views of ``joint [S, n, r, d_in]``, known as one operand."""
        self._joint[joint.data_ptr()] = joint.flatten(1, 2)

    def product(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """``rows[i] @ weights[slot_i]^T``; rows ``[n, k]`` in slot order, weights ``[S, m, k]``, result ``[n, m]``."""
        return grouped_product(rows, weights, self.step)

    def _shrunk(self, x: torch.Tensor, lora_a: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``[n, r]`` per projection, in slot order."""
        rows = self.step.gather(x)
        joint = self._joint.get(lora_a[0].data_ptr())
        if joint is not None:
            return list(self.product(rows, joint).chunk(len(lora_a), dim=1))
        return [self.product(rows, a.squeeze(1)) for a in lora_a]

    def _expand_rows(
        self,
        y: torch.Tensor,
        shrunk: Sequence[torch.Tensor],
        lora_b: Sequence[torch.Tensor],
        sizes: Sequence[int],
        start: int,
    ) -> None:
        for rows, b, size in zip(shrunk, lora_b, sizes, strict=True):
            self.step.add_rows(y[:, start : start + size], self.product(rows, b.squeeze(1)))
            start += size

    def add_shrink(
        self, y: Any, x: torch.Tensor, lora_a_stacked: Sequence[torch.Tensor], scale: float, **kwargs: Any
    ) -> None:
        if not self.step.rows:
            return
        for out, rows in zip(y, self._shrunk(x.view(-1, x.shape[-1]), lora_a_stacked), strict=True):
            self.step.add_rows(out, rows.to(out.dtype) if scale == 1.0 else rows.to(out.dtype) * scale)

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
        self._expand_rows(y.view(-1, y.shape[-1]), rows, lora_b_stacked, output_slices, offset_start)

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
        shrunk = self._shrunk(x, lora_a_stacked)
        if scale != 1.0:
            shrunk = [rows * scale for rows in shrunk]
        self._expand_rows(y, shrunk, lora_b_stacked, output_slices, 0)


class PerAdapterWrapper(GroupedWrapper):
    """One pair of dense products per distinct adapter, as PEFT runs a mixed batch."""

    def product(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return per_adapter_product(rows, weights, self.step)


class NoComputeWrapper(GroupedWrapper):
    """Leaves every adapter product out; what remains is what adapters cost without their arithmetic."""

    def product(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return rows.new_zeros(rows.shape[0], weights.shape[1])

    def add_shrink(self, *args: Any, **kwargs: Any) -> None:
        return None

    def add_expand(self, *args: Any, **kwargs: Any) -> None:
        return None

    def add_lora_linear(self, *args: Any, **kwargs: Any) -> None:
        return None
