"""Every serving experiment at `model=tiny measure=smoke` on real engines, and a run that is interrupted.

The experiments run through `experiments.cli` as run.py does. Engines with the same identity are shared between them:
most experiments differ in their workloads alone, so that the whole file needs nine starts of seconds to a minute each.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from omegaconf import DictConfig

from analysis import load
from experiments import cli
from experiments.engine.parent import EngineProcess, make_engine
from experiments.grid import EngineGroup

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
SMOKE = ("model=tiny", "measure=smoke", "allow_sha_change=true")
TWO_ENGINES_GIB = 8


class Pool:
    """An engine factory whose engines outlive the runs that use them.

    Engines at rest are stopped in their tracks. Before another is started, all of them but the one used last are
    ended, so that memory holds the engines of one run and one more.
    """

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.starts = 0
        self.resting: dict[str, EngineProcess] = {}  # in the order of their last use

    def __call__(self, group: EngineGroup, log: Path) -> Pooled:
        return Pooled(self, group, log)

    def take(self, group: EngineGroup, log: Path, timeout_s: float) -> EngineProcess:
        if (engine := self.resting.pop(group.key, None)) is None:
            for key in list(self.resting)[:-1]:
                self.resting.pop(key).stop()
            self.starts += 1
            engine = make_engine(group, log, self.cache)
            try:
                engine.start(timeout_s)
            except BaseException:
                engine.stop()
                raise
            # A run's logs go with the run.
            engine.log_path = Path(shutil.copy(log, Path(engine._scratch.name) / "engine.log"))
        else:
            shutil.copy(engine.log_path, log)
        engine.resume()
        return engine

    def end_all(self) -> None:
        while self.resting:
            self.resting.popitem()[1].stop()


class Pooled:
    """The `experiments.runner.Engine` of one run."""

    def __init__(self, pool: Pool, group: EngineGroup, log: Path) -> None:
        self._pool, self._group, self._log = pool, group, log
        self._engine: EngineProcess | None = None

    def start(self, timeout_s: float) -> None:
        self._engine = self._pool.take(self._group, self._log, timeout_s)

    def stop(self) -> None:
        if self._engine is not None:
            self._engine.park()
            self._pool.resting[self._group.key] = self._engine
            self._engine = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.fixture(scope="module")
def pool(cache: Path) -> Iterator[Pool]:
    made = Pool(cache)
    yield made
    made.end_all()


@pytest.fixture
def run(
    pool: Pool, cache: Path, tmp_path: Path, composed: Callable[..., DictConfig]
) -> Callable[..., pd.DataFrame]:
    """Runs an experiment and returns its rows, which have been checked for what holds of every experiment."""

    def execute(name: str, *overrides: str, cells: int) -> pd.DataFrame:
        config = composed(f"experiment={name}", *SMOKE, f"paths.cache={cache}", *overrides)
        assert cli.execute(config, factory=pool) == cli.EXIT_OK
        frame = load(tmp_path / "results", name)
        shown = frame[["cell", "status", "reason"]].to_string()
        assert (frame["status"] == "complete").all(), shown
        assert frame["cell"].nunique() == cells, shown
        assert sorted(frame["repeat"]) == sorted([0, 1] * cells), shown
        for column in ("requests_per_s", "output_tokens_per_s", "ttft_s_p50", "tpot_s_p50", "e2e_s_p99"):
            assert (frame[column] > 0).all(), column
        assert (frame["provenance"] == "measured").all()
        return frame

    return execute


def test_popularity(run: Callable[..., pd.DataFrame]) -> None:
    frame = run("popularity", "backends=[tessa]", "measure.caps.grid_values=6", cells=6)
    assert frame["popularity"].nunique() == 6


def test_rate_sweep(run: Callable[..., pd.DataFrame]) -> None:
    """Rates at which six requests take a second or two to arrive."""
    frame = run("rate_sweep", "backends=[tessa]", "grid.workload.arrivals.rate=[4,16]", cells=2)
    assert sorted(frame["request_rate"].unique()) == [4, 16]
    assert frame["schedule_lag_s_p99"].notna().all()


def test_trace_replay(run: Callable[..., pd.DataFrame], shared_dir: Path) -> None:
    traces = shared_dir / "traces"
    if not list(traces.glob("AzureLLMInferenceTrace_*.csv")):
        pytest.skip(f"no published traces in {traces}; `make traces` tells where to get them")
    frame = run(
        "trace_replay", "backends=[tessa]", "measure.caps.grid_values=3", f"paths.traces={traces}", cells=3
    )
    assert frame["workload_hash"].nunique() == 3


def test_batch_sweep(run: Callable[..., pd.DataFrame]) -> None:
    """Two concurrencies and two prompt lengths, which the smoke cap would make one."""
    frame = run("batch_sweep", "backends=[tessa]", "measure.caps.prompt_tokens=64", cells=4)
    assert frame["concurrency"].nunique() == 2
    assert frame["prompt_tokens"].nunique() == 2


def test_adapter_count(run: Callable[..., pd.DataFrame]) -> None:
    """The ends of the axis, of which the cap makes 1 and 4 adapters; identical and distinct ones at each."""
    frame = run("adapter_count", "backends=[tessa]", cells=4)
    assert sorted(frame["num_adapters"].unique()) == [1, 4]
    size = frame.groupby("num_adapters")["adapter_bytes_per_rank"].max()
    assert size[4] > size[1]


def test_budget_sweep(run: Callable[..., pd.DataFrame]) -> None:
    """Attention alone and all projections."""
    frame = run("budget_sweep", "backends=[tessa]", "grid.adapters.rank_equivalent=[4]", cells=2)
    size = frame.groupby("target_modules")["adapter_bytes_per_rank"].max().sort_values()
    assert [name.count("_proj") for name in size.index] == [4, 7]


def test_breakdown(run: Callable[..., pd.DataFrame]) -> None:
    """Both ablations at tp=2: the one without communication has the base model's collectives alone."""
    frame = run("breakdown", "tp=2", "backends=['slora:communication=off','slora:compute=off']", cells=2)
    assert frame["wrong_by_design"].all()
    collectives = frame.groupby("variant")["collectives_per_step"].max()
    layers = 2
    assert collectives["slora:communication=off"] == 1 + 2 * layers
    assert collectives["slora:compute=off"] == 1 + 2 * layers + 4 * layers


def of_sessions(sessions: set[int]) -> set[psutil.Process]:
    """Living processes of these sessions."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def marked(mark: str) -> set[psutil.Process]:
    """The living processes that have inherited this environment variable, whatever their session."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TESSA_TEST_MARK") == mark:
                found.add(process)
    return found


def stored(results: Path) -> dict[str, bytes]:
    """The summaries of the stored cells."""
    return {
        file.parent.name: file.read_bytes() for file in sorted(results.glob("tp_scaling/[!.]*/summary.json"))
    }


def test_an_interrupted_run_leaves_nothing_behind_and_the_next_does_the_rest(
    pool: Pool, cache: Path, tmp_path: Path, repo_root: Path
) -> None:
    """SIGINT while the second of two workloads is measured, one engine at work and the other one parked."""
    pool.end_all()
    if psutil.virtual_memory().available < TWO_ENGINES_GIB * 2**30:
        pytest.skip(f"two engines side by side need {TWO_ENGINES_GIB} GiB of free memory")
    results, mark = tmp_path / "results", uuid.uuid4().hex
    command = [
        *(sys.executable, str(repo_root / "run.py"), "experiment=tp_scaling", "tp=2", *SMOKE),
        *("backends=[base,tessa]", f"paths.results={results}", f"paths.cache={cache}"),
        # The second workload takes long enough to be interrupted in its middle.
        *("+grid.workload.output_tokens.value=[4,400]", "measure.caps.output_tokens=400"),
    ]
    environment = {**os.environ, "TESSA_TEST_MARK": mark}
    output = tmp_path / "output"

    with output.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=repo_root, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 600
        while len(stored(results)) < 2:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
                pytest.fail(f"the run ended too early:\n{output.read_text()[-3000:]}")
            assert time.monotonic() < deadline, output.read_text()[-3000:]
        # vLLM's processes set titles over their environment, so they are known by the session that they share.
        sessions = {os.getsid(p.pid) for p in marked(mark)}
        assert sessions > {process.pid}
        members = of_sessions(sessions)
        assert len(members) >= 7, members  # the run, and for each engine its child and two workers at least
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == cli.EXIT_INTERRUPTED, output.read_text()[-3000:]
        _, alive = psutil.wait_procs(members | marked(mark), timeout=30)
        assert not alive
        assert not marked(mark) | of_sessions(sessions)
    finally:
        for left in marked(mark):
            left.kill()
        process.wait()

    first = stored(results)
    assert len(first) == 2
    assert "interrupted" in output.read_text()
    folders = [entry for entry in (results / "tp_scaling").iterdir() if entry.name != ".claims"]
    assert {entry.name for entry in folders} == set(first)
    assert not list((results / "tp_scaling" / ".claims").glob("*.claim"))
    assert set(load(results)["status"]) == {"complete"}

    again = subprocess.run(
        command, cwd=repo_root, capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    assert again.returncode == cli.EXIT_OK, again.stdout[-3000:] + again.stderr[-3000:]
    assert "2 cells complete; 2 left as they were" in again.stderr
    second = stored(results)
    assert len(second) == 4
    assert {name: second[name] for name in first} == first
    frame = load(results)
    assert (frame["status"] == "complete").all()
    assert sorted(frame["repeat"]) == sorted([0, 1] * 4)
    assert frame.groupby("cell")["session"].nunique().max() == 1
    assert frame["session"].nunique() == 2
    assert not marked(mark)
