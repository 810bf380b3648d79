"""Figures of the layer step: which rows a curve takes, and that files are drawn."""

from __future__ import annotations

import json
from pathlib import Path

import analysis_store
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from analysis import figures, layer_step, load, style
from analysis.report import own_tables
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
    "other",
    [
        {"device": "cpu"}, {"machine": "another gpu"}, {"dtype": "float32"}, {"scale": 8}, {"base_fraction": 0.5},
        {"interconnect": "h100"}, {"custom_all_reduce": False}, {"layers": 16}, {},
    ],
)  # fmt: skip
def test_no_curve_mixes_machines_or_settings(frame: pd.DataFrame, other: dict[str, object]) -> None:
    """Rows of another setting are left out, and of the same one the latest stay, wherever they stand in the file."""
    old = frame.assign(measured_at="2025-01-01", adapter_cost_kernels=9.0, **other)
    kept = layer_step.newest(pd.concat([frame, old]))
    assert len(kept) == len(layer_step.newest(frame))
    assert kept.adapter_cost_kernels.max() < 1
    # A row that the newest run does not have is not filled up with an older one's.
    fewer = layer_step.newest(pd.concat([frame[frame.variant != "punica"], old]))
    assert "punica" not in set(fewer.variant) or not other


def test_the_number_of_timed_layers_may_depend_on_the_degree(frame: pd.DataFrame) -> None:
    assert len(layer_step.newest(frame.assign(layers=frame.tp * 2))) == len(layer_step.newest(frame))


def test_the_table_over_tp_holds_one_setting(frame: pd.DataFrame) -> None:
    """A later run of TESSA alone at another rank is a setting of its own, as in the figure."""
    mine = (frame.variant.isin(["base", "tessa"])) & (frame.sweep == "tp") & (frame.phase == "decode")
    later = frame[mine].assign(rank=32, adapter_cost_kernels=0.9, measured_at="2026-02-01")
    rows = layer_step.newest(pd.concat([frame, later]))
    over_tp = layer_step.over_tp(rows)
    assert set(over_tp.loc[over_tp.phase == "decode", "rank"]) == {32}
    (table,) = own_tables._layer_step(rows, Path())
    decode = [dict(zip(table.heads, row, strict=True)) for row in table.rows if row[1] == "decode"]
    assert [(row["TESSA"], row["Punica"]) for row in decode] == [("90.0", "-")] * 3


def test_rows_that_do_not_say_where_they_were_measured_are_not_drawn(frame: pd.DataFrame) -> None:
    with pytest.raises(UserError, match="with which machine they were measured; delete"):
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


@pytest.fixture
def linked(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows with known links: base's kernels take 1 ms, S-LoRA's collectives as long over several ranks."""
    rows = pd.concat([frame, frame[frame.variant == "punica"].assign(variant="slora")], ignore_index=True)
    kernels = 1e-3 / (1 - rows.adapter_cost_kernels)
    gathered = ((rows.variant == "slora") & (rows.tp > 1)).astype(float)
    step = kernels + 1e-3 * gathered
    return rows.assign(
        kernels_s=kernels, adapter_comm_s=1e-3 * gathered, step_s=step, adapter_cost=1 - 1e-3 / step,
        adapter_collectives_per_step=128 * gathered, model_layers=32, interconnect="h200",
    )  # fmt: skip


def test_collectives_are_a_part_of_the_cost_and_of_the_speed_up(linked: pd.DataFrame, tmp_path: Path) -> None:
    figure = layer_step.with_collectives(linked)
    top, bottom = figure.axes
    bars = [b for b in top.patches if b.get_facecolor()[:3] == to_rgb(style.colour("slora"))]
    parts = {kind: [b for b in bars if b.get_hatch() == style.HATCHES[kind]] for kind in layer_step.PARTS}
    slora = linked[(linked.variant == "slora") & (linked.sweep == "tp") & (linked.phase == "decode")]
    gathered = [b.get_height() for b in parts["modelled"]]
    assert gathered == pytest.approx(list(100 * slora.adapter_comm_s / slora.step_s))
    assert gathered[0] == 0
    whole = [a.get_height() + b.get_height() for a, b in zip(*parts.values(), strict=True)]
    assert whole == pytest.approx(list(100 * slora.adapter_cost))
    assert [b.get_y() for b in parts["modelled"]] == pytest.approx(
        [b.get_height() for b in parts["emulated"]]
    )
    tessa = linked[(linked.variant == "tessa") & (linked.sweep == "tp") & (linked.phase == "decode")]
    (line,) = [x for x in bottom.get_lines() if x.get_color() == style.colour("tessa")]
    assert list(line.get_ydata()) == pytest.approx(list(slora.step_s.to_numpy() / tessa.step_s.to_numpy()))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["Punica (+0)", "S-LoRA (+4)", "TESSA (+0)", *layer_step.PARTS.values()]
    (tmp_path / "layer_step").mkdir()
    linked.to_csv(tmp_path / "layer_step" / "rows.csv", index=False)
    drawn = figures.draw_all(load(tmp_path), tmp_path, tmp_path, experiments=("layer_step",))
    said = json.loads((tmp_path / "layer_step_collectives.json").read_text())
    assert tmp_path / "layer_step_collectives.png" in drawn.paths
    assert said["provenance"] == ["emulated", "modelled"]


def test_without_known_links_there_is_no_figure_of_collectives(linked: pd.DataFrame) -> None:
    assert layer_step.knows_collectives(linked)
    unknown = linked.assign(adapter_cost=linked.adapter_cost.where(linked.tp == 1), interconnect=None)
    assert not layer_step.knows_collectives(unknown)


def test_no_rows_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.py experiment=layer_step"):
        layer_step.read(tmp_path)


def test_a_disturbed_round_does_not_flatten_the_curves(frame: pd.DataFrame) -> None:
    before = layer_step.cost_over_tp(frame).axes[0].get_ylim()
    wild = frame.assign(adapter_cost_kernels_low=-30.0)
    low, high = layer_step.cost_over_tp(wild).axes[0].get_ylim()
    assert high - low < 3 * (before[1] - before[0])
    assert low < 0


def test_variants_off_the_budget_are_marked(frame: pd.DataFrame) -> None:
    assert layer_step.off_note(frame) == ""
    rows = frame.assign(budget_ratio=1.0, padding_ratio=1.0)
    punica = rows.variant == "punica"
    rows.loc[punica, "budget_ratio"] = rows.tp.map({1: 1.0, 2: 0.9, 4: 1.2})
    rows.loc[rows.variant == "tessa", "padding_ratio"] = 1.25
    figure = layer_step.cost_over_tp(rows)
    said = figure.get_suptitle().replace("\n", " ")
    assert "† parameters more than 5 % off LoRA's: Punica 0.90 to 1.20 times" in said
    assert said.endswith("computed with padding: TESSA 1.25 times the parameters")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["Punica †", "TESSA", "TESSA, wide only"]
    (report,) = own_tables._layer_step(rows, Path())
    assert "Punica 0.90 to 1.20 times" in report.note
    assert report.heads[-3:] == ["Punica †", "TESSA", "TESSA (wide)"]
