"""The end table: order, units, intervals, gaps, definitions."""

from __future__ import annotations

import pytest

from analysis import load, tables
from experiments.measure import metrics


@pytest.fixture
def frame(store_cell, tmp_path):
    store_cell("tessa", [90.0, 99.0, 81.0], base=[100.0, 110.0, 90.0])
    store_cell("slora", [50.0], status="failed")
    store_cell("base", [100.0, 110.0, 90.0])
    store_cell("base", [50.0, 55.0, 45.0], tp=2)
    return load(tmp_path / "results")


def test_rows_are_in_order_with_values(frame):
    table = tables.end_table(frame)
    assert table[["tp", "backend"]].to_numpy().tolist() == [
        ["1", "base"],
        ["1", "slora"],
        ["1", "tessa"],
        ["2", "base"],
    ]
    tessa = table[table["backend"] == "tessa"].iloc[0]
    assert tessa["tokens out\n1/s"].startswith("90.0 ±22.")
    assert tessa["cost\n%"] == "10.0 ±0.0"
    assert tessa["TTFT p50\nms"] == "500"
    assert tessa["adapters\nMiB/rank"] == "1.00"
    assert tessa["status"] == "complete"


def test_a_failed_cell_has_no_numbers_and_its_reason_below(frame):
    slora = tables.end_table(frame).query("backend == 'slora'").iloc[0]
    assert slora["tokens out\n1/s"] == "-"
    assert slora["rounds"] == "-"
    text = tables.render(frame)
    assert "failed: round 2/3: it broke (log: tp_scaling/slora-tp1-abcd1234failed/engine.log)" in text


def test_settings_are_not_mixed(store_cell, frame, tmp_path):
    store_cell("base", [7.0], setting="ffff0000")
    table = tables.end_table(load(tmp_path / "results"))
    assert (table["backend"] == "base").sum() == 3


def test_placements_are_blocks_of_their_own(store_cell, tmp_path):
    usual = {"placement": "across", "offset": "random", "shards": 8}
    store_cell("tessa", [9.0], labels=usual)
    store_cell("tessa", [7.0], setting="ffff0000", labels={**usual, "placement": "along", "offset": "first"})
    first, second = tables.end_table(load(tmp_path / "results"))["setting"]
    assert "placement" not in first
    assert "rank-equivalent 4, placement along, offset first, 8 shards" in second


def test_settings_that_read_the_same_bear_their_hash(store_cell, tmp_path):
    store_cell("tessa", [9.0])
    store_cell("tessa", [7.0], setting="ffff0000")
    found = load(tmp_path / "results")
    assert [text[-8:] for text in tables.end_table(found)["setting"]] == ["abcd1234", "ffff0000"]
    assert tables.render(found).count("TTFT p50  ") == 2


def test_budgets_and_padded_ranks_are_marked(store_cell, tmp_path):
    store_cell("punica", [1.0], labels={"budget_ratio": 1.0, "adapter_rank": 4, "served_rank": 8})
    store_cell("slora", [1.0], labels={"budget_ratio": 1.0, "adapter_rank": 4, "served_rank": 4})
    store_cell("tessa", [1.0], labels={"budget_ratio": 1.058, "adapter_rank": None, "served_rank": None})
    store_cell("plain_lora", [1.0])  # stored before these were known
    found = load(tmp_path / "results")
    table = tables.end_table(found).set_index("backend")
    shown = table[["params\nx LoRA", "rank\nserved"]].to_numpy().tolist()
    assert dict(zip(table.index, shown, strict=True)) == {
        "plain_lora": ["-", "-"],
        "punica": ["1.00", "8 †"],
        "slora": ["1.00", "4"],
        "tessa": ["1.06 §", "-"],
    }
    text = tables.render(found)
    assert "§ = more than 5 % off" in text.replace("\n    ", " ")
    assert "† = larger than" in text.replace("\n    ", " ")


def test_times_that_say_nothing_about_speed_are_named(frame):
    assert tables.cautions(frame.assign(measure="demo", cores=2, tp=2, device="cpu")) == []
    said = tables.render(frame.assign(measure="smoke", cores=2, tp=4, device="cpu"))
    assert "measure=smoke shows that everything runs; its times say nothing about speed" in said
    assert said.endswith("tp 4 on 2 cores: ranks wait for a core, so times say nothing about speed")
    assert "ranks wait" not in tables.render(frame.assign(cores=2, tp=4, device="cuda"))


def test_definitions_come_from_the_metrics(frame):
    text = tables.render(frame)
    for column in tables.TABLE:
        definition = metrics.lookup(column.source)[0].definition
        assert definition[:40] in text.replace("\n    ", " ")


def test_no_cells(tmp_path):
    assert tables.render(load(tmp_path)) == "no stored cells"
