"""A training process that follows a script, for tests of the quality experiment without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.quality.pool import Event, Job


class Scripted:
    """Stands in for the training processes of a pool: scores by a rule, and a record of what was asked.

    rule: cell -> score, an exception to raise, or a loss that is not finite.
    """

    def __init__(self, rule: Any) -> None:
        self.rule, self.asked = rule, []

    def make(self, number: int, log: Path) -> Scripted:
        log.write_text("line of the log\n")
        return self

    def start(self, seen: Any) -> None:
        seen({"event": "base", "step": 1, "steps": 1, "loss": 0.5})

    def run(self, job: Job, number: int, seen: Any) -> Event:
        self.asked.append(job.cell)
        said = self.rule(job.cell)
        if isinstance(said, BaseException):
            raise said
        seen({"event": "progress", "step": 1, "steps": 1, "loss": 0.1})
        split = "validation" if job.cell.trial.role == "search" else "test"
        loss = said if said != said else 0.1
        scores = [
            {
                "task": task,
                "metric": "exact_match",
                "value": said,
                "stderr": 0.1,
                "examples": 9,
                "split": split,
            }
            for task in ("one", "two")
        ]
        result = {
            "scores": scores, "trainable_params": 100, "lora_params": 100.0, "budget_ratio": 1.0, "training_s": 1.0,
            "train_loss": loss, "wall_s": 1.5,
        }  # fmt: skip
        return {"event": "done", "result": result}

    def stop(self) -> None:
        pass
