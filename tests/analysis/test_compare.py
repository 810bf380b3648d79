"""Comparing two result sets: regressions are found, noise is not taken for one."""

from __future__ import annotations

import json

import analysis_store
import numpy as np
import pytest

from analysis.__main__ import main
from analysis.compare import compare
from analysis.ratios import between_stores


@pytest.fixture
def stores(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for root, speed, ttft in ((a, 100.0, 0.5), (b, 80.0, 0.4)):
        analysis_store.write_cell(
            root, "tessa", [speed, speed * 1.01, speed * 0.99], metrics={"ttft_s_p50": ttft}
        )
        analysis_store.write_cell(root, "punica", [50.0, 60.0, 40.0 + speed / 10])
    analysis_store.write_cell(a, "slora", [1.0, 1.0])
    analysis_store.write_cell(b, "slora", [1.0], status="timeout")
    return a / "results", b / "results"


def test_what_got_worse_and_better_is_marked(stores):
    found = compare(*stores)
    marked = {(r.backend, r.metric): r.mark for r in found.rows}
    assert marked["tessa", "output_tokens_per_s"] == "worse"
    assert marked["tessa", "ttft_s_p50"] == "better"
    assert marked["tessa", "tpot_s_p50"] == ""
    assert marked["punica", "output_tokens_per_s"] == ""
    ratio = next(r for r in found.rows if (r.backend, r.metric) == ("tessa", "output_tokens_per_s"))
    assert ratio.ratio == pytest.approx(0.8)
    assert ratio.low < 0.8 < ratio.high < 1
    assert len(found.lost) == 1
    assert "complete -> timeout" in found.lost[0]


def test_a_small_change_and_one_without_an_interval(tmp_path):
    for root, speeds, slow in (("a", [100.0, 100.1], [1.0]), ("b", [99.0, 99.1], [0.5])):
        analysis_store.write_cell(tmp_path / root, "tessa", speeds)
        analysis_store.write_cell(tmp_path / root, "slora", slow)
    found = compare(tmp_path / "a" / "results", tmp_path / "b" / "results")
    marks = {(r.backend, r.metric): r.mark for r in found.rows}
    assert marks["tessa", "output_tokens_per_s"] == ""
    assert marks["slora", "output_tokens_per_s"] == "worse?"
    assert found.regressions == []


def test_other_work_is_not_compared(tmp_path):
    analysis_store.write_cell(tmp_path / "a", "tessa", [1.0, 1.0])
    analysis_store.write_cell(tmp_path / "b", "tessa", [2.0, 2.0], setting="ffff0000")
    found = compare(tmp_path / "a" / "results", tmp_path / "b" / "results")
    assert found.rows == []
    assert [text.split(": ")[1] for text in found.changed] == ["complete -> missing", "missing -> complete"]


def test_welch_interval_of_a_ratio():
    i = between_stores(np.array([2.0, 2.2, 1.8]), np.array([1.0, 1.1, 0.9]))
    assert i.centre == pytest.approx(2.0)
    assert i.low * i.high == pytest.approx(i.centre**2)
    assert np.isnan(between_stores(np.array([0.0]), np.array([1.0])).centre)


def test_command_line(stores, capsys):
    a, b = map(str, stores)
    assert main(["compare", a, b]) == 0
    assert "worse" in capsys.readouterr().out
    assert main(["compare", a, b, "--fail", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["lost"]
    assert main(["compare", a, a, "--fail"]) == 0
    assert main(["compare", a, "nowhere"]) == 2
    assert "is no folder" in capsys.readouterr().err
