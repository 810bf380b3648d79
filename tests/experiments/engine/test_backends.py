"""Every backend on the real engine: outputs against merged weights, counters against what its structure says.

One engine start serves all checks of a (backend, TP degree), which stand in tests/backend_cases.py.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from backend_cases import (
    LORA,
    MIXTURE,
    WITHOUT_ADAPTERS,
    Running,
    check_lora,
    check_tessa,
    check_without_adapters,
    mixture,
    setup_for,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("backend", LORA)
def test_lora_equals_merged_weights_and_costs_what_its_structure_says(
    backend: str, tp: int, cache: Path, tmp_path: Path
) -> None:
    check_lora(backend, tp, cache, tmp_path)


@pytest.mark.parametrize("tp", [1, 2])
def test_tessa_equals_merged_weights_and_adds_no_collective(tp: int, cache: Path, tmp_path: Path) -> None:
    check_tessa(tp, cache, tmp_path)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("backend", WITHOUT_ADAPTERS)
def test_backends_without_adapters(backend: str, tp: int, cache: Path, tmp_path: Path) -> None:
    check_without_adapters(backend, tp, cache, tmp_path)


@pytest.mark.parametrize("placement", ["across", "along"])
def test_the_gpus_fixed_buffers_give_the_same_outputs(placement: str, cache: Path, tmp_path: Path) -> None:
    """The products that a GPU uses, on the CPU's implementation of the same ops."""
    folders = [
        f for f, one in zip(mixture(cache, "tessa", 2), MIXTURE, strict=True) if one["placement"] == placement
    ]
    setup = setup_for("tessa", 2, cache, folders)
    arguments = dict(setup.engine_args)
    options = {"products": "static", "placement": placement}
    arguments["additional_config"] = {**arguments["additional_config"], **options}
    with Running(dataclasses.replace(setup, engine_args=arguments), tmp_path / "log") as engine:
        result = engine.gate({})
    assert result["passed"], result


def test_bfloat16_stays_within_its_tolerance(cache: Path, tmp_path: Path) -> None:
    setup = setup_for("tessa", 1, cache, mixture(cache, "tessa", 1))
    arguments = {**setup.engine_args, "dtype": "bfloat16"}
    with Running(dataclasses.replace(setup, engine_args=arguments), tmp_path / "log") as engine:
        result = engine.gate({})
    assert result["passed"], result
    assert result["max_abs_error"] > 1e-4, "bfloat16 was not used"


def test_vllms_own_cpu_ops_are_caught_by_the_gate(cache: Path, tmp_path: Path) -> None:
    """vLLM gives a request without adapter the last slot's adapter when all slots are taken."""
    setup = setup_for("punica", 1, cache, mixture(cache, "lora", 1), kernels="stock")
    with Running(setup, tmp_path / "log") as engine:
        result = engine.gate({})
    assert not result["passed"]
    assert "without adapter" in result["detail"]
    assert json.loads(json.dumps(result)) == result
