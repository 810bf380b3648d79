"""Documents and scores of the project's lm-eval tasks; lm-eval loads this file beside its YAMLs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from datasets import Dataset

from experiments.quality import commonsense, metamath, skills
from tessa.errors import UserError

FOLDER = "TESSA_QUALITY_DATA"


def skill(skill: str, examples: int = skills.EXAMPLES, **_: Any) -> dict[str, Dataset]:
    """A held-out skill's documents, the same everywhere; none is trained on (see `skills.split_of`)."""
    return {
        split: _dataset(
            {"prompt": prompt, "answer": answer} for prompt, answer in skills.distinct(skill, split, examples)
        )
        for split in ("validation", "test")
    }


def gsm8k(**_: Any) -> dict[str, Dataset]:
    return {split: _dataset(metamath.gsm8k(_folder(), split)) for split in ("validation", "test")}


def score_gsm8k(document: dict[str, str], results: list[str]) -> dict[str, float]:
    stated = metamath.stated_answer(results[0])
    return {"exact_match": float(metamath.same(stated, metamath.stated_answer(document["answer"])))}


def commonsense_task(name: str, **_: Any) -> dict[str, Dataset]:
    documents = {split: commonsense.documents(_folder(), name, split) for split in ("validation", "test")}
    return {
        split: _dataset({**row, "name": name} for row in rows) for split, rows in documents.items() if rows
    }


def score_commonsense(document: dict[str, str], results: list[str]) -> dict[str, float]:
    return {
        "exact_match": float(commonsense.first_answer(results[0], document["name"]) == document["answer"])
    }


def _folder() -> Path:
    folder = os.environ.get(FOLDER)
    if not folder:
        raise UserError(f"{FOLDER} is not set: point it at the folder with the published data")
    return Path(folder)


def _dataset(rows: Any) -> Dataset:
    return Dataset.from_list(list(rows))
