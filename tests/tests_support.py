"""Helpers for tests that are no fixtures."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import OmegaConf

from experiments.models import CONF


def model_values(name: str) -> dict[str, Any]:
    """A model's settings as a composed config holds them."""
    values = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert isinstance(values, dict)
    values.pop("defaults", None)
    return {str(key): value for key, value in values.items()}


def load_script(path: Path) -> ModuleType:
    """A script that belongs to no package, as a module of its file's name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def outside_make() -> dict[str, str]:
    """The environment without what `make test` hands down to a make that a test starts."""
    return {
        key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    }
