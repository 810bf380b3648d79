"""What determines a result, as plain data: the engine, the workload, how it is measured, and their hash.

A setting that cannot change a number stays out, so that a cell is found again under another address or time limit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import backends as backends_module
from experiments import config as schema
from experiments import models
from experiments.config import EngineConfig, RunConfig

BACKEND_KEYS = ("backend", "kernels", "options")
# Settings of `measure` that cannot change a number: they bound waiting, or act through the workload.
NOT_IDENTITY = ("name", "start_timeout_s", "base_reference", "caps")


def canonical_hash(value: Any) -> str:
    """sha256 hex of canonical JSON: sorted keys, no spaces, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def workload_spec(config: RunConfig) -> dict[str, Any]:
    """The workload as `experiments.workload.spec.build` takes it, with the caps of `measure` applied."""
    workload, caps = dataclasses.asdict(config.workload), config.measure.caps
    workload.pop("name")
    workload["num_adapters"] = num_adapters(config)
    _cap(workload, "num_requests", caps.requests)
    _cap(workload["arrivals"], "rate", caps.rate)
    # No more can be in flight than there are requests: the label must not say so either.
    _cap(workload["arrivals"], "concurrency", caps.requests)
    rate = (workload["arrivals"] or {}).get("rate")
    if caps.requests is not None and rate:
        _cap(workload, "duration_s", caps.requests / rate)
    for side in ("prompt_tokens", "output_tokens"):
        for key in ("value", "low", "high", "median"):
            _cap(workload.get(side), key, getattr(caps, side))
    if (trace := workload.get("trace")) is not None:
        # A trace brings its own count and lengths, so the caps become its limits.
        workload["num_requests"] = workload["num_requests"] or caps.requests
        for side in ("prompt_tokens", "output_tokens"):
            trace[f"max_{side}"] = trace[f"max_{side}"] or getattr(caps, side)
            _cap(trace, f"max_{side}", getattr(caps, side))
    if (slora := workload.get("slora")) is not None and caps.requests is not None and slora["req_rate"]:
        _cap(slora, "duration", caps.requests / slora["req_rate"])
    return _without_none(workload)


def _cap(node: dict[str, Any] | None, key: str, limit: float | None) -> None:
    if node is not None and limit is not None and node.get(key) is not None:
        node[key] = min(node[key], limit)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value


def num_adapters(config: RunConfig) -> int:
    limit = config.measure.caps.adapters
    return config.adapters.count if limit is None else min(config.adapters.count, limit)


def engine_identity(config: RunConfig, device: str) -> dict[str, Any]:
    """What one engine start depends on."""
    assert config.backend is not None
    adapters = dataclasses.asdict(config.adapters)
    adapters.pop("name")
    adapters["count"] = num_adapters(config)
    if adapters["max_resident"] is None:
        adapters["max_resident"] = adapters["count"]
    adapters["max_resident"] = min(adapters["max_resident"], adapters["count"])
    model = models.load_spec(config.model)
    dtype = config.dtype
    if dtype == "auto":
        # A CPU without AVX-512 is several times slower in bfloat16.
        dtype = "float32" if device == "cpu" else model.dtype
    return {
        "backend": config.backend.name,
        "kernels": config.backend.kernels,
        "options": dict(config.backend.options),
        "model": model_identity(model),
        "tp": config.tp,
        "dtype": dtype,
        "device": device,
        "adapters": _without_none(adapters),
        "engine": engine_settings(config.engine),
    }


def engine_settings(engine: EngineConfig) -> dict[str, Any]:
    """The engine's settings without the addresses by which machines find each other; one machine is the default."""
    settings = dataclasses.asdict(engine)
    del settings["master_addr"], settings["master_port"]
    if settings["nnodes"] == 1:
        del settings["nnodes"]
    return _without_none(settings)


def start_identity(engine: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's identity without what changes while it runs, so that one start serves all of its values."""
    settings = {key: value for key, value in engine["engine"].items() if key != "added_latency_us"}
    return {**engine, "engine": settings}


def model_identity(spec: models.ModelSpec) -> dict[str, Any]:
    """The model without where it lies; a folder on disk is known by its files' names and sizes."""
    identity = dataclasses.asdict(spec)
    path = identity.pop("path")
    if path:
        files = sorted((f.name, f.stat().st_size) for f in Path(path).glob("*.safetensors"))
        identity["files"] = canonical_hash([[name, size] for name, size in files])
    return identity


def measure_identity(config: RunConfig) -> dict[str, Any]:
    measure = dataclasses.asdict(config.measure)
    return _without_none({key: value for key, value in measure.items() if key not in NOT_IDENTITY})


def labels(identity: dict[str, Any]) -> dict[str, Any]:
    """The columns that name a cell in `analysis.load()`."""
    spec, adapters = identity["workload"]["spec"], identity["adapters"]
    arrivals, slora = spec.get("arrivals") or {}, spec.get("slora") or {}
    ranks = list(adapters.get("ranks") or [adapters["rank_equivalent"]])[: adapters["count"]]
    return {
        "backend": identity["backend"],
        "variant": backends_module.variant_name(
            identity["backend"], identity["kernels"], identity["options"]
        ),
        "backend_order": schema.backend_rank(identity["backend"])[0],
        "kernels": identity["kernels"],
        "model": identity["model"].get("name"),
        "dtype": identity["dtype"],
        "device": identity["device"],
        "tp": identity["tp"],
        "nnodes": identity["engine"].get("nnodes", 1),
        "workload_hash": identity["workload"]["hash"],
        "num_adapters": adapters["count"],
        "max_resident": adapters["max_resident"],
        "rank_equivalent": ranks[0] if len(set(ranks)) == 1 else "/".join(map(str, ranks)),
        "target_modules": "+".join(adapters["target_modules"]),
        "placement": adapters["placement"],
        "offset": adapters["offset"],
        "shards": adapters["shards"],
        "popularity": section_name(spec.get("popularity")),
        "arrivals": section_name(
            {"kind": "slora", "alpha": slora["alpha"], "cv": slora["cv"]}
            if slora
            else {**arrivals, "rate": None, "concurrency": None}
        ),
        "request_rate": slora.get("req_rate", arrivals.get("rate")),
        "concurrency": arrivals.get("concurrency"),
        "prompt_tokens": section_name(spec.get("prompt_tokens")),
        "output_tokens": section_name(spec.get("output_tokens")),
        "num_requests": spec.get("num_requests"),
        "added_latency_us": identity["engine"].get("added_latency_us"),
        "wrong_by_design": backends_module.wrong_by_design(identity["backend"], identity["options"]),
        "setting": canonical_hash({k: v for k, v in identity.items() if k not in (*BACKEND_KEYS, "tp")})[:8],
    }


def section_name(section: dict[str, Any] | None) -> str | None:
    """`zipf(s=1.5)`, `uniform`, `fixed(value=64)`; None where the workload has no such section."""
    if section is None:
        return None
    rest = ",".join(f"{k}={v:g}" for k, v in section.items() if k != "kind" and v is not None)
    return f"{section.get('kind')}({rest})" if rest else str(section.get("kind"))
