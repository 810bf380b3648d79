"""`vllm serve` with TESSA adapters over the OpenAI-compatible API, at TP 2, as a user runs it.

One server for the whole module: two slots for more adapters than that, chunked prefill (16 tokens a step), prefix
caching on, adapters of different widths, offsets, placements and target modules in one batch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest
import torch

from experiments import config as schema
from experiments import models
from experiments.backends import known_backends, resolve
from experiments.engine import gate as gating
from experiments.engine.parent import make_engine
from experiments.engine.processes import ProcessTree
from experiments.engine.setup import COMMON_ENV, cpu_env
from experiments.grid import EngineGroup, engine_identity
from experiments.measure.types import records_from_frame
from experiments.workload import build
from tessa.adapter_io import write_adapter
from tessa.offsets import plan_slices

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
PROMPT = 40


def make_adapter(
    folder: Path, shapes: dict[str, tuple[int, int]], rank: float, seed: int, **plan: Any
) -> Path:
    rng = np.random.default_rng(seed)
    slices = plan_slices(shapes, rank=rank, seed=seed, **plan)
    deltas = {
        m: torch.from_numpy(rng.normal(0, 0.1, s.delta_shape).astype("float32")) for m, s in slices.items()
    }
    return write_adapter(folder, slices, deltas, rank_equivalent=rank)


@dataclass
class Server:
    url: str
    model: Path
    folders: dict[str, Path]
    expected: dict[str, list[dict[str, Any]]]
    prompts: list[list[int]]

    def logprobs(self, model: str, prompt: list[int]) -> tuple[list[float], list[float]]:
        """Log-probabilities of the prompt's tokens from the second on, and of a greedy continuation."""
        answer = httpx.post(
            f"{self.url}/v1/completions",
            json={
                "model": model,
                "prompt": prompt,
                "max_tokens": gating.NEW_TOKENS,
                "temperature": 0,
                "prompt_logprobs": 0,
                "logprobs": 0,
                "ignore_eos": True,
            },
            timeout=120,
        )
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        given = choice["prompt_logprobs"][1:]
        own = [entry[str(token)]["logprob"] for entry, token in zip(given, prompt[1:], strict=True)]
        return own, choice["logprobs"]["token_logprobs"]

    def load(self, name: str, folder: Path) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/load_lora_adapter",
            json={"lora_name": name, "lora_path": str(folder)},
            timeout=120,
        )

    def error(self, name: str, i: int) -> float:
        """Largest distance from the merged weights' log-probabilities."""
        own, new = self.logprobs(name if name != "base" else str(self.model), self.prompts[i])
        right = self.expected[name][i]
        return max(
            float(np.abs(np.subtract(own, right["prompt_logprobs"])).max()),
            float(np.abs(np.subtract(new, right["logprobs"])).max()),
        )


def running_server_group(server: Server, counts: str) -> EngineGroup:
    """What the grid makes of `backend=openai url=... backend.options.adapters=[across,along]`."""
    known = known_backends()["openai"]
    known.options.update(url=server.url, adapters=["across", "along"], counts=counts)
    config = schema.RunConfig(backend=resolve(known, "cpu"), model=asdict(models.load_named("tiny")))
    config.adapters.count = 2
    return EngineGroup(engine_identity(config, "cpu"), "key", (), config)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Server]:
    spec = models.load_named("tiny")
    model = models.ensure_model(spec, cache)
    root = tmp_path_factory.mktemp("serve")
    shapes = spec.linear_shapes()
    attention = {m: s for m, s in shapes.items() if "self_attn" in m}
    mlp = {m: s for m, s in shapes.items() if "mlp" in m}
    folders = {
        "across": make_adapter(root / "across", shapes, 4, 1, placement="across"),
        "along": make_adapter(root / "along", shapes, 8, 2, placement="along", shards=4),
        "attention": make_adapter(root / "attention", attention, 16, 3, rule="first"),
        "mlp": make_adapter(
            root / "mlp",
            mlp,
            2,
            4,
            placement={"gate_proj": "along", "up_proj": "across", "down_proj": "across"},
            shards=8,
        ),
    }
    rng = np.random.default_rng(7)
    prompts = [rng.integers(3, spec.vocab_size, PROMPT).tolist() for _ in range(2)]
    names = list(folders)
    asked = [
        gating.GateRequest(prompt, None if name is None else names.index(name))
        for name in (None, *names)
        for prompt in prompts
    ]
    results = gating.reference(str(model), [str(folders[n]) for n in names], asked, "cpu", root)
    expected = {name: results[2 * i : 2 * i + 2] for i, name in enumerate(("base", *names))}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--host", "127.0.0.1"),
        *("--port", str(port), "--tensor-parallel-size", "2", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "256", "--max-num-batched-tokens", "16", "--max-num-seqs", "8"),
        *("--kv-cache-memory-bytes", str(2**26), "--enable-prefix-caching", "--enable-lora"),
        *(
            "--max-loras",
            "2",
            "--max-cpu-loras",
            "3",
            "--additional-config",
            json.dumps({"adapter_backend": "tessa"}),
        ),
        *("--lora-modules", f"across={folders['across']}", f"along={folders['along']}"),
    ]
    log = root / "server.log"
    environment = {
        **os.environ,
        **COMMON_ENV,
        **cpu_env(2),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 600
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail("vllm serve did not come up:\n" + log.read_text()[-4000:])
            try:
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                process.poll()
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
        yield Server(url, model, folders, expected, prompts)
    finally:
        tree = ProcessTree(process.pid, mark="")
        tree.remember_shared_memory()  # ranks that share memory leave it behind when vLLM ends itself
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        tree.kill()
        process.wait()


def test_adapters_given_at_start_equal_merged_weights(server: Server) -> None:
    for name in ("base", "across", "along"):
        assert server.error(name, 0) < 1e-4, name


def test_adapters_load_at_run_time_and_are_evicted_and_loaded_again(server: Server) -> None:
    """Four adapters for two slots and a cache of three, in one mixed batch after another."""
    for name in ("attention", "mlp"):
        response = server.load(name, server.folders[name])
        assert response.status_code == 200, response.text
    order = ["mlp", "base", "across", "attention", "along", "base", "mlp", "across"]
    with ThreadPoolExecutor(len(order)) as pool:
        errors = list(pool.map(lambda pair: server.error(pair[1], pair[0] % 2), enumerate(order)))
    assert max(errors) < 1e-4, dict(zip(order, errors, strict=True))


def test_prefix_cache_is_kept_apart_by_adapter(server: Server) -> None:
    """The same prompt twice for each name: a cache hit must be the adapter's own."""
    for _ in range(2):
        for name in ("across", "base", "attention"):
            own = server.logprobs(name if name != "base" else str(server.model), server.prompts[1])[1]
            right = server.expected[name][1]["logprobs"]
            assert np.abs(np.subtract(own, right)).max() < 1e-4, name


@pytest.mark.parametrize("counts", ["token_ids", "usage"])
def test_the_harness_measures_the_running_server(server: Server, tmp_path: Path, counts: str) -> None:
    """backend=openai: names as the server lists them, the gate over HTTP, counts from the server."""
    group = running_server_group(server, counts)
    work = build(
        {
            "num_requests": 9,
            "num_adapters": 2,
            "arrivals": {"kind": "closed_loop", "concurrency": 4},
            "prompt_tokens": {"kind": "uniform", "low": 5, "high": 40},
            "output_tokens": {"kind": "uniform", "low": 1, "high": 12},
            "popularity": {"kind": "uniform"},
            "base_fraction": 0.3,
        },
        vocab_size=models.load_named("tiny").vocab_size,
    )
    assert {r.adapter for r in work.requests} == {None, 0, 1}
    engine = make_engine(group, tmp_path / "log", tmp_path)
    try:
        engine.start(60)
        assert engine.started["base_model"] == str(server.model)
        gate = engine.gate({})
        assert gate["passed"], gate
        assert gate["reference"] == "none: the server with itself"
        path = work.save(tmp_path)
        engine.warmup(path)
        result = engine.run(path, {"request_timeout_s": 60.0, "stall_timeout_s": 60.0})
        records = records_from_frame(pd.read_parquet(result["records"]))
    finally:
        engine.stop()
    for record, request in zip(records, work.requests, strict=True):
        assert (record.status, record.error) == ("ok", None)
        assert record.output_tokens == len(record.token_times_s) == request.output_tokens
        assert record.prompt_tokens == len(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tp", "does not divide the slice's 1 segments"),
        ("module", "which this model does not have"),
        ("shape", "was trained on a weight of"),
        ("lora", "only 'TESSA' adapters are read"),
        ("pickle", "pickled weights"),
        ("cut off", "is not a readable safetensors file"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_rest_is_served(
    server: Server, tmp_path: Path, kind: str, message: str
) -> None:
    shapes = models.load_named("tiny").linear_shapes()
    some = dict(list(shapes.items())[:7])
    folder = tmp_path / kind
    if kind == "tp":
        make_adapter(folder, some, 8, 5, placement="along", shards=1)
    elif kind == "module":
        make_adapter(folder, {"model.layers.77.self_attn.q_proj": (256, 256)}, 8, 5)
    elif kind == "shape":
        make_adapter(folder, {"model.layers.0.self_attn.q_proj": (512, 512)}, 8, 5)
    else:
        shutil.copytree(server.folders["across"], folder)
        if kind == "lora":
            (folder / "adapter_config.json").write_text(
                json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]})
            )
        elif kind == "pickle":
            (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
        else:
            weights = folder / "adapter_model.safetensors"
            os.truncate(weights, weights.stat().st_size // 2)
    response = server.load(f"bad-{kind}", folder)
    assert response.status_code >= 400
    assert message in response.text
    assert server.error("across", 0) < 1e-4


def test_unloading_takes_an_adapter_away(server: Server) -> None:
    response = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "along"}, timeout=60)
    assert response.status_code == 200, response.text
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        server.logprobs("along", server.prompts[0])
    assert server.error("across", 1) < 1e-4
