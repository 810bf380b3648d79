"""The CPU machine's constants from half of its cells, and the errors on the other half."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from experiments.projection import own_cells, validate

TRUE = {
    "step": 2e-3,
    "layer": 1e-3,
    "byte": 5e-11,
    "collective": 3e-4,
    "kernel": 2e-5,
    "product": 3e-11,
    "adapter": 9e-11,
}
BACKENDS = {"base": (0, 0, 0), "punica": (64, 4e6, 0), "slora": (96, 3e6, 16), "tessa": (32, 5e6, 0)}


def summary(
    name: str, backend: str, tp: int, concurrency: int, prompt: int, layers: int = 4
) -> dict[str, Any]:
    kernels, size, extra = BACKENDS[backend]
    return {
        "experiment": "batch_sweep",
        "cell": name,
        "status": "complete",
        "provenance": "measured",
        "labels": {"variant": backend, "model": "small", "wrong_by_design": False},
        "config": {
            "device": "cpu",
            "dtype": "float32",
            "tp": tp,
            "model": {
                "vocab_size": 4096,
                "architecture": {
                    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": layers,
                    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
                },
            },
            "adapters": {"max_resident": 8},
            "engine": {"max_num_seqs": 64},
            "workload": {
                "spec": {
                    "num_requests": 128, "arrivals": {"kind": "closed_loop", "concurrency": concurrency},
                    "prompt_tokens": {"value": prompt}, "output_tokens": {"value": 64},
                }
            },
        },
        "counters": {
            "adapter_kernels_per_step": kernels, "adapter_bytes_per_rank": size,
            "collectives_per_step": (2 * layers + 1 + extra) if tp > 1 else 0,
        },
        "environment": {"hardware": {"cpu": "a processor", "cores": 2}},
        "rounds": [{"metrics": {"output_tokens_per_s": 1.0}}],
    }  # fmt: skip


def cells(noise: float = 0.0) -> list[dict[str, Any]]:
    """Cells whose throughput follows the model, times a factor near 1."""
    rng, made = np.random.default_rng(0), []
    for tp, layers in ((1, 4), (2, 4), (2, 8)):
        for concurrency in (1, 4, 16, 64):
            for prompt in (16, 256):
                for backend in BACKENDS:
                    name = f"{backend}-{tp}-{layers}-{concurrency}-{prompt}"
                    one = summary(name, backend, tp, concurrency, prompt, layers)
                    point = own_cells.point(one)
                    assert point is not None
                    seconds = sum(TRUE[name] * point[name] for name in own_cells.FEATURES)
                    rate = 1 / (seconds * (1 + noise * rng.standard_normal()))
                    one["rounds"] = [{"metrics": {"output_tokens_per_s": rate}}]
                    made.append(one)
    return made


def test_exact_cells_give_back_the_constants() -> None:
    found, why = own_cells.errors(own_cells.points(cells()))
    assert why is None
    assert found is not None
    assert 16 <= len(found) < 96
    assert (found.ratio - 1).abs().max() < 1e-6
    assert found.attrs["constants"] == pytest.approx(TRUE, rel=1e-3)


def test_noise_shows_in_the_validation_table() -> None:
    found = validate.validation(own_cells.points(cells(noise=0.1)))
    assert 0.02 < found["measured_cells_median_error"] < 0.2
    assert found["measured_cells"] >= 16
    assert found["measured_cells_reason"] is None


def test_held_out_cells_do_not_reach_the_fit() -> None:
    points = own_cells.points(cells())
    before, _ = own_cells.errors(points)
    assert before is not None
    changed = points.copy()
    changed.loc[changed.key.isin(before.key), "seconds"] *= 3
    after, _ = own_cells.errors(changed)
    assert after is not None
    assert after.ratio.to_numpy() == pytest.approx(1 / 3, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("status", "failed"),
        ("provenance", "emulated"),
        ("config", None),
        ("counters", {}),
    ],
)
def test_cells_that_say_nothing_about_the_machine_are_left_out(change: str, value: object) -> None:
    assert own_cells.point({**summary("a", "slora", 2, 4, 16), change: value}) is None


def test_smoke_says_nothing_about_speed() -> None:
    cell = summary("a", "tessa", 1, 8, 64)
    assert own_cells.point(cell) is not None
    cell["labels"]["measure"] = "smoke"
    assert own_cells.point(cell) is None


def test_oversubscribed_and_open_loop_cells_are_left_out() -> None:
    assert own_cells.point(summary("a", "slora", 4, 4, 16)) is None
    poisson = summary("a", "slora", 2, 4, 16)
    poisson["config"]["workload"]["spec"]["arrivals"] = {"kind": "poisson", "rate": 2}
    assert own_cells.point(poisson) is None


def test_too_few_cells_are_said_to_be_too_few() -> None:
    found, why = own_cells.errors(own_cells.points(cells()[: own_cells.MIN_CELLS - 1]))
    assert found is None
    assert "15 such cells" in str(why)
    assert own_cells.errors(None)[0] is None


def test_the_machine_with_most_cells_counts() -> None:
    other = summary("x", "base", 1, 4, 16)
    other["environment"]["hardware"]["cpu"] = "another"
    found, _ = own_cells.errors(own_cells.points([*cells(), other]))
    assert found is not None
    assert set(found.machine) == {"a processor, 2 cores, float32"}
