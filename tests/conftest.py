"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the tests over pytest-xdist's workers: a file stays together for its fixtures, Slurm has one cluster.

    Tests marked `alone` share nothing with their file, which is worth a place of their own where each starts an
    engine. The longest come first, so that the workers end at about the same time.
    """
    items.sort(
        key=lambda item: item.get_closest_marker("engine") is None and not item.get_closest_marker("slurm")
    )
    for item in items:
        if "slurm" in item.path.parts:
            group = "slurm"
        else:
            group = item.nodeid if item.get_closest_marker("alone") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return REPO


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder with the published traces and reference tables; tests that need it are skipped without it."""
    path = Path(os.environ.get("TESSA_SHARED", REPO.parent / "shared"))
    if not path.is_dir():
        pytest.skip(
            f"published traces and reference data not found at {path}; set TESSA_SHARED to their folder"
        )
    return path


@pytest.fixture(scope="session")
def cache() -> Path:
    """Generated models, adapters and references, by content hash; kept between runs."""
    path = REPO / ".cache" / "tests"
    path.mkdir(parents=True, exist_ok=True)
    return path
