"""One training with transformers' Trainer, the same settings for every method but the learning rate."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.measure.memory import step_peak_bytes
from experiments.quality.data import collate
from experiments.quality.spec import QualitySpec

if TYPE_CHECKING:
    import torch

Row = dict[str, list[int]]
Progress = Callable[[int, int, float], None]
REPORTS = 20  # progress messages per training


@dataclass(frozen=True)
class Trained:
    """training_s: wall time of the steps alone; training_cpu_s: this process's part of it. peak_memory_bytes: weights,
    gradients, the optimizer's state and the most that a step held beside them (on a GPU what its allocator handed out).
    """

    trainable_params: int
    training_s: float
    training_cpu_s: float
    train_loss: float
    peak_memory_bytes: int


def train(
    model: Any,
    rows: Sequence[Row],
    pad: int | None,
    spec: QualitySpec,
    rate: float,
    seed: int,
    progress: Progress,
) -> Trained:
    """Trains in place. The seed orders the examples; the model's own weights were drawn before."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Report(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                progress(state.global_step, state.max_steps, float(logs["loss"]))

    on_cpu = next(model.parameters()).device.type == "cpu"
    trainable = [p for p in model.parameters() if p.requires_grad]
    held = _static_bytes(model, trainable)
    peak = 0 if not on_cpu else _step_bytes(model, rows[: spec.batch], pad)
    if not on_cpu:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=scratch,
                max_steps=spec.steps,
                per_device_train_batch_size=spec.batch,
                learning_rate=rate,
                lr_scheduler_type=spec.schedule,
                warmup_steps=round(spec.warmup * spec.steps),
                weight_decay=spec.weight_decay,
                max_grad_norm=spec.clip,
                logging_steps=max(1, spec.steps // REPORTS),
                # With the filter a training that diverged ends with the loss of the steps before.
                logging_nan_inf_filter=False,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=on_cpu,
                seed=seed,
                data_seed=seed,
                remove_unused_columns=False,
                dataloader_pin_memory=False,
            ),
            train_dataset=list(rows),  # type: ignore[arg-type]  # any sequence of rows will do
            data_collator=lambda batch: collate(batch, pad),
            callbacks=[Report()],
        )
        began, cpu_began = time.perf_counter(), time.process_time()
        result = trainer.train()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    memory = held + peak if on_cpu else int(torch.cuda.max_memory_allocated())
    model.eval()
    return Trained(
        sum(p.numel() for p in trainable), seconds, cpu_seconds, float(result.training_loss), memory
    )


def _static_bytes(model: Any, trainable: Sequence[torch.nn.Parameter]) -> int:
    """Weights, and for each trained one its gradient and AdamW's two moments."""
    return sum(p.nbytes for p in model.parameters()) + 3 * sum(p.nbytes for p in trainable)


def _step_bytes(model: Any, rows: Sequence[Row], pad: int | None) -> int:
    """The most that one forward and backward pass holds, gradients of trained weights taken off."""
    model.train()
    batch = collate(rows, pad)
    peak = step_peak_bytes(lambda: model(**batch).loss.backward(), False)
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    model.zero_grad(set_to_none=True)
    return max(0, peak - gradients)
