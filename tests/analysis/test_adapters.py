"""Metrics of each adapter of a stored cell."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis.__main__ import main
from analysis.adapters import per_adapter
from experiments.measure.types import OK, RequestRecord, records_to_frame
from tessa.errors import UserError


def record(number: int, adapter: int | None, first: float) -> RequestRecord:
    times = [first, first + 0.5]
    return RequestRecord(
        request_id=number, adapter=adapter, prompt_tokens=8, requested_output_tokens=2, output_tokens=2,
        scheduled_s=0.0, sent_s=0.0, first_token_s=first, end_s=times[-1], token_times_s=times, status=OK,
    )  # fmt: skip


@pytest.fixture
def cell(store_cell) -> Path:
    folder = store_cell("tessa", [10.0, 10.0])
    rounds = [
        records_to_frame([record(0, 0, t), record(1, 1, 2 * t), record(2, None, t)]) for t in (1.0, 3.0)
    ]
    pd.concat([frame.assign(round=i) for i, frame in enumerate(rounds)]).to_parquet(
        folder / "requests.parquet"
    )
    return folder


def test_each_adapter_has_the_mean_of_its_rounds(cell: Path) -> None:
    frame = per_adapter(cell.parents[1], cell.name).set_index("adapter")
    assert frame["ttft_s_mean"].to_dict() == {-1: 2.0, 0: 2.0, 1: 4.0}
    assert frame["output_tokens_per_s"].sum() == pytest.approx((6 / 2.5 + 6 / 6.5) / 2)
    assert "slo_attainment" not in frame  # no limit is known here


def test_the_command_prints_them(cell: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(cell.parents[1]), "--adapters-of", cell.name]) == 0
    assert "ttft_s_p99" in capsys.readouterr().out
    assert main(["table", str(cell.parents[1]), "--adapters-of", "tessa-tp9-x"]) == 2
    assert "no complete cell" in capsys.readouterr().err


def test_without_request_records_the_error_says_so(cell: Path) -> None:
    (cell / "requests.parquet").unlink()
    with pytest.raises(UserError, match="has no request records"):
        per_adapter(cell.parents[1], cell.name)
