"""The benchmarks' tables name the device and every setting that was changed."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis import benchmarks


def training(**columns: Any) -> str:
    """The table of one method, with the columns of a run before any of them were stored but for what is given."""
    row = {
        "method": "lora", "parameters": 1000, "time_over_lora": 1.0, "time_over_lora_low": 0.9,
        "time_over_lora_high": 1.1, "step_peak_over_lora": 1.0, "memory_over_lora": 1.0, "hidden": 512, "layers": 4,
        "rank": 16, "batch": 4, "tokens": 128, "dtype": "float32", "rounds": 15, "machine": "a CPU, 2 cores",
        "git_sha": "c" * 40, "git_dirty": False,
    }  # fmt: skip
    return benchmarks.training(pd.DataFrame([row | columns]))


def test_a_training_says_how_it_was_measured() -> None:
    plain = training(device="cpu", autocast=None, checkpointing=False, intermediate=1408)
    assert "hidden 512, intermediate 1408, 4 layers" in plain
    assert "128 tokens, float32; medians" in plain
    assert "cpu: a CPU, 2 cores, commit ccccccc" in plain
    changed = training(autocast="bfloat16", checkpointing=True)
    assert (
        "float32 with autocast to bfloat16, activations recomputed in the backward pass; medians" in changed
    )


def test_a_gpu_is_named_once_and_rows_without_a_device_are_shown() -> None:
    assert "; a GPU, commit" in training(device="a GPU", machine="a GPU")
    assert "hidden 512, 4 layers" in training()
    assert "; a CPU, 2 cores, commit" in training()
