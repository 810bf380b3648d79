"""External backends from their configuration to their records: a running server, S-LoRA's server, Punica's runner."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from http_servers import FakeServer

from experiments import cli
from experiments import config as schema
from experiments.engine import external, http_child
from experiments.engine.external import OpenAIEngine, PunicaEngine, SLoraEngine, adapter_names
from experiments.engine.gate import GateRequest
from experiments.engine.http_client import ServerError
from experiments.engine.http_gate import compare_continuations, distance
from experiments.engine.parent import EngineError, make_engine
from experiments.engine.setup import EngineSetup
from experiments.grid import EngineGroup
from experiments.workload import build
from experiments.workload.types import Workload
from tessa.errors import UserError

HERE = Path(__file__).parent
START_S = 60.0
MODELS = [{"id": "base"}, *({"id": f"adapter-{i:04d}", "parent": "base"} for i in range(4))]
LLAMA = {
    "name": "toy",
    "source": "generated",
    "weights": "random",
    "vocab_size": 500,
    "max_model_len": 128,
    "architecture": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    },
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FULL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def group(backend: str, modules: list[str] | None = None, **engine: Any) -> Any:
    """An engine group as the grid makes one, on a machine with a GPU."""
    values: dict[str, Any] = {
        "backend": backend,
        "options": {},
        "tp": 1,
        "dtype": "float16",
        "device": "cuda",
        "adapters": {
            "count": 2,
            "rank_equivalent": 8,
            "target_modules": modules or FULL,
            "placement": "across",
            "offset": "first",
            "shards": 8,
            "seed": 0,
        },
        "engine": {"max_num_seqs": 4},
    }
    values.update(engine)
    config = schema.RunConfig(model=engine.pop("model", LLAMA))
    values.pop("model", None)
    return EngineGroup(values, "key", (), config)


OPENAI = {"counts": "token_ids", "gate": "prompt_logprobs", "check_models": "on", "url": "http://h:1"}
OPENAI |= {"base_model": "", "adapters": "adapter-{index:04d}", "api_key_env": ""}
SLORA = {"python": sys.executable, "port": "0", "max_total_tokens": "1000"}


def openai(url: str, **options: str) -> Any:
    return group("openai", dtype="float32", device="cpu", options={**OPENAI, "url": url, **options})


@pytest.fixture
def work(tmp_path: Path) -> Callable[..., Path]:
    def make(n: int = 4, **more: Any) -> Path:
        spec = {
            "num_requests": n,
            "num_adapters": 2,
            "arrivals": {"kind": "all_at_once"},
            "prompt_tokens": {"kind": "fixed", "value": 5},
            "output_tokens": {"kind": "fixed", "value": 4},
            "popularity": {"kind": "distinct"},
            "base_fraction": 0.3,
            **more,
        }
        return build(spec, vocab_size=400).save(tmp_path / "workloads")

    return make


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    made = []

    def start(engine: Any) -> Any:
        made.append(engine)
        engine.start(START_S)
        return engine

    yield start
    for engine in made:
        engine.stop()


# A running server


def test_a_running_server_is_measured_and_left_running(
    started: Callable[..., Any], work: Callable[..., Path], tmp_path: Path
) -> None:
    with FakeServer(MODELS) as server:
        engine = started(make_engine(openai(server.url), tmp_path / "log", tmp_path))
        assert engine.started == {
            "version": "0.0.1",
            "models": [m["id"] for m in MODELS],
            "base_model": "base",
        }
        gate = engine.gate({})
        assert gate["passed"], gate
        assert gate["reference"] == "none: the server with itself"
        assert gate["max_abs_error"] is None
        path = work()
        engine.warmup(path)
        server.bodies.clear()
        engine.park()
        engine.resume()
        result = engine.run(path, {"request_timeout_s": 30.0, "stall_timeout_s": 30.0})
        records = pd.read_parquet(result["records"])
        assert list(records["status"]) == ["ok"] * 4
        assert list(records["output_tokens"]) == [4] * 4
        assert result["counters"] == {}
        asked = sorted((tuple(body["prompt"]), body["model"]) for body in server.bodies)
        wanted = sorted(
            (r.prompt_token_ids, "base" if r.adapter is None else f"adapter-{r.adapter:04d}")
            for r in Workload.load(path).requests
        )
        assert asked == wanted
        engine.stop()
        again = started(OpenAIEngine.create(openai(server.url), tmp_path / "log", tmp_path))
        assert again.started["base_model"] == "base"


def test_requests_go_to_the_base_model_where_the_server_has_no_adapters(
    started: Callable[..., Any], work: Callable[..., Path], tmp_path: Path
) -> None:
    with FakeServer([{"id": "served"}]) as server:
        engine = started(make_engine(openai(server.url, adapters="none"), tmp_path / "log", tmp_path))
        engine.run(work(), {})
        assert {body["model"] for body in server.bodies} == {"served"}


def test_a_server_that_ignores_the_adapters_fails_the_gate(
    started: Callable[..., Any], tmp_path: Path
) -> None:
    with FakeServer(MODELS) as server:
        server.adapters_matter = False
        for mode in ("prompt_logprobs", "continuation"):
            engine = started(make_engine(openai(server.url, gate=mode), tmp_path / "log", tmp_path))
            gate = engine.gate({})
            assert not gate["passed"]
            assert "the adapter was not applied" in gate["detail"]


@pytest.mark.parametrize(
    ("how", "mode", "detail"),
    [
        (
            "plain",
            "prompt_logprobs",
            "the server gives no prompt_logprobs; try backend.options.gate=continuation",
        ),
        ("no_logprobs", "prompt_logprobs", "the server refused (HTTP 400"),
        ("", "off", "backend.options.gate=off"),
    ],
)
def test_what_the_server_cannot_answer_is_said_to_be_not_gated(
    started: Callable[..., Any], tmp_path: Path, how: str, mode: str, detail: str
) -> None:
    with FakeServer(MODELS, all=how) as server:
        gate = started(make_engine(openai(server.url, gate=mode), tmp_path / "log", tmp_path)).gate({})
    assert gate["passed"] is None
    assert gate["reference"] == "none"
    assert gate["detail"].startswith("not gated: " + detail)


@pytest.mark.fault
@pytest.mark.parametrize(("how", "status"), [("refuse", 404), ("odd", 400)])
def test_another_refusal_in_the_gate_is_a_failure(
    started: Callable[..., Any], tmp_path: Path, how: str, status: int
) -> None:
    with FakeServer(MODELS, all=how) as server:
        engine = started(make_engine(openai(server.url), tmp_path / "log", tmp_path))
        with pytest.raises(EngineError, match=rf"gate: ServerError: HTTP {status}"):
            engine.gate({})


@pytest.mark.fault
def test_a_server_without_the_adapters_is_refused_at_the_start(
    started: Callable[..., Any], tmp_path: Path
) -> None:
    with FakeServer(MODELS[:2]) as server, pytest.raises(EngineError) as raised:
        started(make_engine(openai(server.url), tmp_path / "log", tmp_path))
    assert "does not list adapter-0001; it lists base, adapter-0000" in raised.value.reason


@pytest.mark.fault
def test_a_server_that_is_not_there_or_never_answers(started: Callable[..., Any], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(EngineError, match=r"start: ServerError: .*/v1/models: the connection failed"):
            started(make_engine(openai(url), tmp_path / "log", tmp_path))
    with FakeServer(server="hang") as server:
        engine = make_engine(openai(server.url), tmp_path / "log", tmp_path)
        with pytest.raises(EngineError, match="no answer from the engine within 2 s") as raised:
            engine.start(2.0)
        engine.stop()
    assert raised.value.kind == "timeout"


@pytest.mark.fault
def test_a_server_that_dies_ends_the_round(
    started: Callable[..., Any], work: Callable[..., Path], tmp_path: Path
) -> None:
    with FakeServer(MODELS) as server:
        engine = started(make_engine(openai(server.url), tmp_path / "log", tmp_path))
    with pytest.raises(EngineError, match=r"the load failed: 20 requests failed in a row.*connection failed"):
        engine.run(work(n=30), {})


@pytest.mark.fault
def test_a_warm_up_that_fails_names_the_adapter(
    started: Callable[..., Any], work: Callable[..., Path], tmp_path: Path
) -> None:
    with FakeServer(MODELS, adapter_0001="refuse") as server:
        engine = started(make_engine(openai(server.url), tmp_path / "log", tmp_path))
        with pytest.raises(EngineError, match=r"warm-up: ServerError: HTTP 404 for model 'adapter-0001'"):
            engine.warmup(work())


def test_a_run_of_an_experiment_against_a_running_server(
    composed: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ("experiment=rate_sweep", "model=tiny", "measure=smoke", "backend=openai")
    with FakeServer(MODELS) as server:
        code = cli.execute(composed(*overrides, f"url={server.url}", "adapters.count=2"))
        said = capsys.readouterr()
        assert code == 0, said
        served = len(server.bodies)
        assert cli.execute(composed(*overrides, f"url={server.url}", "adapters.count=2")) == 0
        assert len(server.bodies) == served, "complete cells are not measured again"
    summaries = [json.loads(f.read_text()) for f in (tmp_path / "results").rglob("summary.json")]
    assert {s["status"] for s in summaries} == {"complete"}
    assert {s["labels"]["backend"] for s in summaries} == {"openai"}
    assert {s["provenance"] for s in summaries} == {"measured"}


def test_the_url_reaches_only_the_backend_that_takes_one(composed: Callable[..., Any]) -> None:
    config = schema.build(
        composed(
            "experiment=tp_scaling", "model=tiny", "measure=smoke", "url=http://h:1", "backends=[base,openai]"
        )
    )
    options = {g.backend: g.engine["options"] for p in cli.plan_run(config, "cpu").points for g in p.groups}
    assert options["openai"]["url"] == "http://h:1"
    assert "url" not in options["base"]
    with pytest.raises(UserError, match="option of openai=urll is not known; did you mean 'url'"):
        cli.plan_run(
            schema.build(
                composed("experiment=tp_scaling", "model=tiny", "backend=openai", "+backend.options.urll=x")
            ),
            "cpu",
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": ""}, r"pass url=http://127\.0\.0\.1:8000"),
        ({"url": "127.0.0.1:8000"}, r"url=127\.0\.0\.1:8000 is no address"),
        ({"url": "http://127.0.0.1:99999"}, r"url=http://127\.0\.0\.1:99999 is no address"),
        ({"url": "http://127.0.0.1:abc"}, r"url=http://127\.0\.0\.1:abc is no address"),
        ({"url": "http://[::1"}, r"url=http://\[::1 is no address"),
        ({"url": "http://me:secret@h:1"}, r"must not hold a password"),
        ({"url": "http://h:1/v1"}, r"must end after the port"),
        ({"api_key_env": "TESSA_NO_SUCH_KEY"}, r"names \$TESSA_NO_SUCH_KEY, which is not set"),
        ({"adapters": "a,,c"}, r"names 3 adapters where adapters\.count=2"),
    ],
)
def test_settings_of_a_running_server_are_checked(options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        OpenAIEngine.check(openai(**{"url": OPENAI["url"], **options}))
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_names_of_adapters() -> None:
    assert adapter_names("adapter-{index:04d}", 2) == ["adapter-0000", "adapter-0001"]
    assert adapter_names("[sql, chat,code]", 2) == ["sql", "chat"]
    assert adapter_names("none", 2) == []
    for wrong in ("{}", "{index}{other}", "{index:zz}", "{index", "only-one"):
        with pytest.raises(UserError, match=r"backend\.options\.adapters"):
            adapter_names(wrong, 2)


# S-LoRA


@pytest.fixture
def slora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SLoraEngine]:
    """S-LoRA's engine with its server replaced by one that speaks its protocol."""
    folders = [tmp_path / f"adapter-{i:04d}" for i in range(2)]
    for folder in folders:
        folder.mkdir()
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    (upstream / "slora_server.py").symlink_to(HERE / "fake_slora_server.py")
    monkeypatch.setattr(external, "UPSTREAM", upstream)
    monkeypatch.setattr(external, "_import_problem", lambda python, package: [])
    monkeypatch.setattr(external, "ensure_adapters", lambda spec, cache: folders)
    monkeypatch.setattr(external.models, "ensure_model", lambda spec, cache: tmp_path / "{model}")

    def make(how: str = "", expected: Any = None, **options: str) -> SLoraEngine:
        monkeypatch.setenv("FAKE_SLORA", how)
        monkeypatch.setattr(external.gating, "reference", lambda *_: expected)
        one = group("slora_upstream", ATTENTION, options={**SLORA, **options})
        engine = make_engine(one, tmp_path / "log", tmp_path)
        assert isinstance(engine, SLoraEngine)
        return engine

    return make


def continuations(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the fake server's greedy continuations are."""
    results = []
    for request in requests:
        shift = 0 if request["adapter"] is None else 1 + request["adapter"]
        tokens = [(sum(request["prompt"]) + 17 * shift + i) % 1000 for i in range(8)]
        results.append({"tokens": tokens, "logprobs": [-0.25 * shift - 0.5] * 8})
    return results


def test_slora_is_launched_measured_and_stopped(
    slora: Callable[..., SLoraEngine], started: Callable[..., Any], work: Callable[..., Path], tmp_path: Path
) -> None:
    engine = slora()
    assert engine.setup.gate is not None
    engine.setup = dataclasses.replace(
        engine.setup, gate={**engine.setup.gate, "expected": continuations(engine.setup.gate["requests"])}
    )
    started(engine)
    server = psutil.Process(engine.started["pid"])
    gate = engine.gate({})
    assert gate["passed"], gate
    assert gate["reference"] == "merged weights, greedy continuations"
    assert gate["max_abs_error"] == 0.0
    result = engine.run(work(), {})
    records = pd.read_parquet(result["records"])
    assert list(records["status"]) == ["ok"] * 4, list(records["error"])
    line = next(x for x in (tmp_path / "log").read_text().splitlines() if x.startswith("options "))
    options = json.loads(line.removeprefix("options "))
    assert options["host"] == "127.0.0.1"
    assert options["model_dir"] == str(tmp_path / "{model}")
    assert int(options["nccl_port"]) not in (0, options["port"])
    assert (options["max_total_token_num"], options["running_max_req_size"]) == ("1000", "4")
    assert (options["max_req_input_len"], options["max_req_total_len"]) == ("127", "128")
    assert options["swap"]
    # S-LoRA takes "-<number>" off the end of a folder's name and then looks for the rest on the hub.
    assert [Path(d).name.rstrip("_")[-1] for d in options["lora_dirs"]] == ["0", "1"]
    assert not any(d.rsplit("-", 1)[-1].isdigit() for d in options["lora_dirs"])
    engine.park()
    assert server.status() == psutil.STATUS_STOPPED
    engine.stop()
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


def test_slora_with_wrong_outputs_fails_the_gate(
    slora: Callable[..., SLoraEngine], started: Callable[..., Any]
) -> None:
    engine = slora()
    assert engine.setup.gate is not None
    expected = continuations(engine.setup.gate["requests"])
    expected[0]["logprobs"] = [value - 1.0 for value in expected[0]["logprobs"]]
    engine.setup = dataclasses.replace(engine.setup, gate={**engine.setup.gate, "expected": expected})
    gate = started(engine).gate({})
    assert not gate["passed"]
    assert "request 0 with adapter 0 is off the merged weights by 1" in gate["detail"]


@pytest.mark.fault
def test_slora_that_dies_before_it_serves(
    slora: Callable[..., SLoraEngine], started: Callable[..., Any]
) -> None:
    with pytest.raises(EngineError) as raised:
        started(slora("die_at_start"))
    assert "ended with status 1 before it served" in raised.value.reason
    assert "torch.cuda.OutOfMemoryError: no room for the pool" in raised.value.reason


@pytest.mark.fault
def test_slora_that_dies_in_the_middle_of_a_load(
    slora: Callable[..., SLoraEngine], started: Callable[..., Any], work: Callable[..., Path]
) -> None:
    engine = started(slora("die"))
    with pytest.raises(
        EngineError, match=r"the server's process ended with status 9 during the load"
    ) as raised:
        engine.run(work(), {})
    records = pd.read_parquet(raised.value.records)
    assert len(records) == 4
    assert set(records["status"]) == {"error"}


@pytest.mark.fault
def test_slora_that_dies_in_the_warm_up(
    slora: Callable[..., SLoraEngine], started: Callable[..., Any], work: Callable[..., Path]
) -> None:
    engine = started(slora("die"))
    with pytest.raises(EngineError, match=r"the server's process ended with status 9 during the warm-up"):
        engine.warmup(work())


def test_a_server_whose_connection_breaks_before_its_process_is_gone_has_died() -> None:
    class Going:
        def wait(self, timeout: float | None = None) -> int:
            if timeout == 0:
                raise subprocess.TimeoutExpired("server", timeout)
            return 9

    server = http_child.SLoraServer(EngineSetup("slora_upstream", "model", (), engine_args={}))
    server.process = Going()  # type: ignore[assignment]
    server._check_alive("before it served")
    server.served = True
    with pytest.raises(ServerError, match="the server's process ended with status 9 during the warm-up"):
        server._check_alive("during the warm-up")


@pytest.mark.fault
def test_slora_on_a_port_that_is_taken(
    slora: Callable[..., SLoraEngine], started: Callable[..., Any]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            EngineError, match=rf"port {port} of 127\.0\.0\.1 cannot be used .*backend\.options\.port"
        ):
            started(slora(port=str(port)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cpu"}, r"this machine has no NVIDIA GPU\. On a GPU machine make .*slora_upstream\.yml"),
        ({"options": {**SLORA, "python": ""}}, r"\$TESSA_SLORA_PYTHON is not set"),
        ({"options": {**SLORA, "python": "/no/python"}}, r"/no/python is no Python interpreter"),
        ({"tp": 2}, r"pass tp=1"),
        ({"dtype": "bfloat16"}, r"pass dtype=float16, not bfloat16"),
        ({"modules": FULL}, r"its adapters are on k_proj, o_proj, q_proj, v_proj"),
        ({"model": {**LLAMA, "weights": "dummy"}}, r"needs real weights"),
        (
            {"model": {**LLAMA, "architecture": {**LLAMA["architecture"], "num_key_value_heads": 1}}},  # type: ignore[dict-item]
            r"no grouped-query attention, which 'toy' has",
        ),
        ({"options": {**SLORA, "max_total_tokens": "128"}}, r"does not hold one request of 128 tokens"),
        ({"options": {**SLORA, "port": "eighty"}}, r"port=eighty must be a whole number from 0 to 65535"),
    ],
)
def test_what_slora_cannot_do_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.delenv("TESSA_SLORA_PYTHON", raising=False)
    monkeypatch.setattr(external, "_import_problem", lambda python, package: [])
    values = {"modules": ATTENTION, "options": SLORA, **changes}
    SLoraEngine.check(group("slora_upstream", ATTENTION, options=SLORA))
    with pytest.raises(UserError, match=message) as raised:
        SLoraEngine.check(group("slora_upstream", **values))
    assert "\n" not in str(raised.value)


def test_an_environment_without_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    external._import_problem.cache_clear()
    monkeypatch.setenv("TESSA_PUNICA_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(HERE / "no_packages"))
    with pytest.raises(
        UserError, match=r"cannot use punica \(ModuleNotFoundError: No module named 'punica'\)"
    ):
        PunicaEngine.check(group("punica_upstream", options={"python": ""}))
    external._import_problem.cache_clear()


def test_upstream_without_a_gpu_stops_the_run_before_any_engine_starts(
    composed: Callable[..., Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("experiments.provenance.device", lambda: "cpu")
    overrides = ("experiment=tp_scaling", "model=tiny", "measure=smoke", "backends=[base,punica_upstream]")
    monkeypatch.setattr(
        "experiments.engine.parent.make_engine", lambda *_, **__: pytest.fail("an engine was started")
    )
    assert cli.execute(composed(*overrides)) == cli.EXIT_USER
    limits, said = capsys.readouterr().err.splitlines()
    assert limits.startswith("measure=smoke limits ")
    assert said.startswith("error: punica_upstream cannot run here: this machine has no NVIDIA GPU")
    assert not list((tmp_path / "results").rglob("summary.json"))
    assert cli.execute(composed(*overrides, "dry_run=true")) == cli.EXIT_OK, "planning needs no GPU"


# Punica


def test_punica_runs_in_its_own_interpreter(
    started: Callable[..., Any],
    work: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders = [tmp_path / f"adapter-{i:04d}" for i in range(2)]
    monkeypatch.setattr(external, "_import_problem", lambda python, package: [])
    monkeypatch.setattr(external, "ensure_adapters", lambda spec, cache: folders)
    monkeypatch.setattr(external.models, "ensure_model", lambda spec, cache: tmp_path / "model")
    monkeypatch.setattr(external.gating, "reference", lambda *_: None)
    monkeypatch.setattr(PunicaEngine, "runner", HERE / "scripted_punica.py")
    one = group("punica_upstream", options={"python": sys.executable})
    engine = started(make_engine(one, tmp_path / "log", tmp_path))
    assert engine.command()[0] == sys.executable
    assert engine.started == {"adapters": [str(f) for f in folders], "max_batch": 4}
    gate = engine.gate({})
    assert gate["passed"], gate
    path = work(n=6)
    engine.warmup(path)
    result = engine.run(path, {"stall_timeout_s": 30.0, "request_timeout_s": 30.0})
    records = pd.read_parquet(result["records"])
    assert list(records["status"]) == ["ok"] * 6
    assert list(records["output_tokens"]) == [4] * 6
    wanted = [r.adapter for r in Workload.load(path).requests]
    assert [None if pd.isna(a) else int(a) for a in records["adapter"]] == wanted
    assert result["counters"] == {}
    process = engine._process.pid
    engine.stop()
    assert not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules": ATTENTION}, r"its adapters are on down_proj, gate_proj, k_proj"),
        (
            {"adapters": {"count": 2, "ranks": [8, 16], "target_modules": FULL}},
            r"one rank only; .* has \[8, 16\]",
        ),
    ],
)
def test_what_punica_cannot_do_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(external, "_import_problem", lambda python, package: [])
    options = {"python": sys.executable}
    with pytest.raises(UserError, match=message):
        PunicaEngine.check(group("punica_upstream", options=options, **changes))


# The gate on continuations


def test_continuations_agree_up_to_a_tie() -> None:
    one = {"tokens": [1, 2, 3], "logprobs": [-1.0, -2.0, -3.0]}
    assert distance(one, one, 0.1) == 0.0
    assert distance(one, {**one, "logprobs": [-1.0, -2.5, -3.0]}, 0.1) == 0.5
    tie = {"tokens": [1, 9, 9], "logprobs": [-1.05, -2.1, -9.0]}
    assert distance(one, tie, 0.1) == pytest.approx(0.05)
    assert distance(one, {**tie, "logprobs": [-1.05, -2.3, -9.0]}, 0.1) == float("inf")
    assert distance(one, {"tokens": [1], "logprobs": [-1.0]}, 0.1) == float("inf")


def test_a_base_request_that_changes_in_a_mixed_batch_fails_the_gate() -> None:
    requests = [GateRequest([1, 2], None), GateRequest([1, 3], 0)]
    base = [{"tokens": [1], "logprobs": [-1.0]}] * 2
    mixed = [{"tokens": [1], "logprobs": [-1.5]}, {"tokens": [2], "logprobs": [-4.0]}]
    result = compare_continuations(requests, mixed, None, base, 0.1)
    assert not result["passed"]
    assert result["detail"] == "request 0 without adapter changes by 0.5 when batched with adapter requests"
    assert compare_continuations(requests, [base[0], mixed[1]], None, base, 0.1)["passed"]
    nan = [{"tokens": [1], "logprobs": [float("nan")]}, mixed[1]]
    assert "no finite" in compare_continuations(requests, nan, None, base, 0.1)["detail"]


def test_group_stands_for_what_the_grid_makes(composed: Callable[..., Any]) -> None:
    """The groups of these tests have the keys of real ones."""
    plan = cli.plan_run(
        schema.build(
            composed("experiment=tp_scaling", "model=tiny", "measure=smoke", "backend=slora_upstream")
        ),
        "cpu",
    )
    real = plan.points[0].groups[0].engine
    own = group("slora_upstream").engine
    assert set(own) <= set(real)
    assert set(own["adapters"]) <= set(real["adapters"])
    assert set(SLORA) == set(real["options"])
    assert (external.UPSTREAM / "slora_server.py").is_file()
    assert PunicaEngine.runner.is_file()
