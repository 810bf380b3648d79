"""Plain LoRA (Hu et al., arXiv 2106.09685), computed as PEFT computes a mixed batch."""

from __future__ import annotations

from tessa.backend import BackendSpec

SPEC = BackendSpec(
    name="plain_lora",
    title="Plain LoRA",
    adapter_format="lora",
    summary=(
        "LoRA as one pair of dense products per distinct adapter in the batch, the way PEFT runs a batch of mixed "
        "adapters. Sharding as `punica`: A replicated and B sharded in column-parallel layers, A sharded and B "
        "replicated in row-parallel layers. No extra collective. Its products' shapes follow the batch, so no step is "
        "captured in a CUDA graph: on a GPU its cost holds what capturing saves the other backends."
    ),
    hook="baselines.vllm_lora:PlainLoRA",
    engine_args={"enable_lora": True, "enforce_eager": True},
    kernels=("per_adapter",),
)
