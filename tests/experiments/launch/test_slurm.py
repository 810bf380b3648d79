"""Reading Slurm's commands, from scripts that stand in for them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from experiments import claims
from experiments.launch import slurm
from tessa.errors import UserError


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Sets what a Slurm command prints, and its status."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    slurm.cluster_name.cache_clear()

    def set_output(name: str, output: str, status: int = 0) -> None:
        path = folder / name
        stream = 2 if status else 1
        path.write_text(f"#!/bin/sh\n/bin/cat >&{stream} <<'EOF'\n{output}\nEOF\nexit {status}\n")
        path.chmod(0o755)

    yield set_output
    slurm.cluster_name.cache_clear()


def test_nodes(commands):
    commands(
        "sinfo",
        "a1|gpu*|64+|257000+|gpu:a100:4(S:0-1),gpu:l4:2,fs:1|a100,ib|2-12:00:00|up\n"
        "c1|cpu|8|1000|(null)|(null)|infinite|up\nx1|old|8|1000|(null)|(null)|30:00|down",
    )
    first, second = slurm.nodes()
    assert first == slurm.Node("a1", "gpu", True, 64, 257000, 6, frozenset({"a100", "ib"}), 3600.0)
    assert second == slurm.Node("c1", "cpu", False, 8, 1000, 0, frozenset(), float("inf"))


@pytest.mark.parametrize(
    ("text", "minutes"), [("30:00", 30), ("1:00:00", 60), ("1-01:00:30", 1500.5), ("UNLIMITED", float("inf"))]
)
def test_minutes(text, minutes):
    assert slurm.minutes(text) == minutes


def test_states_of_arrays_single_jobs_and_forgotten_ones(commands):
    commands("squeue", "7_0|9|RUNNING|None\n7_1|7|TIMEOUT|TimeLimit")
    assert slurm.states(["7_0", "7_1", "7_2", "9"]) == {
        "7_0": ("RUNNING", "None"),
        "7_1": ("TIMEOUT", "TimeLimit"),
        "7_2": (slurm.GONE, ""),
        "9": ("RUNNING", "None"),
    }
    commands("squeue", "slurm_load_jobs error: Invalid job id specified", 1)
    assert slurm.states(["7_0"]) == {"7_0": (slurm.GONE, "")}


def test_a_silent_slurm_is_not_taken_for_an_end(commands):
    commands("scontrol", "ClusterName             = hpc")
    commands("squeue", "slurm_load_jobs error: Unable to contact slurm controller", 1)
    with pytest.raises(slurm.SlurmError, match="Unable to contact"):
        slurm.states(["7"])
    assert not slurm.surely_ended("7", "hpc")


@pytest.mark.parametrize(
    ("state", "ended"),
    [("COMPLETED", True), ("NODE_FAIL", True), ("GONE", True), ("PREEMPTED", False), ("COMPLETING", False)],
)
def test_ended(state, ended):
    assert slurm.has_ended(state) is ended


@pytest.mark.parametrize(
    ("shown", "preempted"),
    [
        ("JobId=7 JobState=RUNNING PreemptTime=2026-01-01T00:00:00 Comment=a b", True),
        ("JobId=7 JobState=RUNNING PreemptTime=None", False),
        ("JobId=7 JobState=CANCELLED PreemptTime=2026-01-01T00:00:00", False),
    ],
)
def test_preemption_is_told_from_a_cancelled_job(commands, shown, preempted):
    commands("scontrol", shown)
    assert slurm.preempted("7") is preempted


def test_without_slurm_the_error_names_the_other_launcher(commands):
    commands("squeue", "")
    with pytest.raises(UserError, match=r"not found here: sbatch, srun.*local_jobs") as raised:
        slurm.require()
    assert "squeue," not in str(raised.value)


@pytest.mark.parametrize(
    ("cluster", "listed", "held"),
    [
        ("hpc", "7|7|RUNNING|None", True),
        ("hpc", "7|7|PENDING|BeginTime", True),
        ("hpc", "7|7|FAILED|NonZeroExitCode", False),
        ("other", "7|7|FAILED|NonZeroExitCode", True),
    ],
)
def test_a_claim_of_another_nodes_job_lasts_as_long_as_the_job(commands, tmp_path, cluster, listed, held):
    commands("scontrol", "ClusterName = hpc")
    commands("squeue", listed)
    path: Path = tmp_path / "claims" / "cell.claim"
    assert claims.acquire(path) is not None
    away = {"machine": "0" * 12, "host": "node7", "slurm_job": "7", "slurm_cluster": cluster}
    path.write_text(json.dumps({**json.loads(path.read_text()), **away}))
    os.environ.pop("SLURM_JOB_ID", None)
    assert (claims.holder(path) is not None) is held
    assert (claims.acquire(path) is None) is held
    assert [p.name for p in path.parent.iterdir() if p.name != ".break"] == [path.name]
