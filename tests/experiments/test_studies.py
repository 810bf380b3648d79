"""Experiments without an engine: what they call when they have run, and how their process ends."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from experiments import studies
from experiments.config import PathsConfig, RunConfig, build
from experiments.store import Store, summaries
from tessa.errors import UserError

STARTER = """
import sys
from pathlib import Path
from experiments import studies
sys.executable = {fake!r}
studies._measure({{}}, Path("out"), False)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_stopped_run_takes_its_measuring_process_along(
    how: signal.Signals, tmp_path: Path, repo_root: Path
) -> None:
    fake = tmp_path / "measures"
    fake.write_text("#!/bin/sh\necho up\nexec sleep 600\n")
    fake.chmod(0o755)
    code = STARTER.format(fake=str(fake))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=repo_root
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(how)
    assert process.stdout.read() == b""  # end of file: the child's end of the pipe is closed too
    assert process.wait() != 0
    process.stdout.close()


@pytest.mark.parametrize(("mode", "called"), [("run", [("projection", None)]), ("status", [])])
def test_what_shows_results_is_called_after_a_run(
    mode: str, called: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.projection.runner.run", lambda spec, out, cells: out)
    config = RunConfig(name="projection", kind="projection", paths=PathsConfig(results=str(tmp_path)))
    shown: list[Any] = []

    def report(results: Path, experiment: str, cells: list[str] | None) -> None:
        assert results == tmp_path
        shown.append((experiment, cells))

    assert studies.execute(config, mode, report) == 0
    assert shown == called


def test_a_study_that_reads_no_measure_says_so(
    composed: Callable[..., DictConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in ("layer_step", "projection"):
        assert studies.execute(build(composed(f"experiment={kind}", "measure=smoke")), "status") == 0
        assert f"measure=smoke: {kind} does not read `measure`" in capsys.readouterr().out
        assert studies.execute(build(composed(f"experiment={kind}")), "status") == 0
        assert "measure" not in capsys.readouterr().out


def test_a_smoke_run_hides_no_mistake(composed: Callable[..., DictConfig]) -> None:
    with pytest.raises(UserError, match="seeds is empty"):
        studies.execute(build(composed("experiment=quality", "measure=smoke", "study.seeds=[]")), "status")


def test_a_projection_reads_the_stored_cells(tmp_path: Path) -> None:
    store = Store(tmp_path, "tp_scaling")
    store.write("base-tp1-x", {"tp": 1}, {"status": "complete", "hash": "x"})
    store.write("base-tp2-y", {"tp": 2}, {"status": "failed", "hash": "y"})
    (tmp_path / "tp_scaling" / "base-tp2-y" / "config.json").write_text("{")
    (tmp_path / "no experiment").mkdir()
    found = list(summaries(tmp_path))
    assert [(s["hash"], s["config"]) for s in found] == [("x", {"tp": 1}), ("y", None)]


def test_nothing_below_experiments_imports_the_analysis(repo_root: Path) -> None:
    files = [f for part in ("experiments", "baselines", "tessa") for f in (repo_root / part).rglob("*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            assert not any(name.partition(".")[0] == "analysis" for name in names), f"{file}: {names}"
