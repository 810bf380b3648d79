"""Every shipped config composes, is typed, and says what it is."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from baselines import REGISTRY
from experiments import cli, config, models
from experiments.backends import known_backends, resolve
from experiments.layer_step.spec import LayerStepSpec
from experiments.projection.runner import ProjectionSpec
from experiments.quality import spec as trials
from experiments.quality.spec import QualitySpec
from experiments.studies import spec_from
from tessa.errors import UserError

CONF = Path(__file__).resolve().parents[1] / "conf"
GROUPS = sorted(p.name for p in CONF.iterdir() if p.is_dir())


def files(group: str) -> list[str]:
    return sorted(p.stem for p in (CONF / group).glob("*.yaml"))


def kind(experiment: str) -> str:
    return yaml.safe_load((CONF / "experiment" / f"{experiment}.yaml").read_text()).get("kind", "serving")


SERVING = [name for name in files("experiment") if kind(name) == "serving"]
STUDIES = {"projection": ProjectionSpec, "layer_step": LayerStepSpec, "quality": QualitySpec}
NEED_TRACES = ("trace_replay",)
OWN_GROUPS = ("adapters", "backend", "logger", "measure", "paths", "workload")


@pytest.fixture(autouse=True)
def composing():
    config.register()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        yield


def composed(*overrides: str) -> config.RunConfig:
    return config.build(compose("config", overrides=list(overrides)))


def test_self_is_first_and_the_experiment_last():
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    assert defaults[0] == "_self_"
    assert defaults[-1] == {"experiment": None}


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in OWN_GROUPS for name in files(group)])
def test_every_file_composes_typed(group, name):
    raw = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    assert raw["defaults"] == ["schema", "_self_"]
    built = composed(f"{group}={name}")
    assert isinstance(getattr(built, group), config.SCHEMAS[group])
    if group != "paths":
        assert raw["name"] == name


@pytest.mark.parametrize("name", files("model"))
def test_every_model_composes(name):
    if name == "local":
        with pytest.raises(UserError, match=r"model\.path="):
            models.load_spec(composed(f"model={name}").model)
    else:
        assert models.load_spec(composed(f"model={name}").model).name == name


@pytest.mark.parametrize("measure", files("measure"))
@pytest.mark.parametrize("experiment", SERVING)
def test_every_experiment_expands(experiment, measure, request, monkeypatch):
    if experiment in NEED_TRACES:
        monkeypatch.setenv("TESSA_SHARED", str(request.getfixturevalue("shared_dir")))
    text = (CONF / "experiment" / f"{experiment}.yaml").read_text()
    assert text.startswith("# @package _global_\n")
    model = "tiny" if measure == "smoke" else "small"
    built = composed(f"experiment={experiment}", f"measure={measure}", f"model={model}", "tp=2")
    assert built.name == experiment
    plan = cli.plan_run(built, device="cpu")
    assert len({cell.hash for cell in plan.cells}) == len(plan.cells) > 0
    assert all("base" in {group.backend for group in point.groups} for point in plan.points), (
        "every point needs base for adapter cost"
    )
    json.dumps([cell.identity for cell in plan.cells], allow_nan=False)


@pytest.mark.parametrize(
    "experiment", [n for n in files("experiment") if kind(n) not in ("serving", "quality")]
)
def test_every_study_lists_all_of_its_settings_with_their_defaults(experiment):
    built = composed(f"experiment={experiment}")
    assert built.name == experiment
    spec = spec_from(STUDIES[built.kind], built.study)
    assert set(built.study) == {f.name for f in fields(spec)}
    assert spec == STUDIES[built.kind]()


@pytest.mark.parametrize("experiment", [name for name in files("experiment") if kind(name) == "quality"])
def test_every_quality_experiment_has_its_rates_and_a_smaller_smoke(experiment):
    study = composed(f"experiment={experiment}").study
    spec, small = (
        trials.check(spec_from(QualitySpec, trials.with_smoke(study, m))) for m in ("demo", "smoke")
    )
    assert all(trials.rates(spec, structure) for structure in trials.structures(spec))
    assert len(spec.seeds) >= 3
    assert small.steps * len(small.seeds) < spec.steps * len(spec.seeds) / 5
    assert {s.method for s in trials.structures(spec)} >= {"lora", "tessa"}


@pytest.mark.parametrize("experiment", SERVING)
def test_smoke_is_small(experiment, request, monkeypatch):
    if experiment in NEED_TRACES:
        monkeypatch.setenv("TESSA_SHARED", str(request.getfixturevalue("shared_dir")))
    plan = cli.plan_run(composed(f"experiment={experiment}", "measure=smoke", "model=tiny"), device="cpu")
    for workload in plan.workloads.values():
        assert workload.meta["realised"]["requests"] <= 6
        assert workload.meta["realised"]["total_output_tokens"] <= 24
        assert workload.meta["realised"]["last_arrival_s"] <= 60


def test_weights_is_short_for_the_models_own_setting():
    made = composed("experiment=tp_scaling", "model=tiny", "weights=dummy")
    assert models.load_spec(made.model).weights == "dummy"
    assert models.load_spec(composed("experiment=tp_scaling", "model=tiny").model).weights == "random"
    with pytest.raises(UserError, match="weights"):
        models.load_spec(composed("experiment=tp_scaling", "model=tiny", "weights=hub").model)


def test_every_backend_is_registered_and_has_a_file():
    assert set(known_backends()) == set(REGISTRY)
    assert list(known_backends()) == list(REGISTRY)
    for backend in known_backends().values():
        assert resolve(backend, "cpu").kernels != "auto"


@pytest.mark.parametrize(
    "override",
    [
        "tpp=2",
        "workload.arrivals.rat=3",
        "measure.gate.enable=false",
        "adapters.rank=4",
        "engine.max_seqs=3",
        "logger.projekt=x",
        "paths.result=x",
        "backend=tessa backend.kernel=x",
    ],
)
def test_an_unknown_key_is_an_error(override):
    with pytest.raises(HydraException) as raised:
        compose("config", overrides=override.split())
    assert "unknown setting" in cli.explain_hydra(raised.value)


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("measure.rounds=many", "a whole number"),
        ("measure.request_timeout_s=x", "a number"),
        ("measure.gate.enabled=maybe", "true or false"),
    ],
)
def test_a_wrong_type_is_an_error(override, kind):
    with pytest.raises(HydraException) as raised:
        compose("config", overrides=[override])
    assert cli.explain_hydra(raised.value) == f"{override} is not {kind}; give such a value"


def test_an_unknown_key_in_a_file_is_an_error():
    values = OmegaConf.to_container(compose("config"), resolve=True)
    values["workload"]["popularty"] = {"kind": "uniform"}
    with pytest.raises(UserError, match=r"popularty.*did you mean 'popularity'"):
        config.build(values)
    with pytest.raises(OmegaConfBaseException):
        OmegaConf.merge(OmegaConf.structured(config.RunConfig), values)


RUN_PY = CONF.parent / "run.py"


def run_py(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(RUN_PY), *arguments], capture_output=True, text=True, cwd=CONF.parent
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experiment=tp_scalling"], "did you mean 'tp_scaling'?"),
        (["backend=tesa"], "did you mean 'tessa'? Known values: base,"),
        (["measure.round=2"], "unknown setting 'measure.round'; did you mean 'rounds'?"),
        (["tp=["], "cannot read 'tp=['"),
        (["tp=1,2"], "tp=1,2 gives several values: pass -m before the settings"),
        (["statu"], "after the mode (status, or none) come settings as key=value"),
        (["backends=[slora:compute=off]"], "\"backends=[base,'slora:compute=off']\""),
    ],
)
def test_a_mistake_in_an_override_is_explained(overrides, message):
    with pytest.raises(HydraException) as raised:
        compose("config", overrides=overrides)
    assert message in cli.explain_hydra(raised.value)
    assert "\n" not in cli.explain_hydra(raised.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["tp=3"], "allowed: 1, 2, 4, 8"),
        (["tp=two"], "tp=two is not a whole number; give such a value"),
        (["dtype=float8"], "Known values: auto, float32"),
        (["model=local", "model.path=/no/such/folder"], "does not exist"),
        (["backends=[base,tesa]"], "did you mean 'tessa'?"),
        (["backends=['punica:stok']"], "did you mean 'stock'?"),
        (["backends=['slora:comunication=off']"], "did you mean 'communication'?"),
        (["backends=base"], "list"),
        (["adapters.target_modules=[q_proj,lm_head]"], "adapters.target_modules=lm_head"),
        (["workload.prompt_tokens.value=5000", "measure=paper"], "at most 1024"),
        (["workload.arrivals.kind=poison"], "choose one of all_at_once"),
        (["adapters.placement=acros"], "did you mean 'across'?"),
        (["adapters.offset=gradiant"], "Known values: first, random"),
        (["adapters.offset=weight"], "Known values: first, random"),
        (["adapters.ranks=[]"], "adapters.ranks=[] must be a list"),
        (["adapters.ranks=[4,0]"], "ranks of 1 or more"),
        (["adapters.placement=along", "adapters.shards=3"], "3 shards do not divide"),
        (["adapters.placement=along", "adapters.shards=2", "tp=4"], "allowed tensor parallel sizes: [1, 2]"),
        (["adapters.rank_equivalent=600"], "rank 600 exceeds vLLM's largest max_lora_rank, 512"),
        (["backends=[base,merged]", "model.weights=dummy"], "'merged' needs real weights"),
    ],
)
def test_a_mistake_in_a_value_is_explained(overrides, message, capsys, tmp_path):
    base = ["experiment=tp_scaling", "model=tiny", f"paths.results={tmp_path}/r"]
    assert cli.execute(compose("config", overrides=base + overrides), factory=no_engine) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert message in text
    assert not (tmp_path / "r").exists()


def no_engine(*_: object) -> None:
    raise AssertionError("an engine was asked for")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiment=tp_scaling", "backend=tesa"], "did you mean 'tessa'?"),
        (["status", "experiment=tp_scaling", "tp=3"], "allowed: 1, 2, 4, 8"),
        ([], "no experiment chosen"),
    ],
)
def test_run_py_prints_one_line_and_exits_with_2(arguments, message):
    done = run_py(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_parent_imports_no_engine(tmp_path):
    overrides = ["experiment=tp_scaling", "model=tiny", "dry_run=true", f"paths.results={tmp_path}/r"]
    code = f"""
import sys
def loaded(*names): print("loaded:", *(name for name in names if name in sys.modules))
from experiments.models import load_named
load_named("small")
loaded("numpy", "torch", "transformers", "vllm")
import run
sys.argv = ["run.py", *{overrides}]
assert run.main() == 0
import analysis.figures, analysis.tables, experiments.engine.parent
import experiments.quality.pool, experiments.quality.study, experiments.studies
loaded("torch", "transformers", "vllm", "peft", "lm_eval")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CONF.parent)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("loaded:")]
    assert said == ["loaded:", "loaded:"]


def test_a_multirun_has_the_worst_status_of_its_jobs(tmp_path):
    done = run_py(
        "-m",
        "experiment=tp_scaling",
        "model=tiny",
        "tp=1,3",
        "dry_run=true",
        f"paths.results={tmp_path}/r",
        f"hydra.sweep.dir={tmp_path}/m",
    )
    assert done.returncode == 2
    assert "5 cells, 5 to run" in done.stdout
    assert "tp=3 does not fit" in done.stderr
