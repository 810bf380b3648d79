"""Real training processes on a base model of seconds: cells end to end, agreement with lm-eval's command line."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from analysis import load, quality
from experiments.console import Console
from experiments.quality import skills
from experiments.quality import study as studies
from experiments.quality.pool import Job, Worker, WorkerDied
from experiments.quality.spec import QualitySpec, Structure, Trial, cell

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
TASKS = Path(__file__).resolve().parents[3] / "experiments" / "quality" / "tasks"
TINY = {"hidden_size": 64, "intermediate_size": 96, "layers": 2, "heads": 4, "steps": 12, "batch": 16}
SPEC = QualitySpec(
    methods=("full", "lora", "tessa:across:gradient"), budgets=(4,), seeds=(0,), steps=3, batch=8, workers=1,
    learning_rates={"full": [1e-3], "lora": [1e-2, 1.0], "tessa": [1e-2]}, train_examples=16, test_examples=8,
    validation_examples=4, base=TINY,
)  # fmt: skip


@pytest.mark.slow
def test_cells_end_to_end_and_lm_eval_agrees(cache, tmp_path):
    study = studies.Study("quality", SPEC, tmp_path / "results", "cpu")
    out = io.StringIO()
    outcome = studies.Run(study, Console(out), cache, keep=tmp_path / "adapters")()
    assert (outcome.complete, outcome.failed) == (5, [])
    frame = load(tmp_path / "results")
    rows = quality.rows(frame)
    assert set(rows["task"]) == {"plus_3", "reverse_next", "to_west", "to_east"}
    assert rows["value"].between(0, 1).all()
    assert (rows["examples"] == 8).all()
    assert (frame[frame["role"] == "search"]["examples"] == 4).all()
    assert (rows["training_s"] > 0).all()
    memory = rows.groupby("method")["peak_memory_bytes"].first()
    assert memory["full"] > memory["lora"] > 4 * rows["total_params"].max()
    assert "step 3/3, loss" in out.getvalue()

    kept = {path.name.split("-r4")[0] for path in (tmp_path / "adapters").iterdir()}
    assert {"lora", "tessa-across-gradient"} <= kept
    base, adapter = base_folder(cache), next((tmp_path / "adapters").glob("tessa-*"))
    (prompt, answer) = skills.distinct("plus_3", "test", 1)[0]
    scored = lm_eval(base, adapter, prompt, answer, tmp_path)
    own = rows[(rows["method"] == "tessa") & (rows["task"] == "plus_3")]["value"].item()
    assert scored["tessa_plus_3"]["exact_match,none"] == pytest.approx(own)
    adapted = perplexity(base, adapter, prompt, answer)
    assert abs(perplexity(base, None, prompt, answer) / adapted - 1) > 0.02
    assert scored["one_answer"]["perplexity,none"] == pytest.approx(adapted, rel=1e-3)


def base_folder(cache: Path) -> Path:
    from experiments.quality import base

    return base.folder(base.settings(TINY), cache)


def lm_eval(base: Path, adapter: Path, prompt: str, answer: str, folder: Path) -> dict[str, dict[str, float]]:
    """Scores of lm-eval's own command line: of a shipped task, and of the answer's log-probability."""
    shutil.copytree(TASKS, folder / "tasks")
    # This type of task puts no delimiter between the two.
    (folder / "one.jsonl").write_text(json.dumps({"prompt": prompt, "answer": f" {answer}"}) + "\n")
    (folder / "tasks" / "one_answer.yaml").write_text(ONE_ANSWER.format(data=folder / "one.jsonl"))
    command = [
        *(sys.executable, "-m", "tessa.lm_eval", "run", "--model", "hf", "--device", "cpu"),
        *("--model_args", f"pretrained={base},peft={adapter},dtype=float32", "--batch_size", "8"),
        *("--tasks", "tessa_plus_3,one_answer", "--include_path", str(folder / "tasks"), "--limit", "8"),
        *("--output_path", str(folder / "out.json")),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = folder.glob("out*.json")
    return json.loads(result.read_text())["results"]


def perplexity(base: Path, adapter: Path | None, prompt: str, answer: str) -> float:
    """lm-eval's: exp of minus the mean over documents of the answer's summed log-probability."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import tessa.peft  # noqa: F401  (registers the adapter type)

    tokenizer = AutoTokenizer.from_pretrained(base)
    start, ids = (len(tokenizer(prompt)["input_ids"]), tokenizer(f"{prompt} {answer}")["input_ids"])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.inference_mode():
        logprobs = model.eval()(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(logprobs[i - 1, ids[i]] for i in range(start, len(ids))).neg().exp().item()


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
