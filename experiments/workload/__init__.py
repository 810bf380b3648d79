"""Workloads: built once from a spec, stored under their content hash, read by every backend."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "ArrivalSpec": "schema",
    "LengthSpec": "schema",
    "PopularitySpec": "schema",
    "Request": "types",
    "SLoraSpec": "slora_compat",
    "TraceSpec": "traces",
    "Workload": "types",
    "WorkloadSpec": "schema",
    "build": "spec",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Import on first use, so that `python -m experiments.workload.traces` is not imported twice."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
