"""The two ends of the scale: the base model without adapters, and one adapter folded into the weights."""

from __future__ import annotations

from tessa.backend import BackendSpec

BASE = BackendSpec(
    name="base",
    title="Base model",
    adapter_format="none",
    summary="The base model with adapter support off; requests reach it without an adapter. No extra collective.",
)

BASE_ENABLED = BackendSpec(
    name="base_enabled",
    title="Base, adapters enabled",
    adapter_format="none",
    summary=(
        "The base model with adapter support on and no adapter in use: what merely switching it on costs. Layers "
        "and ops are those of `punica`."
    ),
    hook="baselines.vllm_lora:GroupedLoRA",
    engine_args={"enable_lora": True},
    kernels=("grouped", "stock"),
)

MERGED = BackendSpec(
    name="merged",
    title="Merged adapter",
    adapter_format="merged",
    summary=(
        "The first adapter merged into the base weights and served as a plain model to every request: the upper "
        "bound for a single adapter, and what the correctness gate compares with. No extra collective."
    ),
)
