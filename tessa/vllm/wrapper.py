"""Step metadata for adapter ops: vLLM's token-to-adapter mapping, sorted by slot once per step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from tessa.ops.routing import Routing, route
from tessa.ops.step import step_buffers, step_meta


def token_slots(mapping: LoRAMapping, lora_index_to_id: list[int | None]) -> npt.NDArray[np.int64]:
    """Slot of each token of a step, -1 for tokens without adapter."""
    ids = np.asarray(mapping.index_mapping, dtype=np.int64)
    resident = {adapter: slot for slot, adapter in enumerate(lora_index_to_id) if adapter is not None}
    lookup = np.full(max([0, *resident]) + 1, -1, dtype=np.int64)
    for adapter, slot in resident.items():
        lookup[adapter] = slot
    return np.where(ids > 0, lookup[np.maximum(ids, 0)], -1)


class RoutingWrapper(PunicaWrapperCPU):
    """Holds the current step's `Routing` in place of vLLM's per-token indices.

    vLLM calls `update_metadata` whenever the batch or the slots change. Its own metadata is kept as well where a
    layer that reads it is wrapped (logits, embeddings).
    """

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self.num_slots: int = kwargs["lora_config"].max_loras
        self.keep_vllm_metadata = True
        self.step: Routing = route(torch.empty(0, dtype=torch.int64), self.num_slots)

    def update_metadata(
        self,
        mapping: LoRAMapping,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        if self.keep_vllm_metadata:
            super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        step = route(torch.from_numpy(token_slots(mapping, lora_index_to_id)), self.num_slots)
        self.step = step.to(self.device)


class StaticWrapper(PunicaWrapperCPU):
    """Holds the step in persistent buffers, which captured graphs read; for every device.

    Only TESSA's layers may be wrapped: vLLM's own LoRA ops are not available on a GPU through this class.
    """

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self.num_slots: int = kwargs["lora_config"].max_loras
        self.step = step_buffers(max_num_batched_tokens, self.num_slots, device)

    def update_metadata(
        self,
        mapping: LoRAMapping,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        slots = torch.from_numpy(token_slots(mapping, lora_index_to_id).astype(np.int32))
        step_meta(slots.to(self.device, non_blocking=True), self.num_slots, out=self.step)
