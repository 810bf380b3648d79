"""Figures: what is drawn is what is stored."""

from __future__ import annotations

import pytest
from matplotlib import pyplot as plt

from analysis import figures, load, style
from analysis.__main__ import main, report
from baselines import REGISTRY


@pytest.fixture
def frame(store_cell, tmp_path):
    store_cell("base", [100.0, 110.0, 90.0])
    store_cell("tessa", [90.0, 99.0, 81.0], base=[100.0, 110.0, 90.0])
    store_cell("slora", [50.0], status="failed")
    store_cell("tessa", [45.0, 46.0], tp=2, base=[50.0, 50.0], provenance="emulated")
    return load(tmp_path / "results")


def test_png_and_pdf_per_setting(frame, tmp_path):
    paths = figures.draw(frame, tmp_path / "f")
    assert [p.name for p in paths] == ["tp_scaling_tiny_abcd1234.png"]
    assert paths[0].read_bytes()[:4] == b"\x89PNG"
    assert paths[0].with_suffix(".pdf").read_bytes()[:4] == b"%PDF"
    before = paths[0].with_suffix(".pdf").read_bytes()
    figures.draw(frame, tmp_path / "f")
    assert paths[0].with_suffix(".pdf").read_bytes() == before


def test_bars_are_the_means_and_gaps_are_named(frame):
    figure = figures.throughput_and_cost(frame)
    left, right = figure.axes
    bars = {(round(b.get_x() + b.get_width() / 2, 2), round(b.get_height(), 3)) for b in left.patches}
    assert sorted(height for _, height in bars) == [45.5, 90.0, 100.0]
    assert sorted(b.get_height() for b in right.patches) == pytest.approx([9.0, 10.0], abs=0.01)
    assert [t.get_text() for t in left.texts] == ["failed"]
    assert [b.get_hatch() for b in left.patches].count(style.HATCHES["emulated"]) == 1
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert labels == ["base", "S-LoRA", "TESSA", "emulated"]
    assert "commit cccccccccc" in figures.caption(frame)
    plt.close(figure)


def test_every_backend_has_its_own_colour_and_name():
    assert set(style.COLOURS) == set(style.NAMES) == set(style.MARKERS)
    assert all(style.colour(backend) and style.name(backend) for backend in REGISTRY)
    assert len(set(style.COLOURS.values())) == len(style.COLOURS)
    assert style.colour("punica:stock") == style.colour("punica")
    assert style.name("slora:compute=off") == "S-LoRA (compute=off)"
    assert style.colour("something_new") in style.SPARE_COLOURS


def test_command_line(frame, store_cell, tmp_path, capsys):
    assert main(["table", str(tmp_path / "results")]) == 0
    assert "tessa" in capsys.readouterr().out
    assert main(["figures", str(tmp_path / "results")]) == 0
    assert capsys.readouterr().out.strip().endswith("results/figures/tp_scaling_tiny_abcd1234.png")
    assert main(["figures", str(tmp_path / "none")]) == 0
    assert "no stored cells" in capsys.readouterr().out
    store_cell("merged", [1.0], schema_version=9)
    assert main(["table", str(tmp_path / "results")]) == 2
    assert "schema version 9" in capsys.readouterr().err


def test_report_shows_the_settings_of_its_cells(frame, store_cell, tmp_path, capsys):
    other = store_cell("base", [7.0], setting="ffff0000")
    paths = report(tmp_path / "results", "tp_scaling", [other.name])
    assert [p.name for p in paths] == ["tp_scaling_tiny_ffff0000.png"]
    out = capsys.readouterr().out
    assert f"figure: {paths[0]}" in out
    assert "tessa" not in out.split("figure:")[0].split("requests =")[0]
