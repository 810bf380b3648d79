"""vLLM layers and loader for BD-LoRA (arXiv 2510.23346).

A column-parallel layer's rank holds its rows of A, which is whole, and its block of B; a row-parallel layer's rank
holds its block of A and its columns of B. What a rank holds is thus a LoRA of rank r / blocks on its own shard, so
vLLM's unsharded LoRA layers compute it; only what they store and slice differs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.lora.layers import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import get_adapter_absolute_path

from baselines.vllm_lora import GroupedLoRA
from tessa.errors import UserError
from tessa.ops.slots import aligned
from tessa.vllm.layers import adapter_dtype

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager


class _Blocks:
    """Stores a rank's own blocks; mixed in before a vLLM LoRA layer class."""

    tp_rank: int
    tp_size: int
    base_layer: Any

    @property
    def replicas(self) -> int:
        """Ranks that share one K/V shard. Such a rank holds as many blocks of K and V."""
        return getattr(self.base_layer, "num_kv_head_replicas", 1)

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        local = copy.copy(lora_config)
        share = -(-lora_config.max_lora_rank // self.tp_size) * self.replicas
        object.__setattr__(local, "max_lora_rank", aligned(share, lora_config.lora_dtype))
        super().create_lora_weights(max_loras, local, model_config)  # type: ignore[misc]

    def held(self, rank: int, replicas: int = 1) -> tuple[int, int]:
        """Half-open range of the adapter's rank that belongs to this tensor-parallel rank."""
        block = rank // self.tp_size
        first = self.tp_rank // replicas * replicas
        return first * block, (first + replicas) * block

    def own_rows(self, a: torch.Tensor, replicas: int = 1) -> torch.Tensor:
        start, stop = self.held(a.shape[0], replicas)
        return a[start:stop]


class BlockColumn(_Blocks, ColumnParallelLinearWithLoRA):
    def slice_lora_a(self, lora_a: torch.Tensor) -> torch.Tensor:
        return self.own_rows(lora_a)


class BlockMerged(_Blocks, MergedColumnParallelLinearWithLoRA):
    def slice_lora_a(self, lora_a: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        return [None if a is None else self.own_rows(a) for a in lora_a]


class BlockQKV(_Blocks, MergedQKVParallelLinearWithLoRA):
    def slice_lora_a(self, lora_a: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        copies = (1, self.replicas, self.replicas)
        return [None if a is None else self.own_rows(a, n) for a, n in zip(lora_a, copies, strict=True)]

    def slice_lora_b(self, lora_b: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        own = super().slice_lora_b(lora_b)
        if self.replicas > 1:
            # The shared shard spans several blocks, each with its own rows of A.
            own[1:] = [None if b is None else torch.block_diag(*b.chunk(self.replicas, 0)) for b in own[1:]]
        return own


class BlockRow(_Blocks, RowParallelLinearWithLoRA):
    def slice_lora_a(self, lora_a: torch.Tensor) -> torch.Tensor:
        return self.own_rows(lora_a)

    def slice_lora_b(self, lora_b: torch.Tensor) -> torch.Tensor:
        start, stop = self.held(lora_b.shape[1])
        return lora_b[:, start:stop]


class BlockDiagonalLoRA(GroupedLoRA):
    """BD-LoRA on the kernels of `punica`; options as there."""

    def __init__(self, options: Mapping[str, Any], vllm_config: VllmConfig) -> None:
        super().__init__(options, vllm_config)
        # The layers allocate their blocks' rank themselves.
        self.exact_rank = None

    def layer_classes(self) -> tuple[type, ...]:
        return (BlockQKV, BlockMerged, BlockColumn, BlockRow)

    def load_adapter(self, manager: WorkerLoRAManager, request: LoRARequest) -> LoRAModel:
        path = get_adapter_absolute_path(request.lora_path)
        helper = PEFTHelper.from_local_dir(path, manager.max_position_embeddings)
        blocks = (helper.use_bdlora or {}).get("nblocks")
        if blocks != self.tp_size:
            found = "no block-diagonal LoRA" if blocks is None else f"trained with {blocks} blocks"
            raise UserError(
                f"adapter '{request.lora_name}' ({path}) is {found}; BD-LoRA at tensor parallel size {self.tp_size} "
                f"serves adapters of {self.tp_size} blocks (PEFT: BdLoraConfig(nblocks={self.tp_size}))"
            )
        helper.use_bdlora = None  # this backend implements what vLLM's check refuses
        helper.validate_legal(manager.lora_config)
        wrapped = manager._adapter_manager
        expected = {
            name
            for module in wrapped.supported_lora_modules
            for name in wrapped.packed_modules_mapping.get(module, [module])
        }
        mapper = getattr(wrapped.model, "hf_to_vllm_mapper", None)
        return LoRAModel.from_local_checkpoint(
            path,
            expected,
            peft_helper=helper,
            lora_model_id=request.lora_int_id,
            device="cpu",
            dtype=adapter_dtype(manager.lora_config),
            model_vocab_size=manager.vocab_size,
            weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
        )
