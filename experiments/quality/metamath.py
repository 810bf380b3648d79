"""MetaMathQA to GSM8K as PEFT's public method comparison defines it (huggingface/peft, method_comparison/MetaMathQA).

Files, as their authors publish them: `MetaMathQA-395K.json` (a list with `query` and `response`), `gsm8k/train.jsonl`
and `gsm8k/test.jsonl` (lines with `question` and `answer`). Training examples longer than CHAR_LIMIT characters are
left out; the loss counts the whole text; an answer is right when its last stated number equals the reference's.
"""

from __future__ import annotations

import random
from decimal import Decimal, InvalidOperation
from pathlib import Path

from experiments.quality.files import read_json, text

FILES = "MetaMathQA-395K.json, gsm8k/train.jsonl and gsm8k/test.jsonl"
TEMPLATE = "Question: {query} Think step by step.\nAnswer:"
CHAR_LIMIT = 1300  # of query, a space and response
VALIDATION_SIZE = 50
MARKERS = ("The answer is: ", "The answer is ", "The final answer is: ", "The final answer is ", "#### ")


def training(folder: Path) -> list[tuple[str, str]]:
    """(prompt, continuation) of every example that is short enough, in the file's order."""
    path = folder / "MetaMathQA-395K.json"
    found = []
    for number, row in enumerate(read_json(path), 1):
        query, response = text(row, "query", path, number), text(row, "response", path, number)
        if len(query) + 1 + len(response) <= CHAR_LIMIT:
            found.append((TEMPLATE.format(query=query), f" {response}"))
    return found


def gsm8k(folder: Path, split: str) -> list[dict[str, str]]:
    """`prompt` and `answer` of the questions; validation is a fixed sample of GSM8K's training set, which
    MetaMathQA's own questions are made from, so it ranks learning rates and is no measure of quality."""
    path = folder / "gsm8k" / ("test.jsonl" if split == "test" else "train.jsonl")
    rows = [
        {
            "prompt": TEMPLATE.format(query=text(row, "question", path, number)),
            "answer": text(row, "answer", path, number),
        }
        for number, row in enumerate(read_json(path), 1)
    ]
    if split == "validation":
        rows = random.Random(0).sample(rows, min(VALIDATION_SIZE, len(rows)))
    return rows


def stated_answer(words: str) -> str | None:
    """What follows the last answer marker, on its line, without unit signs; None where there is no marker."""
    words = words.strip().rstrip(".!?")
    for marker in MARKERS:
        if marker in words:
            return words.rpartition(marker)[2].strip().split("\n", 1)[0].strip(" .!?$%")
    return None


def same(stated: str | None, reference: str | None) -> bool:
    """Whether two answers are equal: as numbers (fractions too) where both are, else as texts."""
    if stated is None or reference is None:
        return False
    a, b = number(stated), number(reference)
    return float(a) == float(b) if a is not None and b is not None else a is None and stated == reference


def number(words: str) -> Decimal | None:
    """A decimal number or a fraction of two; None for anything else."""
    parts = words.split("/")
    try:
        values = [Decimal(part.strip()) for part in parts]
        if len(values) == 1:
            return values[0]
        return values[0] / values[1] if len(values) == 2 and values[1] else None
    except (InvalidOperation, ValueError):
        return None
