"""S-LoRA (Sheng et al., arXiv 2311.03285): both factors of every adapter sharded."""

from __future__ import annotations

from tessa.backend import BackendSpec

SPEC = BackendSpec(
    name="slora",
    title="S-LoRA",
    adapter_format="lora",
    summary=(
        "LoRA with both factors sharded everywhere, vLLM's fully sharded layers. Column-parallel layers compute "
        "their share of the rank, all-gather the intermediate and expand into their outputs; row-parallel layers "
        "all-reduce the intermediate and expand into a share of the outputs inside the base layer's own "
        "all-reduce. Extra collectives per transformer layer: an all-gather for q, k, v stacked, an all-reduce for "
        "o, an all-gather for gate and up, an all-reduce for down. S-LoRA's paper counts 3 all-gathers and 1 "
        "all-reduce with attention only. Kernels as `punica`."
    ),
    hook="baselines.vllm_lora:GroupedLoRA",
    engine_args={"enable_lora": True, "fully_sharded_loras": True},
    kernels=("grouped", "stock"),
    options={"communication": ("on", "off"), "compute": ("on", "off")},
    wrong_by_design=(("communication", "off"), ("compute", "off")),
)
