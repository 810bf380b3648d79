"""load(): one tidy frame, failed cells as rows without speed, errors in words."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from analysis import load
from analysis.load import COLUMNS
from tessa.errors import UserError


def test_one_row_per_cell_and_round(store_cell, tmp_path):
    store_cell("base", [100.0, 110.0])
    store_cell("tessa", [90.0, 99.0], base=[100.0, 110.0])
    frame = load(tmp_path / "results")
    assert list(frame.columns[: len(COLUMNS)]) == list(COLUMNS)
    assert frame[["backend", "repeat"]].to_numpy().tolist() == [
        ["base", 0],
        ["base", 1],
        ["tessa", 0],
        ["tessa", 1],
    ]
    assert frame["adapter_cost"].tolist()[2:] == pytest.approx([0.1, 0.1])
    assert frame["adapter_cost"].isna().tolist()[:2] == [True, True]
    assert frame["collectives_per_step"].tolist() == [2.0] * 4
    assert frame["itl_s_p99"].isna().all()
    assert frame["tp"].dtype == "Int64"
    assert set(frame["git_sha"]) == {"c" * 40}


@pytest.mark.parametrize("status", ["failed", "timeout", "incorrect", "invalid"])
def test_a_cell_that_is_not_complete_gives_no_speed(store_cell, tmp_path, status):
    store_cell("tessa", [90.0, 91.0], status=status)
    frame = load(tmp_path / "results")
    assert len(frame) == 1
    row = frame.iloc[0]
    assert (row["status"], row["reason"]) == (status, "round 2/3: it broke")
    assert row["log"].endswith("/engine.log")
    assert pd.isna(row["output_tokens_per_s"])
    assert pd.isna(row["requests_per_s"])
    assert row["schedule_lag_s_p99"] == 0.001


def test_nothing_gives_an_empty_frame_with_all_columns(tmp_path):
    frame = load(tmp_path / "nowhere")
    assert len(frame) == 0
    assert list(frame.columns) == list(COLUMNS)


def test_hidden_and_figure_folders_are_no_cells(store_cell, tmp_path):
    folder = store_cell("base", [1.0])
    folder.rename(folder.with_name(".tmp-x"))
    (tmp_path / "results" / "figures").mkdir()
    assert load(tmp_path / "results").empty


def test_one_experiment(store_cell, tmp_path):
    store_cell("base", [1.0])
    store_cell("base", [1.0], experiment="popularity")
    assert set(load(tmp_path / "results", "popularity")["experiment"]) == {"popularity"}


def test_dirty_at_submit_counts(store_cell, tmp_path):
    clean, dirty = {"sha": "c" * 40, "dirty": False}, {"sha": "c" * 40, "dirty": True}
    store_cell("base", [1.0], environment={"git_start": clean, "git_submit": dirty})
    assert load(tmp_path / "results")["git_dirty"].tolist() == [True]


def test_another_schema_version_and_damage_are_named(store_cell, tmp_path):
    folder = store_cell("base", [1.0], schema_version=0)
    with pytest.raises(UserError, match="schema version 0, this code reads 1"):
        load(tmp_path / "results")
    (folder / "summary.json").write_text(json.dumps({})[:1])
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "results")


@pytest.mark.parametrize(
    ("gate", "labels", "said"),
    [
        ({"passed": True, "reference": "merged weights"}, {}, "passed"),
        ({"passed": True, "reference": "merged weights, greedy continuations"}, {}, "passed"),
        ({"passed": False, "reference": "merged weights"}, {}, "failed"),
        (
            {"passed": True, "reference": "none (dummy weights): base and mixed batch only"},
            {},
            "no merged weights",
        ),
        ({"passed": True, "reference": "merged weights"}, {"wrong_by_design": True}, "wrong by design"),
        ({"passed": None, "reference": "none"}, {}, None),
    ],
)
def test_only_outputs_that_were_held_against_merged_weights_have_passed(
    tmp_path, store_cell, gate, labels, said
):
    store_cell("slora", [1.0, 2.0], gate=gate, labels=labels)
    assert [None if pd.isna(g) else g for g in load(tmp_path / "results")["gate"]] == [said] * 2
