"""vLLM's own benchmarks as commands: the requests in their form, `vllm bench throughput`, and `vllm bench serve` at
a `vllm serve` that is started here.

Each command runs in a session of its own, is stopped by its process id, and must count the workload's tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

from experiments.engine.http_child import claim_port
from experiments.engine.parent import root_cause
from experiments.engine.setup import COMMON_ENV, EngineSetup
from experiments.stopping import stop
from experiments.workload import Workload
from tessa.errors import UserError
from tessa.vllm.lifetime import die_with_parent

# The generated tokenizers spell the printable ASCII characters with the 94 ids after the special ones.
FIRST_ID, FIRST_CHARACTER, CHARACTERS = 3, ord("!"), 94
SEED = 0
START_TIMEOUT_S = 600.0
COMMAND_TIMEOUT_S = 3600.0
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")


@dataclass(frozen=True)
class Bench:
    """What both sides are given: the engine's setup, the requests as a workload file and as a data set of vLLM's."""

    setup: EngineSetup
    workload: Workload
    workload_path: Path
    dataset: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **COMMON_ENV, **self.setup.env}

    @property
    def concurrency(self) -> int:
        return max(1, len(self.workload) // 4)

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def text_of(tokens: Sequence[int]) -> str:
    return "".join(chr(int(token) - FIRST_ID + FIRST_CHARACTER) for token in tokens)


def write_dataset(workload: Workload, tokenizer_file: Path, path: Path) -> Path:
    """The requests in the ShareGPT form that all of vLLM's benchmarks read.

    The length of the answer's text sets the output length. The benchmarks shuffle the file with their seed, so it is
    written in the order from which that shuffle gives the workload's.

    Raises:
        UserError: the tokenizer does not give a prompt's ids back from its text.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    entries = []
    for request in workload.requests:
        prompt, answer = text_of(request.prompt_token_ids), chr(FIRST_CHARACTER) * request.output_tokens
        for text, ids in ((prompt, list(request.prompt_token_ids)), (answer, [FIRST_ID] * len(answer))):
            if tokenizer.encode(text).ids != ids:
                raise UserError(
                    f"{tokenizer_file} does not spell printable characters one token each from id {FIRST_ID} on; "
                    "use a generated model, such as --model small"
                )
        entries.append({"conversations": [{"value": prompt}, {"value": answer}]})
    order = list(range(len(entries)))
    random.Random(SEED).shuffle(order)
    placed: list[dict[str, Any]] = [{}] * len(entries)
    for place, source in enumerate(order):
        placed[source] = entries[place]
    path.write_text(json.dumps(placed))
    return path


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Engine arguments as vLLM's command line takes them."""
    given: list[str] = []
    for key, value in arguments.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            given.append(f"--{name}" if value else f"--no-{name}")
        else:
            given += [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return given


def vllm_throughput(bench: Bench, more: Sequence[str]) -> dict[str, float]:
    """One `vllm bench throughput`, which starts an engine of its own and warms it up before its clock runs."""
    out = bench.folder / "throughput.json"
    command = [
        *(*VLLM, "bench", "throughput", *flags(bench.setup.engine_args), *more),
        *("--dataset-name", "sharegpt", "--dataset-path", str(bench.dataset)),
        *("--num-prompts", str(len(bench.workload)), "--num-warmups", str(min(8, len(bench.workload)))),
        *("--disable-detokenize", "--output-json", str(out)),
    ]
    run_command(command, bench.environment, bench.log("throughput"))
    result = json.loads(out.read_text())
    check_same_work(bench, {"tokens": result["total_num_tokens"], "requests": result["num_requests"]})
    return {"requests_per_s": result["requests_per_second"]}


def vllm_serve(bench: Bench, url: str, concurrency: int | None = None) -> dict[str, float]:
    """One `vllm bench serve` against a running server."""
    out = bench.folder / "serve.json"
    command = [
        *(*VLLM, "bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", url, "--model", bench.setup.model, "--seed", str(SEED)),
        *("--dataset-name", "sharegpt", "--dataset-path", str(bench.dataset)),
        *("--num-prompts", str(len(bench.workload)), "--request-rate", "inf"),
        *("--ignore-eos", "--temperature", "0", "--num-warmups", "4", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(out.parent), "--result-filename", out.name),
        *(("--max-concurrency", str(concurrency)) if concurrency else ()),
    ]
    run_command(command, bench.environment, bench.log("bench-serve"))
    result = json.loads(out.read_text())
    tokens = result["total_input_tokens"] + result["total_output_tokens"]
    check_same_work(bench, {"tokens": tokens, "requests": result["completed"]})
    ttft = result["median_ttft_ms"] / 1e3
    return {
        "requests_per_s": result["request_throughput"],
        "ttft_p50_s": ttft,
        "ttft_from_sending_p50_s": ttft,
        "tpot_p50_s": result["median_tpot_ms"] / 1e3,
    }


def check_same_work(bench: Bench, counted: Mapping[str, int]) -> None:
    """RuntimeError unless vLLM counts the requests and tokens that the workload holds."""
    work = bench.workload
    own = {"tokens": len(work.prompt_tokens) + int(work.output_tokens.sum()), "requests": len(work)}
    if dict(counted) != own:
        raise RuntimeError(f"vllm bench counts {dict(counted)} where the workload has {own}")


def run_command(command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    """Run to the end in a session of its own; RuntimeError with the cause where it fails or takes too long."""
    with log.open("wb") as out:
        process = launch(command, environment, out)
    try:
        code = process.wait(COMMAND_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        stop(process)
        raise RuntimeError(f"{' '.join(command[3:5])} did not end within {COMMAND_TIMEOUT_S:.0f} s") from None
    except BaseException:
        stop(process)
        raise
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
        raise RuntimeError(f"{' '.join(command[3:5])} ended with status {code}: {root_cause(log) or tail}")


def launch(command: Sequence[str], environment: Mapping[str, str], out: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start in a session of its own; it ends with this process, however that ends."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        env=environment,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


@contextlib.contextmanager
def server(bench: Bench) -> Iterator[str]:
    """The url of a `vllm serve` on the loopback address, with the arguments of the engine in process."""
    port = claim_port(0)
    arguments = {k: v for k, v in bench.setup.engine_args.items() if k != "model"}
    command = [
        *(*VLLM, "serve", bench.setup.model, "--host", "127.0.0.1", "--port", str(port), *flags(arguments)),
        "--disable-uvicorn-access-log",
    ]
    log, url = bench.log("server"), f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = launch(command, bench.environment, out)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not healthy(url):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(0.5)
                raise RuntimeError(f"vllm serve ended with status {code}: {root_cause(log)}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"vllm serve did not answer within {START_TIMEOUT_S:.0f} s")
        yield url
    finally:
        stop(process)


def healthy(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == HTTPStatus.OK)
    except OSError:
        return False
