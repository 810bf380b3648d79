"""A backend, a workload and an experiment of one's own: what they touch is counted, and each is run.

They are written into a copy of the tree as a user would write them into theirs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments.backends import resolve
from experiments.config import BackendConfig
from tessa.errors import UserError

TREE = ("analysis", "baselines", "conf", "experiments", "hydra_plugins", "tessa")

MODULE = '''"""Plain LoRA with a switch of its own."""

from tessa.backend import BackendSpec

SPEC = BackendSpec(
    name="toy",
    title="Toy",
    adapter_format="lora",
    summary="As punica, with an option. No extra collective.",
    hook="baselines.vllm_lora:GroupedLoRA",
    engine_args={"enable_lora": True},
    kernels=("grouped", "stock"),
    options={"speed": ("slow", "fast")},
)
'''
LINE = '    "toy": "baselines.toy:SPEC",\n'
BACKEND = "defaults: [schema, _self_]\nname: toy\nkernels: auto\n"
WORKLOAD = """defaults: [schema, _self_]
name: toy
seed: 3
num_requests: 12
arrivals: {kind: gamma, rate: 4.0, cv: 2.0}
prompt_tokens: {kind: uniform, low: 8, high: 24}
output_tokens: {kind: fixed, value: 8}
popularity: {kind: zipf, s: 1.2}
"""
EXPERIMENT = """# @package _global_
defaults:
  - override /workload: toy

name: toy_study
description: a toy of each

grid:
  backends: [base, toy, "toy:speed=fast"]
  workload:
    arrivals:
      rate: [2, 4]
"""


def contents(root: Path) -> dict[str, str]:
    files = (f for f in root.rglob("*") if f.suffix in (".py", ".yaml") and "__pycache__" not in f.parts)
    return {str(f.relative_to(root)): f.read_text(encoding="utf-8") for f in files}


def add_backend(root: Path) -> None:
    (root / "baselines" / "toy.py").write_text(MODULE)
    registry = root / "baselines" / "__init__.py"
    before = registry.read_text()
    registry.write_text(before.replace('    "openai":', LINE + '    "openai":'))
    (root / "conf" / "backend" / "toy.yaml").write_text(BACKEND)


def add_workload(root: Path) -> None:
    (root / "conf" / "workload" / "toy.yaml").write_text(WORKLOAD)


def add_experiment(root: Path) -> None:
    (root / "conf" / "experiment" / "toy_study.yaml").write_text(EXPERIMENT)


@dataclass(frozen=True)
class Extended:
    """A copy of the tree with all three; touched: the files that each of them changed or added."""

    root: Path
    touched: dict[str, list[str]]

    def dry_run(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        """run.py of the copy, whose packages come before the installed project's."""
        return subprocess.run(
            [sys.executable, "run.py", "model=tiny", "dry_run=true", *overrides],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root)},
            capture_output=True,
            text=True,
        )


@pytest.fixture(scope="module")
def extended(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Extended:
    root, touched = tmp_path_factory.mktemp("tree"), {}
    for name in TREE:
        shutil.copytree(repo_root / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repo_root / "run.py", root)
    for add in (add_backend, add_workload, add_experiment):
        before = contents(root)
        add(root)
        after = contents(root)
        touched[add.__name__] = sorted(name for name in after if before.get(name) != after[name])
        assert set(before) <= set(after)
    return Extended(root, touched)


def test_each_touches_few_files(extended: Extended) -> None:
    assert extended.touched == {
        "add_backend": ["baselines/__init__.py", "baselines/toy.py", "conf/backend/toy.yaml"],
        "add_workload": ["conf/workload/toy.yaml"],
        "add_experiment": ["conf/experiment/toy_study.yaml"],
    }


def test_all_three_make_a_plan(extended: Extended) -> None:
    done = extended.dry_run("experiment=toy_study")
    assert done.returncode == 0, done.stderr
    assert "toy_study: 6 cells, 6 to run" in done.stdout
    lines = done.stdout.splitlines()
    assert sum("toy:speed=fast tp=1" in line for line in lines) == 2
    assert sum("rate=2/s" in line for line in lines) == 3
    assert all("zipf(s=1.2)" in line for line in lines if line.startswith("  missing"))


@pytest.mark.parametrize(
    ("backend", "said"), [("toy:speed=fsat", "did you mean 'fast'?"), ("toi", "did you mean 'toy'?")]
)
def test_its_options_and_name_are_checked_like_all_others(
    extended: Extended, backend: str, said: str
) -> None:
    wrong = extended.dry_run("experiment=tp_scaling", f"backends=['{backend}']")
    assert wrong.returncode == 2
    assert said in wrong.stderr


def test_a_backend_without_its_line_in_the_registry_is_not_known() -> None:
    with pytest.raises(UserError, match="backend=toy is not known"):
        resolve(BackendConfig(name="toy"), "cpu")
