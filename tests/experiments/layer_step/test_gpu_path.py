"""The prepared GPU script on the CPU; tests/test_triton_interpreter.py runs the GPU's products without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from baselines import lora_check
from experiments.layer_step import kernel_check
from tessa.ops import selfcheck

BLOCKED = (
    "hydra", "omegaconf", "vllm", "pyarrow", "peft", "transformers", "psutil", "scipy", "matplotlib", "safetensors",
)  # fmt: skip


def gpu_check(repo_root: Path, folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(repo_root / "scripts" / "gpu_check.sh"), *arguments]
    settings = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, cwd=folder, env=settings, capture_output=True, text=True)


def test_the_script_needs_torch_numpy_and_pandas_alone(repo_root: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {BLOCKED!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    done = gpu_check(repo_root, tmp_path, "rows", "--device", "cpu", "--quick", PYTHONPATH=str(site))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kernel check on cpu: 24 of 24 cases right" in done.stdout
    assert done.stdout.strip().splitlines()[-1] == "48 rows complete"
    frame = pd.read_csv(tmp_path / "rows" / "rows.csv")
    assert set(frame.status) == {"complete"}
    assert {file.name for file in (tmp_path / "rows").iterdir() if not file.name.startswith(".")} == {
        "rows.csv", "environment.json", "spec.json", "kernels.log", "layer_step.log",
    }  # fmt: skip


def test_on_a_gpu_every_shape_is_checked_once_and_graphs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def check(device: str, shapes: tuple[object, ...] = ("graphs",)) -> list[kernel_check.Result]:
        seen.extend(shapes)
        return []

    monkeypatch.setattr(selfcheck, "check_kernels", check)
    monkeypatch.setattr(selfcheck, "check_graphs", check)
    monkeypatch.setattr(lora_check, "check_lora_kernels", check)
    for _, run in kernel_check.groups("cuda"):
        run()
    assert len(seen) == len(set(seen))
    assert {"graphs", *selfcheck.SMALL, *selfcheck.LARGE, *lora_check.LARGE} <= set(seen)


def test_the_script_fails_where_there_is_no_gpu(repo_root: Path, tmp_path: Path) -> None:
    done = gpu_check(repo_root, tmp_path, "rows", "--quick", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert done.stdout.count("error: device=cuda, but PyTorch finds no GPU here") == 2  # either half
    assert "Traceback" not in done.stdout
    for wrong in ((), ("rows", "--device", "tpu")):
        done = gpu_check(repo_root, tmp_path, *wrong)
        assert done.returncode == 2
        assert done.stderr.count("usage:") == 1
        assert done.stdout == ""
