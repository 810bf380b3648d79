"""What a job asks for, against what nodes have."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments import config
from experiments.launch.resources import LaunchParams, check
from experiments.launch.slurm import Node
from tessa.errors import UserError

CONF = Path(__file__).resolve().parents[3] / "conf"
SMALL = Node("a1", "gpu", True, 16, 64_000, 4, frozenset({"a100"}), 1440)
FAT = Node("c1", "cpu", False, 128, 512_000, 0, frozenset({"epyc", "fast"}), float("inf"))
NODES = [SMALL, FAT]


@pytest.mark.parametrize(
    "params",
    [
        {"gpus_per_node": 4, "cpus_per_gpu": 4, "mem_gb_per_gpu": 15},
        {"partition": "cpu", "cpus_per_task": 128, "mem_gb": 500, "timeout_min": 100_000},
        {"partition": "gpu,cpu", "cpus_per_task": 128},
        {"partition": "cpu", "constraint": "epyc&fast"},
        {"partition": "gpu,cpu", "constraint": "a100|epyc"},
    ],
)
def test_what_a_node_has_is_accepted(params):
    check(LaunchParams(**params), NODES)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"gpus_per_node": 5}, "the default partition offers at most 4 GPUs .* asks for 5"),
        ({"gpus_per_node": 4, "cpus_per_gpu": 5}, "at most 16 CPUs .* asks for 20"),
        ({"mem_gb": 63}, "at most 62.5 GB of memory .* asks for 63"),
        ({"timeout_min": 1441}, "at most 1440 minutes"),
        ({"partition": "gpux"}, "partition 'gpux' is not known or not up. Known here: cpu, gpu"),
        (
            {"partition": "cpu", "constraint": "a100"},
            "'a100' is a feature of no node there.*: epyc, fast",
        ),
        ({"partition": "gpu,cpu", "constraint": "a100&fast"}, "no single node has all"),
        (
            {"partition": "gpu,cpu", "gpus_per_node": 1, "cpus_per_task": 20},
            "no single node .* 1 GPUs, 20 CPUs",
        ),
    ],
)
def test_what_no_node_has_is_refused(params, message):
    with pytest.raises(UserError, match=message):
        check(LaunchParams(**params), NODES)


def test_a_job_over_nodes_needs_as_many_that_fit():
    pair = [SMALL, dataclasses.replace(SMALL, name="a2"), dataclasses.replace(SMALL, name="a3", gpus=1)]
    check(LaunchParams(nodes=2, gpus_per_node=4), pair)
    with pytest.raises(
        UserError, match=r"has 2 nodes that fit, this job asks for 3 \(hydra\.launcher\.nodes"
    ):
        check(LaunchParams(nodes=3, gpus_per_node=4), pair)


@pytest.mark.parametrize(("nnodes", "nodes", "gpus"), [("null", 1, 8), ("1", 1, 8), ("2", 2, 4)])
def test_the_ranks_of_an_engine_are_spread_over_its_nodes(nnodes, nodes, gpus):
    params = launcher_section(
        "experiment=tp_scaling", "tp=8", "hydra/launcher=slurm", f"engine.nnodes={nnodes}"
    )
    assert (params.nodes, params.gpus_per_node) == (nodes, gpus)
    asked = params.submitit()
    assert (asked["nodes"], asked["ntasks_per_node"], asked["gpus_per_node"]) == (nodes, 1, gpus)


def test_a_cluster_without_default_partition_asks_for_one():
    with pytest.raises(UserError, match=r"no default partition.*cpu"):
        check(LaunchParams(), [FAT])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpus": 2}, "unknown setting hydra.launcher.gpus"),
        ({"tasks_per_node": 2}, "must be 1"),
        ({"device": "tpu"}, "auto, cpu or cuda"),
        ({"timeout_min": 1, "signal_delay_s": 60}, "must be shorter than the time limit"),
        ({"parallel": 0}, "give 1 or more"),
    ],
)
def test_settings_out_of_range(values, message):
    with pytest.raises(UserError, match=message):
        LaunchParams.of(values)


def test_jobs_of_equal_resources_form_a_group():
    one = LaunchParams.of({"_target_": "x", "gpus_per_node": 2, "cpus_per_gpu": 8, "mem_gb_per_gpu": 30.5})
    assert one.group_key() == dataclasses.replace(one, wait=False).group_key()
    assert one.group_key() != dataclasses.replace(one, gpus_per_node=4).group_key()
    assert one.group_key() != dataclasses.replace(one, python="apptainer exec x.sif python3").group_key()
    asked = one.submitit()
    assert (asked["gpus_per_node"], asked["cpus_per_task"], asked["mem"]) == (2, 16, "62464MB")
    assert (asked["nodes"], asked["ntasks_per_node"], asked["additional_parameters"]) == (
        1,
        1,
        {"requeue": True},
    )
    assert "gpus_per_node" not in LaunchParams(gpus_per_node=0).submitit()


@pytest.mark.parametrize(
    ("device", "gpus", "found"), [("auto", 2, "cuda"), ("auto", 0, "cpu"), ("cpu", 2, "cpu")]
)
def test_what_the_job_will_find(device, gpus, found):
    assert LaunchParams(device=device, gpus_per_node=gpus).runs_on == found


def launcher_section(*overrides: str) -> LaunchParams:
    config.register()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        composed = compose("config", overrides=list(overrides), return_hydra_config=True)
    return LaunchParams.of(OmegaConf.to_container(composed.hydra.launcher, resolve=True))


@pytest.mark.parametrize(
    "launcher", sorted(file.stem for file in (CONF / "hydra" / "launcher").glob("*.yaml"))
)
@pytest.mark.parametrize("site", sorted(file.stem for file in (CONF / "site").glob("*.yaml")))
def test_every_launcher_and_site_compose(launcher, site):
    params = launcher_section("experiment=tp_scaling", "tp=4", f"hydra/launcher={launcher}", f"site={site}")
    assert params.gpus_per_node == 4
    assert params.folder == "results/.jobs"


def test_the_site_file_reaches_the_job(monkeypatch):
    monkeypatch.setenv("TESSA_SITE", "example")
    params = launcher_section("experiment=tp_scaling", "tp=4", "hydra/launcher=slurm")
    asked = params.submitit()
    assert (asked["partition"], asked["account"], asked["constraint"]) == ("gpu", "my-project", "a100")
    assert (asked["cpus_per_task"], asked["mem"]) == (32, f"{240 * 1024}MB")
    assert asked["setup"][0] == "module load cuda"
    assert asked["additional_parameters"] == {"requeue": True, "exclusive": "user"}
