"""Eight commonsense tasks after training on commonsense-170k (LLM-Adapters' files and prompts).

Files, as their authors publish them: `commonsense_170k.json` and `dataset/<task>/test.json`, each a list of objects
with `instruction`, `input`, `output` and, for testing, `answer`. The model writes its answer; the first word of the
task's answer set in it counts.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from experiments.quality.files import read_json, text
from tessa.errors import UserError

FILES = "commonsense_170k.json and dataset/<task>/test.json"
TASKS = {
    "boolq": "true|false",
    "piqa": "solution[12]",
    "social_i_qa": "answer[1-5]",
    "hellaswag": "ending[1-4]",
    "winogrande": "option[12]",
    "ARC-Easy": "answer[1-5]",
    "ARC-Challenge": "answer[1-5]",
    "openbookqa": "answer[1-5]",
}
VALIDATION_SIZE = 120
_INDENT = " " * 16
# The prompt the data was made for, indented lines included: models trained with it expect it to the letter.
PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request. \n\n"
    f"{_INDENT}### Instruction:\n{_INDENT}{{instruction}}\n\n{_INDENT}### Response:\n{_INDENT}"
)


def _rows(folder: Path) -> list[tuple[str, str]]:
    path = folder / "commonsense_170k.json"
    return [
        (PROMPT.format(instruction=text(row, "instruction", path, n)), text(row, "output", path, n))
        for n, row in enumerate(read_json(path), 1)
    ]


def _validation_positions(count: int) -> set[int]:
    """The rows held back, the same in every run; at most half, so that a small file leaves something to train on."""
    return set(random.Random(0).sample(range(count), min(VALIDATION_SIZE, count // 2)))


def training(folder: Path) -> list[tuple[str, str]]:
    """(prompt, continuation) of every example but those held back for validation."""
    rows = _rows(folder)
    held = _validation_positions(len(rows))
    return [row for i, row in enumerate(rows) if i not in held]


def documents(folder: Path, task: str, split: str) -> list[dict[str, str]]:
    """`prompt` and `answer` of a task's test set, or of the held-back training rows whose answers are of its kind."""
    if task not in TASKS:
        raise UserError(f"commonsense task {task!r} is unknown; known: {', '.join(TASKS)}")
    if split == "test":
        path = folder / "dataset" / task / "test.json"
        return [
            {
                "prompt": PROMPT.format(instruction=text(row, "instruction", path, n)),
                "answer": text(row, "answer", path, n),
            }
            for n, row in enumerate(read_json(path), 1)
        ]
    rows = _rows(folder)
    held = [rows[i] for i in sorted(_validation_positions(len(rows)))]
    answered = [(prompt, first_answer(output, task)) for prompt, output in held]
    return [{"prompt": prompt, "answer": answer} for prompt, answer in answered if answer is not None]


def first_answer(words: str, task: str) -> str | None:
    """The first word of the task's answer set in a text."""
    match = re.search(TASKS[task], words)
    return match.group() if match else None
