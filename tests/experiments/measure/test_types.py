"""Records survive the way to a file and back."""

from __future__ import annotations

import pandas as pd
import pytest
from fake_engine import Step, make, play, steady

from experiments.measure.load import LoadOptions
from experiments.measure.types import records_from_frame, records_to_frame


@pytest.mark.fake
def test_records_round_trip_through_parquet(tmp_path):
    good = steady(0.2, 0.1)
    script = lambda r: good(r) if r.request_id else [Step(0.1, 1), Step(0.1, 0, "raise")]  # noqa: E731
    options = LoadOptions(base_only=True, max_duration_s=2.0)
    result, _, _ = play(make(base_fraction=0.5), script, options)
    assert {r.status for r in result.records} == {"ok", "error", "aborted"}
    assert {r.adapter is None for r in result.records} == {True, False}
    frame = records_to_frame(result.records)
    assert records_from_frame(frame) == result.records
    frame.to_parquet(tmp_path / "r.parquet")
    assert records_from_frame(pd.read_parquet(tmp_path / "r.parquet")) == result.records


def test_no_records_give_an_empty_frame_with_all_columns():
    frame = records_to_frame([])
    assert len(frame) == 0
    assert "token_times_s" in frame.columns
    assert records_from_frame(frame) == []
