"""The training benchmark: its measures, and a run small enough for a test."""

from __future__ import annotations

import pandas as pd
import pytest

pytest.importorskip("peft")

import torch

from experiments.bench_training import main, parse, ratios, step_peak_bytes


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
    lora, across = results.loc["lora"], results.loc["tessa-across"]
    assert across["parameters"] == pytest.approx(lora["parameters"], rel=0.05)
    # Placed across, q, k, v, gate and up keep a slice of their input where LoRA keeps all of it.
    assert across["step_peak_bytes"] < lora["step_peak_bytes"]


def test_one_round_has_no_quartiles():
    with pytest.raises(SystemExit):
        parse(["--rounds", "1"])
