"""Figures and the claims table of the projection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis import projection
from analysis.claims import evidence
from analysis.report import own_tables
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


@pytest.mark.parametrize(
    ("change", "left_out"),
    [
        ({"backends": ("base", "tessa")}, set()),
        ({"backends": ("base", "slora")}, {"speedup"}),
        ({"backends": ("base",)}, {"cost", "cost_nccl_only", "speedup", "shares", "interconnect"}),
        ({"custom_all_reduce": (False,)}, {"cost", "speedup", "shares"}),
        ({"sweep_tp": 3}, {"crossovers", "interconnect"}),
    ],
)
def test_what_was_not_projected_is_left_out(tmp_path: Path, change: dict, left_out: set[str]) -> None:
    spec = ProjectionSpec(**{"models": ("llama-3.1-8b",), "gpus": ("h100",), "tps": (1, 2), **change})
    run(spec, tmp_path / "projection")
    drawn = {path.stem for path in projection.draw(tmp_path, tmp_path / "figures")}
    names = {"cost", "cost_nccl_only", "speedup", "crossovers", "shares", "interconnect", "claims"}
    assert drawn - {"projection_validation"} == {f"projection_{name}" for name in names - left_out}


def test_a_backend_not_projected_is_nan_in_the_claims_and_no_evidence(tmp_path: Path) -> None:
    spec = ProjectionSpec(models=("llama-3.1-8b",), gpus=("h100",), tps=(1, 2), backends=("base", "tessa"))
    run(spec, tmp_path / "projection")
    table = projection.claims(projection.read(tmp_path))
    assert list(table.tp) == [1, 2]
    assert table[["C1_punica_cost", "C1_slora_cost_low", "C4_slora_collectives"]].isna().all(axis=None)
    assert table[["C1_tessa_cost", "C4_tessa_collectives", "C6_tessa_over_slora"]].notna().all(axis=None)
    found = evidence.from_projection(tmp_path)
    assert {claim: len(entries) for claim, entries in found.items()} == {"C1": 0, "C2": 0, "C4": 1, "C6": 2}
    figure = projection.cost_over_tp(projection.read(tmp_path))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["TESSA", projection.BOUND]
    (numbers, *_) = own_tables.study("projection", tmp_path).tables
    assert [dict(zip(numbers.heads, row, strict=True))["C4: S-LoRA"] for row in numbers.rows] == ["-", "-"]


def test_missing_projection_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="experiment=projection"):
        projection.read(tmp_path)


def test_validation_without_cells_has_null_for_them(tmp_path: Path) -> None:
    found = projection.validation(tmp_path)
    assert found["measured_cells_median_error"] is None
    assert {"layer_ops_median_error", "layer_ops_worst_error", "slora_loss_worst_error_points"} <= set(found)
