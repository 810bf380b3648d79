"""From a cell group's configuration to an `EngineSetup`: files that must exist, and vLLM's arguments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from tessa.budget import lora_params, matched_bd_rank
from tessa.errors import UserError
from tessa.slices import parallel_of

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


def loads_adapters(spec: BackendSpec) -> bool:
    """Whether vLLM's adapter support is switched on."""
    return spec.uses_adapters or bool(spec.engine_args.get("enable_lora"))


def largest_rank(spec: BackendSpec, engine: Mapping[str, Any], model: models.ModelSpec) -> int:
    """The largest rank among the adapters' own: BD-LoRA's is not the rank-equivalent."""
    made = adapter_set(spec, engine, model)
    return max(made.ranks if made else adapter_ranks(engine["adapters"]))


def max_lora_rank(spec: BackendSpec, engine: Mapping[str, Any], rank: int) -> int:
    """vLLM's argument for adapters of up to `rank`. Raises UserError where vLLM has no such value."""
    arguments = {**spec.engine_args, **(engine["engine"].get("extra") or {})}
    return vllm_rank(rank, int(engine["tp"]) if arguments.get("fully_sharded_loras") else 1)


def served_rank(spec: BackendSpec, engine: Mapping[str, Any], rank: int) -> int | None:
    """The rank at which LoRA factors of up to `rank` are stored and computed; None where there are none of ours.

    vLLM's own layers pad every adapter to `max_lora_rank`; BD-LoRA's cut that into a block for each TP rank. The
    project's keep the adapters' rank, in whole 16 bytes (`tessa.ops.slots.aligned`) and, with both factors sharded,
    in equal shares.
    """
    if spec.external or spec.adapter_format not in ("lora", "bd_lora"):
        return None
    tp, full = int(engine["tp"]), max_lora_rank(spec, engine, rank)
    unit = 16 // (4 if engine["dtype"] == "float32" else 2)
    if spec.adapter_format == "bd_lora":
        return tp * _whole(-(-full // tp), unit)
    if "stock" in spec.kernels and (engine["device"] != "cpu" or engine["kernels"] == "stock"):
        return full
    own = _whole(rank, unit)
    return min(full, math.lcm(own, tp) if spec.engine_args.get("fully_sharded_loras") else own)


def _whole(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def check_adapters(engine: Mapping[str, Any], model: models.ModelSpec) -> None:
    """Raises UserError where a backend cannot serve the adapters that are asked for, before any engine starts."""
    spec = baselines.get_backend(engine["backend"])
    if spec.adapter_format == "merged" and model.weights == "dummy":
        raise UserError("backend 'merged' needs real weights to merge into; use another backend or model")
    if loads_adapters(spec) and not spec.external:
        max_lora_rank(spec, engine, largest_rank(spec, engine, model))
    made = adapter_set(spec, engine, model)
    if made is None or made.format != "tessa":
        return
    tp = int(engine["tp"])
    settings = f"adapters.placement={made.placement} adapters.shards={made.shards}"
    try:
        for index in first_of_each(made.ranks):
            for module, s in made.slices(index).items():
                # With fewer K/V heads than ranks, ranks share a shard.
                shared = module.endswith(("k_proj", "v_proj"))
                replicas = max(1, tp // model.num_kv_heads) if shared else 1
                s.local(0, tp, parallel_of(module), replicas=replicas)
    except UserError as error:
        raise UserError(f"{settings}: {error}") from None


def adapter_labels(engine: Mapping[str, Any], model: models.ModelSpec) -> dict[str, Any]:
    """A cell's columns on what its adapters really are; None where the backend serves none that are made here.

    ``adapter_parameters``: parameters of all adapters together; ``budget_ratio``: parameters over LoRA's at the same
    rank-equivalent, of the adapter that is farthest from it; ``adapter_rank``: the largest rank of the adapters, which
    TESSA's do not have; ``served_rank``: see `served_rank`.

    Raises:
        UserError: the adapters do not fit the model or vLLM.
    """
    spec = baselines.get_backend(engine["backend"])
    found = dict.fromkeys(("adapter_parameters", "budget_ratio", "adapter_rank", "served_rank"))
    made = adapter_set(spec, engine, model)
    if made is None or not spec.uses_adapters or spec.adapter_format == "server":
        return found
    wanted = adapter_ranks(engine["adapters"])
    counts = {made.ranks[i]: made.parameters(i) for i in first_of_each(made.ranks)}
    per_rank = sum(lora_params(1, *shape) for shape in made.shapes.values())
    ratios = [counts[own] / (per_rank * want) for own, want in zip(made.ranks, wanted, strict=True)]
    rank = max(made.ranks) if made.format != "tessa" else None
    return {
        "adapter_parameters": sum(counts[own] for own in made.ranks),
        "budget_ratio": max(ratios, key=lambda ratio: abs(ratio - 1)),
        "adapter_rank": rank,
        "served_rank": None if rank is None else served_rank(spec, engine, rank),
    }


def first_of_each(ranks: Sequence[int]) -> list[int]:
    """Index of the first adapter of each rank: adapters of one rank are equally large."""
    return [ranks.index(rank) for rank in dict.fromkeys(ranks)]


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
    rank = largest_rank(spec, engine, model_spec)
    if loads_adapters(spec):
        arguments.update(
            enable_lora=True,
            max_loras=int(adapters["max_resident"]),
            max_cpu_loras=int(adapters["count"]),
            max_lora_rank=max_lora_rank(spec, engine, rank),
            lora_target_modules=sorted(adapters["target_modules"]),
        )
    if spec.hook:
        arguments["additional_config"] = {
            "adapter_backend": spec.hook,
            "kernels": backend.kernels,
            "lora_rank": rank,
            **backend.options,
        }
        if spec.adapter_format == "tessa":  # what a GPU's fixed buffers make room for
            arguments["additional_config"] |= {name: adapters[name] for name in ("placement", "shards")}
    arguments.update(spec.engine_args)
    arguments.update(settings.get("extra") or {})
    return arguments
