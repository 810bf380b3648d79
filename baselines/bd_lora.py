"""BD-LoRA: block-diagonal LoRA, sharded as the base weight (arXiv 2510.23346)."""

from __future__ import annotations

from tessa.backend import BackendSpec

SPEC = BackendSpec(
    name="bd_lora",
    title="BD-LoRA",
    adapter_format="bd_lora",
    summary=(
        "LoRA whose B is block-diagonal in column-parallel layers and whose A is block-diagonal in row-parallel "
        "layers, with as many blocks as tensor-parallel ranks: each rank shrinks and expands with its own block. "
        "No extra collective. Kernels as `punica`, on the blocks."
    ),
    hook="baselines.block_diagonal:BlockDiagonalLoRA",
    engine_args={"enable_lora": True},
    kernels=("grouped", "stock"),
)
