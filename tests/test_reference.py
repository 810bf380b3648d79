"""`make reference`: its commands are plans that hold, and it runs on a clean tree alone."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from tests_support import load_script

from experiments import cli, config, studies
from experiments.layer_step.spec import LayerStepSpec
from experiments.projection.runner import ProjectionSpec
from experiments.quality.spec import QualitySpec

REPO = Path(__file__).resolve().parents[1]
reference = load_script(REPO / "scripts" / "reference.py")


@pytest.mark.parametrize("step", reference.STEPS, ids=lambda s: " ".join((s.experiment, *s.overrides[:1])))
def test_every_step_is_a_plan(step, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if step.module is not None:
        assert importlib.util.find_spec(step.module)
        assert step.into(tmp_path)[-2:] == ["--out", str(tmp_path / step.experiment)]
        return
    if step.lacks is reference.lacks_trace:
        request.getfixturevalue("shared_dir")
    config.register()
    with initialize_config_dir(config_dir=str(REPO / "conf"), version_base="1.3"):
        built = config.build(compose("config", overrides=step.into(tmp_path)[1:]))
    kinds = {"layer_step": LayerStepSpec, "projection": ProjectionSpec, "quality": QualitySpec}
    if built.kind in kinds:
        studies.spec_from(kinds[built.kind], built.study)
        return
    plan = cli.plan_run(built, "cpu")
    assert {cell.variant for cell in plan.cells} >= {"base", "slora", "tessa"}
    assert built.measure.rounds >= 3
    assert built.measure.gate.enabled


def test_every_experiment_has_a_step() -> None:
    shipped = {f.stem for f in (REPO / "conf" / "experiment").glob("*.yaml")}
    # Those with pretrained models need models and data that the project does not come with.
    own = {name for name in shipped if not name.startswith("quality_")}
    assert own <= {step.experiment for step in reference.STEPS}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"sha": "a" * 40, "dirty": True}, "uncommitted changes"),
        ({"sha": None, "dirty": None}, "not a git checkout"),
    ],
)
def test_a_tree_that_is_no_commit_is_refused(monkeypatch: pytest.MonkeyPatch, state: dict, said: str) -> None:
    monkeypatch.setattr(reference.provenance, "git_state", lambda: state)
    monkeypatch.setattr(reference, "run", lambda *_: pytest.fail("a step was run"))
    with pytest.raises(SystemExit, match=said):
        reference.main([])


def fake(monkeypatch: pytest.MonkeyPatch, codes: dict[str, int]) -> list[str]:
    """A clean tree on which every step ends at once; returns the list of what was run."""
    ran: list[str] = []

    def step(step, _results: Path, _environment: dict[str, str]) -> int:
        ran.append(step.experiment)
        return codes.get(step.experiment, 0)

    def after(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command[3])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(reference.provenance, "git_state", lambda: {"sha": "a" * 40, "dirty": False})
    monkeypatch.setattr(reference, "run", step)
    monkeypatch.setattr(reference.subprocess, "run", after)
    return ran


def test_all_steps_then_the_copy_and_the_readme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TESSA_SHARED", str(tmp_path))
    monkeypatch.delenv("SMOLLM2_WHEEL", raising=False)
    ran = fake(monkeypatch, {})
    assert reference.main([]) == 0
    assert ran == [s.experiment for s in reference.STEPS if s.lacks is None] + ["export", "readme"]


def test_another_machine_has_a_set_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    results, out = reference.folders("h100")
    assert (results.name, out.name) == ("reference-run-h100", "reference_h100")
    assert {results, out}.isdisjoint(reference.folders(None))
    fake(monkeypatch, {})
    into: list[Path] = []
    monkeypatch.setattr(reference, "run", lambda _step, results, _environment: into.append(results) or 0)
    assert reference.main(["--machine", "h100", "--only", "breakdown"]) == 0
    assert into == [results]
    with pytest.raises(SystemExit, match="small letters and digits"):
        reference.main(["--machine", "../x"])


def test_a_failed_step_stops_no_other_but_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = fake(monkeypatch, {"breakdown": 1})
    assert reference.main(["--only", "breakdown,projection"]) == 1
    assert ran == ["breakdown", "projection"]


def test_an_interrupt_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = fake(monkeypatch, {"tp_scaling": 130})
    assert reference.main(["--only", "tp_scaling,projection"]) == 130
    assert ran == ["tp_scaling"]


def test_the_list_names_commands_and_an_unknown_step_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--list"]) == 0
    assert "python run.py experiment=tp_scaling tp=2 model=small" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no reference step for nope"):
        reference.main(["--only", "nope"])
