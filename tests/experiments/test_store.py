"""The results folder: whole cells or none, errors in words, and no harm between runs."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pandas as pd
import pytest

from experiments import claims, store
from experiments.store import SCHEMA_VERSION, Store
from tessa.errors import UserError

RECORDS = pd.DataFrame({"request_id": [0, 1], "round": [0, 0]})


def summary(status: str = "complete", cell_hash: str = "h") -> dict[str, object]:
    return {"status": status, "hash": cell_hash, "rounds": []}


@pytest.fixture
def results(tmp_path: Path) -> Store:
    return Store(tmp_path / "results", "exp")


def hidden(where: Store) -> list[str]:
    return [p.name for p in where.folder.iterdir() if p.name.startswith(".") and p.name != ".claims"]


def test_a_cell_is_written_whole(results, tmp_path):
    log = tmp_path / "live.log"
    log.write_text("hello\n")
    folder = results.write("a-tp1-x", {"tp": 1}, summary(), RECORDS, log)
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "engine.log",
        "requests.parquet",
        "summary.json",
    ]
    assert results.status("a-tp1-x", "h") == "complete"
    assert results.status("a-tp1-x", "other") == "missing"
    assert results.summary("a-tp1-x")["schema_version"] == SCHEMA_VERSION
    assert pd.read_parquet(folder / "requests.parquet").equals(RECORDS)
    assert results.cells() == ["a-tp1-x"]
    assert hidden(results) == []


def test_a_newer_cell_replaces_the_older(results):
    results.write("c", {}, summary("failed"), RECORDS)
    results.write("c", {}, summary("complete"))
    assert results.status("c") == "complete"
    assert not (results.path("c") / "requests.parquet").exists()


def test_a_summary_is_amended_alone_or_not_at_all(results, monkeypatch):
    results.write("c", {"tp": 1}, summary(), RECORDS)
    results.amend("c", {**results.summary("c"), "more": 1})
    assert results.summary("c")["more"] == 1
    assert sorted(p.name for p in results.path("c").iterdir()) == [
        "config.json",
        "requests.parquet",
        "summary.json",
    ]
    break_at(monkeypatch, "summary.json", OSError(errno.ENOSPC, "full"))
    with pytest.raises(UserError, match="full"):
        results.amend("c", {**results.summary("c"), "more": 2})
    assert results.summary("c")["more"] == 1
    assert hidden(results) == []


STEPS = ["mkdir", "config.json", "requests", "log", "summary.json", "sync", "first rename", "second rename"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "how", [KeyboardInterrupt, OSError(errno.ENOSPC, "full"), OSError(errno.EROFS, "ro")]
)
def test_a_break_between_any_two_steps_loses_nothing(results, tmp_path, monkeypatch, step, how):
    results.write("c", {"old": True}, summary("failed"), RECORDS)
    log = tmp_path / "live.log"
    log.write_text("x")
    break_at(monkeypatch, step, how)
    expected = KeyboardInterrupt if how is KeyboardInterrupt else UserError
    with pytest.raises(expected) as raised:
        results.write("c", {"old": False}, summary("complete"), RECORDS, log)
    monkeypatch.undo()
    if expected is UserError:
        assert ("full" if how.errno == errno.ENOSPC else "read-only") in str(raised.value)
    make_owner_dead(monkeypatch)
    after = Store(results.results, "exp")
    assert after.status("c") == "failed"
    assert json.loads((after.path("c") / "config.json").read_text()) == {"old": True}
    assert hidden(after) == []


def test_rounds_are_kept_until_the_cell_is_stored(results):
    assert results.kept_rounds("c", "h") is None
    results.keep_rounds("c", {"hash": "h", "rounds": [1]}, RECORDS)
    results.keep_rounds("c", {"hash": "h", "rounds": [1, 2]}, RECORDS)
    kept, records = results.kept_rounds("c", "h")
    assert kept["rounds"] == [1, 2]
    assert records.equals(RECORDS)
    assert results.kept_rounds("c", "other") is None
    assert results.cells() == []
    results.write("c", {}, summary("failed"))
    assert results.kept_rounds("c", "h") is None
    assert hidden(results) == []


ROUND_STEPS = ["mkdir", "rounds.json", "requests", "sync", "first rename", "second rename"]


@pytest.mark.parametrize("step", ROUND_STEPS)
@pytest.mark.parametrize("how", [KeyboardInterrupt, OSError(errno.ENOSPC, "full")])
def test_a_break_leaves_the_rounds_that_were_kept_before(results, monkeypatch, step, how):
    results.keep_rounds("c", {"hash": "h", "rounds": [1]}, RECORDS)
    break_at(monkeypatch, step, how)
    with pytest.raises(KeyboardInterrupt if how is KeyboardInterrupt else UserError):
        results.keep_rounds("c", {"hash": "h", "rounds": [1, 2]}, RECORDS)
    monkeypatch.undo()
    make_owner_dead(monkeypatch)
    after = Store(results.results, "exp")
    kept, records = after.kept_rounds("c", "h")
    assert kept["rounds"] == [1]
    assert records.equals(RECORDS)
    assert hidden(after) == [".rounds-c"]


def test_rounds_left_beside_a_complete_cell_are_cleared(results, monkeypatch):
    results.keep_rounds("c", {"hash": "h", "rounds": [1]}, RECORDS)
    monkeypatch.setattr(Store, "drop_rounds", lambda self, cell: None)
    results.write("c", {}, summary())
    monkeypatch.undo()
    assert hidden(Store(results.results, "exp")) == []


def break_at(monkeypatch: pytest.MonkeyPatch, step: str, how: object) -> None:
    def fail(*_: object, **__: object) -> None:
        raise how  # type: ignore[misc]

    write_json, rename, calls = store._write_json, os.rename, []

    def json_step(path: Path, value: object) -> None:
        if path.name == step:
            path.write_text("{")
            fail()
        write_json(path, value)

    def rename_step(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == (1 if step == "first rename" else 2):
            fail()
        rename(source, target)

    if step == "mkdir":
        mkdir = Path.mkdir
        monkeypatch.setattr(
            Path, "mkdir", lambda self, **k: fail() if ".tmp-" in self.name else mkdir(self, **k)
        )
    elif step in ("config.json", "summary.json", "rounds.json"):
        monkeypatch.setattr(store, "_write_json", json_step)
    elif step == "requests":
        monkeypatch.setattr(pd.DataFrame, "to_parquet", fail)
    elif step == "log":
        monkeypatch.setattr(store, "_copy_log", fail)
    elif step == "sync":
        monkeypatch.setattr(store, "_sync", fail)
    else:
        monkeypatch.setattr(store.os, "rename", rename_step)


def make_owner_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "owner_is_dead", lambda tag: True)


def test_another_schema_version_is_refused(results):
    results.write("c", {}, summary())
    file = results.path("c") / "summary.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "schema_version": 0}))
    with pytest.raises(UserError, match="schema version 0, this code reads and writes 1"):
        Store(results.results, "exp")
    assert json.loads(file.read_text())["schema_version"] == 0


def test_a_damaged_summary_is_named(results):
    results.write("c", {}, summary())
    (results.path("c") / "summary.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        results.status("c")


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(UserError, match=r"paths\.results="):
        Store(tmp_path / "results", "exp")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch, code):
    def refuse(*_: object) -> None:
        raise OSError(code, "no")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(UserError, match="cannot write results"):
        Store(tmp_path / "results", "exp")


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".hidden", "/etc"])
def test_names_cannot_leave_the_folder(results, name):
    with pytest.raises(UserError, match="plain folder name"):
        results.path(name)
    with pytest.raises(UserError, match="folder name"):
        Store(results.results, name)


def test_an_unknown_status_is_a_bug(results):
    with pytest.raises(ValueError, match="status"):
        results.write("c", {}, summary("fine"))


def test_values_become_plain_json(results):
    import numpy as np

    found = store.jsonable(
        {"a": np.float64("nan"), "b": np.int64(3), "c": (1.0, float("inf")), "d": Path("x")}
    )
    assert found == {"a": None, "b": 3, "c": [1.0, None], "d": "x"}


def test_a_long_log_keeps_its_end(results, tmp_path):
    log = tmp_path / "live.log"
    log.write_text("a" * store.LOG_LIMIT + "the cause\n")
    results.write("c", {}, summary("failed"), log=log)
    kept = (results.path("c") / "engine.log").read_text()
    assert len(kept) == store.LOG_LIMIT
    assert kept.endswith("the cause\n")


def test_scratch_of_a_live_run_is_left_alone(results, monkeypatch):
    mine = results.scratch("logs")
    Store(results.results, "exp")
    assert mine.is_dir()
    make_owner_dead(monkeypatch)
    Store(results.results, "exp")
    assert not mine.exists()
