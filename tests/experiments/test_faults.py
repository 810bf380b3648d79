"""Faults of engines, injected into whole runs: `faults.ENGINE` says what is expected of each."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fault_engines import HANGING, Machines, marked
from faults import ENGINE, Fault

from analysis import load
from experiments import cli
from experiments.engine import parent

pytestmark = [pytest.mark.fake, pytest.mark.fault]


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def two_workloads(tiny_run: Any) -> Any:
    config = tiny_run("measure.rounds=1", "model=tiny")
    config["grid"] = {"backends": ["base", "tessa"], "workload.seed": [1, 2]}
    return config


@pytest.fixture(params=ENGINE, ids=[fault.name for fault in ENGINE])
def fault(request: pytest.FixtureRequest) -> Fault:
    return request.param


@pytest.fixture
def machines(fault: Fault, tmp_path: Path, two_workloads: Any) -> Iterator[Machines]:
    made = Machines({fault.command: fault.behaviour}, tmp_path / "machines")
    made.prepare(cli.plan_run(cli.schema.build(two_workloads), device="cpu"))
    yield made
    for engine in made.made:
        engine.stop()


def test_a_fault_is_a_row_and_leaves_nothing(
    machines: Machines, fault: Fault, two_workloads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault.behaviour in (*HANGING, "deaf"):
        monkeypatch.setattr(parent, "STOP_GRACE_S", 0.5)
    code = cli.execute(two_workloads, factory=machines)
    assert code == (cli.EXIT_OK if fault.status == "complete" else cli.EXIT_FAILED)

    frame = load(tmp_path / "results").drop_duplicates("cell")
    order = [cell.name for cell in cli.plan_run(cli.schema.build(two_workloads), device="cpu").cells]
    assert sorted(frame["cell"]) == sorted(order)
    base = frame[frame["backend"] == "base"]
    assert (base["status"] == "complete").all(), base["reason"].to_list()
    tessa = frame[frame["backend"] == "tessa"].set_index("cell")
    first, second = [tessa.loc[name] for name in order if name.startswith("tessa")]
    assert (first["status"], second["status"]) == (fault.status, fault.next), [
        first["reason"],
        second["reason"],
    ]
    log = (tmp_path / "results" / first["log"]).read_text()
    if fault.status != "complete":
        assert fault.words in first["reason"]
        assert first["reason"].startswith(fault.words.split(":")[0]) or fault.command == "park"
        assert pd.isna(first["output_tokens_per_s"])
    if fault.behaviour not in ("flood",):
        assert "holds psm_" in log
    if fault.behaviour in ("stalled", "failing"):
        kept = pd.read_parquet((tmp_path / "results" / first["log"]).with_name("requests.parquet"))
        assert list(kept["status"]) == ["ok"] * 5 + ["aborted"], "the requests of the failed round are kept"

    left = {mark: marked(mark) for mark in machines.marks}
    assert not any(left.values()), left
    assert not [mark for mark in machines.marks if Path(mark).exists()], "folders with sockets are left"
    logs = [path.read_text() for path in (tmp_path / "results").rglob("engine.log")]
    held = {pair for text in logs for pair in re.findall(r"holds (psm_\w+) and port (\d+)", text)}
    assert len(held) >= 1
    assert not [name for name, _ in held if Path("/dev/shm", name).exists()]
    assert not [port for _, port in held if is_open(int(port))]
    experiment = tmp_path / "results" / "tp_scaling"
    assert not list((experiment / ".claims").glob("*.claim"))
    assert sorted(entry.name for entry in experiment.iterdir() if entry.name != ".claims") == sorted(order)
