"""Figures of the layer step: which rows a curve takes, and that files are drawn."""

from __future__ import annotations

from pathlib import Path

import analysis_store
import pandas as pd
import pytest

from analysis import layer_step
from tessa.errors import UserError


@pytest.fixture
def frame() -> pd.DataFrame:
    return analysis_store.layer_step_rows()


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("tp", [1, 2, 4]),
        ("sequences", [1, 8, 32]),
        ("distinct", [1, 2, 8]),
        ("resident", [2, 8]),
        ("rank", [16, 64]),
    ],
)
def test_a_curve_varies_one_axis_from_the_start(frame: pd.DataFrame, axis: str, values: list[int]) -> None:
    rows = layer_step.along(frame, axis)
    assert sorted(rows[rows.variant == "tessa"].x) == values


@pytest.mark.parametrize(
    "other", [{"device": "cpu"}, {"machine": "another gpu"}, {"dtype": "float32"}, {"scale": 8}, {}]
)
def test_no_curve_mixes_machines_or_precisions(frame: pd.DataFrame, other: dict[str, object]) -> None:
    """Rows of another setting are left out, and of the same one the latest stay, wherever they stand in the file."""
    old = frame.assign(measured_at="2025-01-01", adapter_cost_kernels=9.0, **other)
    kept = layer_step.newest(pd.concat([frame, old]))
    assert len(kept) == len(layer_step.newest(frame))
    assert kept.adapter_cost_kernels.max() < 1


def test_rows_that_do_not_say_where_they_were_measured_are_not_drawn(frame: pd.DataFrame) -> None:
    with pytest.raises(UserError, match="on which machine"):
        layer_step.newest(frame.drop(columns="machine"))


def test_figures_are_drawn_of_the_newest_device(frame: pd.DataFrame, tmp_path: Path) -> None:
    old = frame.assign(device="cpu", measured_at="2025-01-01", adapter_cost_kernels=9.0)
    (tmp_path / "layer_step").mkdir()
    pd.concat([old, frame]).to_csv(tmp_path / "layer_step" / "rows.csv", index=False)
    paths = layer_step.draw(tmp_path, tmp_path / "figures")
    assert [p.name for p in paths if p.suffix == ".png"] == ["layer_step_tp.png", "layer_step_sweeps_m.png"]
    assert all(path.stat().st_size > 1000 for path in paths)
    figure = layer_step.cost_over_tp(frame)
    lines = figure.axes[0].get_lines()
    drawn = {line.get_label(): list(line.get_ydata()) for line in lines}
    assert drawn["TESSA"] == pytest.approx([10, 20, 40])


def test_no_rows_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.py experiment=layer_step"):
        layer_step.read(tmp_path)
