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


def test_definitions_come_from_the_metrics(frame):
    text = tables.render(frame)
    for column in tables.TABLE:
        definition = metrics.lookup(column.source)[0].definition
        assert definition[:40] in text.replace("\n    ", " ")


def test_no_cells(tmp_path):
    assert tables.render(load(tmp_path)) == "no stored cells"
