"""Figures and the claims table of the projection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis import projection
from experiments import provenance
from experiments.projection.runner import ProjectionSpec, run
from tessa.errors import UserError


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    run(ProjectionSpec(models=("llama-3.1-8b",), gpus=("h100",), tps=(1, 2, 8)), folder / "projection")
    return folder


def test_claims_table_has_a_row_per_tp_with_bands(results: Path) -> None:
    table = projection.claims(projection.read(results))
    assert list(table.tp) == [1, 2, 8]
    assert (table.C4_tessa_collectives == 0).all()
    assert list(table.C4_slora_collectives) == [0, 4 * 32, 4 * 32]
    assert (table.C2_parameter_share < 0.01).all()
    assert (table.C6_tessa_over_slora_low <= table.C6_tessa_over_slora).all()
    assert table.C1_slora_cost.is_monotonic_increasing
    assert set(table.provenance) == {"modelled"}


def test_a_projection_names_its_commit(results: Path) -> None:
    said = json.loads((results / "projection" / "environment.json").read_text())
    assert said["git_start"] == provenance.git_state()
    assert "pandas" in said["packages"]


def test_draw_writes_png_pdf_and_the_table(results: Path, tmp_path: Path) -> None:
    paths = projection.draw(results, tmp_path / "figures")
    assert all(path.is_file() and path.stat().st_size > 0 for path in paths)
    stems = {path.stem for path in paths}
    assert {"projection_cost", "projection_speedup", "projection_crossovers", "projection_claims"} <= stems


def test_curves_say_with_which_all_reduce_they_were_modelled(results: Path) -> None:
    frame = projection.read(results)
    for custom, said in ((True, "custom all-reduce"), (False, "NCCL's all-reduce")):
        figure = projection.cost_over_tp(frame, custom_all_reduce=custom)
        assert said in figure.get_suptitle()
        projection.plt.close(figure)


def test_missing_projection_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="experiment=projection"):
        projection.read(tmp_path)


def test_validation_without_cells_has_null_for_them(tmp_path: Path) -> None:
    found = projection.validation(tmp_path)
    assert found["measured_cells_median_error"] is None
    assert {"layer_ops_median_error", "layer_ops_worst_error", "slora_loss_worst_error_points"} <= set(found)
