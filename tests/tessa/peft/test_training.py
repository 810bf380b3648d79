"""A tiny model learns, with TESSA and transformers' Trainer, what its base cannot do."""

from __future__ import annotations

import peft
import pytest
import torch
from transformers import Trainer, TrainingArguments

from tessa.adapter_io import read_adapter
from tessa.peft import TessaConfig

FIRST, SYMBOLS, LENGTH = 3, 50, 16  # tokens FIRST .. FIRST + SYMBOLS - 1 count in a circle


def _counting(step: int, rows: int, seed: int) -> torch.Tensor:
    """[rows, LENGTH]: each token is the one before it plus ``step``, in a circle, from a random start."""
    start = torch.randint(SYMBOLS, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return FIRST + (start + step * torch.arange(LENGTH)) % SYMBOLS


def _accuracy(model, step: int) -> float:
    ids = _counting(step, 50, seed=99)
    with torch.no_grad():
        predicted = model(ids).logits[:, :-1].argmax(-1)
    return (predicted == ids[:, 1:]).float().mean().item()


@pytest.fixture(scope="module")
def counts_by_one(make_llama):
    """A base model trained to count by one."""
    model = make_llama().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for i in range(200):
        ids = _counting(1, 16, seed=i)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    assert _accuracy(model, 1) > 0.99
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("placement", ["across", "along"])
def test_trainer_teaches_a_task_that_the_base_cannot_do(make_llama, counts_by_one, tmp_path, placement):
    base = make_llama()
    base.load_state_dict(counts_by_one)
    assert _accuracy(base, 7) < 0.1

    torch.manual_seed(0)
    config = TessaConfig(
        rank_equivalent=8, placement=placement, shards=4, offset_rule="weight", task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, config)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=300,
            per_device_train_batch_size=16,
            learning_rate=5e-3,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in _counting(7, 400, seed=1)],
    )
    trainer.train()
    # The optimizer holds two moments per delta and nothing for the base.
    state = trainer.optimizer.state_dict()["state"]
    moments = sum(v.numel() for s in state.values() for k, v in s.items() if k.startswith("exp_avg"))
    deltas = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert moments == 2 * deltas
    assert deltas < 0.25 * sum(p.numel() for p in base.parameters())

    model.eval()
    assert _accuracy(model, 7) > 0.95
    with model.disable_adapter():
        assert _accuracy(model, 1) > 0.99

    trainer.save_model(tmp_path / "adapter")
    assert read_adapter(tmp_path / "adapter").num_params == deltas
    fresh = make_llama()
    fresh.load_state_dict(counts_by_one)
    merged = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").merge_and_unload()
    assert _accuracy(merged, 7) > 0.95
