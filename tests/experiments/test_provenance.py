"""Provenance: the code's state, what a job inherits, and what must not be kept."""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import provenance
from tessa.errors import UserError


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    folder.mkdir()
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t"]
    subprocess.run([*git, "init", "-q"], check=True)
    (folder / "a").write_text("1")
    subprocess.run([*git, "add", "a"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    return folder


def test_clean_dirty_and_untracked(repo):
    clean = provenance.git_state(repo)
    assert len(clean["sha"]) == 40
    assert clean["dirty"] is False
    (repo / "b").write_text("2")
    assert provenance.git_state(repo) == {"sha": clean["sha"], "dirty": True}
    (repo / "b").unlink()
    (repo / "a").write_text("3")
    assert provenance.git_state(repo)["dirty"] is True


def test_outside_of_git(tmp_path):
    assert provenance.git_state(tmp_path / "nowhere") == {"sha": None, "dirty": None}


def test_submit_is_marked_once(monkeypatch):
    monkeypatch.delenv(provenance.SUBMIT_SHA, raising=False)
    monkeypatch.delenv(provenance.SUBMIT_DIRTY, raising=False)
    states = iter([{"sha": "a" * 40, "dirty": True}, {"sha": "b" * 40, "dirty": False}])
    monkeypatch.setattr(provenance, "git_state", lambda: next(states))
    provenance.mark_submit()
    provenance.mark_submit()
    assert provenance.submit_state() == {"sha": "a" * 40, "dirty": True}


def test_changed_code_is_refused_unless_allowed():
    before, after = {"sha": "a" * 40, "dirty": False}, {"sha": "b" * 40, "dirty": False}
    with pytest.raises(UserError, match="allow_sha_change=true"):
        provenance.check_same_code(before, after, allowed=False)
    provenance.check_same_code(before, after, allowed=True)
    provenance.check_same_code(before, before, allowed=False)
    provenance.check_same_code({"sha": None, "dirty": None}, after, allowed=False)


def test_collect_is_plain_and_names_no_user(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    found = provenance.collect()
    text = json.dumps(found)
    assert found["slurm"] == {"slurm_job_id": "123"}
    assert found["packages"]["numpy"]
    assert found["hardware"]["cores"] >= 1
    assert str(Path.home()) not in text
    if getpass.getuser() not in ("root",):
        assert getpass.getuser() not in text


def test_a_cell_says_what_run_py_was_given_but_for_folders(monkeypatch):
    monkeypatch.setattr(provenance, "_overrides", None)
    assert provenance.collect()["overrides"] is None
    home = Path.home()
    provenance.mark_command(
        ["experiment=tp_scaling", f"paths.results={home}/r", f"+workload.path={home}/t.csv"]
    )
    assert provenance.collect()["overrides"] == ["experiment=tp_scaling", "+workload.path=<home>/t.csv"]


def test_a_row_says_what_was_typed_but_for_its_folder(monkeypatch):
    monkeypatch.setattr(provenance, "_overrides", None)
    spec = SimpleNamespace(name="experiments.layer_step.__main__")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(
        sys, "argv", ["x", "--tp", "2", "4", "--out", "some/where", "--log", f"{Path.home()}/l"]
    )
    assert provenance.command() == "python -m experiments.layer_step --tp 2 4 --log '<home>/l'"
    monkeypatch.setattr(sys, "argv", ["x", "--out=some/where"])
    assert provenance.command() == "python -m experiments.layer_step"
    provenance.mark_command(["experiment=layer_step", "study.rounds=3", "paths.results=r"])
    assert provenance.command() == "python run.py experiment=layer_step study.rounds=3"


def test_scrub(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "abcdef0123456789")
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    repo, home = str(provenance.REPO), str(Path.home())
    text = f"{repo}/run.py key abcdef0123456789 {home}/x {sys.prefix}/lib {repo}er abc"
    shown = provenance.scrub(text)
    assert shown.startswith("<repo>/run.py key <some_api_key> <home>/x <env>/lib")
    assert "<repo>er" not in shown
    assert shown.endswith("er abc")


def test_device_follows_the_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(provenance, "gpus", lambda: ())
    assert provenance.device() == "cpu"
    monkeypatch.setattr(provenance, "gpus", lambda: ({"name": "H100"},))
    assert provenance.device() == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert provenance.device() == "cpu"


def test_gpus_are_read_from_nvidia_smi(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559, 550.54, 1980, 2619'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    provenance.gpus.cache_clear()
    try:
        (gpu,) = provenance.gpus()
    finally:
        monkeypatch.undo()
        provenance.gpus.cache_clear()
    assert gpu["name"] == "NVIDIA H100"
    assert gpu["driver_version"] == "550.54"
