"""The training benchmark: its measures, and a run small enough for a test."""

from __future__ import annotations

import json

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
    main([*small.split(), "--json", str(tmp_path / "out.json")])
    printed = capsys.readouterr().out
    assert "total at rank-equivalent 8" in printed
    results = {r["method"]: r for r in json.loads((tmp_path / "out.json").read_text())["results"]}
    assert list(results) == ["lora", "tessa-across", "tessa-along"]
    for method, result in results.items():
        assert f"\n{method} " in printed
        assert len(result["step_s"]) == len(result["cpu_s"]) == 2
        assert min(result["step_s"]) > 0
    lora, across = results["lora"], results["tessa-across"]
    assert across["parameters"] == pytest.approx(lora["parameters"], rel=0.05)
    # Placed across, q, k, v, gate and up keep a slice of their input where LoRA keeps all of it.
    assert across["step_peak_bytes"] < lora["step_peak_bytes"]


def test_one_round_has_no_quartiles():
    with pytest.raises(SystemExit):
        parse(["--rounds", "1"])
