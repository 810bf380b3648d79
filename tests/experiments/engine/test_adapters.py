"""Generated adapters: matched budgets, and the reference's merging against PEFT's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from experiments import models
from experiments.adapters import AdapterSet, ensure_adapters, make
from experiments.engine.reference import merged
from tessa.budget import matched_bd_rank
from tessa.errors import UserError
from tessa.peft import TessaConfig  # noqa: F401  (registers TESSA with PEFT)

SHAPES = models.load_named("tiny_gqa").linear_shapes()


def params(folder: Path) -> int:
    return sum(t.numel() for t in load_file(folder / "adapter_model.safetensors").values())


@pytest.mark.parametrize("rank", [4, 8, 16])
def test_budgets_match_lora_within_five_percent(tmp_path: Path, rank: int) -> None:
    counts = {}
    for form, ranks in (("lora", rank), ("tessa", rank), ("bd_lora", matched_bd_rank(SHAPES, rank, 2))):
        spec = AdapterSet(form, SHAPES, (ranks,), blocks=2)
        make(spec, tmp_path / form)
        counts[form] = params(tmp_path / form / "adapter-0000")
        assert counts[form] == spec.parameters(0)
    assert counts["lora"] == sum(rank * (a + b) for a, b in SHAPES.values())
    assert abs(counts["tessa"] / counts["lora"] - 1) <= 0.05, counts
    # BD-LoRA's rank is a multiple of its blocks, so small ranks match only as nearly as that allows.
    assert abs(counts["bd_lora"] / counts["lora"] - 1) <= (0.05 if rank > 4 else 0.2), counts


def test_the_same_description_is_made_once(tmp_path: Path) -> None:
    spec = AdapterSet("lora", SHAPES, (4, 8))
    first = ensure_adapters(spec, tmp_path)
    before = [(f / "adapter_model.safetensors").stat().st_mtime_ns for f in first]
    assert ensure_adapters(spec, tmp_path) == first
    assert [(f / "adapter_model.safetensors").stat().st_mtime_ns for f in first] == before
    ranks = [json.loads((f / "adapter_config.json").read_text())["r"] for f in first]
    assert ranks == [4, 8]


def test_a_description_that_does_not_fit_names_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a rank that 4 divides, got rank 6"):
        ensure_adapters(AdapterSet("bd_lora", SHAPES, (6,), blocks=4), tmp_path)
    with pytest.raises(UserError, match="allowed: lora, bd_lora, tessa"):
        make(AdapterSet("dora", SHAPES, (6,)), tmp_path)


@pytest.mark.parametrize(
    ("form", "placement"),
    [("lora", "across"), ("bd_lora", "across"), ("tessa", "across"), ("tessa", "along")],
)
def test_reference_merging_equals_pefts(tmp_path: Path, cache: Path, form: str, placement: str) -> None:
    """Logits of Hugging Face with our hand-merged weights and with PEFT's adapter on top."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    spec = AdapterSet(form, SHAPES, (8,), blocks=2, placement=placement, shards=2, offset="random")
    folder = ensure_adapters(spec, cache)[0]
    path = models.ensure_model(models.load_named("tiny_gqa"), cache)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ids = torch.arange(3, 27)[None]
    with torch.inference_mode():
        plain = model(ids).logits
        with merged(model, folder):
            by_hand = model(ids).logits
        assert torch.equal(model(ids).logits, plain), "merging must leave no trace"
        by_peft = PeftModel.from_pretrained(model, folder)(ids).logits
    assert (by_hand - plain).abs().max() > 1e-2
    torch.testing.assert_close(by_hand, by_peft, rtol=1e-4, atol=1e-4)
