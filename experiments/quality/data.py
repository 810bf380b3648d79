"""Examples of every protocol, and their way into token ids.

An example is a prompt and the continuation that is to be learned; both are text, and the model sees the one directly
followed by the other, then the end-of-text token.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.quality import commonsense, metamath, skills
from experiments.quality.spec import QualitySpec
from tessa.errors import UserError

if TYPE_CHECKING:
    import torch

IGNORED = -100  # label of a position that the loss leaves out


@dataclass(frozen=True)
class Pair:
    prompt: str
    continuation: str


def training_pairs(spec: QualitySpec) -> list[Pair]:
    """The training examples, the same for every trial, in an order that each trial shuffles.

    Raises:
        UserError: where the protocol's files are absent or malformed.
    """
    if spec.protocol == "skills":
        count = spec.train_examples or 1000
        found = [
            Pair(prompt, f" {answer}")
            for name in skills.HELD_OUT
            for prompt, answer in skills.distinct(name, "train", count)
        ]
        return found
    module = {"metamath": metamath, "commonsense": commonsense}[spec.protocol]
    rows = module.training(data_folder(spec))
    if spec.train_examples is not None:
        rows = random.Random(0).sample(rows, min(len(rows), spec.train_examples))
    return [Pair(prompt, answer) for prompt, answer in rows]


def data_folder(spec: QualitySpec) -> Path:
    """Folder of the published files. UserError where none is given or it is absent."""
    module: Any = {"metamath": metamath, "commonsense": commonsense}[spec.protocol]
    if spec.data is None:
        raise UserError(f"study.data is missing: give the folder that holds {module.FILES}")
    folder = Path(spec.data).expanduser()
    if not folder.is_dir():
        raise UserError(f"study.data={spec.data} is no folder: give the folder that holds {module.FILES}")
    return folder


def encode(
    tokenizer: Any, prompt: str, continuation: str, max_length: int, loss_on: str
) -> dict[str, list[int]]:
    """Token ids and labels of one example, cut at `max_length`; `loss_on` is "answer" or "all".

    Prompt and continuation are tokenised as one text, as they are when the model writes the continuation itself.
    """
    begin = tokenizer(prompt)["input_ids"]
    ids = tokenizer(prompt + continuation)["input_ids"] + [tokenizer.eos_token_id]
    masked = len(begin) if loss_on == "answer" else 0
    labels = [IGNORED] * masked + ids[masked:]
    return {"input_ids": ids[:max_length], "labels": labels[:max_length]}


def encoded(tokenizer: Any, pairs: Sequence[Pair], spec: QualitySpec) -> list[dict[str, list[int]]]:
    """Token ids of many examples; those whose answer would be cut off whole are left out."""
    rows = [encode(tokenizer, p.prompt, p.continuation, spec.max_length, spec.loss_on) for p in pairs]
    kept = [row for row in rows if any(label != IGNORED for label in row["labels"])]
    if not kept:
        raise UserError(f"no example fits study.max_length={spec.max_length} tokens; raise it")
    return kept


def collate(rows: Sequence[Mapping[str, list[int]]], pad: int | None) -> dict[str, torch.Tensor]:
    """Rows of different lengths as one batch, padded on the right."""
    import torch

    longest = max(len(row["input_ids"]) for row in rows)

    def stack(key: str, fill: int) -> torch.Tensor:
        return torch.tensor([row[key] + [fill] * (longest - len(row[key])) for row in rows])

    return {
        "input_ids": stack("input_ids", pad or 0),
        "attention_mask": torch.tensor(
            [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
        ),
        "labels": stack("labels", IGNORED),
    }
