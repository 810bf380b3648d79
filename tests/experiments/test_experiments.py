"""Every serving experiment at `model=tiny measure=smoke` on real engines.

The experiments run through `experiments.cli` as run.py does. Engines with the same identity are shared between them:
most experiments differ in their workloads alone, so that the whole file needs five starts of half a minute each.
Their processes are forked, so times mean nothing here (`warm`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from omegaconf import DictConfig
from warm import WarmEngine

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
            engine = WarmEngine(make_engine(group, log, self.cache).setup, log)
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
        for column in ("requests_per_s", "output_tokens_per_s", "ttft_s_p50", "e2e_s_p99"):
            assert (frame[column] > 0).all(), column
        # Not above: beside other tests a client may be held up until all tokens of a request have come.
        assert (frame["tpot_s_p50"] >= 0).all()
        assert (frame["provenance"] == ("emulated" if name == "interconnect" else "measured")).all()
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


def test_interconnect(run: Callable[..., pd.DataFrame]) -> None:
    """Every collective of the load is delayed, and those of a decode step are counted; the engines are those of
    `breakdown`. What a delay does to a step's time: tests/experiments/engine/test_latency.py."""
    variants = ("slora:communication=off", "slora:compute=off")
    chosen = ",".join(f"'{variant}'" for variant in variants)
    axis = "grid.engine.added_latency_us=[0,100]"
    frame = run("interconnect", f"backends=[{chosen}]", "engine.enforce_eager=null", axis, cells=4)
    assert sorted(frame["added_latency_us"].unique()) == [0, 100]
    layers = 2
    # The sampler's gather of logits is a collective of the step too, outside of the model's forward.
    expected = dict(zip(variants, (2 + 2 * layers, 2 + 6 * layers), strict=True))
    for variant, rows in frame.groupby("variant"):
        assert (rows["step_collectives"] == expected[str(variant)]).all()
        assert (rows["engine_collectives"] == expected[str(variant)] * rows["engine_steps"]).all()
        assert rows.loc[rows["added_latency_us"] == 100, "latency_slope"].notna().all()
