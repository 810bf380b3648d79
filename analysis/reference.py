"""The reference set: a small copy of a results folder, free of what tells about the machine's owner, for git.

A cell keeps `summary.json` and `config.json`, so that everything here reads it as any other result. Left out: logs,
tracebacks, host and job names, the kernel's release, and request records but for what the replay of a trace draws.
"""

from __future__ import annotations

import json
import math
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.load import summaries
from experiments.provenance import scrub
from tessa.errors import UserError

DIGITS = 6
MOST_BYTES = 5_000_000
"""What the set may take in git, figures included."""
REPLAYED = ("trace_replay",)
"""Experiments whose figures need request records, and the columns that they need."""
REPLAY_COLUMNS = ("request_id", "scheduled_s", "first_token_s", "end_s", "status", "round")
DROPPED = ("traceback",)
ENVIRONMENT = ("git_submit", "git_start", "packages", "hardware", "platform", "overrides")
FOLDERS = re.compile(r"(?<![\w.>/])/(?:[\w.-]+/)+[\w.-]+")
STUDY_FILES = (".json", ".csv", ".parquet")


def export(results: Path, out: Path) -> list[Path]:
    """Replaces the experiments in `out` that `results` has too by their small copies; returns the written files.

    Other experiments in `out` stay. Raises UserError where `results` holds nothing, where a complete cell or a study's
    table comes from a tree with uncommitted changes or from no known commit, and where a name of this machine would be
    written.
    """
    kept: dict[str, dict[Path, bytes]] = {}
    for summary in summaries(results):
        _refuse_unclean(summary)
        place = Path(summary["folder"])
        files = kept.setdefault(summary["experiment"], {})
        files[place / "summary.json"] = _summary_text(summary).encode()
        if summary["config"] is not None:
            files[place / "config.json"] = _text(_rounded(summary["config"]), "config.json").encode()
        records = results / place / "requests.parquet"
        if summary["experiment"] in REPLAYED and records.is_file():
            files[place / "requests.parquet"] = _slim_requests(records)
    for folder in _studies(results, set(kept)):
        _refuse_unclean_study(folder)
        files = {Path(folder.name) / f.name: _study_file(f) for f in _study_sources(folder)}
        kept[folder.name] = files
    if not kept:
        raise UserError(f"{results} holds no results; run experiments with paths.results={results} first")
    written = []
    for experiment, files in kept.items():
        shutil.rmtree(out / experiment, ignore_errors=True)
        for name, content in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(content)
            written.append(out / name)
    return sorted(written)


def size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _refuse_unclean(summary: dict[str, Any]) -> None:
    if summary["status"] == "complete" and not _clean(summary["environment"]["git_start"]):
        raise _unclean(summary["folder"])


def _clean(git: dict[str, Any]) -> bool:
    return bool(git.get("sha")) and git.get("dirty") is False


def _unclean(where: object) -> UserError:
    return UserError(
        f"{where} was made on a tree with uncommitted changes or without a commit, so it cannot be a reference; "
        "commit, delete that folder and run the experiment again"
    )


def _refuse_unclean_study(folder: Path) -> None:
    """A study says where its tables come from in their columns, in `environment.json`, or in both."""
    said = []
    for file in _study_sources(folder):
        if file.name == "environment.json":
            said.append(_clean(json.loads(file.read_text(encoding="utf-8")).get("git_start") or {}))
        elif file.suffix in (".csv", ".parquet"):
            table = pd.read_csv(file) if file.suffix == ".csv" else pd.read_parquet(file)
            if {"git_sha", "git_dirty"} <= set(table.columns):
                said.append(bool(table["git_sha"].notna().all() and table["git_dirty"].eq(False).all()))
    if not said or not all(said):
        raise _unclean(folder.name)


def _summary_text(summary: dict[str, Any]) -> str:
    """A summary with a line for each round, numbers with DIGITS significant digits."""
    kept = {k: v for k, v in summary.items() if k not in (*DROPPED, "folder", "config")}
    environment = {k: v for k, v in summary["environment"].items() if k in ENVIRONMENT}
    kept |= {"log": None, "environment": _without_release(environment)}
    return _text(_rounded(kept), str(summary["folder"]))


def _text(value: dict[str, Any], where: str) -> str:
    """JSON with a line per key and per round: small, and its diffs can be read."""

    def line(key: str, item: Any) -> str:
        if key == "rounds" and isinstance(item, list):
            inner = ",\n".join(f"  {json.dumps(entry, ensure_ascii=False)}" for entry in item)
            return f'"rounds": [\n{inner}\n ]' if item else '"rounds": []'
        return f"{json.dumps(key)}: {json.dumps(item, ensure_ascii=False)}"

    text = "{\n " + ",\n ".join(line(key, item) for key, item in value.items()) + "\n}\n"
    return _checked(text, where)


def _checked(text: str, where: str) -> str:
    """The text with this machine's folders replaced; UserError where a name of the machine is left."""
    text = FOLDERS.sub("<path>", scrub(text))
    host = platform.node()
    if len(host) > 3 and re.search(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", text):
        raise UserError(
            f"{where}: the host's name {host!r} is in it; the reference set goes into git without it"
        )
    return text


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, float) and math.isfinite(value) and not value.is_integer():
        return float(f"{value:.{DIGITS}g}")
    return value


def _slim_requests(file: Path) -> bytes:
    frame = pd.read_parquet(file)
    frame = frame[[c for c in REPLAY_COLUMNS if c in frame]]
    for column in frame.select_dtypes("float").columns:
        frame[column] = frame[column].astype("float32")
    return _parquet(frame)


def _parquet(frame: pd.DataFrame) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "table.parquet"
        frame.to_parquet(target, index=False, compression="zstd")
        return target.read_bytes()


def _studies(results: Path, served: set[str]) -> Iterator[Path]:
    """Folders of experiments that keep tables of their own instead of cells."""
    for folder in sorted(results.iterdir()) if results.is_dir() else []:
        if folder.is_dir() and folder.name not in served and any(_study_sources(folder)):
            yield folder


def _study_sources(folder: Path) -> list[Path]:
    if folder.name in ("figures", "report") or folder.name.startswith("."):
        return []
    return sorted(f for f in folder.iterdir() if f.suffix in STUDY_FILES and not f.name.startswith("."))


def _study_file(file: Path) -> bytes:
    """A study's table or JSON file with nothing of the machine in it."""
    if file.suffix == ".parquet":
        return _parquet(_scrubbed(pd.read_parquet(file), file))
    if file.suffix == ".csv":
        return _scrubbed(pd.read_csv(file), file).to_csv(index=False).encode()
    value = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not (key == "host" and isinstance(item, str))}
        return _text(_rounded(_without_release(kept)), file.name).encode()
    return (_checked(json.dumps(_rounded(value), indent=1, ensure_ascii=False), file.name) + "\n").encode()


def _without_release(environment: dict[str, Any]) -> dict[str, Any]:
    """`Linux x86_64` as platform: a kernel's release may name who runs the machine."""
    words = str(environment.get("platform") or "").split()
    return {**environment, "platform": f"{words[0]} {words[-1]}"} if words else environment


def _scrubbed(frame: pd.DataFrame, file: Path) -> pd.DataFrame:
    """Text without folders, numbers with DIGITS digits; columns that name a host, a log or a traceback go."""
    frame = frame.drop(columns=[c for c in ("host", "hostname", "log", "traceback") if c in frame])
    for column in frame.columns:
        if pd.api.types.is_float_dtype(frame[column]):
            frame[column] = frame[column].map(_rounded)
        elif not pd.api.types.is_numeric_dtype(frame[column]):
            clean = {v: _checked(v, file.name) for v in frame[column].unique() if isinstance(v, str)}
            frame[column] = frame[column].map(lambda v, clean=clean: clean.get(v, v))
    return frame
