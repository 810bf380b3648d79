"""A Slurm of this machine's own, and sweeps of scripted engines in it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
from tests_support import load_script

from analysis import load

REPO = Path(__file__).resolve().parents[2]
# Only a hang takes so long: what is waited for comes in seconds, or in minutes on a machine under load.
PATIENCE_S = 900.0
SETTINGS = (
    "experiment=tp_scaling",
    "model=tiny",
    "measure=smoke",
    "measure.interleave=off",
    "backends=[base,tessa]",
    # Commits made while the tests run must not matter here; tests/experiments/test_provenance.py is about them.
    "allow_sha_change=true",
)


@pytest.fixture(scope="session")
def local_cluster() -> ModuleType:
    return load_script(REPO / "scripts/slurm/local_cluster.py")


@pytest.fixture(scope="session")
def cluster(local_cluster: ModuleType) -> Iterator[Any]:
    if reason := local_cluster.missing():
        pytest.skip(f"no Slurm here: {reason}")
    with local_cluster.LocalCluster() as started:
        yield started


@dataclass
class Sweeps:
    """Starts run.py with scripted engines; results and everything else below one temporary folder."""

    folder: Path
    environment: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def results(self) -> Path:
        return self.folder / "results"

    def start(
        self, *arguments: str, script: dict[int, str] | None = None, mode: str = ""
    ) -> subprocess.Popen[str]:
        """run.py in the background; its output, both streams, is read with `communicate`."""
        process = subprocess.Popen(
            [sys.executable, str(REPO / "run.py"), *([mode] if mode else []), *self.overrides(*arguments)],
            cwd=REPO,
            env={**self.environment, "TESSA_TEST_SCRIPT": json.dumps(script or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(process)
        return process

    def overrides(self, *arguments: str) -> list[str]:
        flags = [argument for argument in arguments if argument == "-m"]
        arguments = tuple(argument for argument in arguments if argument != "-m")
        return [
            *flags,
            *SETTINGS,
            f"paths.results={self.results}",
            f"paths.cache={self.folder}/cache",
            *arguments,
        ]

    def run(self, *arguments: str, script: dict[int, str] | None = None, mode: str = "") -> tuple[int, str]:
        process = self.start(*arguments, script=script, mode=mode)
        output = process.communicate(timeout=PATIENCE_S)[0]
        print(output)
        return process.returncode, output

    def happened(self, mark: str) -> bool:
        return (self.folder / "once" / mark).exists()

    def frame(self) -> pd.DataFrame:
        """One row per cell, with `seed` and the Slurm part of the provenance."""
        rows = load(self.results).drop_duplicates("cell").copy()
        summaries = [
            json.loads((self.results / "tp_scaling" / c / "summary.json").read_text()) for c in rows["cell"]
        ]
        configs = [
            json.loads((self.results / "tp_scaling" / c / "config.json").read_text()) for c in rows["cell"]
        ]
        rows["seed"] = [config["adapters"]["seed"] for config in configs]
        rows["nodes"] = [[node["rank"] for node in summary.get("nodes", [])] for summary in summaries]
        rows["slurm"] = [summary["environment"]["slurm"] for summary in summaries]
        return rows.set_index(["seed", "backend"]).sort_index()


@contextlib.contextmanager
def making_sweeps(environment: dict[str, str]) -> Iterator[Sweeps]:
    folder = Path(tempfile.mkdtemp(prefix="tessa-sweep-"))
    (folder / "once").mkdir()
    made = Sweeps(
        folder,
        {
            **os.environ,
            **environment,
            # What the plain script runs; a `python` found by the shell may be another one.
            "TESSA_PYTHON": sys.executable,
            "TESSA_TEST_ENGINE": "scripted:make",
            "TESSA_TEST_ONCE": str(folder / "once"),
            "PYTHONPATH": str(Path(__file__).parent),
            "OMP_NUM_THREADS": "1",
            "MPLCONFIGDIR": str(folder / "matplotlib"),
        },
    )
    try:
        yield made
    finally:
        for process in made.started:
            if process.poll() is None:  # the test failed while it ran
                process.terminate()
                print(process.communicate()[0])
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def sweeps(cluster: Any) -> Iterator[Sweeps]:
    with making_sweeps(cluster.environment) as made:
        yield made


@pytest.fixture(scope="module")
def array_sweeps(cluster: Any) -> Iterator[Sweeps]:
    with making_sweeps(cluster.environment) as made:
        yield made


@pytest.fixture
def local_sweeps() -> Iterator[Sweeps]:
    with making_sweeps({}) as made:
        yield made


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """Waits for a condition and returns its value. Fails with what was waited for and what `show` says of the
    state, after a quarter of an hour or as soon as `hopeless` gives a reason."""

    def wait(
        condition: Callable[[], Any],
        what: str,
        hopeless: Callable[[], str | None] = lambda: None,
        show: Callable[[], str] = lambda: "",
    ) -> Any:
        give_up = time.monotonic() + PATIENCE_S
        while True:
            reason = hopeless()  # before the condition, which may have come true just before the end
            if value := condition():
                return value
            if reason is not None or time.monotonic() > give_up:
                pytest.fail(f"waited in vain for {what}: {reason or 'time is up'}\n{show()}")
            time.sleep(0.2)

    return wait


@pytest.fixture(scope="session")
def job_ids() -> Callable[[str], list[str]]:
    """The jobs that a launcher says it submitted."""
    return lambda output: [
        job for line in re.findall(r"^submitted (.+?):", output, re.M) for job in line.split(", ")
    ]
