"""Punica: segmented gather shrink, then expand (Chen et al., arXiv 2310.18547)."""

from __future__ import annotations

from tessa.backend import BackendSpec

SPEC = BackendSpec(
    name="punica",
    title="Punica",
    adapter_format="lora",
    summary=(
        "LoRA through segmented gather products, one shrink and one expand per projection. Column-parallel layers "
        "replicate A and shard B by output, row-parallel layers shard A by input and replicate B. No extra "
        "collective; the replicated factor does not shrink with TP. On a GPU these are vLLM's own layers and its "
        "Punica-derived Triton kernels; on the CPU vLLM's layers run on this project's grouped products "
        "(kernels=grouped) or on vLLM's own ops (kernels=stock)."
    ),
    hook="baselines.vllm_lora:GroupedLoRA",
    engine_args={"enable_lora": True},
    kernels=("grouped", "stock"),
)
