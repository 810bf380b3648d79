"""wandb, offline: one finished run per cell, with nothing in it that the store would not keep."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments import cli
from experiments.config import LoggerConfig
from experiments.grid import Cell
from experiments.loggers import WandbLogger, has_key
from experiments.provenance import REPO

pytestmark = pytest.mark.fake

BLOCK, FILE_HEADER, HEADER = 32768, 7, 7


@pytest.fixture(autouse=True)
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without any setting of wandb's."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / ".netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def stored_records(file: Path) -> Iterator[Any]:
    """The records of a `.wandb` file, a log of LevelDB's format: what `wandb sync` would upload."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = file.read_bytes(), FILE_HEADER, b""
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:  # a block's last bytes hold no record
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):  # the whole of a record, or its last part
            yield Record.FromString(parts)
            parts = b""


def runs(tmp_path: Path) -> dict[str, list[Any]]:
    """Records of every offline run, by the run's name."""
    files = sorted((tmp_path / "cache").rglob("*.wandb"))
    found = [list(stored_records(file)) for file in files]
    names = [next(r.run.display_name for r in records if r.HasField("run")) for records in found]
    assert len(set(names)) == len(names)
    return dict(zip(names, found, strict=True))


def config_of(run: Any) -> dict[str, Any]:
    return {item.key: json.loads(item.value_json) for item in run.config.update}


def summary_of(records: list[Any]) -> dict[str, Any]:
    updates = [item for r in records if r.HasField("summary") for item in r.summary.update]
    return {item.key: json.loads(item.value_json) for item in updates}


def test_without_a_key_each_cell_is_one_finished_run_offline(fleet, tiny_run, tmp_path, capsys):
    fleet.gates["tessa"] = {"passed": False, "max_abs_error": 1.0, "detail": "differs"}
    assert cli.execute(tiny_run("logger=wandb", "backends=[base,tessa]"), factory=fleet) == 1
    assert "wandb failed" not in capsys.readouterr().err
    store, sent = cli.Store(tmp_path / "results", "tp_scaling"), runs(tmp_path)
    assert sorted(sent) == store.cells()
    assert {name.partition("-")[0]: summary_of(sent[name])["status"] for name in sent} == {
        "base": "complete",
        "tessa": "incorrect",
    }
    for name, records in sent.items():
        stored = store.summary(name)
        run = next(r.run for r in records if r.HasField("run"))
        assert (run.project, run.run_group) == ("tessa-bench", "tp_scaling")
        assert config_of(run)["workload"]["hash"] == stored["labels"]["workload_hash"]
        (end,) = (r.exit for r in records if r.HasField("exit"))
        assert end.exit_code == (0 if stored["status"] == "complete" else 1)
        assert len([r for r in records if r.HasField("history")]) == len(stored["rounds"])
        summary = summary_of(records)
        assert summary["reason"] == stored["reason"]
        assert summary["git_sha"] == stored["environment"]["git_start"]["sha"]


def test_nothing_leaves_that_the_store_would_not_keep(tmp_path, monkeypatch):
    secret, private = "hf_0123456789abcdef", tmp_path / "home" / "private"
    monkeypatch.setenv("SOME_TOKEN", secret)
    identity = {"backend": "slora", "tp": 1, "options": {"python": f"{private}/bin/python", "auth": secret}}
    summary = {
        "status": "failed",
        "reason": f"no access with {secret} to {private}",
        "cell": "slora-tp1-0123",
        "rounds": [],
        "environment": {"git_start": {"sha": "c" * 40}},
    }
    warnings: list[str] = []
    logger = WandbLogger(LoggerConfig(name="wandb"), str(tmp_path / "cache"), warnings.append)
    logger.log_cell(Cell("tp_scaling", identity, {}, "0123"), summary)
    logger.close()
    assert warnings == []
    ((_, records),) = runs(tmp_path).items()
    run = next(r.run for r in records if r.HasField("run"))
    assert config_of(run)["options"] == {"python": "<home>/private/bin/python", "auth": "<some_token>"}
    assert summary_of(records)["reason"] == "no access with <some_token> to <home>/private"
    (kept,) = (tmp_path / "cache").rglob("files")
    written = [str(r) for r in records] + [f.read_text() for f in kept.rglob("*") if f.is_file()]
    for text in (secret, str(tmp_path), str(REPO), sys.prefix):
        assert not [w for w in written if text in w], text


def test_a_wandb_that_breaks_costs_no_cell(fleet, tiny_run, tmp_path, monkeypatch, capsys):
    import wandb

    finish = wandb.Run.finish

    def broken(run: wandb.Run, *args: Any, **kwargs: Any) -> None:
        finish(run, *args, **kwargs)
        raise RuntimeError("no route to host")

    monkeypatch.setattr(wandb.Run, "finish", broken)
    assert cli.execute(tiny_run("logger=wandb", "backends=[base,slora]"), factory=fleet) == 0
    store = cli.Store(tmp_path / "results", "tp_scaling")
    assert [store.status(cell) for cell in store.cells()] == ["complete", "complete"]
    assert capsys.readouterr().err.count("wandb failed") == 1
    assert len(runs(tmp_path)) == 1


def test_a_service_that_does_not_end_costs_no_run(tmp_path, monkeypatch):
    import wandb

    def broken(**_: Any) -> None:
        raise RuntimeError("gone")

    warnings: list[str] = []
    monkeypatch.setattr(wandb, "init", broken)
    monkeypatch.setattr(wandb, "teardown", broken)
    logger = WandbLogger(LoggerConfig(name="wandb"), str(tmp_path), warnings.append)
    logger.close()
    assert not warnings, "a wandb that was never used has nothing to end"
    logger.log_cell(Cell("tp_scaling", {"backend": "base", "tp": 1}, {}, "0123"), {"status": "complete"})
    logger.close()
    assert ["wandb failed" in w for w in warnings] == [True, False]


def test_a_key_is_found_where_wandb_looks(tmp_path, monkeypatch):
    assert not has_key()
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert has_key()
    monkeypatch.delenv("WANDB_API_KEY")
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password 0123\n")
    netrc.chmod(0o600)
    assert has_key()
