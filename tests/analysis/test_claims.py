"""Claims: each verdict from evidence that earns it, and from evidence that does not."""

from __future__ import annotations

import json
import shutil

import analysis_store
import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

from analysis import claims, load, quality
from analysis.__main__ import main
from analysis.claims import evidence, rules

GPU = {"device": "cuda"}
NONE = {"adapter_gemms_per_step": 0.0, "collectives_per_step": 0.0, "adapter_bytes_per_rank": 2**10}


def verdicts(tmp_path, reference=False):
    results = tmp_path / "results"
    return {row["id"]: row for row in claims.table(load(results), results, reference)}


def test_nothing_stored_is_not_tested(tmp_path):
    rows = verdicts(tmp_path)
    assert list(rows) == ["C1", "C2", "C3", "C4", "C5", "C6"]
    assert {row["verdict"] for row in rows.values()} == {"not tested"}
    assert all(row["ours"] is None and row["paper"] and row["rule"] for row in rows.values())


@pytest.mark.parametrize(("device", "most", "verdict"), [("cuda", 8, "reproduced"), ("cpu", 2, "partly")])
def test_the_paper_s_numbers_count_on_gpus_alone(tmp_path, device, most, verdict):
    for tp, slora in ((1, 0.155), (most, 0.43)):
        tessa = 1 - (1 - slora) * (3.46 if tp == most else 1.1) * 0.5
        analysis_store.point(
            tmp_path, "tp_scaling", "a", {"slora": slora, "tessa": tessa}, tp, labels={"device": device}
        )
    rows = verdicts(tmp_path)
    assert rows["C1"]["verdict"] == verdict
    assert rows["C1"]["ours"] == pytest.approx(43, abs=3)
    assert rows["C1"]["interval"][0] < rows["C1"]["ours"] < rows["C1"]["interval"][1]
    assert "15." in rows["C1"]["note"]
    assert "% at TP 1" in rows["C1"]["note"]


def test_speedup_is_the_ratio_within_rounds(tmp_path, store_cell):
    store_cell("slora", [100.0, 10.0, 50.0], labels=GPU)
    store_cell("tessa", [346.0, 34.6, 173.0], labels=GPU)
    row = verdicts(tmp_path)["C6"]
    assert row["ours"] == pytest.approx(3.46)
    assert row["interval"] == pytest.approx([3.46, 3.46])
    assert (row["verdict"], row["provenance"]) == ("reproduced", "measured")


def test_a_single_round_has_no_interval_and_decides_nothing(tmp_path, store_cell):
    store_cell("slora", [100.0], labels=GPU, base=[200.0])
    store_cell("tessa", [360.0], labels=GPU)
    rows = verdicts(tmp_path)
    for claim, value in (("C1", 50), ("C6", 3.6)):
        assert (rows[claim]["verdict"], rows[claim]["ours"]) == ("not tested", None)
        (listed,) = rows[claim]["evidence"]
        assert (listed["value"], listed["judged"]) == (pytest.approx(value), False)


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [(3.2, 2.0, 5.0, "reproduced"), (3.0, 2.0, 5.0, "partly"), (3.2, 3.1, 3.3, "partly")],
)
def test_a_wide_interval_does_not_make_up_for_a_small_speed_up(value, low, high, verdict):
    evidence = claims.evidence.Evidence("tessa", 8, value, low, high, "measured", "", True)
    assert rules.CLAIMS[5].judge(evidence, [evidence]) == verdict


@pytest.mark.parametrize(("spread", "verdict"), [(2.0, "reproduced"), (20.0, "partly")])
def test_growth_with_tp_counts_where_it_is_separated(spread, verdict):
    evidence = claims.evidence.Evidence(
        "slora", 8, 43.0, 43.0 - spread, 43.0 + spread, "measured", "", True, 15.0, 1,
        reference_low=15.0 - spread, reference_high=15.0 + spread,
    )  # fmt: skip
    assert rules.CLAIMS[0].judge(evidence, [evidence]) == verdict


def test_each_backend_s_growth_is_said(tmp_path):
    for tp, slora in ((1, 0.1), (2, 0.4)):
        analysis_store.point(tmp_path, "tp_scaling", "a", {"punica": 0.15, "slora": slora}, tp)
    row = verdicts(tmp_path)["C1"]
    own, other = row["note"].split("; ")
    assert own.startswith("slora at TP 2, ")
    assert "% at TP 1, growth separated, greatest of 2" in own
    assert other.startswith("punica 1")
    assert other.endswith("% at TP 1, growth not separated")
    assert all(
        e["reference_interval"][0] < e["reference"] < e["reference_interval"][1] for e in row["evidence"]
    )


@pytest.mark.parametrize(
    ("slora", "tessa", "verdict"),
    [
        ({"budget_ratio": 1.0}, {"budget_ratio": 1.04}, "partly"),
        ({"budget_ratio": 1.0}, {"budget_ratio": 1.06}, "not tested"),
        ({"adapter_rank": 4, "served_rank": 4}, {}, "partly"),
        ({"adapter_rank": 4, "served_rank": 8}, {}, "not tested"),
    ],
)
def test_adapters_of_another_size_are_no_speedup(tmp_path, store_cell, slora, tessa, verdict):
    store_cell("slora", [100.0, 101.0, 102.0], labels=slora)
    store_cell("tessa", [200.0, 201.0, 202.0], labels=tessa)
    assert verdicts(tmp_path)["C6"]["verdict"] == verdict


@pytest.mark.parametrize(("device", "verdict"), [("cuda", "not"), ("cpu", "not tested")])
def test_slower_than_slora_refutes_the_claim_on_gpus_alone(tmp_path, store_cell, device, verdict):
    store_cell("slora", [100.0, 101.0, 102.0], labels={"device": device})
    store_cell("tessa", [90.0, 91.0, 92.0], labels={"device": device})
    assert verdicts(tmp_path)["C6"]["verdict"] == verdict


@pytest.mark.parametrize(
    ("spread", "device", "verdict"),
    [(1.0, "cuda", "not"), (1.0, "cpu", "not tested"), (40.0, "cuda", "not tested")],
)
def test_a_cost_that_may_be_zero(tmp_path, store_cell, spread, device, verdict):
    speeds = [100.0 - spread, 100.0 + spread, 100.0]
    store_cell("punica", speeds, base=[100.0, 100.0, 100.0], labels={"device": device})
    assert verdicts(tmp_path)["C1"]["verdict"] == verdict


@pytest.mark.parametrize(("status", "git"), [("incorrect", None), ("complete", analysis_store.DIRTY)])
def test_bad_cells_are_no_evidence(tmp_path, store_cell, status, git):
    store_cell("slora", [100.0, 101.0], tp=2)
    store_cell("tessa", [300.0, 301.0], tp=2, status=status, git=git or analysis_store.CLEAN)
    assert verdicts(tmp_path, reference=True)["C6"]["verdict"] == "not tested"
    assert verdicts(tmp_path, reference=True)["C4"]["verdict"] == "not tested"


def test_open_loops_and_ablations_do_not_count(tmp_path, store_cell):
    store_cell("slora", [100.0, 101.0], labels={"arrivals": "poisson"})
    store_cell("tessa", [300.0, 301.0], labels={"arrivals": "poisson"})
    store_cell("slora:communication=off", [1.0, 1.0], setting="b", base=[9.0, 9.0])
    rows = verdicts(tmp_path)
    assert rows["C6"]["verdict"] == rows["C1"]["verdict"] == "not tested"


def test_collectives_and_products_are_counted(tmp_path, store_cell):
    store_cell("punica", [1.0, 1.0], tp=2, counters={**NONE, "adapter_gemms_per_step": 14.0})
    store_cell("tessa", [1.0, 1.0], tp=2, counters={**NONE, "collectives_per_step": 9.0})
    assert verdicts(tmp_path)["C4"]["verdict"] == "not tested"
    store_cell("base", [1.0, 1.0], tp=2, counters={**NONE, "collectives_per_step": 9.0})
    rows = verdicts(tmp_path)
    assert (rows["C3"]["verdict"], rows["C4"]["verdict"]) == ("reproduced", "reproduced")
    assert rows["C3"]["interval"] is None, "a count of one step has no interval"
    store_cell("base", [1.0, 1.0], tp=2, setting="b", counters=NONE)
    store_cell("tessa", [1.0, 1.0], tp=2, setting="b", counters={**NONE, "collectives_per_step": 1.0})
    assert verdicts(tmp_path)["C4"]["verdict"] == "not"


def test_one_rank_says_nothing_of_communication(tmp_path, store_cell):
    store_cell("tessa", [1.0, 1.0], tp=1, counters=NONE)
    assert verdicts(tmp_path)["C4"]["verdict"] == "not tested"


@pytest.mark.parametrize("forced", [False, True])
def test_a_product_of_its_own_is_not_the_claim(tmp_path, store_cell, forced):
    """Products count even where they are fewer than Punica's; the wide product that was forced is part of it."""
    store_cell("punica", [1.0, 1.0], counters={**NONE, "adapter_gemms_per_step": 44.0})
    store_cell("tessa", [1.0, 1.0], counters={**NONE, "adapter_gemms_per_step": 16.0})
    if forced:
        store_cell("tessa:schedule=wide", [1.0, 1.0], counters=NONE)
    assert verdicts(tmp_path)["C3"]["verdict"] == ("partly" if forced else "not")


@pytest.mark.parametrize("labels", [{"measure": "smoke"}, {"tp": 4}])
def test_short_and_crowded_runs_say_nothing_of_speed(tmp_path, labels):
    """Four ranks on the two cores of the store's machine."""
    tp = labels.pop("tp", 1)
    analysis_store.point(tmp_path, "tp_scaling", "a", {"slora": 0.3, "tessa": 0.1}, tp, labels=labels)
    rows = verdicts(tmp_path)
    assert rows["C1"]["verdict"] == rows["C6"]["verdict"] == "not tested"


def test_the_greatest_of_many_settings_must_stand_out(tmp_path):
    """A clear gain is found beside a wide one, and each interval is wider than if it were the only one."""
    analysis_store.point(tmp_path, "tp_scaling", "a", {"slora": 0.3, "tessa": 0.1})
    alone = verdicts(tmp_path)["C6"]["interval"]
    for i in range(4):
        analysis_store.point(tmp_path, "tp_scaling", f"b{i}", {"slora": 0.1, "tessa": 0.1})
    row = verdicts(tmp_path)["C6"]
    assert row["interval"][0] < alone[0] < alone[1] < row["interval"][1]
    assert row["verdict"] == "partly"
    assert row["ours"] == pytest.approx(0.9 / 0.7, rel=0.03)


def test_costs_against_another_session_are_no_evidence(tmp_path, store_cell):
    folder = store_cell("slora", [50.0, 51.0, 52.0], base=[100.0, 100.0, 100.0])
    file = folder / "summary.json"
    file.write_text(file.read_text().replace("same_round", "other_session"))
    assert verdicts(tmp_path)["C1"]["verdict"] == "not tested"


@pytest.mark.parametrize(
    ("source", "rank", "verdict"),
    [("hub", 1, "reproduced"), ("generated", 1, "partly"), ("path", 1, "partly"), ("hub", 16, "not")],
)
def test_shares_come_from_the_shapes(tmp_path, store_cell, source, rank, verdict):
    architecture = {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    config = {
        "model": {"architecture": architecture, "vocab_size": 4096, "source": source},
        "adapters": {"rank_equivalent": rank, "target_modules": analysis_store.ALL_MODULES.split("+")},
    }
    store_cell("punica", [1.0, 1.0], config=config, counters=NONE)
    row = verdicts(tmp_path)["C2"]
    lora = 4 * rank * (4 * 2048 + 3 * (1024 + 2816))
    base = 4 * (4 * 1024**2 + 3 * 1024 * 2816) + 4096 * 1024
    assert row["ours"] == pytest.approx(100 * lora / base, rel=1e-4)
    assert row["verdict"] == verdict


@pytest.mark.parametrize(("gain", "verdict"), [(0.1, "partly"), (-0.2, "not")])
def test_quality_is_judged_by_the_paired_difference(tmp_path, gain, verdict):
    """On a base model of our own, so at most partly."""
    analysis_store.quality(tmp_path / "results", gain)
    row = verdicts(tmp_path)["C5"]
    assert row["verdict"] == verdict
    assert row["ours"] == pytest.approx(100 * gain, abs=3)
    judged = [e["interval"] for e in row["evidence"] if e["judged"]]
    assert len(judged) == 4  # the default placement's means, one per budget
    assert len(row["evidence"]) == 4 + 4 * 2  # the tasks are listed beside them
    assert row["interval"] == min(judged)
    assert "of 4 matched budgets, lowest of 4, mean of tasks at rank-equivalent" in row["note"]


def test_quality_is_judged_by_the_mean_over_open_tasks_with_intervals_that_hold_together():
    lora, hard = (
        [0.40, 0.60, 0.50, 0.45, 0.55],
        {4: [0.50, 0.52, 0.55, 0.43, 0.60], 8: [0.41, 0.55, 0.5, 0.5, 0.6]},
    )
    easy, other = [1.0] * 5, [0.2, 0.3, 0.35, 0.4, 0.5]
    parts = []
    for rank, scores in hard.items():
        tasks = {"easy": easy, "hard": lora, "other": other[::-1]}
        parts.append(analysis_store.trainings("lora", tasks, rank))
        parts.append(
            analysis_store.trainings("tessa across random", {**tasks, "hard": scores, "other": other}, rank)
        )
    found = claims.quality.differences(quality.rows(pd.concat(parts)))
    judged = [e for e in found if e.judged]
    for e, scores in zip(judged, hard.values(), strict=True):
        by_hand = ttest_rel(np.mean([other, scores], 0), np.mean([other[::-1], lora], 0)).confidence_interval(
            0.975
        )
        assert (e.low, e.high) == pytest.approx((100 * by_hand.low, 100 * by_hand.high))
        assert e.value == pytest.approx(50 * (np.mean(scores) - np.mean(lora)))
        assert e.note.startswith("mean of tasks")
        assert "1 of 3 tasks saturated and left out" in e.note
    listed = [e for e in found if not e.judged]
    assert [e.setting.partition(",")[0] for e in listed] == ["hard", "other"] * 2
    by_hand = ttest_rel(hard[4], lora).confidence_interval(1 - 0.05 / 4)
    assert (listed[0].low, listed[0].high) == pytest.approx((100 * by_hand.low, 100 * by_hand.high))


def test_a_budget_at_which_nothing_can_differ_is_no_evidence():
    both = {"easy": [1.0] * 3, "hopeless": [0.0] * 3}
    table = pd.concat([analysis_store.trainings(kind, both) for kind in ("lora", "tessa across random")])
    assert claims.quality.differences(quality.rows(table)) == []
    other = pd.concat(
        [
            analysis_store.trainings("lora", {"a": [1.0] * 3}),
            analysis_store.trainings("tessa", {"a": [0.0] * 3}),
        ]
    )
    assert [e.value for e in claims.quality.differences(quality.rows(other))] == [-100]
    kinds = {"lora": [0.4, 0.5, 0.6], "tessa across random": [0.3, 0.4, 0.5]}
    one = [analysis_store.trainings(k, {"easy": [1.0] * 3, "hard": v}) for k, v in kinds.items()]
    (judged, _) = claims.quality.differences(quality.rows(pd.concat(one)))
    assert judged.value == pytest.approx(-10)
    assert judged.note == "hard at rank-equivalent 4, 1 of 2 tasks saturated and left out"


@pytest.mark.parametrize(
    ("intervals", "published", "verdict"),
    [
        ([(-1, 3), (0, 4)], True, "reproduced"),
        ([(-1, 3), (0, 4)], False, "partly"),
        ([(-1, 3), (-9, -4)], True, "partly"),
        ([(-9, -3), (-9, 2)], True, "not"),
        ([(-9, 2), (-9, -1)], True, "not tested"),
    ],
)
def test_quality_is_comparable_where_the_whole_interval_is_above_the_margin(intervals, published, verdict):
    found = [
        claims.evidence.Evidence("tessa", 1, (low + high) / 2, low, high, "measured", "", published)
        for low, high in intervals
    ]
    assert rules.CLAIMS[4].judge(found[0], found) == verdict


def test_quality_counts_in_full_on_a_published_model(tmp_path):
    analysis_store.quality(tmp_path / "results", 0.1)
    for file in (tmp_path / "results").rglob("summary.json"):
        file.write_text(file.read_text().replace('"protocol": "skills"', '"protocol": "metamath"'))
    assert verdicts(tmp_path)["C5"]["verdict"] == "reproduced"


def test_budgets_that_do_not_match_are_left_out(tmp_path):
    analysis_store.quality(tmp_path / "results", params=1.2)
    assert verdicts(tmp_path)["C5"]["verdict"] == "not tested"


def test_modelled_evidence_gives_partly_at_most():
    evidence = claims.evidence.Evidence("tessa", 8, 4.0, 3.9, 4.1, "modelled", "", True)
    assert rules.CLAIMS[5].judge(evidence, [evidence]) == "partly"


def test_written_as_json_markdown_and_text(full_results, capsys):
    assert main(["claims", "--json", str(full_results)]) == 0
    rows = json.loads(capsys.readouterr().out)
    needed = {"id", "paper", "ours", "interval", "provenance", "setting", "verdict"}
    assert all(needed <= set(row) for row in rows)
    assert main(["claims", "--markdown", str(full_results)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| C") for line in lines) == 6
    assert main(["claims", str(full_results)]) == 0
    out = capsys.readouterr().out
    assert all(rule.rule[:30] in out for rule in rules.CLAIMS)


SIZES = {"sequences": 8, "length": 16, "rank": 16, "distinct": 2, "resident": 2}
"""Of a layer step's point."""


def test_layer_step_and_projection_are_evidence_of_their_own_kind(tmp_path, store_cell):
    def row(variant, tp, seconds, cost, collectives):
        return {
            "variant": variant, "tp": tp, "phase": "decode", "sweep": "tp", "status": "complete", "model": "m",
            "device": "a GPU", "machine": "a GPU", "dtype": "bfloat16", "scale": 1, "layers": 2, "base_fraction": 0.0,
            "interconnect": "h100", "custom_all_reduce": True, **SIZES, "measured_at": "2026-01-01",
            "step_s": seconds, "adapter_cost": cost, "adapter_cost_kernels": 0.9,
            "adapter_collectives_per_step": collectives,
        }  # fmt: skip

    rows = [row("slora", tp, 4.0 * tp, 0.1 * tp, 8 * (tp > 1)) for tp in (1, 4)]
    rows += [row("tessa", tp, 2.0, 0.0, 0) for tp in (1, 4)]
    (tmp_path / "results" / "layer_step").mkdir(parents=True)
    pd.DataFrame(rows).to_csv(tmp_path / "results" / "layer_step" / "rows.csv", index=False)
    found = verdicts(tmp_path)
    assert (found["C6"]["ours"], found["C6"]["provenance"], found["C6"]["verdict"]) == (
        8.0,
        "emulated",
        "partly",
    )
    assert (found["C1"]["ours"], found["C1"]["verdict"]) == (40.0, "partly")
    said = "slora at TP 4, 10.0 % at TP 1, growth without intervals, with modelled collectives"
    assert found["C1"]["note"] == said
    assert (found["C4"]["ours"], found["C4"]["verdict"]) == (0.0, "partly")

    table = [
        {
            "sweep": "tp", "custom_all_reduce": True, "gpu": "h100", "model": "m", "tp": tp, "backend": backend,
            **{f"adapter_cost{end}": 0.3 * tp for end in ("", "_low", "_high")},
            **{f"speedup_over_slora{end}": 1.0 + tp for end in ("", "_low", "_high")},
            "parameter_share": 0.004, "adapter_collectives_per_step": 0.0,
        }
        for tp in (1, 2) for backend in ("punica", "slora", "tessa")
    ]  # fmt: skip
    (tmp_path / "results" / "projection").mkdir()
    pd.DataFrame(table).to_parquet(tmp_path / "results" / "projection" / "projection.parquet")
    found = verdicts(tmp_path)
    assert found["C6"]["ours"] == 8.0
    assert {e["provenance"] for e in found["C6"]["evidence"]} == {"emulated", "modelled"}
    assert (found["C2"]["ours"], found["C2"]["verdict"]) == (0.4, "partly")
    store_cell("slora", [1.0, 1.0])
    store_cell("tessa", [1.5, 1.5])
    assert (verdicts(tmp_path)["C6"]["ours"], verdicts(tmp_path)["C6"]["provenance"]) == (1.5, "measured")


def test_a_claim_sets_layer_steps_of_one_setting_against_each_other(tmp_path):
    """A later TESSA of another rank, or beside another share of base, is no rival of an earlier S-LoRA."""

    def stored(*rows):
        rows = pd.DataFrame([row for part in rows for row in part])
        (tmp_path / "layer_step").mkdir(exist_ok=True)
        rows.to_csv(tmp_path / "layer_step" / "rows.csv", index=False)
        return {(e.tp, e.value, e.setting) for e in evidence.from_layer_step(tmp_path)["C6"]}

    def run(seconds, at, **change):
        return [
            {
                "variant": variant, "tp": tp, "phase": "decode", "sweep": "tp", "status": "complete", "model": "m",
                "device": "cpu", "machine": "a CPU", "dtype": "float32", "scale": 1, "layers": 2, "base_fraction": 0.0,
                "interconnect": None, "custom_all_reduce": True, **SIZES, "measured_at": at, "step_s": value,
                "adapter_cost": 0.1, "adapter_cost_kernels": 0.1, "adapter_collectives_per_step": 0, **change,
            }
            for variant, value in seconds.items() for tp in (1, 2)
        ]  # fmt: skip

    first = run({"slora": 4.0, "tessa": 2.0}, "2026-01-01")
    where = "one layer's kernels, m float32 on cpu"
    alone = {(1, 2.0, where), (2, 2.0, where)}
    assert stored(first) == alone
    other = run({"tessa": 1.0}, "2026-01-02", rank=64)
    said = f"{where}, 8 sequences of 16 tokens, rank 16, 2 of 2 adapters"
    assert stored(first, other) == {(1, 2.0, said), (2, 2.0, said)}
    shared = run({"tessa": 1.0}, "2026-01-02", base_fraction=0.5)
    assert stored(first, shared) == set()
    # The latest, wherever it stands in the file.
    assert stored(first, run({"tessa": 1.0}, "2025-01-01")) == alone


def test_a_dirty_layer_step_or_projection_is_no_reference(complete_results, tmp_path):
    results = tmp_path / "results"
    for name in ("layer_step", "projection"):
        shutil.copytree(complete_results / name, results / name)

    def kinds(git):
        rows = analysis_store.layer_step_rows().assign(git_sha=git["sha"], git_dirty=git["dirty"])
        rows.to_csv(results / "layer_step" / "rows.csv", index=False)
        (results / "projection" / "environment.json").write_text(json.dumps({"git_start": git}))
        return {e["provenance"] for row in verdicts(tmp_path, True).values() for e in row["evidence"]}

    assert kinds(analysis_store.CLEAN) == {"emulated", "modelled"}
    assert kinds(analysis_store.DIRTY) == set()
