"""Load, records, metrics and statistics: how a run is measured, whatever engine it ran on."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "Client": "types",
    "Interval": "stats",
    "LoadOptions": "load",
    "LoadResult": "types",
    "MetricOptions": "arrays",
    "RequestRecord": "types",
    "TokenEvent": "types",
    "records_from_frame": "types",
    "records_to_frame": "types",
    "run_load": "load",
    "summarise": "summary",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Import on first use: reading metric definitions does not load scipy, `-m` runs import nothing twice."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
