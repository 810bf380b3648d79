"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Read when torch is loaded, here and in every process that a test starts: threads that wait busily for one another
# keep the threads of the test beside them from the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

REPO = Path(__file__).resolve().parents[1]
LONGEST = (
    "experiments/engine/test_backends.py",
    "slurm/test_cluster.py",
    "experiments/engine/test_backends_tp4.py",
    "experiments/test_experiments.py",
    "experiments/engine/test_two_machines.py",
    "experiments/test_real_faults.py",
    "experiments/quality/test_serving.py",
    "tessa/vllm/test_serve.py",
    "experiments/test_faults.py",
    "experiments/test_store_faults.py",
    "analysis/test_notebooks.py",
    "experiments/quality/test_training.py",
    "analysis/test_report_in_browser.py",
    "test_triton_interpreter.py",
    "test_readme_snippets.py",
    "slurm/test_local_jobs.py",
    "tessa/vllm/test_quantised.py",
    "experiments/test_bench_collectives.py",
)
"""The files that take longest, in that order; all others come after them (`make test` shows its slowest tests)."""

pytest.register_assert_rewrite("backend_cases")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that the processes of `make test` end at about the same time. They take files in this
    order because of pytest-xdist's `--no-loadscope-reorder`, see pyproject.toml."""
    place = {f"tests/{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


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
