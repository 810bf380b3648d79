"""A backend, a workload and an experiment of one's own: what they touch is counted, and each is run.

Each is written into a copy of the tree as a user would write it into theirs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.fixture
def copy(repo_root: Path, tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name in TREE:
        shutil.copytree(repo_root / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(repo_root / "run.py", root)
    return root


def python(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """This Python in the copy, which comes before the installed project."""
    env = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, *arguments], cwd=root, env=env, capture_output=True, text=True)


def test_each_touches_few_files(copy: Path) -> None:
    touched = {}
    for add in (add_backend, add_workload, add_experiment):
        before = contents(copy)
        add(copy)
        after = contents(copy)
        touched[add.__name__] = sorted(name for name in after if before.get(name) != after[name])
        assert set(before) <= set(after)
    assert touched == {
        "add_backend": ["baselines/__init__.py", "baselines/toy.py", "conf/backend/toy.yaml"],
        "add_workload": ["conf/workload/toy.yaml"],
        "add_experiment": ["conf/experiment/toy_study.yaml"],
    }


def test_all_three_make_a_plan(copy: Path) -> None:
    for add in (add_backend, add_workload, add_experiment):
        add(copy)
    done = python(copy, "run.py", "experiment=toy_study", "model=tiny", "dry_run=true")
    assert done.returncode == 0, done.stderr
    assert "toy_study: 6 cells, 6 to run" in done.stdout
    lines = done.stdout.splitlines()
    assert sum("toy:speed=fast tp=1" in line for line in lines) == 2
    assert sum("rate=2/s" in line for line in lines) == 3
    assert all("zipf(s=1.2)" in line for line in lines if line.startswith("  missing"))
    alone = python(
        copy, "run.py", "experiment=tp_scaling", "backends=[base,toy]", "model=tiny", "dry_run=true"
    )
    assert "tp_scaling: 2 cells, 2 to run" in alone.stdout


def test_its_options_and_name_are_checked_like_all_others(copy: Path) -> None:
    add_backend(copy)
    wrong = python(
        copy, "run.py", "experiment=tp_scaling", "model=tiny", "backends=['toy:speed=fsat']", "dry_run=true"
    )
    assert wrong.returncode == 2
    assert "did you mean 'fast'?" in wrong.stderr
    without = (copy / "baselines" / "__init__.py").read_text().replace(LINE, "")
    (copy / "baselines" / "__init__.py").write_text(without)
    unknown = python(copy, "run.py", "experiment=tp_scaling", "model=tiny", "backends=[toy]", "dry_run=true")
    assert unknown.returncode == 2
    assert "toy" in unknown.stderr


def test_a_new_backend_can_be_drawn(copy: Path) -> None:
    add_backend(copy)
    code = (
        "from analysis import style; from baselines import get_backend;"
        "assert get_backend('toy').title == 'Toy'; assert style.colour('toy:fast') in style.SPARE_COLOURS;"
        "assert style.name('toy') == 'toy'"
    )
    assert python(copy, "-c", code).returncode == 0
