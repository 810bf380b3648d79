"""Comparing two result sets: regressions are found, noise is not taken for one."""

from __future__ import annotations

import json
from pathlib import Path

import analysis_store
import numpy as np
import pytest

from analysis import load
from analysis.__main__ import main
from analysis.compare import as_text, compare
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


def test_many_cells_without_a_partner_are_one_line(tmp_path):
    for i in range(4):
        analysis_store.write_cell(tmp_path / "a", "tessa", [1.0, 1.0], setting=f"aaaa000{i}")
        analysis_store.write_cell(
            tmp_path / "b", "tessa", [2.0, 2.0], setting=f"ffff000{i % 3}" + "0" * (i // 3)
        )
    analysis_store.write_cell(tmp_path / "b", "tessa", [2.0], setting="aaaa0000", experiment="breakdown")
    found = compare(tmp_path / "a" / "results", tmp_path / "b" / "results")
    assert len(found.changed) == 9
    lines = [line for line in as_text(found).splitlines() if line.startswith("no comparison")]
    assert [line.partition(": ")[2] for line in lines] == [
        "4 cells of tp_scaling: complete -> missing (--json names them)",
        "breakdown/tessa-tp1-aaaa0000complete: missing -> complete",
        "4 cells of tp_scaling: missing -> complete (--json names them)",
    ]


def test_noise_of_many_cells_is_no_regression(tmp_path):
    """The same speeds but for noise: some of the intervals at 95 % each do not hold 1."""
    rng = np.random.default_rng(0)
    for root in ("a", "b"):
        for i in range(20):
            speeds = list(100 * np.exp(0.1 * rng.standard_normal(5)))
            analysis_store.write_cell(tmp_path / root, "tessa", speeds, setting=f"s{i}")
    found = compare(tmp_path / "a" / "results", tmp_path / "b" / "results")
    assert found.count == 100
    assert found.level == pytest.approx(99.95)
    assert [row for row in found.rows if row.mark] == []
    frames = [load(tmp_path / root / "results") for root in ("a", "b")]
    one_by_one = []
    for i in range(20):
        (a, b) = (frame[frame["setting"] == f"s{i}"]["output_tokens_per_s"] for frame in frames)
        one_by_one.append(between_stores(b.to_numpy(float), a.to_numpy(float)))
    assert any(one.low > 1 or one.high < 1 for one in one_by_one)
    assert "so that all 100 of them hold at once" in " ".join(as_text(found).split())


@pytest.fixture
def trained(tmp_path):
    """Two sets of trainings; in B TESSA lost ten points, and one of LoRA's seeds failed."""
    for root, gain in (("a", 0.0), ("b", -0.1)):
        analysis_store.quality(tmp_path / root / "results", gain)
    file = next((tmp_path / "b" / "results" / "quality").glob("lora-r4-*/summary.json"))
    summary = json.loads(file.read_text())
    file.write_text(json.dumps({**summary, "status": "failed", "reason": "training: it broke"}))
    return tmp_path / "a" / "results", tmp_path / "b" / "results"


def test_scores_are_compared_by_structure_budget_and_task(trained):
    found = compare(*trained)
    assert found.rows == []
    assert len(found.scores) == 2 * 17
    assert {score.structure for score in found.scores if score.mark == "worse"} == {
        "tessa across random",
        "tessa along random",
    }
    assert found.regressions == [score for score in found.scores if "tessa" in score.structure]
    one = found.regressions[0]
    assert one.difference == pytest.approx(-0.1)
    assert (one.seeds, one.task) == (3, "base7_addition")
    lora = [score for score in found.scores if (score.structure, score.rank_equivalent) == ("lora", 4)]
    assert [(score.seeds, score.mark) for score in lora] == [(2, "")] * 2
    (text,) = found.lost
    assert text.startswith("quality/lora-r4-")
    assert text.endswith(": complete -> failed")


def test_trainings_that_all_failed_have_no_scores(trained):
    for file in trained[1].rglob("summary.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "status": "failed", "rounds": []}))
    found = compare(*trained)
    assert (found.scores, len(found.lost)) == ([], 51)


def test_a_pair_of_nothing_but_trainings_or_tables_is_not_called_empty(trained, tmp_path, capsys):
    a, b = map(str, trained)
    assert main(["compare", a, b, "--fail"]) == 1
    out = capsys.readouterr().out
    assert "TESSA across, random" in out
    assert "34 comparisons, 16 worse, 1 cells lost" in out
    assert main(["compare", a, a, "--fail", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["scores"]) == 34
    for root in ("c", "d"):
        (tmp_path / root / "layer_step").mkdir(parents=True)
        (tmp_path / root / "layer_step" / "rows.csv").write_text("x\n1\n")
    assert main(["compare", str(tmp_path / "c"), str(tmp_path / "d")]) == 0
    assert "no comparison: tables of layer_step" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    "command",
    [["table"], ["figures"], ["claims"], ["report"], ["validation"], ["readme", "--check", "--results"]],
)
def test_no_command_takes_a_file_or_nothing_for_an_empty_folder(command, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for name in ("file", "nowhere"):
        assert main([*command, str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.splitlines() == [
            f"error: {tmp_path / name} is no folder; give one that runs wrote, such as results"
        ]
    assert not (tmp_path / "nowhere").exists()


def test_machines_commits_and_settings_are_named(stores):
    a, b = stores
    text = as_text(compare(a, b))
    assert text.startswith("A: a CPU, 2 cores; commit ccccccc\nB: a CPU, 2 cores; commit ccccccc\n")
    assert "The machines differ" not in text
    for file in b.rglob("summary.json"):
        said = json.loads(file.read_text())
        said["environment"]["hardware"]["cpu"] = "another CPU"
        file.write_text(json.dumps(said))
    found = compare(a, b)
    assert "\nThe machines differ" in as_text(found)
    assert found.settings.keys() == {row.setting for row in found.rows}
    assert all(f"{setting}: {words[:20]}" in as_text(found) for setting, words in found.settings.items())
    assert not [row for row in found.rows if row.backend == "base" and row.metric == "1 - adapter_cost"]


@pytest.mark.parametrize("command", ["table", "figures", "compare"])
def test_an_experiment_that_nobody_knows_is_named_with_the_known_ones(command, stores, capsys):
    folders = list(map(str, stores[: 2 if command == "compare" else 1]))
    assert main([command, *folders, "--experiment", "tp_scalin"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: --experiment=tp_scalin is not known; did you mean 'tp_scaling'? Known values: "
    )
    assert "quality_metamath" in line
    Path(folders[0], "mine").mkdir()
    assert main([command, *folders, "--experiment", "mine"]) == 0
    Path(folders[0], "mine").rmdir()


def test_a_threshold_below_0_is_refused(stores, capsys):
    with pytest.raises(SystemExit):
        main(["compare", *map(str, stores), "--threshold", "-1"])
    assert "give 0 or more" in capsys.readouterr().err


def test_an_export_of_nothing_is_refused(tmp_path, capsys):
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert "nowhere is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["table"], ["validation"]])
def test_an_empty_folder_gives_what_it_can(command, tmp_path, monkeypatch):
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(command) == 0
