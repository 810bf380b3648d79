"""What is trained goes into the serving engine as it is, and it answers as the training stack does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from warm import WarmEngine

from experiments.config import GateConfig, MeasureConfig, RunConfig
from experiments.engine.build import build_setup
from experiments.engine.gate import NEW_TOKENS, GateRequest
from experiments.engine.setup import EngineSetup
from experiments.quality import skills
from experiments.quality.spec import QualitySpec, Structure, Trial
from tessa.slices import ALL_MODULES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TP = 2
Answer = dict[str, Any]
BASE = {"hidden_size": 64, "intermediate_size": 96, "layers": 2, "heads": 4, "steps": 12, "batch": 16}
SPEC = QualitySpec(
    steps=6, batch=8, workers=1, train_examples=16, test_examples=2, blocks=TP, shards=4, base=BASE
)
# Two adapters of each kind, so that a batch mixes them.
TRIALS = {
    "punica": [("lora", None, None, 0), ("lora", None, None, 1)],
    "bd_lora": [("bd_lora", None, None, 0), ("bd_lora", None, None, 1)],
    "tessa": [("tessa", "across", "gradient", 0), ("tessa", "along", "random", 1)],
}


@pytest.fixture(scope="module")
def bench(cache: Path):
    from experiments.quality.worker import Bench

    return Bench(SPEC, cache, lambda message: None)


def trained(bench: Any, backend: str, folder: Path) -> list[Path]:
    """Folders of the backend's adapters, saved by PEFT after a few steps."""
    folders = []
    for i, (method, placement, rule, seed) in enumerate(TRIALS[backend]):
        structure = Structure(method, placement, rule, 4, "all")
        folders.append(folder / str(i))
        bench.run(Trial(structure, 3e-2, seed, "test"), folders[-1])
    return folders


def answers(bench: Any, folders: list[Path], requests: list[GateRequest]) -> list[Answer]:
    """What the training stack says: PEFT's model with the adapter loaded, nothing merged."""
    from peft import PeftModel

    from experiments.engine.reference import score

    found: list[Answer] = []
    models = [PeftModel.from_pretrained(bench.fresh(), folder).eval() for folder in folders]
    plain = bench.fresh().eval()
    for request in requests:
        model = plain if request.adapter is None else models[request.adapter]
        found.append(score(model, request.prompt, NEW_TOKENS))
    return found


def questions(bench: Any) -> list[GateRequest]:
    """Prompts of the held-out skills; adapters in turn, and some without."""
    prompts = [prompt for name in skills.HELD_OUT for prompt, _ in skills.distinct(name, "test", 2)]
    ids = [bench.tokenizer(prompt)["input_ids"] for prompt in prompts]
    return [GateRequest(tokens, (0, 1, None)[i % 3]) for i, tokens in enumerate(ids)]


def setup_for(
    model_folder: Path, backend: str, folders: list[Path], gate: dict[str, Any], cache: Path
) -> EngineSetup:
    model = {"name": "local", "source": "path", "weights": "path", "path": str(model_folder), "dtype": "float32",
             "max_model_len": 64}  # fmt: skip
    engine = {
        "backend": backend,
        "kernels": "auto",
        "options": {},
        "tp": TP,
        "dtype": "float32",
        "device": "cpu",
        "adapters": {
            "count": 2,
            "max_resident": 2,
            "rank_equivalent": 8,
            "target_modules": list(ALL_MODULES),
            "placement": "across",
            "offset": "first",
            "shards": 4,
            "seed": 0,
        },
        "engine": {"max_num_seqs": 16, "kv_cache_gib": 0.0625},
    }
    measure = MeasureConfig(name="test", gate=GateConfig(enabled=False))
    made = build_setup(RunConfig(name="test", tp=TP, model=model, measure=measure), engine, cache)
    return dataclasses.replace(made, adapters=tuple(map(str, folders)), gate=gate)


@pytest.mark.parametrize("backend", list(TRIALS))
def test_greedy_answers_equal_those_of_the_training_stack(backend, bench, cache, tmp_path):
    folders = trained(bench, backend, tmp_path)
    requests = questions(bench)
    expected = answers(bench, folders, requests)
    result = served(bench.folder, backend, folders, requests, expected, cache, tmp_path / "log")
    assert result["passed"], result["detail"]
    assert result["max_abs_error"] < 1e-4


def test_a_fully_trained_model_answers_as_the_training_stack_does(bench, cache, tmp_path):
    """It is a model folder as any other: `backend=base model=local model.path=FOLDER`."""
    from transformers import AutoModelForCausalLM

    from experiments.engine.reference import score

    folder = tmp_path / "full"
    bench.run(Trial(Structure("full"), 1e-2, 0, "test"), folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    requests = [dataclasses.replace(request, adapter=None) for request in questions(bench)]
    expected = [score(model, request.prompt, NEW_TOKENS) for request in requests]
    assert [e["tokens"] for e in expected] != [a["tokens"] for a in answers(bench, [], requests)]
    result = served(folder, "base", [], requests, expected, cache, tmp_path / "log")
    assert result["passed"], result["detail"]
    assert result["max_abs_error"] < 1e-4


def served(
    model: Path, backend: str, folders: list[Path], requests: list[GateRequest], expected: list[Answer],
    cache: Path, log: Path,
) -> dict[str, Any]:  # fmt: skip
    """How an engine's answers compare with the expected ones, as the gate reports it."""
    gate = {"requests": [dataclasses.asdict(r) for r in requests], "expected": expected}
    engine = WarmEngine(setup_for(model, backend, folders, gate, cache), log)
    try:
        engine.start(600)
        return engine.gate({"requests": len(requests), "tolerance": None})
    finally:
        engine.stop()
