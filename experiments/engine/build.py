"""From a cell group's configuration to an `EngineSetup`: files that must exist, and vLLM's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import baselines
from experiments import models
from experiments.adapters import AdapterSet, ensure_adapters
from experiments.backends import resolve, wrong_by_design
from experiments.config import BackendConfig, RunConfig
from experiments.engine import gate as gating
from experiments.engine.merge import ensure_merged
from experiments.engine.setup import EngineSetup, cpu_env, offline_env, vllm_rank
from tessa.backend import BackendSpec
from tessa.budget import matched_bd_rank
from tessa.errors import UserError

FIRST_TEXT_TOKEN = 3  # generated tokenizers keep 0, 1 and 2 for padding, start and end


def build_setup(config: RunConfig, engine: Mapping[str, Any], cache: Path) -> EngineSetup:
    """Everything one engine needs.

    Args:
        engine: what the engine's identity says (`experiments.grid.engine_identity`).
        cache: folder for generated models, adapters and references.
    """
    backend = resolve(
        BackendConfig(engine["backend"], engine["kernels"], dict(engine["options"])), engine["device"]
    )
    spec = baselines.get_backend(backend.name)
    model_spec = models.load_spec(config.model)
    real_weights = model_spec.weights != "dummy"
    if spec.adapter_format == "merged" and not real_weights:
        raise UserError("backend 'merged' needs real weights to merge into; use another backend or model")
    model = str(models.ensure_model(model_spec, cache))
    adapters = adapter_set(spec, engine, model_spec)
    folders = [str(f) for f in ensure_adapters(adapters, cache)] if adapters else []
    gate: dict[str, Any] | None = None
    if config.measure.gate.enabled:
        requests = gate_requests(spec, engine, model_spec, config.measure.gate.requests)
        expected = (
            gating.reference(model, folders, requests, engine["device"], cache) if real_weights else None
        )
        # A request to the merged model names no adapter, though its reference does.
        sent = requests if spec.uses_adapters else [replace(r, adapter=None) for r in requests]
        gate = {"requests": [asdict(r) for r in sent], "expected": expected}
    if spec.adapter_format == "merged":
        model = str(ensure_merged(Path(model), Path(folders[0]), cache))
    return EngineSetup(
        backend=spec.name,
        model=model,
        adapters=tuple(folders) if spec.uses_adapters else (),
        engine_args=engine_args(spec, backend, config, engine, model, model_spec),
        env={
            **(cpu_env(local_ranks(engine)) if engine["device"] == "cpu" else {"VLLM_PLUGINS": "tessa"}),
            **offline_env(model),
        },
        gate=gate,
        wrong_by_design=wrong_by_design(backend.name, backend.options),
        device=engine["device"],
    )


def gate_requests(
    spec: BackendSpec, engine: Mapping[str, Any], model: models.ModelSpec, count: int
) -> list[gating.GateRequest]:
    """The gate's batch for a backend: over its adapters, over the one that is merged, or over none."""
    adapters = int(engine["adapters"]["count"]) if spec.uses_adapters else 1
    requests = gating.gate_requests(adapters, model.vocab_size, FIRST_TEXT_TOKEN, count)
    if spec.adapter_format == "merged":
        return [r for r in requests if r.adapter == 0]
    return requests if spec.uses_adapters else [replace(r, adapter=None) for r in requests]


def local_ranks(engine: Mapping[str, Any]) -> int:
    """Ranks that this machine runs: all of them, or its share where the engine spans several."""
    settings = engine["engine"]
    return int(engine["tp"]) // int(settings.get("nnodes") or 1)


def adapter_ranks(adapters: Mapping[str, Any]) -> list[int]:
    """The rank of every adapter: the same for all, or the given ones in turn."""
    ranks = list(adapters.get("ranks") or [adapters["rank_equivalent"]])
    return [int(ranks[i % len(ranks)]) for i in range(int(adapters["count"]))]


def adapter_set(spec: BackendSpec, engine: Mapping[str, Any], model: models.ModelSpec) -> AdapterSet | None:
    """The adapters of a backend, None where it has none. The merged baseline merges a LoRA adapter."""
    if spec.adapter_format == "none":
        return None
    settings = engine["adapters"]
    wanted = set(settings["target_modules"])
    shapes = {m: s for m, s in model.linear_shapes().items() if m.rsplit(".", 1)[-1] in wanted}
    unknown = wanted - {m.rsplit(".", 1)[-1] for m in shapes}
    if unknown:
        known = sorted({m.rsplit(".", 1)[-1] for m in model.linear_shapes()})
        raise UserError(
            f"adapters.target_modules {sorted(unknown)} are not in model '{model.name}'; it has {known}"
        )
    ranks = adapter_ranks(settings)
    if spec.adapter_format == "bd_lora":
        ranks = [matched_bd_rank(shapes, rank, int(engine["tp"])) for rank in ranks]
    return AdapterSet(
        format="lora" if spec.adapter_format == "merged" else spec.adapter_format,
        shapes=shapes,
        ranks=tuple(ranks),
        placement=settings["placement"],
        offset=settings["offset"],
        shards=int(settings["shards"]),
        blocks=int(engine["tp"]),
        seed=int(settings["seed"]),
    )


def engine_args(
    spec: BackendSpec,
    backend: BackendConfig,
    config: RunConfig,
    engine: Mapping[str, Any],
    model: str,
    model_spec: models.ModelSpec,
) -> dict[str, Any]:
    """Arguments of ``vllm.AsyncEngineArgs``; all backends share them but for their adapter support."""
    cpu = engine["device"] == "cpu"
    settings = engine["engine"]
    eager = settings.get("enforce_eager")
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": engine["dtype"],
        "tensor_parallel_size": int(engine["tp"]),
        "max_model_len": int(settings.get("max_model_len") or model_spec.max_model_len),
        "max_num_seqs": int(settings["max_num_seqs"]),
        # With adapters vLLM never compiles on the CPU, so the base model does not either.
        "enforce_eager": cpu if eager is None else bool(eager),
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
        "load_format": model_spec.load_format,
        "worker_extension_cls": "tessa.vllm.worker.WorkerExtension",
    }
    if cpu:
        arguments["kv_cache_memory_bytes"] = int(float(settings["kv_cache_gib"]) * 2**30)
    else:
        arguments["gpu_memory_utilization"] = float(settings["gpu_memory_utilization"])
    for key, name in (
        ("max_num_batched_tokens", "max_num_batched_tokens"),
        ("distributed_executor", "distributed_executor_backend"),
    ):
        if settings.get(key) is not None:
            arguments[name] = settings[key]
    adapters = engine["adapters"]
    ranks = adapter_ranks(adapters)
    if spec.uses_adapters or spec.engine_args.get("enable_lora"):
        if spec.adapter_format == "bd_lora":
            ranks = list(adapter_set(spec, engine, model_spec).ranks)  # type: ignore[union-attr]
        arguments.update(
            enable_lora=True,
            max_loras=int(adapters["max_resident"]),
            max_cpu_loras=int(adapters["count"]),
            max_lora_rank=vllm_rank(max(ranks)),
            lora_target_modules=sorted(adapters["target_modules"]),
        )
    if spec.hook:
        arguments["additional_config"] = {
            "adapter_backend": spec.hook,
            "kernels": backend.kernels,
            "lora_rank": max(ranks),
            **backend.options,
        }
        if spec.adapter_format == "tessa":  # what a GPU's fixed buffers make room for
            arguments["additional_config"] |= {name: adapters[name] for name in ("placement", "shards")}
    arguments.update(spec.engine_args)
    arguments.update(settings.get("extra") or {})
    return arguments
