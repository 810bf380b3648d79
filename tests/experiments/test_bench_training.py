"""The training benchmark: its measures, and a run small enough for a test."""

from __future__ import annotations

import pandas as pd
import pytest

pytest.importorskip("peft")

import torch

from experiments.bench_training import main, parse, ratios
from experiments.measure.memory import step_peak_bytes


def test_peak_counts_what_lives_at_once():
    mib = 2**18  # float32 numbers in 2**20 bytes

    def step():
        kept = torch.empty(3 * mib)
        for _ in range(4):
            torch.empty(2 * mib)
        del kept
        torch.empty(mib)

    assert step_peak_bytes(step, cuda=False) == 5 * 2**20


def test_ratios_are_formed_within_a_round():
    # The second round ran while the machine was busy; method and reference slowed alike.
    assert ratios([0.9, 9.0, 0.9], [1.0, 10.0, 1.0]) == pytest.approx((0.9, 0.9, 0.9))


def test_small_run_reports_budget_time_and_memory(tmp_path, capsys):
    small = "--hidden 64 --layers 2 --vocab 128 --batch 2 --tokens 64 --rank 8 --rounds 2 --warmup 1"
    main([*small.split(), "--out", str(tmp_path / "training")])
    printed = capsys.readouterr().out
    assert "total at rank-equivalent 8" in printed
    results = pd.read_csv(tmp_path / "training" / "rows.csv").set_index("method")
    assert list(results.index) == ["lora", "tessa-across", "tessa-along"]
    assert all(f"\n{method} " in printed for method in results.index)
    assert (results["rounds"] == 2).all()
    assert (results[["step_s", "time_over_lora", "memory_over_lora"]] > 0).all(axis=None)
    assert (results.loc["lora", ["time_over_lora", "step_peak_over_lora", "memory_over_lora"]] == 1).all()
    assert results["git_sha"].notna().all()
    assert (results["intermediate"] == 64 * 11 // 4).all()
    assert not results["checkpointing"].any()
    on_gpu = torch.cuda.is_available()
    assert (results["device"] == (torch.cuda.get_device_name() if on_gpu else "cpu")).all()
    lora, across = results.loc["lora"], results.loc["tessa-across"]
    assert across["parameters"] == pytest.approx(lora["parameters"], rel=0.05)
    # Placed across, q, k, v, gate and up keep a slice of their input where LoRA keeps all of it.
    assert across["step_peak_bytes"] < lora["step_peak_bytes"]


def test_what_the_model_is_made_of_is_known_before_it_is_made():
    assert parse(["--hidden", "128"]).intermediate == 352
    assert parse(["--hidden", "128", "--intermediate", "96"]).intermediate == 96


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--rounds 1", "--rounds is 1; give 2 or more"),  # quartiles
        ("--hidden 32", "--hidden is 32; give 64 or more"),
        ("--hidden 96", "--hidden is 96; give a multiple of 64"),
        ("--hidden 320 --gqa 2", "--hidden is 320; give a multiple of 64"),
        ("--rank 0", "--rank is 0; give 1 or more"),
        ("--hidden 64 --layers 1 --vocab 64 --shards 7", "7 shards do not divide"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, said, tmp_path, capsys):
    assert main([*arguments.split(), "--out", str(tmp_path / "training")]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert said in error
    assert not (tmp_path / "training").exists()
