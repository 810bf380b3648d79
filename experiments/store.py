"""The results folder: one folder per cell, complete or absent, safe for several runs at once.

    results/<experiment>/<backend>-tp<k>-<hash12>/{config.json, summary.json, requests.parquet, engine.log}

A cell is written into a hidden folder beside its place and renamed into it. While a cell is being measured,
a claim file keeps other runs away from it (see `experiments.claims`). Where each round starts its engines anew,
the rounds measured so far lie in a hidden folder, `.rounds-<cell>`, until the cell is stored.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments import claims
from experiments.disk import disk_errors, writable
from experiments.provenance import scrub
from tessa.errors import UserError

SCHEMA_VERSION = 1
STATUSES = ("complete", "failed", "timeout", "incorrect", "invalid")
LOG_NAME = "engine.log"
LOG_LIMIT = 2_000_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_PARTIAL = re.compile(r"\.(?P<kind>tmp|old)-(?P<cell>.+)-(?P<owner>[0-9a-f]{12}\.\d+)-[0-9a-f]{8}")


def summaries(results_dir: str | Path, experiment: str | None = None) -> Iterator[dict[str, Any]]:
    """The stored summaries, with the cell's folder relative to `results_dir` as `folder`."""
    root = Path(results_dir)
    for file in sorted(root.glob(f"{experiment or '*'}/*/summary.json")):
        if file.parent.name.startswith("."):
            continue
        try:
            summary = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({error}); delete its folder and run again") from error
        if summary.get("schema_version") != SCHEMA_VERSION:
            raise UserError(
                f"{file} has schema version {summary.get('schema_version')}, this code reads {SCHEMA_VERSION}: "
                "use the code that wrote it, or move it away"
            )
        yield {**summary, "folder": str(file.parent.relative_to(root)), "config": _config(file.parent)}


def _config(folder: Path) -> dict[str, Any] | None:
    """What determines the cell; None where that file is absent or damaged: the numbers do not depend on it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


class Store:
    """Cells of one experiment below one results folder.

    Raises UserError when the folder cannot be created or written, or holds cells of another schema version.
    """

    def __init__(self, results: Path | str, experiment: str, create: bool = True) -> None:
        if not _NAME.fullmatch(experiment):
            raise UserError(f"experiment name {experiment!r} cannot be a folder name")
        self.results = Path(results)
        self.experiment = experiment
        self.folder = self.results / experiment
        if create:
            writable(self.folder)
            with disk_errors(self.folder):
                self._recover()
        self._check_schema()

    def path(self, cell: str) -> Path:
        """Folder of a cell. Raises UserError for a name that could leave the experiment's folder."""
        if not _NAME.fullmatch(cell):
            raise UserError(f"cell name {cell!r} is not a plain folder name")
        return self.folder / cell

    def cells(self) -> list[str]:
        """Names of the stored cells, sorted."""
        if not self.folder.is_dir():
            return []
        return sorted(
            entry.name
            for entry in self.folder.iterdir()
            if not entry.name.startswith(".") and (entry / "summary.json").is_file()
        )

    def summary(self, cell: str, cell_hash: str | None = None) -> dict[str, Any] | None:
        """A stored cell's summary, or None where there is none or it belongs to another hash."""
        file = self.path(cell) / "summary.json"
        try:
            summary = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UserError(
                f"{file} cannot be read ({error}). Delete the folder; the cell will be run again."
            ) from error
        return summary if cell_hash is None or summary.get("hash") == cell_hash else None

    def status(self, cell: str, cell_hash: str | None = None) -> str:
        """One of STATUSES, or `missing`."""
        summary = self.summary(cell, cell_hash)
        return "missing" if summary is None else str(summary["status"])

    def scratch(self, purpose: str) -> Path:
        """A new hidden folder of this run; a later run clears it if this one dies."""
        folder = self._hidden("tmp", purpose)
        with disk_errors(self.folder):
            folder.mkdir(parents=True)
        return folder

    def claim(self, cell: str) -> claims.Claim | None:
        """The right to run a cell, or None while another run holds it."""
        with disk_errors(self.folder):
            return claims.acquire(self.folder / ".claims" / f"{self.path(cell).name}.claim")

    def claimed_by(self, cell: str) -> str | None:
        """Who is running a cell now, in words."""
        return claims.holder(self.folder / ".claims" / f"{self.path(cell).name}.claim")

    def write(
        self,
        cell: str,
        config: dict[str, Any],
        summary: dict[str, Any],
        records: pd.DataFrame | None = None,
        log: Path | None = None,
    ) -> Path:
        """Stores a cell whole, replacing a former one, and returns its folder.

        `summary` needs `status` and `hash`; the schema version is added. Raises UserError when the disk is
        full or not writable; nothing half-written is left, and a former cell of that name stays.
        """
        if summary.get("status") not in STATUSES:
            raise ValueError(f"status {summary.get('status')!r} is not one of {STATUSES}")
        final = self.path(cell)
        summary = {"schema_version": SCHEMA_VERSION, **summary}
        self._put(final, {"config.json": config, "summary.json": summary}, records, log)
        self.drop_rounds(cell)
        return final

    def keep_rounds(self, cell: str, summary: dict[str, Any], records: pd.DataFrame | None) -> None:
        """Keeps what has been measured of a cell that the caller has claimed, whole, in place of what was kept
        before, until `write` or `drop_rounds`. Raises UserError as `write` does."""
        self._put(self._rounds(cell), {"rounds.json": summary}, records)

    def kept_rounds(self, cell: str, cell_hash: str) -> tuple[dict[str, Any], pd.DataFrame | None] | None:
        """What `keep_rounds` was given last; None where there is nothing, nothing readable or another hash's."""
        file = self._rounds(cell) / "rounds.json"
        records = file.with_name("requests.parquet")
        try:
            summary = json.loads(file.read_text(encoding="utf-8"))
            found = summary, pd.read_parquet(records) if records.exists() else None
        except (OSError, ValueError):
            return None
        return found if summary.get("hash") == cell_hash else None

    def drop_rounds(self, cell: str) -> None:
        """Discards the kept rounds of a cell, if there are any."""
        aside = self._hidden("tmp", self._rounds(cell).name)
        with contextlib.suppress(OSError):
            os.rename(self._rounds(cell), aside)  # so that dying here never leaves a part of them
            shutil.rmtree(aside, ignore_errors=True)

    def amend(self, cell: str, summary: dict[str, Any]) -> None:
        """Replaces the summary of a stored cell, which the caller has claimed, and leaves its other files.

        Raises UserError when the disk is full or not writable; the former summary stays then.
        """
        file = self.path(cell) / "summary.json"
        temporary = self._hidden("tmp", cell)
        with disk_errors(self.folder):
            try:
                temporary.mkdir()
                _write_json(temporary / file.name, summary)
                _sync(temporary / file.name)
                os.replace(temporary / file.name, file)
                _sync(file.parent)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def _rounds(self, cell: str) -> Path:
        return self.folder / f".rounds-{self.path(cell).name}"

    def _put(
        self,
        final: Path,
        documents: dict[str, dict[str, Any]],
        records: pd.DataFrame | None = None,
        log: Path | None = None,
    ) -> None:
        """Makes `final` a folder of these files, in place of a former one: whole, or not at all."""
        temporary = self._hidden("tmp", final.name)
        with disk_errors(self.folder):
            try:
                temporary.mkdir(parents=True)
                for name, document in documents.items():
                    _write_json(temporary / name, document)
                if records is not None and len(records):
                    records.to_parquet(temporary / "requests.parquet", index=False)
                if log is not None:
                    _copy_log(log, temporary / LOG_NAME)
                for file in temporary.iterdir():
                    _sync(file)
                _sync(temporary)
                self._replace(temporary, final)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise

    def _replace(self, temporary: Path, final: Path) -> None:
        former = self._hidden("old", final.name)
        with contextlib.suppress(FileNotFoundError):
            os.rename(final, former)
        # Dying here leaves the former folder under its hidden name; `_recover` puts it back.
        os.rename(temporary, final)
        _sync(self.folder)
        shutil.rmtree(former, ignore_errors=True)

    def _hidden(self, kind: str, cell: str) -> Path:
        return self.folder / f".{kind}-{cell}-{claims.owner_tag()}-{uuid.uuid4().hex[:8]}"

    def _recover(self) -> None:
        """Clears what dead runs of this machine left: half-written cells go, replaced ones come back."""
        for entry in list(self.folder.iterdir()):
            match = _PARTIAL.fullmatch(entry.name)
            if match is None or not claims.owner_is_dead(match["owner"]):
                continue
            final = self.folder / match["cell"]
            if match["kind"] == "old" and not final.exists():
                with contextlib.suppress(OSError):
                    os.rename(entry, final)
            else:
                shutil.rmtree(entry, ignore_errors=True)
        for entry in self.folder.glob(".rounds-*"):
            # Dying between storing a cell and discarding its rounds leaves them.
            if self.status(cell := entry.name.removeprefix(".rounds-")) == "complete":
                self.drop_rounds(cell)

    def _check_schema(self) -> None:
        for cell in self.cells():
            summary = self.summary(cell) or {}
            if summary.get("schema_version") != SCHEMA_VERSION:
                raise UserError(
                    f"{self.folder / cell} has schema version {summary.get('schema_version')}, this code "
                    f"reads and writes {SCHEMA_VERSION}. Choose another folder with paths.results=..., or "
                    "move the old results away."
                )


def to_run(status: str, only: str | None, force: bool) -> bool:
    """Whether a cell of this status is to be measured: complete ones are kept unless forced, and with
    only="failed" those that were never run are left."""
    if only == "failed":
        return status not in ("complete", "missing")
    return force or status != "complete"


def jsonable(value: Any) -> Any:
    """Plain JSON values: numpy scalars unwrapped, NaN and infinities as null, paths and texts scrubbed."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | np.ndarray):
        return [jsonable(item) for item in (sorted(value) if isinstance(value, set) else value)]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str | Path):
        return scrub(str(value))
    return value


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(jsonable(value), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _copy_log(source: Path, target: Path) -> None:
    """Keeps the end of a log, scrubbed of this machine's folders and of secrets."""
    with contextlib.suppress(FileNotFoundError), source.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_LIMIT))
        target.write_text(scrub(file.read().decode("utf-8", errors="replace")), encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems refuse fsync on a folder; a full disk must not be ignored.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
