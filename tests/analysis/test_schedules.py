"""TESSA's schedules: the rule's regret by hand, the figure's lines, and a short real run."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from analysis import schedules
from analysis.__main__ import main
from analysis.figures import draw_all
from analysis.load import load
from experiments import bench_schedules
from tessa.errors import UserError


@pytest.fixture
def rows() -> pd.DataFrame:
    """Two layers; wide is the faster one in the first alone, and the rule takes it for both at 2 slots."""
    made = []
    for slots, distinct in ((1, 1), (2, 1), (2, 2)):
        for layer, wide, segmented in (("qkv", 12.0, 15.0), ("o", 30.0, 20.0)):
            made.append(
                {
                    "layer": layer,
                    "tokens": 64,
                    "slots": slots,
                    "distinct": distinct,
                    "base_us": 10.0,
                    "wide_us": wide * slots,
                    "segmented_us": segmented,
                    "chose_wide": slots == 2,
                    "model": "small",
                    "tp": 1,
                    "rank": 4.0,
                    "threads": 1,
                    "machine": "a CPU, 2 cores",
                }
            )
    return pd.DataFrame(made)


def test_the_rules_regret_is_over_the_better_schedule_of_each_layer(rows: pd.DataFrame) -> None:
    table = schedules.summary(rows)
    one, two = table.loc[(64, 1, 1)], table.loc[(64, 2, 2)]
    assert (one["rule_us"], one["best_us"]) == (35, 32)
    assert (two["rule_us"], two["best_us"]) == (84, 35)
    assert one["regret"] == pytest.approx(3 / 32)
    assert (one["wide_layers"], two["wide_layers"]) == (0, 2)


def test_the_figure_has_both_schedules_and_the_choice(
    rows: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = schedules.over_adapters(rows)
    left, right = figure.axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in left.lines}
    assert drawn["wide"] == [2.1, 4.2]
    assert drawn["segmented"] == [1.75, 1.75]
    assert drawn["the rule's choice"] == [1.75, 4.2]
    assert list(right.lines[0].get_xdata()) == [1, 2]
    folder = tmp_path / schedules.FOLDER
    folder.mkdir()
    rows.assign(git_sha="c" * 40, git_dirty=True).to_csv(folder / "rows.csv", index=False)
    capsys.readouterr()
    assert main(["figures", str(tmp_path), "--experiment", "schedules", "--out", str(tmp_path / "o")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "o" / "schedules.png")]
    said = json.loads((tmp_path / "o" / "schedules.json").read_text())
    assert said["caption"] == "schedules, measured; commit ccccccc+changes; a CPU, 2 cores"
    assert said["commits"] == ["c" * 40]


def test_a_short_run_is_stored_with_its_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--model", "tiny", "--repeats", "1", "--out", str(tmp_path / schedules.FOLDER)]
    assert bench_schedules.main(arguments) == 0
    found = schedules.read(tmp_path)
    assert set(found["layer"]) == {"qkv", "o", "gate_up", "down"}
    assert (found["provenance"] == "measured").all()
    assert found["git_sha"].notna().all()
    assert "segmented/base" in capsys.readouterr().out


def test_its_caption_names_what_was_typed(rows: pd.DataFrame, tmp_path: Path) -> None:
    folder = tmp_path / "schedules"
    folder.mkdir()
    typed = "python -m experiments.bench_schedules --threads 2"
    said = []
    for table in (rows, rows.assign(command=typed)):
        table.assign(git_sha="a" * 40, git_dirty=False).to_csv(folder / "rows.csv", index=False)
        draw_all(load(tmp_path), tmp_path, tmp_path / "f", experiments=("schedules",))
        said.append(json.loads((tmp_path / "f" / "schedules.json").read_text()))
    assert [one["commands"] for one in said] == [["python -m experiments.bench_schedules"], [typed]]
    assert said[0]["machines"] == ["a CPU, 2 cores"]


def test_without_rows_the_command_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bench_schedules"):
        schedules.read(tmp_path)
