"""Hooks that run the LoRA baselines on vLLM's LoRA layers.

On a GPU vLLM's layers and kernels stay untouched. On the CPU its ops are exchanged for `baselines.grouped`, and
the factors are stored at the adapters' own rank: vLLM reserves at least rank 8 and would compute the padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.platforms import current_platform

from baselines.grouped import GroupedWrapper, NoComputeWrapper, PerAdapterWrapper
from tessa.backend import AdapterHook
from tessa.errors import UserError
from tessa.ops.slots import aligned
from tessa.vllm.layers import adapter_dtype

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.worker_manager import WorkerLoRAManager


class GroupedLoRA(AdapterHook):
    """Punica and S-LoRA.

    Options in ``additional_config``: ``kernels`` "grouped" or "stock"; ``lora_rank``, the largest rank that will
    be loaded; ``communication`` and ``compute`` "on" or "off" (S-LoRA's ablations).
    """

    wrapper_class: type[GroupedWrapper] = GroupedWrapper

    def __init__(self, options: Mapping[str, Any], vllm_config: VllmConfig) -> None:
        super().__init__(options, vllm_config)
        self.tp_size = vllm_config.parallel_config.tensor_parallel_size
        self.stock = options.get("kernels") == "stock" or not current_platform.is_cpu()
        self.wrapper: GroupedWrapper | None = None
        self.exact_rank: int | None = int(options["lora_rank"]) if options.get("lora_rank") else None

    def punica_wrapper(self, *args: Any, **kwargs: Any) -> GroupedWrapper | None:
        if self.options.get("compute") == "off":
            if self.stock and not current_platform.is_cpu():
                raise UserError(
                    "compute=off is written for the CPU ops; on a GPU use communication=off alone"
                )
            self.wrapper = NoComputeWrapper(*args, **kwargs)
        elif not self.stock:
            self.wrapper = self.wrapper_class(*args, **kwargs)
        return self.wrapper

    def installed(self, manager: WorkerLoRAManager) -> None:
        if self.options.get("communication") == "off":
            disable_adapter_communication()
        if self.wrapper is None:
            return
        layers = manager._adapter_manager.modules.values()
        linear = [layer for layer in layers if isinstance(layer, BaseLinearLayerWithLoRA)]
        self.wrapper.keep_vllm_metadata = len(linear) != len(layers)
        loaded = self.options.get("lora_rank")
        if loaded is not None:
            manager.get_dummy_lora_warmup_rank = lambda default: min(default, int(loaded))
        rank = self.exact_rank
        if rank is not None:
            rank = aligned(rank, adapter_dtype(manager.lora_config))
            if manager.lora_config.fully_sharded_loras and rank % self.tp_size:
                rank = math.lcm(rank, self.tp_size)
        for layer in linear:
            self._relay(layer, rank)

    def _relay(self, layer: Any, rank: int | None) -> None:
        """Store a layer's factors at the adapters' rank, with the fused projections' A factors side by side."""
        old_a, old_b = layer.lora_a_stacked, layer.lora_b_stacked
        full = old_b[0].shape[3]
        rank = full if rank is None else min(rank, full)
        slots, _, local, d_in = old_a[0].shape
        share = -(-local * rank // full)
        joint = torch.zeros(slots, len(old_a), share, d_in, dtype=old_a[0].dtype, device=old_a[0].device)
        layer.lora_a_stacked = tuple(joint[:, i : i + 1] for i in range(len(old_a)))
        # B is stored transposed, so that an expansion reads it row by row; vLLM sees the shape that it expects.
        layer.lora_b_stacked = tuple(
            b.new_zeros(*b.shape[:2], rank, b.shape[2]).transpose(2, 3) for b in old_b
        )
        assert self.wrapper is not None
        self.wrapper.register_joint(joint)


class PlainLoRA(GroupedLoRA):
    """Plain LoRA: on every device one pair of dense products per distinct adapter.

    Raises:
        UserError: steps would be captured in graphs, which would repeat the batch that they were captured with.
    """

    wrapper_class = PerAdapterWrapper

    def __init__(self, options: Mapping[str, Any], vllm_config: VllmConfig) -> None:
        super().__init__(options, vllm_config)
        if not (vllm_config.model_config.enforce_eager or current_platform.is_cpu()):
            raise UserError(
                "plain LoRA's products follow the batch and cannot be captured; use --enforce-eager"
            )
        self.stock = False


def disable_adapter_communication() -> None:
    """S-LoRA's ablation: leave its own collectives out and keep every product's shape. Outputs become wrong.

    The base layers' all-reduce is kept: only calls made while a sharded LoRA layer computes its adapters are
    replaced.
    """
    import vllm.lora.layers.column_parallel_linear as column
    import vllm.lora.layers.row_parallel_linear as row

    def all_gather(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        from vllm.distributed import get_tensor_model_parallel_world_size

        copies = [1] * x.dim()
        copies[dim] = get_tensor_model_parallel_world_size()
        return x.repeat(copies)

    column.tensor_model_parallel_all_gather = all_gather
    sharded = row.RowParallelLinearWithShardedLoRA
    original_apply, original_reduce = sharded.apply, row.tensor_model_parallel_all_reduce

    def apply(self: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        row.tensor_model_parallel_all_reduce = lambda buffer: buffer
        try:
            return original_apply(self, x, bias)
        finally:
            row.tensor_model_parallel_all_reduce = original_reduce

    sharded.apply = apply
