"""What a run says before it starts: limits that `measure` sets, and settings that the grid would overwrite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from experiments import cli, notes
from experiments import config as schema
from tessa.errors import UserError

Composed = Callable[..., Any]


def test_a_limit_where_none_was_asked_for_is_said(composed: Composed) -> None:
    (line,) = notes.limits(schema.build(composed("experiment=trace_replay")))
    assert line.startswith("measure=demo limits num_requests all to 32, ")


def test_what_measure_limits_is_said_with_what_was_asked_for(composed: Composed) -> None:
    config = schema.build(
        composed("experiment=rate_sweep", "workload.num_requests=200", "workload.prompt_tokens.high=70")
    )
    (line,) = notes.limits(config)
    assert line.startswith("measure=demo limits num_requests 200 to 32, prompt_tokens.high 70 to 64, ")
    assert (
        " and leaves workload.arrivals.rate 1, 4, 8 out of the grid: measure.caps.<limit>=null lifts" in line
    )
    lifted = ["requests", "prompt_tokens", "output_tokens", "grid_values"]
    free = composed("experiment=rate_sweep", *(f"measure.caps.{name}=null" for name in lifted))
    assert notes.limits(schema.build(free)) == []
    assert notes.limits(schema.build(composed("experiment=rate_sweep", "measure=paper"))) == []


@pytest.mark.parametrize(
    ("experiment", "typed", "instead"),
    [
        ("rate_sweep", "workload.arrivals.rate=-8", "grid.workload.arrivals.rate=[-8]"),
        ("adapter_count", "+adapters.count=2", "grid.adapters.count=[2]"),
        ("adapter_count", "workload.popularity.kind=zipf", "grid.workload.popularity=[...]"),
        ("adapter_count", "adapters={count: 4}", "grid.adapters.count=[...]"),
    ],
)
def test_a_setting_that_the_grid_sweeps_is_refused(
    composed: Composed, capsys: pytest.CaptureFixture[str], experiment: str, typed: str, instead: str
) -> None:
    overrides = [f"experiment={experiment}", "dry_run=true"]
    assert cli.execute(composed(*overrides), overrides=[*overrides, typed]) == cli.EXIT_USER
    assert capsys.readouterr().err == (
        f"error: experiment={experiment} sweeps {instead.partition('=')[0].removeprefix('grid.')}, so {typed} would "
        f"change nothing; give {instead}\n"
    )


def test_settings_beside_the_swept_ones_pass(composed: Composed) -> None:
    config = schema.build(composed("experiment=adapter_count"))
    notes.check_swept(
        config, ["backends=[base]", "adapters={seed: 2}", "workload=poisson", "grid.adapters.count=[2]"]
    )
    with pytest.raises(UserError):
        notes.check_swept(config, ["adapters.count=1"])
