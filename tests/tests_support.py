"""Helpers for tests that are no fixtures."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from experiments.models import CONF


def model_values(name: str) -> dict[str, Any]:
    """A model's settings as a composed config holds them."""
    values = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(values, dict)
    values.pop("defaults", None)
    return {str(key): value for key, value in values.items()}
