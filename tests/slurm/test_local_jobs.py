"""Sweeps as processes of this machine, and what launchers do before they start anything."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments import cli
from tessa.errors import UserError

pytestmark = pytest.mark.fake

LOCAL = ("hydra/launcher=local_jobs", "hydra.launcher.parallel=3")


def test_a_dead_job_costs_its_unfinished_cell(local_sweeps):
    sweep = ("-m", "adapters.seed=1,2,3", *LOCAL)
    code, output = local_sweeps.run(*sweep, script={2: "raise", 3: "kill"})
    assert code == 1
    frame = local_sweeps.frame()
    assert frame["status"].to_dict() == {
        (1, "base"): "complete",
        (1, "tessa"): "complete",
        (2, "base"): "complete",
        (2, "tessa"): "failed",
        (3, "base"): "complete",
    }
    assert output.count("missing: ") == output.count("failed: ") == 1

    code, output = local_sweeps.run(*sweep)
    assert code == 0
    assert output.count("started job") == 2
    assert "no job [adapters.seed=1] nothing to run: 2 of 2 cells complete" in output
    again = local_sweeps.frame()
    assert len(again) == 6
    assert (again["status"] == "complete").all()


def test_code_that_changed_after_submit_is_refused(local_sweeps):
    local_sweeps.environment["TESSA_SUBMIT_SHA"] = "d" * 40
    local_sweeps.environment["TESSA_SUBMIT_DIRTY"] = "0"
    code, output = local_sweeps.run("-m", "tp=1", *LOCAL, "allow_sha_change=false")
    assert code == 1
    assert "error: the code changed while the job waited: submitted at dddddddddddd" in output
    assert output.count("missing: ") == 2


def test_looking_submits_nothing(local_sweeps):
    for mode, more in (("status", ()), ("", ("dry_run=true",))):
        code, output = local_sweeps.run("-m", "tp=1,2", *LOCAL, *more, mode=mode)
        assert code == 0
        assert sorted(re.findall(r"tessa-tp\d", output)) == ["tessa-tp1", "tessa-tp2"]
        assert "started job" not in output
    assert not (local_sweeps.results / ".jobs").exists()


def test_scripted_engines_write_only_to_the_temporary_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TESSA_TEST_ENGINE", "json:dumps")
    assert cli.factory_of_tests(tmp_path) is json.dumps
    for results in (Path.home() / "results", tmp_path / ".." / ".." / ".." / ".." / ".." / "results"):
        with pytest.raises(UserError, match="TESSA_TEST_ENGINE is set"):
            cli.factory_of_tests(results)
    monkeypatch.delenv("TESSA_TEST_ENGINE")
    assert cli.factory_of_tests(Path.home()) is None
