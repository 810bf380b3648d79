"""The backends that a run can name: their configs from conf/backend, checked against the registry."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from baselines import REGISTRY, get_backend
from experiments import config as schema
from experiments.config import BackendConfig

CONF = Path(__file__).resolve().parents[1] / "conf"


def known_backends(conf: Path = CONF) -> dict[str, BackendConfig]:
    """The backends of conf/backend by name, in their fixed order."""
    found: dict[str, BackendConfig] = {}
    for file in sorted(conf.glob("backend/*.yaml"), key=lambda f: schema.backend_rank(f.stem)):
        values = OmegaConf.to_container(OmegaConf.load(file))
        assert isinstance(values, dict)
        values.pop("defaults", None)
        built = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(BackendConfig), values))
        assert isinstance(built, BackendConfig)
        found[file.stem] = built
    return found


def resolve(backend: BackendConfig, device: str) -> BackendConfig:
    """The backend with `kernels=auto` replaced by what the device gets, its options checked and filled in.

    On a GPU the LoRA baselines run vLLM's own kernels; on a CPU the project's (see the registry's order).
    Raises UserError for kernels or options that the backend does not have.
    """
    schema.one_of("backend", backend.name, list(REGISTRY))
    spec, result = get_backend(backend.name), copy.deepcopy(backend)
    if result.kernels == "auto":
        result.kernels = "stock" if device == "cuda" and "stock" in spec.kernels else spec.kernels[0]
    schema.one_of(f"kernels of {spec.name}", result.kernels, spec.kernels)
    result.options = {name: _text(value) for name, value in result.options.items() if value is not None}
    for name in result.options:
        schema.one_of(f"option of {spec.name}", name, [*spec.options, *spec.settings])
    for name, default in spec.settings.items():
        result.options.setdefault(name, default)
    for name, allowed in spec.options.items():
        schema.one_of(f"{spec.name} option {name}", result.options.setdefault(name, allowed[0]), allowed)
    return result


def _text(value: Any) -> str:
    """An option as text: YAML reads bare on and off as booleans; a list is its items with commas between."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)


def variant_name(backend: str, kernels: str, options: dict[str, str] | None = None) -> str:
    """How one backend is shown beside its variants: `punica`, `punica:stock`, `slora:communication=off`."""
    if backend not in REGISTRY:
        return backend
    spec = get_backend(backend)
    parts = [] if kernels in ("auto", spec.kernels[0]) else [kernels]
    for name, value in (options or {}).items():
        if name in spec.options and value != spec.options[name][0]:
            parts.append(f"{name}={value}")
    return ":".join([backend, *parts])


def wrong_by_design(backend: str, options: dict[str, str]) -> bool:
    """Whether these options make the outputs wrong on purpose (ablations)."""
    return backend in REGISTRY and any(
        options.get(name) == value for name, value in get_backend(backend).wrong_by_design
    )
