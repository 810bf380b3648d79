"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]


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
