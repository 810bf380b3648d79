"""Stored cells made by hand, so that analysis is tested without the harness."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import analysis_store
import pytest

from experiments import provenance
from experiments.projection.runner import ProjectionSpec
from experiments.projection.runner import run as project


@pytest.fixture
def store_cell(tmp_path: Path) -> Callable[..., Path]:
    """Writes one cell below tmp_path and returns its folder."""
    return functools.partial(analysis_store.write_cell, tmp_path)


@pytest.fixture(scope="session")
def full_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with every serving experiment and gaps of every kind. Not to be written to."""
    return analysis_store.full_store(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="session")
def complete_results(full_results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`full_results` with a small projection and a layer step beside it. Not to be written to."""
    folder = tmp_path_factory.mktemp("complete") / "results"
    shutil.copytree(full_results, folder)
    spec = ProjectionSpec(models=("llama-3.1-8b",), gpus=("h100",), tps=(1, 2, 8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            provenance, "command", lambda: None
        )  # pytest's own command is not one of the projection's
        project(spec, folder / "projection")
    (folder / "layer_step").mkdir()
    analysis_store.layer_step_rows().to_csv(folder / "layer_step" / "rows.csv", index=False)
    return folder
