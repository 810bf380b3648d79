"""The self-check of the load generator: its verdict, and the row that it stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.measure import selfcheck
from experiments.measure.types import LoadResult, RequestRecord

LAG_S = np.linspace(0.0, 0.010, 101)  # p50 5 ms, p99 9.9 ms


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load is as late as LAG_S says: a request is sent every 20 ms, and the last one ends after 3 s."""
    records = [
        RequestRecord(i, None, 512, 16, scheduled_s=0.02 * i - lag, sent_s=0.02 * i)
        for i, lag in enumerate(LAG_S)
    ]
    result = LoadResult(records, LAG_S, 3.0, "ok", None, "open_loop")
    monkeypatch.setattr(selfcheck, "measure", lambda *_: result)


@pytest.mark.usefixtures("late")
def test_a_late_p99_fails_and_is_stored_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert selfcheck.main(["--out", str(tmp_path / "lag")]) == 1
    assert "p99 9.90 ms" in (said := capsys.readouterr().out)
    assert "p99 ABOVE the tolerance of 5 ms" in said
    (row,) = pd.read_csv(tmp_path / "lag" / "rows.csv").to_dict("records")
    assert row["schedule_lag_s_p50"] == pytest.approx(0.005)
    assert row["schedule_lag_s_p99"] == pytest.approx(0.0099)
    assert row["schedule_lag_s_max"] == pytest.approx(0.010)
    assert (row["requests"], row["sent_rate"]) == (101, pytest.approx(50.0))
    assert (row["rate"], row["tolerance_s"], row["within"]) == (100.0, 0.005, False)


@pytest.mark.usefixtures("late")
def test_the_tolerance_is_on_the_p99(capsys: pytest.CaptureFixture[str]) -> None:
    assert selfcheck.main(["--tolerance", "0.00991"]) == 0
    assert "p99 within the tolerance" in capsys.readouterr().out


def test_a_real_load_is_stored_with_its_machine_and_commit(tmp_path: Path) -> None:
    arguments = ["--rate", "400", "--seconds", "0.1", "--tolerance", "inf", "--out", str(tmp_path)]
    assert selfcheck.main(arguments) == 0
    (row,) = pd.read_csv(tmp_path / "rows.csv").to_dict("records")
    assert (row["requests"], row["rate"], row["seconds"], row["spin_s"]) == (40, 400.0, 0.1, 0.0)
    assert row["schedule_lag_s_p50"] <= row["schedule_lag_s_p99"] <= row["schedule_lag_s_max"]
    assert (row["experiment"], row["provenance"], row["within"]) == ("schedule_lag", "measured", True)
    assert {"machine", "git_sha", "git_dirty"} <= set(row)
    assert row["device"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "1", "--seconds", "0.5"], "is no request"),
        (["--rate", "-1"], "rate"),
    ],
)
def test_wrong_arguments_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert selfcheck.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
