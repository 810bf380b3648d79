"""The Triton kernels in Triton's interpreter, in one process: it must be chosen before Triton is imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = (
    "tessa/ops/interpreted_kernels.py",
    "baselines/interpreted_lora.py",
    "experiments/layer_step/interpreted_gpu_path.py",
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_in_the_interpreter(repo_root: Path) -> None:
    files = [str(repo_root / "tests" / name) for name in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=repo_root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert "passed" in summary, summary
    assert ("skipped" in summary) == (importlib.util.find_spec("vllm") is None), summary
