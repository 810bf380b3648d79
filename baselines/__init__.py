"""Every serving backend by name; one line each, imported only when asked for.

The order is the order of all tables and figures.
"""

from __future__ import annotations

import importlib

from tessa.backend import BackendSpec
from tessa.errors import UserError

REGISTRY: dict[str, str] = {
    "base": "baselines.base:BASE",
    "base_enabled": "baselines.base:BASE_ENABLED",
    "merged": "baselines.base:MERGED",
    "plain_lora": "baselines.plain_lora:SPEC",
    "punica": "baselines.punica:SPEC",
    "slora": "baselines.slora:SPEC",
    "bd_lora": "baselines.bd_lora:SPEC",
    "tessa": "tessa.spec:SPEC",
    "slora_upstream": "baselines.upstream:SLORA",
    "punica_upstream": "baselines.upstream:PUNICA",
    "openai": "baselines.openai:SPEC",
}


def get_backend(name: str) -> BackendSpec:
    """Look a backend up; UserError lists the known names."""
    if name not in REGISTRY:
        raise UserError(f"backend '{name}' is unknown; known backends: {', '.join(REGISTRY)}")
    module, _, attribute = REGISTRY[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
