"""Engines of the backends that run outside this project's vLLM: what each needs, and how its child is set up.

A class named by `tessa.backend.BackendSpec.engine` offers ``check(group)``, which raises `UserError` with one line
where the backend cannot run here, and ``create(group, log_path, cache)``, which makes an engine of one
`experiments.grid.EngineGroup`. Planning a run needs neither; `check_groups` is called before the first engine starts.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import string
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from baselines import get_backend
from experiments import models
from experiments.adapters import ensure_adapters
from experiments.engine import build
from experiments.engine import gate as gating
from experiments.engine.http_gate import compare_continuations
from experiments.engine.parent import EngineError, EngineProcess
from experiments.engine.setup import EngineSetup, offline_env
from tessa.backend import BackendSpec
from tessa.errors import UserError
from tessa.slices import ALL_MODULES, ATTENTION

REPO = Path(__file__).resolve().parents[2]
UPSTREAM = REPO / "baselines" / "upstream"
IMPORT_TIMEOUT_S = 120.0


def engine_class(spec: BackendSpec) -> Any:
    """The class of an external backend's engines."""
    module, _, attribute = str(spec.engine).partition(":")
    return getattr(importlib.import_module(module), attribute)


def check_groups(groups: Iterable[Any]) -> None:
    """Raise UserError for the first group whose external backend cannot run on this machine."""
    for group in groups:
        spec = get_backend(group.backend)
        if spec.external:
            if any(cell.added_latency_us is not None for cell in group.cells):
                raise UserError(
                    f"backend '{spec.name}' runs outside of this project's engine, so no latency can be added to its "
                    "collectives; leave it out of experiment=interconnect"
                )
            engine_class(spec).check(group)


class OpenAIEngine(EngineProcess):
    """A server that somebody else runs: only its driver is started, parked and stopped."""

    child_module = "experiments.engine.http_child"

    @classmethod
    def check(cls, group: Any) -> None:
        options = group.engine["options"]
        url = options.get("url", "")
        if not url:
            raise UserError("backend=openai needs the server's address: pass url=http://127.0.0.1:8000")
        wrong = UserError(f"url={url} is no address of a server; write it like http://127.0.0.1:8000")
        try:
            parts = urlsplit(url)
            _ = parts.port  # a port that is no number or too great is found where it is read
        except ValueError:
            raise wrong from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise wrong
        if parts.username or parts.password:
            raise UserError(
                "url must not hold a password, since it is stored with the results; use api_key_env"
            )
        if parts.path.rstrip("/") or parts.query:
            raise UserError(f"url={url} must end after the port; /v1/completions is added to it")
        variable = options.get("api_key_env")
        if variable and not os.environ.get(variable):
            raise UserError(f"backend.options.api_key_env names ${variable}, which is not set")
        adapter_names(options["adapters"], int(group.engine["adapters"]["count"]))

    @classmethod
    def create(cls, group: Any, log_path: Path, cache: Path) -> OpenAIEngine:
        cls.check(group)
        engine, options = group.engine, group.engine["options"]
        names = adapter_names(options["adapters"], int(engine["adapters"]["count"]))
        requests = gating.gate_requests(
            len(names),
            models.load_spec(group.config.model).vocab_size,
            build.FIRST_TEXT_TOKEN,
            group.config.measure.gate.requests,
        )
        return cls(
            EngineSetup(
                backend=group.backend,
                model=options["url"],
                adapters=tuple(names),
                engine_args={"protocol": "openai", "dtype": engine["dtype"], **options},
                gate={"requests": [asdict(r) for r in requests]},
                device=engine["device"],
            ),
            log_path,
        )


class SLoraEngine(EngineProcess):
    """The authors' S-LoRA server, launched by the driver in the same session."""

    child_module = "experiments.engine.http_child"
    variable = "TESSA_SLORA_PYTHON"
    environment = "requirements/slora_upstream.yml"

    @classmethod
    def check(cls, group: Any) -> None:
        _check_upstream(group, cls.variable, cls.environment, "slora", set(ATTENTION))
        _number(group, "port", 0, 65535)
        limit = _number(group, "max_total_tokens", 1, None)
        longest = _longest(group)
        if limit < longest + 1:
            raise UserError(
                f"backend.options.max_total_tokens={limit} does not hold one request of {longest} tokens; raise it"
            )

    @classmethod
    def create(cls, group: Any, log_path: Path, cache: Path) -> SLoraEngine:
        cls.check(group)
        setup, folders = _upstream_setup(group, cache)
        engine, options, longest = group.engine, group.engine["options"], _longest(group)
        made = cls(setup, log_path)
        # S-LoRA cuts a number at the end of a folder's name off, so the adapters get names without one.
        links = []
        for index, folder in enumerate(folders):
            link = Path(made._scratch.name) / f"adapter{index}_"
            link.symlink_to(folder, target_is_directory=True)
            links.append(str(link))
        command = [
            *(str(interpreter(group, cls.variable)), str(UPSTREAM / "slora_server.py")),
            *("--host", "127.0.0.1", "--port", "{port}", "--nccl_port", "{nccl_port}"),
            *("--model_dir", setup.model, "--tokenizer_mode", "auto"),
            *("--max_total_token_num", options["max_total_tokens"]),
            *("--running_max_req_size", str(engine["engine"]["max_num_seqs"])),
            *("--max_req_input_len", str(longest - 1), "--max_req_total_len", str(longest)),
            *("--disable_log_stats", "--swap"),
            *(part for link in links for part in ("--lora-dirs", link)),
        ]
        arguments = {
            "protocol": "slora",
            "dtype": engine["dtype"],
            "port": options["port"],
            "command": command,
            "lora_dirs": links,
        }
        made.setup = replace(
            setup,
            adapters=tuple(f"adapter-{i}" for i in range(len(links))),
            engine_args=arguments,
            env={**setup.env, "PYTHONPATH": _with_repo()},
        )
        return made


class PunicaEngine(EngineProcess):
    """The authors' Punica under `baselines/upstream/punica_runner.py`, in Punica's own environment."""

    variable = "TESSA_PUNICA_PYTHON"
    environment = "requirements/punica_upstream.yml"
    python: Path = Path(sys.executable)
    runner: Path = UPSTREAM / "punica_runner.py"

    @classmethod
    def check(cls, group: Any) -> None:
        _check_upstream(group, cls.variable, cls.environment, "punica", set(ALL_MODULES))
        ranks = set(build.adapter_ranks(group.engine["adapters"]))
        if len(ranks) > 1:
            raise UserError(
                f"punica_upstream serves adapters of one rank only; adapters.ranks has {sorted(ranks)}"
            )

    @classmethod
    def create(cls, group: Any, log_path: Path, cache: Path) -> PunicaEngine:
        cls.check(group)
        setup, folders = _upstream_setup(group, cache)
        arguments = {
            "dtype": group.engine["dtype"],
            "max_batch": int(group.engine["engine"]["max_num_seqs"]),
        }
        environment = {**setup.env, "PYTHONPATH": _with_repo()}
        made = cls(
            replace(setup, adapters=tuple(map(str, folders)), engine_args=arguments, env=environment),
            log_path,
        )
        made.python = interpreter(group, cls.variable)
        return made

    def command(self) -> list[str]:
        return [str(self.python), str(self.runner)]

    def gate(self, options: dict[str, Any]) -> dict[str, Any]:
        """Greedy continuations against the merged weights; they are judged here, not in Punica's environment."""
        if self.setup.gate is None:
            return gating.not_gated("there is no reference")
        requests = [gating.GateRequest(**r) for r in self.setup.gate["requests"]]
        base = self._score([gating.GateRequest(r.prompt, None) for r in requests])
        mixed = self._score(requests)
        tolerance = float(options.get("tolerance") or gating.TOLERANCE[self.setup.engine_args["dtype"]])
        try:
            return compare_continuations(requests, mixed, self.setup.gate["expected"], base, tolerance)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError("failed", f"gate: {type(error).__name__}: {error}", self.log_path) from error

    def _score(self, requests: list[gating.GateRequest]) -> Any:
        return self._call("score", requests=[asdict(r) for r in requests], new_tokens=gating.NEW_TOKENS)


def adapter_names(text: str, count: int) -> list[str]:
    """Names of ``count`` adapters at a server: ``none``, a list with commas, or a pattern with ``{index}``.

    Raises:
        UserError: a pattern that names no index or cannot be filled in, or a list that is too short.
    """
    if text.strip() in ("none", ""):
        return []
    if "{" in text:
        try:
            fields = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
            if fields != {"index"}:
                raise ValueError("it must hold {index} and no other field")
            return [text.format(index=i) for i in range(count)]
        except (ValueError, KeyError, IndexError) as error:
            raise UserError(
                f"backend.options.adapters={text} is no pattern ({error}); write it like adapter-{{index:04d}}"
            ) from None
    names = [name.strip() for name in text.strip("[]").split(",")]
    if len(names) < count or not all(names):
        raise UserError(
            f"backend.options.adapters names {len(names)} adapters where adapters.count={count}; give as many, a "
            "pattern such as adapter-{index:04d}, or none"
        )
    return names[:count]


def interpreter(group: Any, variable: str) -> Path:
    """The Python of a backend's own environment: its option ``python``, else the environment variable."""
    return Path(group.engine["options"].get("python") or os.environ.get(variable) or "").expanduser()


def _check_upstream(group: Any, variable: str, environment: str, package: str, modules: set[str]) -> None:
    engine, name = group.engine, group.backend
    missing = []
    if engine["device"] != "cuda":
        missing.append("this machine has no NVIDIA GPU")
    python = interpreter(group, variable)
    if str(python) == ".":
        missing.append(f"${variable} is not set")
    elif not os.access(python, os.X_OK) or python.is_dir():
        missing.append(f"{python} is no Python interpreter")
    elif not missing:
        missing += _import_problem(python, package)
    if missing:
        raise UserError(
            f"{name} cannot run here: {'; '.join(missing)}. On a GPU machine make its environment from {environment} "
            f"and set {variable} to that environment's python, or leave {name} out of the backends"
        )
    model = models.load_spec(group.config.model)
    wanted = set(engine["adapters"]["target_modules"])
    for wrong, why in (
        (int(engine["tp"]) != 1, f"it runs on one GPU; pass tp=1, not tp={engine['tp']}"),
        (engine["dtype"] != "float16", f"it computes in float16; pass dtype=float16, not {engine['dtype']}"),
        (model.weights == "dummy", "it needs real weights; use a model with weights, not weights=dummy"),
        (model.architecture["model_type"] != "llama", f"it serves Llama models, not {model.name!r}"),
        (
            model.num_kv_heads != model.num_heads,
            f"it knows no grouped-query attention, which {model.name!r} has",
        ),
        (
            wanted != modules,
            f"its adapters are on {', '.join(sorted(modules))}; pass adapters.target_modules=[...] with exactly these",
        ),
    ):
        if wrong:
            raise UserError(f"{name} cannot run this: {why}")


@functools.cache
def _import_problem(python: Path, package: str) -> list[str]:
    """Why the environment cannot be used, from importing the package and asking its torch for a GPU."""
    code = f"import torch, {package}; assert torch.cuda.is_available(), 'its torch finds no GPU'"
    try:
        done = subprocess.run(
            [str(python), "-c", code],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{python} does not start ({type(error).__name__})"]
    if done.returncode == 0:
        return []
    lines = done.stderr.strip().splitlines() or ["no message"]
    return [f"{python} cannot use {package} ({re.sub(r'^AssertionError: ', '', lines[-1])})"]


def _upstream_setup(group: Any, cache: Path) -> tuple[EngineSetup, list[Path]]:
    """The parts that both upstream backends share: model, adapters and the gate's reference."""
    spec, engine = get_backend(group.backend), group.engine
    model_spec = models.load_spec(group.config.model)
    model = str(models.ensure_model(model_spec, cache))
    adapters = build.adapter_set(spec, engine, model_spec)
    assert adapters is not None
    folders = ensure_adapters(adapters, cache)
    gate = None
    if group.config.measure.gate.enabled:
        requests = gating.gate_requests(
            len(folders), model_spec.vocab_size, build.FIRST_TEXT_TOKEN, group.config.measure.gate.requests
        )
        expected = gating.reference(model, [str(f) for f in folders], requests, engine["device"], cache)
        gate = {"requests": [asdict(r) for r in requests], "expected": expected}
    setup = EngineSetup(
        backend=spec.name,
        model=model,
        adapters=(),
        engine_args={},
        env=offline_env(model),
        gate=gate,
        device=engine["device"],
    )
    return setup, folders


def _longest(group: Any) -> int:
    model = models.load_spec(group.config.model)
    return int(group.engine["engine"].get("max_model_len") or model.max_model_len)


def _number(group: Any, option: str, least: int, most: int | None) -> int:
    text = group.engine["options"][option]
    if not text.isdigit() or int(text) < least or (most is not None and int(text) > most):
        span = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise UserError(f"backend.options.{option}={text} must be a whole number {span}")
    return int(text)


def _with_repo() -> str:
    """PYTHONPATH by which the launcher finds `tessa.vllm.lifetime`, which imports nothing but the standard library."""
    return os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
