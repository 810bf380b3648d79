"""`test_backends.py` at TP 4, where ranks share KV heads; a file of its own, so that another process can run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_cases import LORA, WITHOUT_ADAPTERS, check_lora, check_tessa, check_without_adapters

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.mark.parametrize("backend", LORA)
def test_lora_equals_merged_weights_and_costs_what_its_structure_says(
    backend: str, cache: Path, tmp_path: Path
) -> None:
    check_lora(backend, 4, cache, tmp_path)


def test_tessa_equals_merged_weights_and_adds_no_collective(cache: Path, tmp_path: Path) -> None:
    check_tessa(4, cache, tmp_path)


@pytest.mark.parametrize("backend", WITHOUT_ADAPTERS)
def test_backends_without_adapters(backend: str, cache: Path, tmp_path: Path) -> None:
    check_without_adapters(backend, 4, cache, tmp_path)
