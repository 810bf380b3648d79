"""The copy for git reads like the original, is small, and says nothing about whose machine it was."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import analysis_store
import numpy as np
import pandas as pd
import pytest

from analysis import load, reference
from analysis.__main__ import main
from analysis.load import requests
from tessa.errors import UserError


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = analysis_store.write_cell(
        tmp_path, "base", [100.123456789, 110.0], config={"tp": 1, "workload": {"spec": {"trace": None}}}
    )
    (folder / "engine.log").write_text("a long log")
    analysis_store.write_cell(
        tmp_path, "slora", [], status="failed", traceback=f"in {Path.home()}/x.py on {platform.node()}",
        reason="start: /usr/lib/somewhere/engine.py: it broke",
    )  # fmt: skip
    for backend, cell in analysis_store.point(tmp_path, "trace_replay", "t", {"tessa": 0.1}).items():
        arrivals = np.linspace(0, 5, 20)
        analysis_store.write_requests(cell, arrivals, 0.1 + 0.01 * arrivals * (backend == "base"))
    analysis_store.quality(tmp_path / "results")
    (tmp_path / "results" / "layer_step").mkdir()
    rows = analysis_store.layer_step_rows().assign(host=platform.node(), note="see /usr/lib/x/y.py")
    rows.to_csv(tmp_path / "results" / "layer_step" / "rows.csv", index=False)
    return tmp_path / "results"


def test_the_copy_gives_the_same_numbers(results: Path, tmp_path: Path) -> None:
    reference.export(results, tmp_path / "ref")
    before, after = load(results), load(tmp_path / "ref")
    assert list(before["cell"]) == list(after["cell"])
    for column in (
        "output_tokens_per_s",
        "adapter_cost",
        "status",
        "git_sha",
        "machine",
        "family",
        "setting",
    ):
        left, right = before[column].tolist(), after[column].tolist()
        if before[column].dtype.kind == "f":
            assert right == pytest.approx(left, rel=1e-5, nan_ok=True), column
        else:
            assert right == left, column
    cell = after[after["experiment"] == "trace_replay"].iloc[0]["folder"]
    copied = requests(tmp_path / "ref", cell)
    assert copied is not None
    whole = requests(results, cell)
    assert whole is not None
    assert copied["first_token_s"].to_numpy() == pytest.approx(whole["first_token_s"].to_numpy(), abs=1e-5)


def test_a_studys_own_table_is_copied_without_names(results: Path, tmp_path: Path) -> None:
    reference.export(results, tmp_path / "ref")
    kept = pd.read_csv(tmp_path / "ref" / "layer_step" / "rows.csv")
    assert len(kept) == len(analysis_store.layer_step_rows())
    assert "host" not in kept
    assert set(kept["note"]) == {"see <path>"}


def test_no_log_no_folder_and_no_host_is_copied(results: Path, tmp_path: Path) -> None:
    file = next((results / "tp_scaling").glob("base*/summary.json"))
    said = json.loads(file.read_text())
    said["environment"] |= {
        "host": platform.node(),
        "platform": "Linux 6.1.0-somebodys x86_64",
        "slurm": {"a": "b"},
    }
    file.write_text(json.dumps(said))
    written = reference.export(results, tmp_path / "ref")
    text = "\n".join(f.read_text() for f in written if f.suffix in (".json", ".csv"))
    assert "engine.log" not in {f.name for f in written}
    assert not [w for w in (platform.node(), str(Path.home()), "somebodys", "/usr/lib", "slurm") if w in text]
    assert "start: <path>: it broke" in text
    assert '"platform": "Linux x86_64"' in text
    assert load(tmp_path / "ref")["log"].isna().all()


def test_a_host_name_that_hides_in_a_label_stops_the_copy(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "node", lambda: "uniform")
    with pytest.raises(UserError, match="host's name 'uniform'"):
        reference.export(results, tmp_path / "ref")


@pytest.mark.parametrize("git", [analysis_store.DIRTY, {"sha": None, "dirty": None}])
def test_numbers_of_a_dirty_tree_are_refused(results: Path, tmp_path: Path, git: dict[str, object]) -> None:
    analysis_store.write_cell(tmp_path, "tessa", [90.0], git=git)
    with pytest.raises(UserError, match="cannot be a reference"):
        reference.export(results, tmp_path / "ref")
    assert not (tmp_path / "ref").exists()


@pytest.mark.parametrize("change", [{"git_dirty": True}, {"git_sha": None}, {"git_dirty": None}])
def test_a_table_with_a_row_of_a_dirty_tree_is_refused(
    results: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    file = results / "layer_step" / "rows.csv"
    rows = pd.read_csv(file)
    last = rows.iloc[-1:].assign(**change)
    pd.concat([rows.iloc[:-1], last]).to_csv(file, index=False)
    with pytest.raises(UserError, match="layer_step was made on a tree"):
        reference.export(results, tmp_path / "ref")
    assert not (tmp_path / "ref").exists()


def test_a_study_must_say_where_it_comes_from(results: Path, tmp_path: Path) -> None:
    folder = results / "projection"
    folder.mkdir()
    pd.DataFrame({"x": [1.0]}).to_parquet(folder / "projection.parquet")
    with pytest.raises(UserError, match="projection was made on a tree"):
        reference.export(results, tmp_path / "ref")
    said = folder / "environment.json"
    said.write_text(json.dumps({"git_start": analysis_store.DIRTY}))
    with pytest.raises(UserError, match="projection was made on a tree"):
        reference.export(results, tmp_path / "ref")
    said.write_text(json.dumps({"git_start": analysis_store.CLEAN}))
    reference.export(results, tmp_path / "ref")
    assert json.loads((tmp_path / "ref" / "projection" / "environment.json").read_text())["git_start"] == (
        analysis_store.CLEAN
    )


def test_a_second_export_replaces_its_experiments_and_leaves_the_others(
    results: Path, tmp_path: Path
) -> None:
    out = tmp_path / "ref"
    (out / "tp_scaling" / "old").mkdir(parents=True)
    (out / "mine").mkdir()
    (out / "mine" / "rows.csv").write_text("a\n1\n")
    reference.export(results, out)
    assert not (out / "tp_scaling" / "old").exists()
    assert (out / "mine" / "rows.csv").exists()


def test_the_command_says_how_large_the_copy_is(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["export", str(results), str(tmp_path / "ref")]) == 0
    assert "MB" in capsys.readouterr().out
    monkeypatch.setattr(reference, "MOST_BYTES", 10)
    assert main(["export", str(results), str(tmp_path / "ref")]) == 1
    (tmp_path / "nothing").mkdir()
    assert main(["export", str(tmp_path / "nothing"), str(tmp_path / "ref")]) == 2
    assert "holds no results" in capsys.readouterr().err
