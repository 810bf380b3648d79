"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that the processes of `make test` end at about the same time."""
    items.sort(key=lambda item: not any(item.get_closest_marker(name) for name in ("engine", "slurm")))


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
