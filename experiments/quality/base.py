"""The embedded base model: a small Llama trained once on the learned skills, kept in the cache under its settings.

python -m experiments.quality.base      # trains it now, with the settings of conf/experiment/quality.yaml
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.identity import canonical_hash
from experiments.quality import skills
from tessa.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

FORMAT = 1  # part of the folder's name: raise it when equal settings begin to give another model
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class BaseSettings:
    """What determines the model. `intermediate_size` is such that BD-LoRA of 4 blocks spends LoRA's parameters at
    twice LoRA's rank (see `tessa.budget.matched_bd_rank`); heads of 32 are the smallest that vLLM's
    attention takes on a CPU."""

    hidden_size: int = 96
    intermediate_size: int = 320
    layers: int = 3
    heads: int = 4
    head_dim: int = 32
    max_positions: int = 64
    steps: int = 700
    batch: int = 64
    learning_rate: float = 6e-3
    warmup: float = 0.03
    seed: int = 0

    @property
    def hash(self) -> str:
        content = {"format": FORMAT, "skills": skills.fingerprint(), **asdict(self)}
        return canonical_hash(content)[:12]


def settings(values: dict[str, Any]) -> BaseSettings:
    """BaseSettings with some values given. UserError for an unknown one."""
    known = [f.name for f in fields(BaseSettings)]
    for key in values:
        if key not in known:
            raise UserError(f"unknown setting 'study.base.{key}'. Known settings there: {', '.join(known)}")
    return BaseSettings(**values)


def folder(chosen: BaseSettings, cache: Path) -> Path:
    return cache / "quality" / f"skills-base-{chosen.hash}"


def ensure_base(chosen: BaseSettings, cache: Path, progress: Progress | None = None) -> Path:
    """The checkpoint's folder, trained first when it is missing; one process trains, others wait for it."""
    target = folder(chosen, cache)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".making-"))
        try:
            model, report = train(chosen, progress)
            model.save_pretrained(scratch)
            tokenizer(chosen.max_positions).save_pretrained(scratch)
            (scratch / "training.json").write_text(json.dumps({**asdict(chosen), **report}, indent=1))
            scratch.chmod(0o755)
            os.rename(scratch, target)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return target


def tokenizer(max_length: int) -> PreTrainedTokenizerBase:
    """One token per word; nothing is added before or after a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(skills.VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token=skills.PAD))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=skills.PAD,
        bos_token=skills.BOS,
        eos_token=skills.EOS,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def new_model(chosen: BaseSettings) -> LlamaForCausalLM:
    """The untrained model; its weights follow from the seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = {word: i for i, word in enumerate(skills.VOCABULARY)}
    torch.manual_seed(chosen.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(skills.VOCABULARY),
            hidden_size=chosen.hidden_size,
            intermediate_size=chosen.intermediate_size,
            num_hidden_layers=chosen.layers,
            num_attention_heads=chosen.heads,
            num_key_value_heads=chosen.heads,
            head_dim=chosen.head_dim,
            max_position_embeddings=chosen.max_positions,
            tie_word_embeddings=False,
            pad_token_id=ids[skills.PAD],
            bos_token_id=ids[skills.BOS],
            eos_token_id=ids[skills.EOS],
        )
    )


def train(
    chosen: BaseSettings, progress: Progress | None = None
) -> tuple[LlamaForCausalLM, dict[str, float]]:
    """Trains the model from nothing; returns it with its last loss and the seconds it took.

    Matrices of the layers take Muon, which needs about half of AdamW's steps here; everything else takes AdamW.
    """
    import torch

    from experiments.quality.muon import Muon

    model = new_model(chosen).train()
    hidden = [p for n, p in model.named_parameters() if p.ndim == 2 and n.startswith("model.layers")]
    rest = [p for n, p in model.named_parameters() if p.ndim < 2 or not n.startswith("model.layers")]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(hidden, lr=chosen.learning_rate),
        torch.optim.AdamW(rest, lr=chosen.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    began, loss = time.perf_counter(), float("nan")
    for step, (ids, labels) in enumerate(batches(chosen)):
        rise = (step + 1) / max(1.0, chosen.warmup * chosen.steps)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = chosen.learning_rate * min(1.0, rise, 1.0 - step / chosen.steps)
        result = model(input_ids=ids, labels=labels)
        result.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loss = float(result.loss.detach())
        if progress is not None and (step + 1) % 20 == 0:
            progress(step + 1, chosen.steps, loss)
    return model.eval(), {"loss": loss, "seconds": time.perf_counter() - began}


def batches(chosen: BaseSettings) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and labels, the skills in turn; the loss counts the answers, as the questions are random."""
    from experiments.quality.data import collate, encode

    words = tokenizer(chosen.max_positions)
    source = skills.mixture(skills.LEARNED, "train", chosen.seed)
    for _ in range(chosen.steps):
        rows = [
            encode(words, prompt, f" {answer}", chosen.max_positions, "answer")
            for prompt, answer in itertools.islice(source, chosen.batch)
        ]
        batch = collate(rows, words.pad_token_id)
        yield batch["input_ids"], batch["labels"]


def main() -> None:
    import sys

    import yaml

    from experiments import models

    given = yaml.safe_load((models.REPO / "conf" / "experiment" / "quality.yaml").read_text())
    chosen = settings(given["study"].get("base") or {})

    def show(step: int, steps: int, loss: float) -> None:
        print(f"\rstep {step}/{steps}  loss {loss:.3f}", end="", file=sys.stderr)

    print(f"\n{ensure_base(chosen, models.default_cache(), show)}")


if __name__ == "__main__":
    main()
