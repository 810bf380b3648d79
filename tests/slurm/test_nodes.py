"""Engines over several nodes of a real Slurm: ranks, addresses and the end of the job."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from experiments.launch import slurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]

PAIR = ("tp=2", "engine.nnodes=2", "engine.master_addr=127.0.0.1", "backends=[tessa]")
SLURM = ("hydra/launcher=slurm", "hydra.launcher.gpus_per_node=0", "hydra.launcher.cpus_per_task=1")


def test_more_nodes_than_there_are_is_refused(cluster, sweeps):
    code, output = sweeps.run("-m", *SLURM, *PAIR, "site.partition=main")
    assert code == 2
    assert "partition main has 1 node that fits, this job asks for 2" in output
    code, output = sweeps.run("-m", *SLURM, *PAIR, "site.partition=pair", "hydra.launcher.nodes=1")
    assert code == 2
    assert "hydra.launcher.nodes=1 and engine.nnodes=2 must be the same" in output
    code, output = sweeps.run("-m", *PAIR, "hydra/launcher=local_jobs")
    assert code == 2
    assert "needs several machines" in output


def test_each_node_gets_its_share_of_the_gpus(cluster, sweeps, job_ids):
    """Scripted engines that need both nodes to come."""
    code, output = sweeps.run(
        *("-m", "tp=4", "engine.nnodes=2", "engine.master_addr=127.0.0.1", "model=tiny"),
        *(
            "hydra/launcher=slurm",
            "hydra.launcher.device=cpu",
            "hydra.launcher.cpus_per_task=1",
            "site.partition=pair",
        ),
    )
    assert code == 0
    (job,) = job_ids(output)
    assert "2 GPUs on each of 2 nodes" in output
    shown = cluster.run("scontrol", "show", "job", job)
    assert re.search(r"NumNodes=2\b", shown)
    assert re.search(r"TresPerNode=(gres:)?gpu:2\b", shown)
    frame = sweeps.frame()
    assert (frame["status"] == "complete").all()
    assert {tuple(nodes) for nodes in frame["nodes"]} == {(1,)}


def test_the_plain_script_brings_the_other_nodes(cluster, sweeps, until):
    options = ["--partition=pair", "--nodes=2", "--cpus-per-task=1", f"--output={sweeps.folder}/job.log"]
    submitted = subprocess.run(
        [
            *("sbatch", *options, "--parsable", "scripts/slurm/run.sbatch"),
            *sweeps.overrides("tp=2", "engine.master_addr=127.0.0.1"),
        ],
        env=sweeps.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    job, log = submitted.stdout.strip(), sweeps.folder / "job.log"
    until(
        lambda: slurm.has_ended(cluster.run("squeue", "-h", "--states=all", "-o", "%T", f"--jobs={job}")),
        "the end of the job",
        show=lambda: log.read_text() if log.exists() else "no log",
    )
    frame = sweeps.frame()
    assert (frame["status"] == "complete").all(), log.read_text()
    assert {tuple(nodes) for nodes in frame["nodes"]} == {(1,)}
    assert "the run is over" in log.read_text()
    assert not list(Path(__file__).resolve().parents[2].glob(".cache/nodes-*"))


@pytest.mark.engine
def test_a_real_engine_over_two_nodes(cluster, sweeps, cache, job_ids):
    sweeps.environment.pop("TESSA_TEST_ENGINE")
    code, output = sweeps.run(
        "-m", *SLURM, *PAIR, "site.partition=pair", "model=tiny", f"paths.cache={cache}"
    )
    assert code == 0, output
    (job,) = job_ids(output)
    frame = sweeps.frame()
    assert (frame["status"] == "complete").all()
    assert (frame["nnodes"] == 2).all()
    summary = json.loads(next(sweeps.results.glob("tp_scaling/tessa-*/summary.json")).read_text())
    assert summary["gate"]["passed"]
    assert [node["rank"] for node in summary["nodes"]] == [1]
    assert summary["environment"]["slurm"]["slurm_job_id"] == job
