"""Scores of a model on the project's lm-eval tasks, in this process."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.quality import commonsense, skills
from experiments.quality.data import data_folder
from experiments.quality.spec import QualitySpec

TASKS = Path(__file__).parent / "tasks"
METRIC = "exact_match"
FOLDER = "TESSA_QUALITY_DATA"


@dataclass(frozen=True)
class Score:
    """value and stderr are shares of right answers among `examples` documents of `split`."""

    task: str
    metric: str
    value: float
    stderr: float
    examples: int
    split: str


def task_names(spec: QualitySpec) -> list[str]:
    """lm-eval's names of a protocol's tasks."""
    if spec.protocol == "metamath":
        return ["tessa_gsm8k"]
    names = skills.HELD_OUT if spec.protocol == "skills" else tuple(commonsense.TASKS)
    return [f"tessa_{name.lower().replace('-', '_')}" for name in names]


class Evaluator:
    """Tasks are built once; models come and go. The split, `validation` or `test`, is all that a call scores."""

    def __init__(self, spec: QualitySpec) -> None:
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        if spec.protocol != "skills":
            os.environ[FOLDER] = str(data_folder(spec))
        self._spec = spec
        self._manager = TaskManager(include_path=str(TASKS), include_defaults=False)
        self._built: dict[str, Any] = {}

    def tasks(self, split: str) -> list[Any]:
        """The protocol's tasks that have documents in the split, which is all they show."""
        if split not in self._built:
            tasks = self._manager.load(task_names(self._spec))["tasks"].values()
            for task in tasks:
                if split == "validation":
                    task.config.test_split = None  # lm-eval takes test documents where there are any
                else:
                    task.config.validation_split = None
            self._built[split] = [task for task in tasks if _has_documents(task, split)]
        return self._built[split]

    def __call__(self, model: Any, tokenizer: Any, split: str) -> list[Score]:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        harness = HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=self._spec.eval_batch,
            max_length=self._spec.max_length,
        )
        limit = self._spec.validation_examples if split == "validation" else self._spec.test_examples
        found = simple_evaluate(
            harness,
            tasks=self.tasks(split),
            task_manager=self._manager,  # without it lm-eval reads all its own tasks, every time
            limit=limit,
            bootstrap_iters=100,
            log_samples=False,
            verbosity="ERROR",
        )
        assert found is not None
        return [
            Score(
                task=name.removeprefix("tessa_"),
                metric=METRIC,
                value=float(values[f"{METRIC},none"]),
                stderr=float(values[f"{METRIC}_stderr,none"]),
                examples=int(found["n-samples"][name]["effective"]),
                split=split,
            )
            for name, values in found["results"].items()
            if f"{METRIC},none" in values
        ]


def _has_documents(task: Any, split: str) -> bool:
    """A small file's held-back rows may lack a task; its test set never may."""
    return split == "test" or split in task.dataset
