"""Runs that start their engines anew for each round: an interruption costs the round it falls in, no more."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis import load
from analysis.reference import export
from experiments import cli, provenance
from experiments.store import Store
from tessa.errors import UserError

pytestmark = pytest.mark.fake

ALL = ["base", "slora", "tessa"]
RESTART = ("measure.interleave=restart", "measure.rounds=4")
THREE = (*RESTART, f"backends=[{','.join(ALL)}]")


@pytest.fixture(autouse=True)
def one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is committed while the tests run must not change what they see."""
    monkeypatch.setattr(provenance, "git_state", lambda: {"sha": "a" * 40, "dirty": False})


@pytest.fixture
def interrupted(fleet: Any, tiny_run: Any) -> Callable[..., None]:
    """A run that SIGTERM ends in its third round."""

    def run(*overrides: str, backend: str = "slora") -> None:
        fleet.calls.clear()
        fleet.script[backend, "run"] = lambda engine: (
            os.kill(os.getpid(), signal.SIGTERM) if fleet.count(backend, "run") == 3 else None
        )
        assert cli.execute(tiny_run(*(overrides or THREE)), factory=fleet) == cli.EXIT_INTERRUPTED
        fleet.script.clear()
        fleet.calls.clear()

    return run


def kept(results: Path) -> list[str]:
    return sorted(folder.name.split("-")[1] for folder in results.glob("tp_scaling/.rounds-*"))


def hidden(results: Path) -> list[str]:
    return [e.name for e in (results / "tp_scaling").iterdir() if e.name[0] == "." and e.name != ".claims"]


def summary_of(results: Path, backend: str) -> dict[str, Any]:
    (file,) = results.glob(f"tp_scaling/{backend}-*/summary.json")
    return json.loads(file.read_text())


def runs(fleet: Any) -> list[str]:
    return [backend for backend, step in fleet.calls if step == "run"]


def test_the_next_run_measures_the_missing_rounds_only(fleet, tiny_run, interrupted, tmp_path):
    results = tmp_path / "results"
    interrupted()
    assert kept(results) == ALL
    assert load(results).empty
    with pytest.raises(UserError, match="holds no results"):
        export(results, tmp_path / "reference")
    fleet.speeds.update(base=200.0, tessa=100.0)
    assert cli.execute(tiny_run(*THREE), factory=fleet) == 0
    # The third round of all, in which the first run was interrupted, and the fourth; each in its own order.
    assert runs(fleet) == ["tessa", "base", "slora", "base", "slora", "tessa"]
    assert fleet.count("tessa", "start") == 2
    assert hidden(results) == []
    frame = load(results)
    assert (frame["status"] == "complete").all()
    assert set(frame["adapter_cost_basis"]) == {"same_round"}
    tessa = frame.query("backend == 'tessa'").set_index("repeat")
    assert tessa["adapter_cost"].to_list() == pytest.approx([0.1, 0.1, 0.5, 0.5])
    sessions = [entry["session"] for entry in summary_of(results, "tessa")["rounds"]]
    assert sessions[0] == sessions[1] != sessions[2] == sessions[3]
    (records,) = results.glob("tp_scaling/tessa-*/requests.parquet")
    assert pd.read_parquet(records)["round"].value_counts().to_dict() == dict.fromkeys(range(4), 6)


def test_a_continued_cell_has_the_form_of_any_other(fleet, tiny_run, interrupted, tmp_path):
    interrupted()
    cli.execute(tiny_run(*THREE), factory=fleet)
    cli.execute(tiny_run(*THREE, f"paths.results={tmp_path}/whole"), factory=fleet)
    for backend in ALL:
        one, other = summary_of(tmp_path / "results", backend), summary_of(tmp_path / "whole", backend)
        assert list(one) == list(other)
        assert [list(entry) for entry in one["rounds"]] == [list(entry) for entry in other["rounds"]]
        same = ("hash", "cell", "status", "labels", "intervals", "counters", "gate", "nodes")
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
        frames = [
            pd.read_parquet(next(tmp_path.glob(f"{folder}/tp_scaling/{backend}-*/requests.parquet")))
            for folder in ("results", "whole")
        ]
        pd.testing.assert_frame_equal(*frames)


@pytest.mark.parametrize("change", ["force", "sha", "dirty", "packages", "machine", "hash"])
def test_rounds_of_another_environment_are_measured_again(
    fleet, tiny_run, interrupted, tmp_path, monkeypatch, change
):
    interrupted()
    if change in ("sha", "dirty"):
        state = {"sha": "a" * 40, "dirty": False} | {change: "b" * 40 if change == "sha" else True}
        monkeypatch.setattr(provenance, "git_state", lambda: state)
    elif change == "packages":
        monkeypatch.setattr(provenance, "package_versions", lambda: {"vllm": "another"})
    elif change == "machine":
        monkeypatch.setattr(provenance, "hardware", lambda: {"cpu": "another CPU", "cores": 2, "gpus": []})
    elif change == "hash":
        for file in tmp_path.glob("results/tp_scaling/.rounds-*/rounds.json"):
            file.write_text(file.read_text().replace(json.loads(file.read_text())["hash"], "0" * 64))
    more = ["force=true"] if change == "force" else []
    assert cli.execute(tiny_run(*THREE, *more), factory=fleet) == 0
    assert len(runs(fleet)) == 3 * 4
    assert hidden(tmp_path / "results") == []


def test_ratios_to_a_base_that_is_measured_again_are_kept(fleet, tiny_run, interrupted, tmp_path):
    late = (*RESTART, "backends=[base,tessa]", "measure.base_reference=rerun")
    cli.execute(tiny_run(*RESTART, "backends=[base]"), factory=fleet)
    interrupted(*late, backend="tessa")
    assert kept(tmp_path / "results") == ["tessa"]
    fleet.speeds.update(base=200.0, tessa=100.0)
    assert cli.execute(tiny_run(*late), factory=fleet) == 0
    assert (fleet.count("base", "run"), fleet.count("tessa", "run")) == (2, 2)
    tessa = load(tmp_path / "results").query("backend == 'tessa'").set_index("repeat")
    assert tessa["adapter_cost"].to_list() == pytest.approx([0.1, 0.1, 0.5, 0.5])
    assert set(tessa["adapter_cost_basis"]) == {"same_round"}


def test_a_cell_that_failed_starts_anew_beside_the_others(
    fleet, tiny_run, interrupted, tmp_path, scripted_error
):
    def fail(engine: Any) -> None:
        if fleet.count("slora", "run") == 2:
            raise scripted_error("failed", "died")

    fleet.script["slora", "run"] = fail
    interrupted(backend="tessa")
    assert kept(tmp_path / "results") == ["base", "tessa"]
    assert cli.execute(tiny_run(*THREE), factory=fleet) == 0
    assert [fleet.count(backend, "run") for backend in ALL] == [2, 4, 2]
    slora = load(tmp_path / "results").query("backend == 'slora'").set_index("repeat")
    assert slora["adapter_cost_basis"].to_list() == ["other_session"] * 2 + ["same_round"] * 2


def test_between_the_cells_of_a_finished_run_nothing_is_measured_again(
    fleet, tiny_run, tmp_path, monkeypatch
):
    write, stop = Store.write, [False]

    def stop_after_one(self: Store, *arguments: Any) -> Path:
        if stop[0]:
            raise KeyboardInterrupt
        stop[0] = True
        return write(self, *arguments)

    monkeypatch.setattr(Store, "write", stop_after_one)
    assert cli.execute(tiny_run(*THREE), factory=fleet) == cli.EXIT_INTERRUPTED
    monkeypatch.setattr(Store, "write", write)
    assert kept(tmp_path / "results") == ["slora", "tessa"]
    fleet.calls.clear()
    assert cli.execute(tiny_run(*THREE, "measure.base_reference=rerun"), factory=fleet) == 0
    assert not fleet.calls
    frame = load(tmp_path / "results")
    assert set(frame["gate"]) == {"passed"}
    assert set(frame["adapter_cost_basis"]) == {"same_round"}
    assert len(frame) == 3 * 4


def test_killed_while_a_round_is_kept(fleet, tiny_run, tmp_path, monkeypatch):
    """Some cells have the round and others not: each is measured in what it lacks, and the ratio says so."""
    keep, calls = Store.keep_rounds, []

    def stop_at_the_last(self: Store, *arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 8:  # slora in the third round: base is kept already
            raise KeyboardInterrupt
        keep(self, *arguments)

    monkeypatch.setattr(Store, "keep_rounds", stop_at_the_last)
    assert cli.execute(tiny_run(*THREE), factory=fleet) == cli.EXIT_INTERRUPTED
    monkeypatch.setattr(Store, "keep_rounds", keep)
    fleet.calls.clear()
    assert cli.execute(tiny_run(*THREE), factory=fleet) == 0
    assert [fleet.count(backend, "run") for backend in ALL] == [1, 2, 2]
    tessa = load(tmp_path / "results").query("backend == 'tessa'").set_index("repeat")
    same, other = "same_round", "other_session"
    assert tessa["adapter_cost_basis"].to_list() == [same, same, other, same]
