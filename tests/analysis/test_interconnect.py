"""Slopes, predictions and crossings of added latencies, from rows with known step times."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis import collectives, interconnect

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
                        "step_s_added": step + noise * longer, **more,
                    }
                )  # fmt: skip
    return pd.DataFrame(found)


def test_the_slope_is_the_count() -> None:
    found = interconnect.slopes(rows()).set_index("variant")
    assert found.counted.to_dict() == COUNTS
    assert found.ratio.to_numpy() == pytest.approx(1)
    assert interconnect.slopes(rows(noise=1.2)).ratio.to_numpy() == pytest.approx(1.2)


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
    frame.to_csv(tmp_path / "collectives" / "rows.csv", index=False)
    found = collectives.errors(tmp_path)
    assert found["collectives_median_error"] == pytest.approx(0, abs=1e-3)
    assert found["collectives_worst_error"] == pytest.approx(0.5, abs=0.01)  # base's message is twice as slow
    assert found["collectives_layer_worst_error"] == pytest.approx(0.5, abs=0.01)
    assert found["collectives_rows"] == 10
    assert all(path.stat().st_size > 0 for path in collectives.draw(tmp_path, tmp_path / "figures"))
