"""Structures become PEFT models of the budget they claim, and start as the base model."""

from __future__ import annotations

import pytest
import torch

from experiments.quality import base, methods
from experiments.quality.data import collate, encode
from experiments.quality.spec import TARGETS, QualitySpec, Structure
from experiments.quality.worker import spread
from tessa.budget import bd_lora_params, lora_params
from tessa.slices import parallel_of

SETTINGS = base.BaseSettings(layers=2)
SPEC = QualitySpec()


def model():
    return base.new_model(SETTINGS).eval()


def batch():
    tokenizer = base.tokenizer(64)
    rows = [
        encode(tokenizer, "previous : b c =", " a", 64, "answer"),
        encode(tokenizer, "reverse : a b =", " b a", 64, "answer"),
    ]
    return collate(rows, tokenizer.pad_token_id)


def trained(made) -> int:
    return sum(p.numel() for p in made.parameters() if p.requires_grad)


def prepared(*structure, seed=0):
    batches = [batch()]
    made = Structure(*structure)
    return methods.prepare(model(), made, SPEC, seed, lambda: batches), made


SIZES = methods.shapes(model(), list(TARGETS["all"]))


@pytest.mark.parametrize("rank", [2, 4, 8])
def test_lora_and_bd_lora_spend_what_the_formulas_say(rank):
    lora, structure = prepared("lora", None, None, rank, "all")
    assert trained(lora) == sum(lora_params(rank, *size) for size in SIZES.values())
    assert methods.budget(lora, structure, trained(lora))["budget_ratio"] == 1.0
    blocks, _ = prepared("bd_lora", None, None, rank, "all")
    found = methods.matched_bd_rank(SIZES, rank, SPEC.blocks)
    assert found == 2 * rank  # what the base model's sizes are made for
    unit = sum(bd_lora_params(found, *size, parallel_of(m), SPEC.blocks) for m, size in SIZES.items())
    assert trained(blocks) == unit
    assert trained(blocks) == pytest.approx(trained(lora), rel=0.05)


@pytest.mark.parametrize("placement", ["across", "along"])
@pytest.mark.parametrize("rule", ["first", "random", "weight", "gradient"])
def test_tessa_is_matched_and_starts_as_the_base_model(placement, rule):
    made, structure = prepared("tessa", placement, rule, 4, "all")
    assert methods.budget(made, structure, trained(made))["budget_ratio"] == pytest.approx(1.0, abs=0.05)
    inputs = batch()["input_ids"]
    with torch.no_grad():
        assert torch.allclose(made(input_ids=inputs).logits, model()(input_ids=inputs).logits, atol=1e-6)


def test_seeds_move_random_offsets_and_nothing_of_the_other_rules():
    def offsets(rule, seed):
        made, _ = prepared("tessa", "across", rule, 4, "all", seed=seed)
        return [s["offset"] for s in made.peft_config["default"].slices.values()]

    assert offsets("random", 0) != offsets("random", 1)
    assert offsets("gradient", 0) == offsets("gradient", 1)
    assert set(offsets("first", 0)) == {0}


@pytest.mark.parametrize(("targets", "modules"), [("attention", 4), ("mlp", 3), ("qv", 2)])
def test_targets_are_the_modules_they_name(targets, modules):
    made, structure = prepared("lora", None, None, 2, targets)
    names = {n.split(".lora_A")[0].rsplit(".", 1)[-1] for n, _ in made.named_parameters() if ".lora_A" in n}
    assert names == set(TARGETS[targets])
    assert len(names) == modules
    assert methods.budget(made, structure, trained(made))["budget_ratio"] == 1.0


def test_full_trains_everything_and_base_nothing():
    whole = sum(p.numel() for p in model().parameters())
    assert trained(prepared("full")[0]) == whole
    assert trained(prepared("base")[0]) == 0
    assert methods.budget(model(), Structure("full"), whole)["budget_ratio"] is None


def test_the_loss_counts_the_answer_alone():
    tokenizer = base.tokenizer(64)
    row = encode(tokenizer, "reverse : a b =", " b a", 64, "answer")
    assert row["labels"][:5] == [-100] * 5
    assert row["labels"][5:] == row["input_ids"][5:]
    assert tokenizer.decode(row["input_ids"][5:]) == "b a </s>"
    whole = encode(tokenizer, "reverse : a b =", " b a", 64, "all")
    assert whole["labels"] == whole["input_ids"] == row["input_ids"]
    assert len(encode(tokenizer, "reverse : a b =", " b a", 6, "all")["labels"]) == 6
    made = collate([row, row | {"input_ids": row["input_ids"][:3], "labels": row["labels"][:3]}], 0)
    assert made["attention_mask"].sum(1).tolist() == [8, 3]
    assert made["labels"][1, 3:].tolist() == [-100] * 5


def test_gradient_batches_hold_every_task():
    """1,000 rows of each of four tasks, one after the other: each batch takes as many of each, and none twice."""
    rows = [(task, i) for task in range(4) for i in range(1000)]
    batches = list(spread(rows, 4, 32))
    assert [len(batch) for batch in batches] == [32] * 4
    for batch in batches:
        assert [sum(task == row[0] for row in batch) for task in range(4)] == [8] * 4
    assert len({row for batch in batches for row in batch}) == 4 * 32
    assert list(spread(rows[:3], 4, 32)) == [[row] for row in rows[:3]]
