"""Sweeps through a real Slurm: whatever happens to a job, its finished cells are rows, and a rerun does the rest.

An array that needs minutes of waiting goes on while the other tests run, those of engines over several nodes too.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from experiments.launch import slurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(3600)]

SLURM = ("hydra/launcher=slurm", "hydra.launcher.gpus_per_node=0", "hydra.launcher.cpus_per_task=1")
PAIR = ("tp=2", "engine.nnodes=2", "engine.master_addr=127.0.0.1", "backends=[tessa]")
ARRAY = (
    "-m",
    "adapters.seed=1,2,3,4,5",
    *SLURM,
    "hydra.launcher.timeout_min=60",
    "hydra.launcher.signal_delay_s=60",
)
FATES = {1: "raise", 2: "exit", 3: "killall", 4: "hang", 5: "hang"}


@pytest.fixture(scope="module")
def array(cluster, array_sweeps, until):
    """The launcher of an array that goes on while the other tests run. One job's engine raises, one calls
    sys.exit, one is killed; of two that hang one is preempted here and the other comes to its time limit."""
    launcher = array_sweeps.start(*ARRAY, script=FATES)

    def over() -> str | None:
        return None if launcher.poll() is None else f"the launcher ended: {launcher.communicate()[0]}"

    def queue() -> str:
        return cluster.run("squeue", "--states=all", "--array", "-o", "%i %P %T %r")

    def running() -> list[str]:
        return cluster.run("squeue", "-h", "-t", "running", "-o", "%i").split()

    both = lambda: array_sweeps.happened("4-hang") and array_sweeps.happened("5-hang")  # noqa: E731
    until(both, "two jobs that hang", over, queue)
    hanging = until(
        lambda: jobs if len(jobs := running()) == 2 else None, "the end of the others", over, queue
    )
    options = ("--partition=urgent", "--cpus-per-task=7", "--output=/dev/null", "--wrap=true")
    urgent = cluster.run("sbatch", "--parsable", *options)
    state = ("squeue", "-h", "--states=all", "-o", "%T", f"--jobs={urgent}")
    until(lambda: cluster.run(*state) == "COMPLETED", "the urgent job", over, queue)
    left = [job for job in hanging if "Restarts=0" in cluster.run("scontrol", "show", "job", job)]
    assert len(left) == 1, queue()
    # Slurm counts whole minutes. The limit lies one to two minutes ahead, the signal comes a minute before it.
    minutes, _, _ = cluster.run("squeue", "-h", "-o", "%M", f"--jobs={left[0]}").rpartition(":")
    hours, _, minutes = minutes.rpartition(":")
    limit = int(hours or 0) * 60 + int(minutes) + 2
    cluster.run("scontrol", "update", f"JobId={left[0]}", f"TimeLimit={limit}")
    return launcher


def test_each_degree_gets_its_gpus_in_a_submission_of_its_own(array, cluster, sweeps, job_ids):
    code, output = sweeps.run(
        "-m", "tp=1,2", "hydra/launcher=slurm", "hydra.launcher.device=cpu", "hydra.launcher.cpus_per_task=1"
    )
    assert code == 0
    jobs = job_ids(output)
    assert [("_" in job) for job in jobs] == [False, False]
    shown = [
        re.search(r"TresPerNode=(\S+)", cluster.run("scontrol", "show", "job", job)).group(1) for job in jobs
    ]
    assert [value.removeprefix("gres:") for value in shown] == ["gpu:1", "gpu:2"]
    frame = sweeps.frame()
    assert sorted(frame["tp"]) == [1, 1, 2, 2]
    assert {row["tp"]: row["slurm"]["slurm_job_id"] for _, row in frame.iterrows()} == {
        1: jobs[0],
        2: jobs[1],
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("hydra.launcher.gpus_per_node=9", "at most 8 GPUs"),
        ("site.partition=gpus", "partition 'gpus' is not known or not up. Known here: main, pair, urgent"),
        ("tp=3", "tp=3"),
    ],
)
def test_a_job_that_could_never_run_is_not_submitted(array, cluster, sweeps, setting, message):
    newest = ["squeue", "-h", "--states=all", "--sort=-i", "-o", "%A"]
    before = cluster.run(*newest)
    code, output = sweeps.run("-m", *SLURM, setting)
    assert code == 2
    assert "error: " in output
    assert message in output
    assert cluster.run(*newest) == before


def test_the_plain_script_stops_in_order_and_is_queued_again(array, cluster, sweeps, until):
    options = [f"--output={sweeps.folder}/job.log", "--cpus-per-task=1", "--parsable"]
    submitted = subprocess.run(
        ["sbatch", *options, "scripts/slurm/run.sbatch", *sweeps.overrides("adapters.seed=6")],
        env={**sweeps.environment, "TESSA_TEST_SCRIPT": '{"6": "hang"}'},
        capture_output=True,
        text=True,
        check=True,
    )
    job, log = submitted.stdout.strip(), sweeps.folder / "job.log"

    def state() -> str:
        return cluster.run("squeue", "-h", "--states=all", "-o", "%T", f"--jobs={job}")

    def over() -> str | None:
        return f"the job is {state()}" if slurm.has_ended(state()) else None

    def text() -> str:
        return log.read_text() if log.exists() else "the job has written nothing"

    until(lambda: sweeps.happened("6-hang"), "an engine that hangs", over, text)
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    until(lambda: state() == "COMPLETED", "the end of the job after its second start", over, text)
    frame = sweeps.frame()
    assert (frame["status"] == "complete").all()
    assert frame.loc[(6, "base"), "slurm"]["slurm_job_id"] == job
    assert frame.loc[(6, "tessa"), "slurm"]["slurm_restart_count"] == "1"
    assert "interrupted: finished cells are stored" in text()


def test_a_launcher_that_does_not_wait(array, cluster, sweeps, until, job_ids):
    code, output = sweeps.run("-m", "adapters.seed=7", *SLURM, "hydra.launcher.wait=false")
    assert code == 0
    assert "not waiting for the jobs" in output
    (job,) = job_ids(output)
    until(
        lambda: slurm.has_ended(cluster.run("squeue", "-h", "--states=all", "-o", "%T", f"--jobs={job}")),
        "the end of the job",
    )
    code, output = sweeps.run("adapters.seed=7", mode="status")
    assert "total: 2 complete" in output


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


def test_an_array_in_which_everything_happens_ends_with_the_right_rows(array, array_sweeps, job_ids):
    output = array.communicate(timeout=1800)[0]
    print(output)
    assert array.returncode == 1
    jobs = job_ids(output)
    assert len(jobs) == 5
    assert len({job.split("_")[0] for job in jobs}) == 1, "one array"

    frame = array_sweeps.frame()
    assert (frame.xs("base", level="backend")["status"] == "complete").all()
    assert len(frame.xs("base", level="backend")) == 5
    tessa = frame.xs("tessa", level="backend")
    assert tessa["status"].to_dict() == {1: "failed", 4: "complete", 5: "complete"}
    assert "the device burnt down" in tessa.loc[1, "reason"]
    for seed, job in enumerate(jobs, 1):
        recorded = frame.loc[(seed, "base"), "slurm"]
        assert f"{recorded['slurm_array_job_id']}_{recorded['slurm_array_task_id']}" == job
    # The base cells of the two that hung come from the first start, the others from the second.
    for seed in (4, 5):
        assert frame.loc[(seed, "base"), "slurm"].get("slurm_restart_count", "0") == "0"
        assert tessa.loc[seed, "slurm"]["slurm_restart_count"] == "1"
    logs = {
        seed: next((array_sweeps.results / ".jobs" / jobs[seed - 1]).glob("*_log.out")) for seed in (4, 5)
    }
    texts = {seed: log.read_text() for seed, log in logs.items()}
    assert sorted("goes back to the queue" in text for text in texts.values()) == [False, True]
    assert sorted("Caught signal SIGUSR2" in text for text in texts.values()) == [False, True]
    assert re.search(r"missing: tessa-tp1", output)
    assert re.search(r"failed: tessa-tp1", output)

    code, output = array_sweeps.run(*ARRAY, script=FATES)
    assert code == 0
    assert output.count("nothing to run: 2 of 2 cells complete") == 2
    assert len(job_ids(output)) == 3, "only the three jobs with something to run"
    again = array_sweeps.frame()
    assert (again["status"] == "complete").all()
    kept = ~again.index.isin([(1, "tessa"), (2, "tessa"), (3, "tessa")])
    assert (again.loc[kept, "slurm"] == frame["slurm"].reindex(again.index[kept])).all()
