"""The notebooks run from top to bottom, on a full store, on an empty one, and on what comes with the project."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import analysis_store
import jupytext
import pytest
from nbclient import NotebookClient

from analysis import notebook

FOLDER = Path(notebook.__file__).parent / "notebooks"
NAMES = ("overview", "serving", "quality", "projection")


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo_root: Path) -> Any:
    """Runs notebooks one after another in one kernel and returns the cells of each with their outputs."""

    def run(results: Path, *names: str) -> list[list[Any]]:
        for variable, folder in (("JUPYTER_RUNTIME_DIR", "runtime"), ("IPYTHONDIR", "ipython")):
            monkeypatch.setenv(variable, str(tmp_path / folder))
        monkeypatch.setenv("PYTHONPATH", str(repo_root))
        monkeypatch.setenv("TESSA_RESULTS", str(results))
        read = [jupytext.read(FOLDER / f"{name}.py") for name in names]
        joined = copy.copy(read[0])
        joined.cells = [cell for one in read for cell in one.cells]
        NotebookClient(
            joined, timeout=120, kernel_name="python3", resources={"metadata": {"path": FOLDER}}
        ).execute()
        return [one.cells for one in read]

    return run


def outputs(cells: list[Any]) -> tuple[str, int]:
    """All printed text and tables, and the number of figures."""
    found = [output for cell in cells for output in cell.get("outputs", [])]
    data = [output.get("data", {}) for output in found]
    text = [output.get("text", "") for output in found] + [entry.get("text/plain", "") for entry in data]
    return "\n".join(text), sum("image/png" in entry for entry in data)


def test_all_are_there_and_thin() -> None:
    files = sorted(FOLDER.glob("*"))
    assert sorted(NAMES) == [file.stem for file in files if file.suffix == ".py"]
    assert not [file for file in files if file.suffix == ".ipynb"], (
        "kept as text; outputs do not belong in git"
    )
    for file in files:
        if file.suffix == ".py":
            code = [c.source for c in jupytext.read(file).cells if c.cell_type == "code"]
            assert not any("def " in source or "plt." in source for source in code), file
            assert sum(len(source.splitlines()) for source in code) < 40, file


@pytest.mark.parametrize(
    ("name", "figures", "said"),
    [
        ("overview", 1, ["C6", "tp_scaling", "output_tokens_per_s"]),
        ("serving", 10, ["slora:communication=off", "missing: adapter_count/slora"]),
        ("quality", 1, ["base7_addition", "C5"]),
        ("projection", 6, ["layer_ops_median_error", "C6_tessa_over_slora", "layer_step, emulated"]),
    ],
)
def test_a_notebook_shows_a_users_results(
    execute: Any, complete_results: Path, name: str, figures: int, said: list[str]
) -> None:
    (cells,) = execute(complete_results, name)
    text, images = outputs(cells)
    assert images >= figures
    for words in said:
        assert words in text
    assert "No cells are stored" not in text


def test_every_notebook_runs_without_results_and_says_so(execute: Any, tmp_path: Path) -> None:
    for name, cells in zip(NAMES, execute(tmp_path / "empty", *NAMES), strict=True):
        text, images = outputs(cells)
        assert "No cells are stored below" in text, name
        assert "TESSA_RESULTS" in text, name
        assert images == 0, name


def test_out_of_the_box_it_is_the_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store_cell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TESSA_RESULTS", raising=False)
    monkeypatch.setattr(notebook, "REPO", tmp_path)
    monkeypatch.setattr(notebook, "REFERENCE", tmp_path / "results" / "reference")
    assert notebook.Results().folder == tmp_path / "results"
    store_cell("base", [1.0])
    (tmp_path / "results").rename(tmp_path / "reference")
    (tmp_path / "results").mkdir()
    (tmp_path / "reference").rename(tmp_path / "results" / "reference")
    assert notebook.Results().folder == tmp_path / "results" / "reference"
    assert notebook.Results("results").folder == tmp_path / "results"
    shown = tmp_path / "results" / "reference_x1" / "layer_step"
    shown.mkdir(parents=True)
    analysis_store.layer_step_rows().to_csv(shown / "rows.csv", index=False)
    capsys.readouterr()
    notebook.Results().show("layer_step", "tp_scaling")
    said = capsys.readouterr().out
    assert "layer_step is from results/reference_x1:\nlayer_step, emulated" in said
    assert "tp_scaling is from" not in said


def test_equal_cells_of_two_experiments_count_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for experiment in ("tp_scaling", "breakdown"):
        analysis_store.write_cell(tmp_path, "tessa", [1.0], experiment=experiment)
    notebook.Results(tmp_path / "results")
    assert capsys.readouterr().out.startswith("2 cells of 2 experiments in ")
