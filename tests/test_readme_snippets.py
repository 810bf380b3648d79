"""The README's two snippets, word for word: training with PEFT, then `vllm serve` with what was trained."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import peft
import pytest
import readme_text
import torch
from transformers import AutoModelForCausalLM

import tessa.peft
from experiments import models
from experiments.engine.http_child import claim_port
from experiments.engine.setup import COMMON_ENV, cpu_env
from experiments.stopping import stop
from experiments.vllm_bench import START_TIMEOUT_S, healthy, launch
from tessa.adapter_io import read_adapter

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def model(cache: Path) -> Path:
    return models.ensure_model(models.load_named("tiny"), cache)


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the training snippet was run, with a step of training where it says that one comes."""
    (code,) = readme_text.blocks(README, "python")
    assert "path/to/model" in code
    folder = tmp_path_factory.mktemp("training")
    lines = code.replace("path/to/model", str(model)).splitlines()
    place = next(i for i, line in enumerate(lines) if "train it" in line)
    lines[place + 1 : place + 1] = [
        "import torch",
        "optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=50.0)",
        f"ids = torch.tensor([{PROMPT}])",
        "for _ in range(3):",
        "    optimizer.zero_grad()",
        "    model(input_ids=ids, labels=ids).loss.backward()",
        "    optimizer.step()",
    ]
    (folder / "train.py").write_text("\n".join(lines) + "\n")
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env={**os.environ, **COMMON_ENV},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def logprobs(model: Path, adapter: Path | None) -> np.ndarray:
    """Log-probabilities of PROMPT's tokens from the second on, by Hugging Face."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        assert tessa.peft.TessaConfig
        loaded = peft.PeftModel.from_pretrained(loaded, adapter)
    with torch.no_grad():
        values = loaded(input_ids=torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    return values[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0].numpy()


def test_the_training_snippet_saves_a_tessa_adapter(trained: Path, model: Path) -> None:
    saved = trained / "my-adapter"
    assert {file.name for file in saved.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    read = read_adapter(saved)
    assert {name.rpartition(".")[2] for name in read.slices} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert np.abs(logprobs(model, saved) - logprobs(model, None)).max() > 1e-2


@pytest.fixture(scope="module")
def url(trained: Path, model: Path) -> Iterator[str]:
    """The README's command, run where the adapter was saved, with arguments that only make it small and local."""
    command = readme_text.serve_command(REPO / "README.md")
    assert "path/to/model" in command
    assert "=my-adapter" in command
    port = claim_port(0)
    filled = command.replace("path/to/model", str(model)).replace("=my-adapter", f"={trained / 'my-adapter'}")
    words = shlex.split(filled)
    words[0] = str(Path(sys.executable).with_name("vllm"))
    small = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--max-num-seqs", "4",
             "--kv-cache-memory-bytes", str(2**26), "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
    log, address = trained / "server.log", f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = launch(
            [*words, *small], {**os.environ, **COMMON_ENV, **cpu_env(1), "HF_HUB_OFFLINE": "1"}, out
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not healthy(address):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail("vllm serve did not come up:\n" + log.read_text(errors="replace")[-3000:])
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        yield address
    finally:
        stop(process)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_vllm_serve_gives_the_trained_adapters_answers(url: str, trained: Path, model: Path) -> None:
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        listed = {entry["id"] for entry in client.get("/v1/models").json()["data"]}
        assert "mine" in listed
        for name, adapter in (("mine", trained / "my-adapter"), (str(model), None)):
            request = {
                "model": name,
                "prompt": PROMPT,
                "max_tokens": 1,
                "temperature": 0,
                "prompt_logprobs": 0,
            }
            answer = client.post("/v1/completions", json=request)
            answer.raise_for_status()
            given = answer.json()["choices"][0]["prompt_logprobs"][1:]
            own = [entry[str(token)]["logprob"] for entry, token in zip(given, PROMPT[1:], strict=True)]
            assert np.abs(np.subtract(own, logprobs(model, adapter))).max() < 1e-4, name
