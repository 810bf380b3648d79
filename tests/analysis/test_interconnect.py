"""Slopes, predictions and crossings of added latencies, from rows with known step times."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis import collectives, interconnect
from analysis.figures import interconnect as drawn

LAYERS, STEPS, TOKENS = 4, 40, 1024
COUNTS = {"base": 10, "slora": 26, "tessa": 10}
STEP_S = {"base": 0.050, "slora": 0.045, "tessa": 0.052}


def rows(noise: float = 1.0, **more: object) -> pd.DataFrame:
    """Three backends; S-LoRA's sharding is ahead without added latency and falls behind."""
    found = []
    for added in (0, 200, 500, 2000):
        for order, (backend, step) in enumerate(STEP_S.items()):
            for repeat in range(2):
                longer = COUNTS[backend] * added * 1e-6
                wall = STEPS * (step + longer)
                found.append(
                    {
                        "experiment": "interconnect", "status": "complete", "variant": backend, "backend_order": order,
                        "added_latency_us": added, "tp": 2, "model": "small", "family": "f", "layers": float(LAYERS),
                        "target_modules": "q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj", "repeat": repeat,
                        "output_tokens_per_s": TOKENS / wall, "wall_s": wall, "engine_steps": STEPS,
                        "step_collectives": COUNTS[backend], "step_s_plain": step,
                        "step_s_added": step + noise * longer, "step_rest_s_plain": step - 0.01,
                        "step_rest_s_added": step - 0.01 + longer, **more,
                    }
                )  # fmt: skip
    return pd.DataFrame(found)


def test_the_slope_is_the_count() -> None:
    found = interconnect.slopes(rows()).set_index("variant")
    assert found.counted.to_dict() == COUNTS
    assert found.ratio.to_numpy() == pytest.approx(1)
    noisy = interconnect.slopes(rows(noise=1.2))
    assert noisy.ratio.to_numpy() == pytest.approx(1.2)
    assert noisy.waited.tolist() == pytest.approx(noisy.counted.tolist())
    older = rows(noise=1.2).drop(columns=["step_rest_s_plain", "step_rest_s_added"])
    assert interconnect.slopes(older).waited.isna().all()
    assert interconnect.errors(older)["interconnect_waited_worst_error"] is None
    assert interconnect.errors(rows(noise=1.2))["interconnect_waited_worst_error"] == pytest.approx(
        0, abs=1e-9
    )


def test_the_prediction_reads_the_cell_without_latency_alone() -> None:
    frame = rows()
    found = interconnect.predictions(frame)
    assert found.predicted.to_numpy() == pytest.approx(found.measured.to_numpy())
    assert found.groupby("variant").collectives.first().to_dict() == COUNTS
    frame.loc[frame.added_latency_us > 0, "output_tokens_per_s"] *= 2
    again = interconnect.predictions(frame)
    assert again.predicted.to_numpy() == pytest.approx(found.predicted.to_numpy())
    assert interconnect.errors(frame)["interconnect_throughput_median_error"] == pytest.approx(0.5)


def test_counts_follow_modules_and_ablations() -> None:
    attention = "q_proj+k_proj+v_proj+o_proj"
    assert interconnect.collectives("slora", LAYERS, 2) == 26
    assert interconnect.collectives("slora", LAYERS, 2, attention) == 18
    assert interconnect.collectives("slora:communication=off", LAYERS, 2) == 10
    assert interconnect.collectives("slora", LAYERS, 1) == 0


def test_crossings_lie_where_the_curves_meet() -> None:
    found = interconnect.predictions(rows())
    (one, two) = interconnect.crossings(found, "predicted")
    assert one["between"] == ("base", "slora")
    assert one["ahead_beyond"] == "base"
    meets = (STEP_S["base"] - STEP_S["slora"]) / (16 * 1e-6)
    assert one["added_latency_us"] == pytest.approx(meets, rel=0.15)
    assert two["ahead_beyond"] == "tessa"
    assert two["added_latency_us"] > one["added_latency_us"]


def test_rows_without_the_check_give_nulls() -> None:
    for frame in (pd.DataFrame(), rows().drop(columns="step_s_added"), rows(experiment="tp_scaling")):
        assert set(interconnect.errors(frame).values()) == {None}
        assert interconnect.slopes(frame).empty


def test_collectives_without_rows_give_nulls_and_name_the_command(tmp_path: Path) -> None:
    assert set(collectives.errors(tmp_path).values()) == {None}
    with pytest.raises(Exception, match="bench_collectives"):
        collectives.read(tmp_path)


def test_collectives_from_stored_rows(tmp_path: Path) -> None:
    table = []
    for ranks, crowded in ((2, False), (4, True)):
        for kind in ("all_reduce", "all_gather", "gather"):
            for i in range(7):
                size = 1024 * 4**i
                table.append(
                    (
                        "sweep",
                        kind,
                        size,
                        1,
                        "gloo",
                        ranks,
                        (1.5 if crowded else 1) * (3e-5 + size / 1e9),
                        crowded,
                    )
                )
        table.append(("base", "all_reduce", 131072, 2, "gloo", ranks, 2 * (3e-5 + 131072 / 1e9), crowded))
    columns = ["backend", "kind", "message_bytes", "count", "transport", "ranks", "seconds", "oversubscribed"]
    (tmp_path / "collectives").mkdir()
    frame = pd.DataFrame(table, columns=columns).assign(machine="a processor, 2 cores")
    frame = frame.assign(seconds_low=0.9 * frame.seconds, seconds_high=1.2 * frame.seconds)
    frame.to_csv(tmp_path / "collectives" / "rows.csv", index=False)
    found = collectives.errors(tmp_path)
    assert found["collectives_median_error"] == pytest.approx(0, abs=1e-3)
    assert found["collectives_worst_error"] == pytest.approx(0.5, abs=0.01)  # base's message is twice as slow
    assert found["collectives_layer_worst_error"] == pytest.approx(0.5, abs=0.01)
    assert found["collectives_rows"] == 10
    assert all(path.stat().st_size > 0 for path in collectives.draw(tmp_path, tmp_path / "figures"))


def test_a_slope_has_the_range_of_single_latencies() -> None:
    frame = rows()
    assert interconnect.slopes(frame).ratio_low.to_numpy() == pytest.approx(1)
    worse = frame.added_latency_us == 200
    frame.loc[worse, "step_s_added"] += frame.step_collectives[worse] * 1e-4
    found = interconnect.slopes(frame)
    assert found.ratio_low.to_numpy() == pytest.approx(1)
    assert found.ratio_high.to_numpy() == pytest.approx(1.5)
    assert (found.ratio < 1.1).all()


def test_the_prediction_starts_from_the_mean_that_is_drawn() -> None:
    frame = pd.concat([rows(), rows()[lambda part: part.repeat == 0].assign(repeat=2)])
    frame.loc[(frame.added_latency_us == 0) & (frame.repeat == 2), "output_tokens_per_s"] *= 1.3
    found = interconnect.predictions(frame)
    start = found[found.added_latency_us == 0]
    means = frame[frame.added_latency_us == 0].groupby("variant", sort=False).output_tokens_per_s.mean()
    assert start.predicted.to_numpy() == pytest.approx(means.to_numpy())
    assert start.measured.to_numpy() == pytest.approx(means.to_numpy())


def test_the_figure_says_that_a_panel_is_modelled() -> None:
    labels = {
        "provenance": "emulated", "dtype": "float32", "device": "cpu", "cell": "c", "git_sha": "c" * 40,
        "git_dirty": False, "num_requests": 8, "workload_hash": "0123", "machine": "a CPU", "num_adapters": 2,
    }  # fmt: skip
    frame, notes = rows(**labels), {}
    figure = drawn.against_latency(frame, notes)
    assert notes["provenance"] == ["emulated", "modelled"]
    assert notes["caption"].endswith("the middle panel is modelled")
    assert {"emulated", "modelled"} <= {text.get_text() for text in figure.legends[0].get_texts()}
    assert figure.get_supxlabel().startswith("emulated/modelled; ")
    left, middle, right = figure.axes
    curves = {x.get_color(): x.get_ydata() for x in middle.lines}
    for line in (x for x in left.lines if len(x.get_xdata()) == 4):
        assert line.get_ydata() == pytest.approx(curves[line.get_color()])
    assert sum(str(x.get_gid()).startswith("range ") for x in right.lines) == 3
