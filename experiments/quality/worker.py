"""The training process: takes trials as JSON lines, answers with progress and results as JSON lines.

    python -m experiments.quality.worker PARENT    # started by experiments.quality.pool, whose process id it gets

In: `{"spec": {...}, "cache": path}` once, then `{"id": n, "trial": {...}, "keep": folder or null}` per trial. Out:
`{"event": "base" | "progress", "step", "steps", "loss"}`, then `{"event": "done", "id", "result": {...}}` or
`{"event": "failed", "id", "reason", "traceback"}`. Whatever libraries print goes to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from experiments.quality.spec import QualitySpec, Structure, Trial

GRADIENT_BATCHES = 4
PARENT_POLL_S = 1.0


class Bench:
    """Everything that trials share: base weights, tokenizer, token ids, lm-eval's tasks."""

    def __init__(self, spec: QualitySpec, cache: Path, send: Any) -> None:
        import torch
        from transformers import AutoTokenizer

        from experiments.quality import data, models
        from experiments.quality.evaluation import Evaluator

        torch.set_num_threads(spec.threads)
        self.spec, self.send = spec, send
        self.folder = models.ensure(spec, cache, lambda *at: send_progress(send, "base", *at))
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.tokenizer.model_max_length = spec.max_length
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.device = models.torch_device(spec)
        self.rows = data.encoded(self.tokenizer, data.training_pairs(spec), spec)
        self.evaluate = Evaluator(spec)

    def fresh(self) -> Any:
        """The base model as it was before any training."""
        from experiments.quality import models

        return models.load(self.folder, self.spec).to(self.device)

    def run(self, trial: Trial, keep: Path | None) -> dict[str, Any]:
        """Trains and scores one trial; `keep` gets the adapter (or, of `full`, a model folder that engines load)."""
        from experiments.quality import methods
        from experiments.quality.training import train

        began = time.perf_counter()
        structure = trial.structure
        model = methods.prepare(self.fresh(), structure, self.spec, trial.seed, self._gradient_batches)
        result: dict[str, Any] = {
            "trainable_params": 0,
            "total_params": sum(p.numel() for p in model.parameters()),
        }
        if structure.method != "base":
            assert trial.learning_rate is not None
            trained = train(
                model, self.rows, self.tokenizer.pad_token_id, self.spec, trial.learning_rate, trial.seed,
                lambda *at: send_progress(self.send, "progress", *at),
            )  # fmt: skip
            result.update(dataclasses.asdict(trained))
            result.update(methods.budget(model, structure, trained.trainable_params))
        model.eval()
        at = time.perf_counter()
        split = "validation" if trial.role == "search" else "test"
        scores = self.evaluate(model, self.tokenizer, split)
        result["evaluation_s"] = time.perf_counter() - at
        if keep is not None:
            model.save_pretrained(keep)
            if structure.rank_equivalent is None:
                self._save_tokenizer(keep)
        return {
            **result,
            "scores": [dataclasses.asdict(s) for s in scores],
            "wall_s": time.perf_counter() - began,
        }

    def _save_tokenizer(self, folder: Path) -> None:
        """The base model's own: the one used here is cut to the examples' length."""
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(self.folder).save_pretrained(folder)

    def _gradient_batches(self) -> Iterable[Mapping[str, Any]]:
        from experiments.quality.data import collate

        for mine in spread(self.rows, GRADIENT_BATCHES, self.spec.batch):
            batch = collate(mine, self.tokenizer.pad_token_id)
            yield {key: value.to(self.device) for key, value in batch.items()}


def spread(rows: list[Any], count: int, size: int) -> Iterable[list[Any]]:
    """`count` batches of `size` rows taken evenly from all of them, as rows lie task by task; fewer where rows are."""
    for i in range(min(count, len(rows))):
        mine = rows[i::count]
        kept = min(size, len(mine))
        yield [mine[j * len(mine) // kept] for j in range(kept)]


def send_progress(send: Any, event: str, step: int, steps: int, loss: float) -> None:
    send({"event": event, "step": step, "steps": steps, "loss": loss})


def serve(source: TextIO, out: TextIO) -> None:
    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    first = json.loads(source.readline())
    try:
        bench = Bench(spec_of(first["spec"]), Path(first["cache"]), send)
    except Exception as error:
        send(
            {
                "event": "broken",
                "reason": reason(error),
                "user": is_user_error(error),
                "traceback": traceback.format_exc(),
            }
        )
        return
    send({"event": "ready"})
    for line in source:
        job = json.loads(line)
        try:
            keep = Path(job["keep"]) if job.get("keep") else None
            send({"event": "done", "id": job["id"], "result": bench.run(trial_of(job["trial"]), keep)})
        except Exception as error:
            send(
                {
                    "event": "failed",
                    "id": job["id"],
                    "reason": reason(error),
                    "traceback": traceback.format_exc(),
                }
            )


def reason(error: Exception) -> str:
    return str(error) if is_user_error(error) else f"{type(error).__name__}: {error}"


def is_user_error(error: Exception) -> bool:
    from tessa.errors import UserError

    return isinstance(error, UserError)


def spec_of(values: dict[str, Any]) -> QualitySpec:
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return QualitySpec(**plain)


def trial_of(values: dict[str, Any]) -> Trial:
    return Trial(**{**values, "structure": Structure(**values["structure"])})


def end_with(parent: int) -> None:
    """Waits until this process is no longer a child of ``parent``, and ends it.

    A parent that is killed can end nothing, and a training would only notice at its next line of progress. The kernel's
    signal for a parent's death does not serve here: it comes when the parent's thread ends that started the child.
    """
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def main(parent: int) -> None:
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    # The protocol keeps the real standard output; prints of libraries must not get into it.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, out)


if __name__ == "__main__":
    main(int(sys.argv[1]))
