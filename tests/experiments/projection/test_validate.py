"""Calibration constants, held-out errors, the check on measured cells, and the files that a run writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.projection import bands, calibrate, hardware, validate
from experiments.projection.reference import find_reference, slora_figure
from experiments.projection.runner import ProjectionSpec, crossovers, project, run
from experiments.projection.slora_paper import fitting_batch, predict, resident_tokens
from experiments.projection.step import Setting
from tessa.errors import UserError


@pytest.fixture(scope="module")
def reference(shared_dir: Path) -> Path:
    return shared_dir / "reference"


def test_held_out_errors_meet_the_aim(reference: Path) -> None:
    errors = validate.layer_op_errors(reference)
    held = errors[errors.held_out]
    assert set(held.model) == {"llama-3.1-8b", "llama-3.1-70b", "llama-2-70b"}
    assert (held.ratio - 1).abs().median() < 0.10
    assert np.all(held.groupby(["gpu", "kind"]).ratio.median().between(0.8, 1.2))


def test_written_constants_are_those_of_the_fit(reference: Path) -> None:
    for name, fitted in calibrate.calibrate(reference).items():
        gpu = hardware.GPUS[name]
        assert fitted["matmul"].memory_share == pytest.approx(gpu.matmul.memory_share, rel=0.02)
        assert fitted["matmul"].flop_share == pytest.approx(gpu.matmul.flop_share, rel=0.02)
        for ranks, link in fitted["nccl"].items():
            assert link.bus_bandwidth == pytest.approx(gpu.nccl[ranks].bus_bandwidth, rel=0.02)
            assert link.alpha_s == pytest.approx(gpu.nccl[ranks].alpha_s, rel=0.05)


def test_written_bands_are_the_held_out_quantiles(reference: Path) -> None:
    found = validate.validation(None, reference)
    ends = [found[f"layer_sum_ratio_{q}"] for q in ("p10", "p90")]
    assert ends == pytest.approx(bands.LAYER_RATIO, abs=0.01)
    ends = [found[f"all_reduce_ratio_{q}"] for q in ("p10", "p90")]
    assert ends == pytest.approx(bands.COLLECTIVE_RATIO, abs=0.02)
    assert found["measured_cells_median_error"] is None
    assert "no measured cells" in found["measured_cells_reason"]
    assert found["slora_loss_4_gpus_worst_error_points"] < 10
    assert 0.05 < found["slora_base_only_repeat_difference"] < 0.1  # 1.21 and 1.31 requests/s


def test_slora_prediction_does_not_read_the_columns_that_it_predicts(reference: Path) -> None:
    figure = slora_figure(reference)
    assert list(figure.columns) == [
        "model", "gpus", "gpu", "adapters", "slora", "slora_no_lora_communication", "base_only",
    ]  # fmt: skip
    errors = validate.slora_errors(reference)
    assert errors.error_points.abs().max() < 12
    assert errors.predicted_loss.corr(errors.loss) > 0.7
    assert (errors.predicted_loss > errors.predicted_loss_without_communication).all()


def test_slora_pool_gives_way_to_adapters() -> None:
    base = 20 * resident_tokens()
    few, distinct_few = fitting_batch(base, 1, 64)
    many, distinct_many = fitting_batch(base, 1000, 64)
    assert fitting_batch(base, 0, 64)[0] == pytest.approx(20)
    assert 20 > few > many
    assert distinct_few <= 1 < distinct_many
    p = predict("slora-70b", "a100-80", 4, 10, 3.46)
    assert 0 < p.loss_without_communication < p.loss < 1


def test_absent_reference_gives_nulls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TESSA_SHARED", str(tmp_path))
    assert find_reference() is None
    found = validate.validation(pd.DataFrame())
    assert found["layer_ops_median_error"] is None
    assert found["slora_loss_worst_error_points"] is None
    with pytest.raises(UserError, match="no folder of reference data"):
        find_reference(tmp_path / "absent")


def test_bands_hold_the_value() -> None:
    setting = Setting("llama-3.1-70b", "h100", 8)
    for backend in ("base", "punica", "slora", "tessa"):
        for e in (
            bands.step_estimate(backend, setting),
            bands.cost_estimate(backend, setting),
            bands.speedup_estimate(backend, "slora", setting),
        ):
            assert e.low <= e.value <= e.high
    wide = bands.cost_estimate("slora", setting)
    assert wide.high - wide.low > 0.05


SMALL = ProjectionSpec(models=("llama-3.1-8b",), gpus=("h100",), tps=(1, 8, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ()}, "models is empty; give at least one, such as llama-3.1-8b"),
        ({"models": ("x",)}, "unknown model shape 'x'"),
        ({"gpus": ("x",)}, "unknown GPU 'x'"),
        ({"tps": (1, 1)}, r"tps=\[1, 1\] names 1 twice"),
        ({"tps": (0,)}, "tps=0 is too small"),
        ({"rank": 0}, "rank=0 is too small"),
    ],
)
def test_a_mistake_names_what_is_allowed(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ProjectionSpec(**change)


def test_run_writes_all_files_and_skips_tp_that_does_not_split(tmp_path: Path) -> None:
    out = run(SMALL, tmp_path / "projection")
    frame = pd.read_parquet(out / "projection.parquet")
    assert set(frame.provenance) == {"modelled"}
    assert set(frame[frame.sweep == "tp"].tp) == {1, 8}
    assert not frame.drop(columns="mode").isna().any().any()
    assert json.loads((out / "assumptions.json").read_text())["spec"]["rank"] == 16
    assert "layer_ops_median_error" in json.loads((out / "validation.json").read_text())
    assert not list(out.glob("*.part"))


def test_crossover_is_the_least_x_that_loses() -> None:
    found = crossovers(project(SMALL)).set_index(["sweep", "backend", "rival"]).x
    wide = found["resident", "tessa_wide", "bd_lora"]
    assert np.isnan(wide) or wide > 8
    frame = pd.DataFrame(
        {"sweep": "rank", "model": "m", "gpu": "g", "x": [1, 2, 4] * 2, "backend": ["tessa"] * 3 + ["slora"] * 3,
         "step_s": [1, 2, 5, 3, 3, 3]}
    )  # fmt: skip
    assert crossovers(frame).set_index("rival").x["slora"] == 4
