"""Figures of the layer step: which rows a curve takes, and that files are drawn."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis import layer_step
from tessa.errors import UserError

START = {"tp": 4, "sequences": 8, "length": 16, "rank": 16, "distinct": 2, "resident": 2}


def row(variant: str, sweep: str, cost: float, phase: str = "decode", **change: int) -> dict[str, object]:
    settings = {**START, **change}
    return {
        "variant": variant, "model": "m", "phase": phase, "sweep": sweep, "status": "complete", **settings,
        "tokens": settings["sequences"], "device": "gpu", "dtype": "bfloat16", "scale": 1, "measured_at": "2026-01-01",
        "adapter_cost_kernels": cost, "adapter_cost_kernels_low": cost - 0.01, "adapter_cost_kernels_high": cost + 0.01,
    }  # fmt: skip


@pytest.fixture
def frame() -> pd.DataFrame:
    rows = []
    for variant in ("base", "punica", "tessa", "tessa:wide"):
        rows += [row(variant, "tp", 0.1 * tp, tp=tp) for tp in (1, 2, 4)]
        rows += [row(variant, "batch", 0.3, sequences=n, distinct=min(2, n)) for n in (1, 32)]
        rows += [row(variant, "distinct", 0.3, distinct=n, resident=n) for n in (1, 8)]
        rows += [row(variant, "resident", 0.3, resident=8), row(variant, "rank", 0.3, rank=64)]
        rows += [row(variant, "tp", 0.2, "prefill", tp=tp) for tp in (1, 4)]
    return pd.DataFrame(rows)


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
