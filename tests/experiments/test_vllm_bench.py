"""The cross-check's two sides get the same requests, and its table says what it should; no engine is started."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from experiments import bench_crosscheck, models, vllm_bench
from experiments.engine.setup import EngineSetup
from experiments.stopping import stop
from experiments.vllm_bench import Bench
from tessa.errors import UserError


@pytest.fixture
def bench(tmp_path: Path, cache: Path) -> Bench:
    model = models.ensure_model(models.load_named("tiny"), cache)
    work = bench_crosscheck.requests_workload(24)
    dataset = vllm_bench.write_dataset(work, model / "tokenizer.json", tmp_path / "requests.json")
    setup = EngineSetup("base", str(model), (), {"model": str(model)})
    return Bench(setup, work, work.save(tmp_path), dataset, tmp_path)


def test_vllm_reads_the_workloads_requests_in_its_order(bench: Bench) -> None:
    """As vLLM's reader does it: shuffle by the seed, tokenise the prompt, count the answer's tokens."""
    entries = json.loads(bench.dataset.read_text())
    random.seed(vllm_bench.SEED)
    random.shuffle(entries)
    tokenizer = Tokenizer.from_file(f"{bench.setup.model}/tokenizer.json")
    for entry, request in zip(entries, bench.workload.requests, strict=True):
        prompt, answer = (turn["value"] for turn in entry["conversations"])
        assert tuple(tokenizer.encode(prompt).ids) == request.prompt_token_ids
        assert len(tokenizer.encode(answer).ids) == request.output_tokens


def test_a_tokenizer_that_spells_otherwise_is_refused(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    content = json.loads(Path(bench.setup.model, "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["!"], vocab['"'] = vocab['"'], vocab["!"]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="one token each"):
        vllm_bench.write_dataset(bench.workload, file, tmp_path / "other.json")


def test_engine_arguments_become_flags() -> None:
    given = {
        "model": "m",
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "seed": 0,
        "extra": {"a": 1},
    }
    assert vllm_bench.flags(given) == [
        *(
            "--model",
            "m",
            "--enforce-eager",
            "--no-enable-prefix-caching",
            "--seed",
            "0",
            "--extra",
            '{"a": 1}',
        )
    ]


def test_other_counts_than_the_workloads_are_refused(bench: Bench) -> None:
    tokens = len(bench.workload.prompt_tokens) + int(bench.workload.output_tokens.sum())
    vllm_bench.check_same_work(bench, {"tokens": tokens, "requests": 24})
    with pytest.raises(RuntimeError, match="where the workload has"):
        vllm_bench.check_same_work(bench, {"tokens": tokens - 1, "requests": 24})


def test_a_failing_command_says_why(tmp_path: Path) -> None:
    code = "import sys; print('noise'); sys.exit('ValueError: no such thing')"
    with pytest.raises(RuntimeError, match="status 1: ValueError: no such thing"):
        vllm_bench.run_command([sys.executable, "-c", code], os.environ, tmp_path / "log")


def test_a_stopped_command_takes_its_children_along(tmp_path: Path) -> None:
    """The child ignores SIGTERM and outlives its parent, as a stuck engine would."""
    child = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    stop(process)
    assert process.stdout.read() == b""  # end of file: the child's end of the pipe is closed too
    process.stdout.close()


def rows(harness: list[float], vllm: list[float]) -> list[dict[str, object]]:
    return [
        {"part": "throughput", "round": i, "harness": {"requests_per_s": h}, "vllm": {"requests_per_s": v}}
        for i, (h, v) in enumerate(zip(harness, vllm, strict=True))
    ]


def test_the_ratio_is_taken_within_rounds() -> None:
    """The machine slows down by half after the first round; the ratio does not notice."""
    frame = bench_crosscheck.table(rows([10.2, 5.1, 5.1], [10.0, 5.0, 5.0]))
    assert len(frame) == 1  # the offline benchmark has no latencies
    row = frame.iloc[0]
    np.testing.assert_allclose([row["ratio"], row["low"], row["high"]], 1.02)
    assert (row["harness"], row["vllm"], row["rounds"]) == (5.1, 5.0, 3)
    assert row["within"]
    assert "temperature 1" in bench_crosscheck.describe(frame)


def test_a_difference_beyond_the_limit_is_shown() -> None:
    assert not bench_crosscheck.table(rows([9.6, 9.6], [10.0, 10.0])).iloc[0]["within"]


def test_sides_take_turns_in_going_first() -> None:
    order: list[str] = []
    sides = {name: lambda name=name: order.append(name) or {} for name in ("vllm", "harness")}
    for index in range(2):
        bench_crosscheck.alternate(index, sides)
    assert order == ["vllm", "harness", "harness", "vllm"]


def test_a_model_without_the_generated_tokenizer_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TESSA_CACHE", str(tmp_path))
    assert bench_crosscheck.main(["--model", "llama3_1_8b"]) == 2
    assert "use a generated model" in capsys.readouterr().err


def test_both_sides_get_the_same_engine_arguments(bench: Bench, cache: Path, tmp_path: Path) -> None:
    made, engine = bench_crosscheck.prepare("tiny", 100, tmp_path, cache)
    try:
        arguments = made.setup.engine_args
        assert engine.setup.engine_args == arguments
        assert arguments["max_num_seqs"] == 100
        assert arguments["max_num_batched_tokens"] == 2048
        assert not arguments["enable_prefix_caching"]
        assert made.setup == engine.setup
    finally:
        engine.stop()
