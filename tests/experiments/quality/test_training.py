"""Real training processes on a base model of seconds: cells end to end, agreement with lm-eval's command line."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis import load, quality
from experiments.console import Console
from experiments.engine.setup import COMMON_ENV, cpu_env
from experiments.provenance import REPO
from experiments.quality import base, data, skills, training
from experiments.quality import study as studies
from experiments.quality.pool import Job, Worker, WorkerDied
from experiments.quality.spec import SCHEDULES, QualitySpec, Structure, Trial, cell

ONE_ANSWER = """
task: one_answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
"""
((PROMPT, ANSWER),) = skills.distinct("plus_3", "test", 1)
TASKS = Path(__file__).resolve().parents[3] / "experiments" / "quality" / "tasks"
TINY = {"hidden_size": 64, "intermediate_size": 96, "layers": 2, "heads": 4, "steps": 12, "batch": 16}
SPEC = QualitySpec(
    methods=("full", "lora", "tessa:across:gradient"), budgets=(4,), seeds=(0,), steps=3, batch=8, workers=1,
    learning_rates={"full": [1e-3], "lora": [1e-2, 1.0], "tessa": [1e-2]}, train_examples=16, test_examples=8,
    validation_examples=4, base=TINY,
)  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """A study's run: its folder, what it printed, and the base model's folder."""

    folder: Path
    printed: str
    base: Path

    @property
    def rows(self) -> pd.DataFrame:
        return quality.rows(load(self.folder / "results"))

    @property
    def adapter(self) -> Path:
        return next((self.folder / "adapters").glob("tessa-*"))


@dataclass(frozen=True)
class Scored:
    """lm-eval's scores by task, and the words it was given for each question of plus_3."""

    scores: dict[str, dict[str, float]]
    answers: dict[int, list[str]]


@pytest.fixture(scope="module")
def ran(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("study")
    study = studies.Study("quality", SPEC, folder / "results", "cpu")
    out = io.StringIO()
    outcome = studies.Run(study, Console(out), cache, keep=folder / "adapters")()
    assert (outcome.complete, outcome.failed) == (5, [])
    return Ran(folder, out.getvalue(), base.folder(base.settings(TINY), cache))


@pytest.fixture(scope="module")
def by_hf(ran: Ran) -> Scored:
    return lm_eval("hf", {"pretrained": ran.base, "peft": ran.adapter}, ran.folder / "hf")


@pytest.mark.slow
def test_cells_end_to_end(ran):
    frame, rows = load(ran.folder / "results"), ran.rows
    assert set(rows["task"]) == {"plus_3", "reverse_next", "to_west", "to_east"}
    assert rows["value"].between(0, 1).all()
    assert (rows["examples"] == 8).all()
    assert (frame[frame["role"] == "search"]["examples"] == 4).all()
    assert (rows["training_s"] > 0).all()
    memory = rows.groupby("method")["peak_memory_bytes"].first()
    assert memory["full"] > memory["lora"] > 4 * rows["total_params"].max()
    assert "step 3/3, loss" in ran.printed
    kept = {path.name.split("-r4")[0] for path in (ran.folder / "adapters").iterdir()}
    assert {"lora", "tessa-across-gradient"} <= kept


@pytest.mark.slow
def test_lm_eval_agrees(ran, by_hf):
    rows = ran.rows
    own = rows[(rows["method"] == "tessa") & (rows["task"] == "plus_3")]["value"].item()
    assert by_hf.scores["tessa_plus_3"]["exact_match,none"] == pytest.approx(own)
    adapted = perplexity(ran.base, ran.adapter)
    assert abs(perplexity(ran.base, None) / adapted - 1) > 0.02
    assert by_hf.scores["one_answer"]["perplexity,none"] == pytest.approx(adapted, rel=1e-3)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_lm_eval_agrees_on_vllm(ran, by_hf):
    """The plugin serves the adapter inside lm-eval's own engine, log-probabilities of prompts included."""
    arguments = {
        "pretrained": ran.base,
        "lora_local_path": ran.adapter,
        "additional_config": {"adapter_backend": "tessa"},
        "enforce_eager": True,
        "max_model_len": 64,
        "kv_cache_memory_bytes": 2**26,
    }
    # In one process, so that vLLM is imported once.
    environment = COMMON_ENV | cpu_env(1) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    found = lm_eval("vllm", arguments, ran.folder / "vllm", environment)
    assert len(found.answers) == 8
    assert found.answers == by_hf.answers
    for task, metric in (("tessa_plus_3", "exact_match,none"), ("one_answer", "perplexity,none")):
        assert found.scores[task][metric] == pytest.approx(by_hf.scores[task][metric], rel=1e-3), task


def lm_eval(
    model: str, arguments: dict[str, Any], folder: Path, environment: Mapping[str, str] | None = None
) -> Scored:
    """What lm-eval's own command line finds: on a shipped task, and on an answer's log-probability."""
    shutil.copytree(TASKS, folder / "tasks")
    # This type of task puts no delimiter between the two.
    (folder / "one.jsonl").write_text(json.dumps({"prompt": PROMPT, "answer": f" {ANSWER}"}) + "\n")
    (folder / "tasks" / "one_answer.yaml").write_text(ONE_ANSWER.format(data=folder / "one.jsonl"))
    command = [
        *(sys.executable, "-m", "tessa.lm_eval", "run", "--model", model, "--batch_size", "8"),
        *("--model_args", json.dumps({"dtype": "float32", **arguments}, default=str)),
        *("--tasks", "tessa_plus_3,one_answer", "--include_path", str(folder / "tasks"), "--limit", "8"),
        *("--output_path", str(folder / "out.json"), "--log_samples"),
        *(("--device", "cpu") if model == "hf" else ()),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        command, env=os.environ | offline | dict(environment or {}), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = folder.glob("out*.json")
    (samples,) = folder.glob("samples_tessa_plus_3*.jsonl")
    rows = map(json.loads, samples.read_text().splitlines())
    return Scored(
        json.loads(result.read_text())["results"],
        {row["doc_id"]: row["resps"][0][0].split() for row in rows},  # engines differ in the first space
    )


def perplexity(base: Path, adapter: Path | None) -> float:
    """lm-eval's: exp of minus the mean over documents of the answer's summed log-probability."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import tessa.peft  # noqa: F401  (registers the adapter type)

    tokenizer = AutoTokenizer.from_pretrained(base)
    start, ids = (len(tokenizer(PROMPT)["input_ids"]), tokenizer(f"{PROMPT} {ANSWER}")["input_ids"])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.inference_mode():
        logprobs = model.eval()(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(logprobs[i - 1, ids[i]] for i in range(start, len(ids))).neg().exp().item()


def test_the_learning_rate_falls_as_the_study_says(tiny_base, monkeypatch):
    """Linear: by the same amount every step. Cosine: by less at both ends."""
    import transformers

    trainers: list[transformers.Trainer] = []

    # The method, as the module's names are looked up lazily and not always in the same object.
    train = transformers.Trainer.train

    def kept(self: transformers.Trainer) -> Any:
        trainers.append(self)
        return train(self)

    monkeypatch.setattr(transformers.Trainer, "train", kept)
    words = base.tokenizer(64)
    rows = [data.encode(words, PROMPT, f" {ANSWER}", 64, "answer")] * 2
    for schedule in SCHEDULES:
        spec = dataclasses.replace(SPEC, schedule=schedule, steps=8, batch=2, warmup=0.0)
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny_base)
        training.train(model, rows, words.pad_token_id, spec, 1e-3, 0, lambda *_: None)
    cosine, linear = (
        np.array([entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry])
        for trainer in trainers
    )
    assert np.diff(linear) == pytest.approx(-1e-3 / 8)
    falls = -np.diff(cosine)
    assert falls[0] < falls[3] / 2
    assert falls[-1] < falls[3]


def test_the_loss_of_a_training_that_diverged_is_not_a_number(tiny_base):
    """By default the Trainer puts the mean of the steps before in its place, and the study would take that."""
    import torch
    import transformers

    words = base.tokenizer(64)
    rows = [data.encode(words, PROMPT, f" {ANSWER}", 64, "answer")] * 2
    spec = dataclasses.replace(SPEC, steps=4, batch=2)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_base)
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).fill_(float("nan"))
    found = training.train(model, rows, words.pad_token_id, spec, 1e-3, 0, lambda *_: None)
    assert math.isnan(found.train_loss)


def test_a_training_process_ends_with_a_parent_that_is_killed():
    # The test holds the writing end of the input, so that only the parent's death can end the process.
    code = (
        "import os, signal, subprocess, sys\n"
        "command = [sys.executable, '-m', 'experiments.quality.worker', str(os.getpid())]\n"
        "subprocess.Popen(command, start_new_session=True)\n"
        "print('started', flush=True)\n"
        "signal.pause()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout.readline() == b"started\n"
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == b""  # its end comes when the last process has ended that can write to it
    parent.stdin.close()
    parent.stdout.close()


@pytest.fixture
def worker(cache, tmp_path, tiny_base):
    made = Worker(SPEC, cache, tmp_path / "log")
    made.start(lambda _: None)
    yield made
    made.stop()


def job(rate: float = 1e-2, seed: int = 0) -> Job:
    structure = Structure("lora", None, None, 4, "all")
    return Job(cell("quality", SPEC, Trial(structure, rate, seed, "test"), "cpu"))


def test_trials_are_repeatable_and_a_dead_process_says_so(worker):
    def outcome(**options):
        return worker.run(job(**options), 0, lambda _: None)["result"]["train_loss"]

    first = outcome()
    assert outcome(seed=1) != first  # no state of one trial reaches the next
    assert outcome() == first
    os.killpg(worker._process.pid, 9)
    with pytest.raises(WorkerDied, match=r"SIGKILL|is gone"):
        outcome()
