"""From a structure to a PEFT model: LoRA and block-diagonal LoRA from PEFT, TESSA from our tuner, full fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from experiments.quality.spec import TARGETS, QualitySpec, Structure
from tessa.budget import lora_params, matched_bd_rank
from tessa.slices import COLUMN_PARALLEL, ROW_PARALLEL

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Batches = Callable[[], Iterable[Mapping[str, "torch.Tensor"]]]


def prepare(
    model: PreTrainedModel, structure: Structure, spec: QualitySpec, seed: int, batches: Batches
) -> Any:
    """The model as it is trained (or evaluated, for `base`).

    Args:
        batches: a few training batches with labels, asked for only where offsets follow gradients.
    """
    if structure.method in ("base", "full"):
        return model.requires_grad_(structure.method == "full")
    import peft
    import torch

    torch.manual_seed(seed)
    config = adapter_config(model, structure, spec, seed)
    if structure.offset_rule == "gradient":
        from tessa.peft import choose_slices

        choose_slices(model, config, batches())
    return peft.get_peft_model(model, config)


def adapter_config(model: PreTrainedModel, structure: Structure, spec: QualitySpec, seed: int) -> Any:
    """PEFT's configuration of a structure at its budget."""
    import peft
    from peft.tuners.lora.config import BdLoraConfig

    targets = list(TARGETS[str(structure.targets)])
    rank = int(structure.rank_equivalent or 0)
    if structure.method == "tessa":
        from tessa.peft import TessaConfig

        return TessaConfig(
            rank_equivalent=rank,
            target_modules=targets,
            placement=str(structure.placement),
            offset_rule=str(structure.offset_rule),
            shards=spec.shards,
            seed=seed,
            task_type="CAUSAL_LM",
        )
    blocks = None
    if structure.method == "bd_lora":
        rank = spec.bd_rank or matched_bd_rank(shapes(model, targets), rank, spec.blocks)
        blocks = BdLoraConfig(
            target_modules_bd_a=list(ROW_PARALLEL),
            target_modules_bd_b=list(COLUMN_PARALLEL),
            nblocks=spec.blocks,
            match_strict=True,
        )
    return peft.LoraConfig(
        r=rank,
        lora_alpha=spec.alpha * rank,  # type: ignore[arg-type]  # PEFT divides it by the rank
        target_modules=targets,
        use_bdlora=blocks,
        task_type="CAUSAL_LM",
    )


def shapes(model: PreTrainedModel, targets: list[str]) -> dict[str, tuple[int, int]]:
    """Module path -> (d_out, d_in) of the targeted projections."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if name.rsplit(".", 1)[-1] in targets and hasattr(module, "in_features")
    }


def budget(model: PreTrainedModel, structure: Structure, trained: int) -> dict[str, float | None]:
    """Trained parameters over LoRA's at the same rank-equivalent and modules; None without a budget."""
    if structure.rank_equivalent is None:
        return {"lora_params": None, "budget_ratio": None}
    base = getattr(model, "get_base_model", lambda: model)()
    sizes: dict[str, tuple[int, int]] = {}
    for name, module in base.named_modules():
        inner = module.get_base_layer() if hasattr(module, "get_base_layer") else None
        if inner is not None and hasattr(inner, "in_features"):
            sizes[name] = (inner.out_features, inner.in_features)
    lora = sum(lora_params(structure.rank_equivalent, *size) for size in sizes.values())
    return {"lora_params": lora, "budget_ratio": trained / lora}
