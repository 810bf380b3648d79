"""Reading rows out of trace files, strictly: a file that is not right is one line that says where.

Every problem is a UserError of the form `<file>, line <n>: <what is wrong>; <what to do>`.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tessa.errors import UserError

_INT32_MAX = 2**31 - 1
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


@dataclass
class Rows:
    """Raw values of the wanted columns and the line each row came from."""

    path: Path
    sha256: str
    bom: bool
    lines: np.ndarray  # int64 [rows]
    values: dict[str, list[Any]]

    def fail(self, row: int, problem: str) -> UserError:
        return _error(self.path, int(self.lines[row]), problem)


def read_rows(path: str | Path, kind: str, wanted: dict[str, str]) -> Rows:
    """Read the columns `wanted` ({role: column name}) of a CSV ("csv") or JSON-lines ("jsonl") file.

    A file that starts with the gzip magic is decompressed whatever its name. UTF-8, with or without a byte
    order mark, is the only encoding. Blank lines at the end are ignored; anywhere else they are errors.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(
            f"trace file {path} does not exist; `python -m experiments.workload.traces` says where to get it"
        ) from None
    except OSError as exc:
        raise UserError(f"trace file {path} cannot be read: {exc.strerror}") from exc
    text, bom = _decode(path, _decompress(path, raw))
    if not text.strip():
        raise _error(
            path, 1, "the file is empty; expected " + ("a header line and rows" if kind == "csv" else "rows")
        )
    lines, values = (_csv_rows if kind == "csv" else _jsonl_rows)(path, text, wanted)
    if not len(lines):
        raise _error(path, 1, "there is a header but no row after it; the trace is empty")
    return Rows(path, hashlib.sha256(raw).hexdigest(), bom, np.asarray(lines, dtype=np.int64), values)


def to_lengths(rows: Rows, role: str, name: str) -> np.ndarray:
    """int64 [rows] token counts; a value that is not a whole number from 0 to 2^31 - 1 is an error."""
    numbers = _numbers(rows.values[role])
    for row in np.flatnonzero(~np.isfinite(numbers) | (numbers != np.floor(numbers)))[:1]:
        raise rows.fail(row, f"{name} is {rows.values[role][row]!r}, not a whole number of tokens")
    for row in np.flatnonzero(numbers < 0)[:1]:
        raise rows.fail(row, f"{name} is {rows.values[role][row]!r}; a length cannot be negative")
    for row in np.flatnonzero(numbers > _INT32_MAX)[:1]:
        raise rows.fail(row, f"{name} is {rows.values[role][row]!r}, more than {_INT32_MAX}")
    return numbers.astype(np.int64)


def to_seconds(rows: Rows, role: str, name: str, unit: str) -> np.ndarray:
    """float64 [rows], seconds since the first row. `unit`: a key of TIME_UNITS or "iso" (dates)."""
    values = rows.values[role]
    if unit == "iso":
        stamps = pd.to_datetime(pd.Series(values, dtype=object), format="ISO8601", errors="coerce", utc=True)
        for row in np.flatnonzero(stamps.isna())[:1]:
            raise rows.fail(
                row, f"{name} is {values[row]!r}, not a date and time such as 2023-11-16 18:15:46.68"
            )
        seconds = (stamps - stamps.iloc[0]).dt.total_seconds().to_numpy()
    else:
        numbers = _numbers(values)
        for row in np.flatnonzero(~np.isfinite(numbers))[:1]:
            raise rows.fail(row, f"{name} is {values[row]!r}, not a number of {unit}")
        seconds = (numbers - numbers[0]) * TIME_UNITS[unit]
    for row in np.flatnonzero(np.diff(seconds) < 0)[:1] + 1:
        raise rows.fail(
            row,
            f"{name} {values[row]!r} is before {values[row - 1]!r} of the row above; sort the file by time",
        )
    return seconds


def to_labels(rows: Rows, role: str) -> tuple[np.ndarray, list[str]]:
    """Adapter ids int32 [rows] by first appearance, and their labels; an empty value is -1 (base)."""
    labels = pd.Series(["" if v is None else str(v).strip() for v in rows.values[role]], dtype=object)
    codes, names = pd.factorize(labels.where(labels != "", None))
    return codes.astype(np.int32), [str(n) for n in names]


def _decompress(path: Path, raw: bytes) -> bytes:
    if raw[:2] != b"\x1f\x8b":
        return raw
    out: list[bytes] = []
    lines, left = 1, raw
    while left:
        member = zlib.decompressobj(wbits=31)
        view = memoryview(left)
        try:
            for start in range(0, len(view), 1 << 16):
                piece = member.decompress(view[start : start + (1 << 16)])
                lines += piece.count(b"\n")
                out.append(piece)
                if member.eof:
                    break
        except zlib.error as exc:
            raise _error(
                path, lines, f"the gzip data is damaged here ({exc}); download the file again"
            ) from None
        if not member.eof:
            raise _error(path, lines, "the gzip data ends early (truncated file); download the file again")
        left = member.unused_data + bytes(view[start + (1 << 16) :])
        if left[:2] != b"\x1f\x8b":
            break  # padding after the last member
    return b"".join(out)


def _decode(path: Path, data: bytes) -> tuple[str, bool]:
    if data[:2] in _UTF16_BOMS or b"\x00" in data[:200]:
        raise _error(
            path, 1, "the text is UTF-16 (or binary), not UTF-8; convert it: iconv -f UTF-16 -t UTF-8"
        )
    bom = data.startswith(b"\xef\xbb\xbf")
    try:
        return data.decode("utf-8-sig"), bom
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        bad = data[exc.start + (3 if bom else 0)]
        raise _error(path, line, f"byte 0x{bad:02x} is not UTF-8; save the file as UTF-8") from None


def _csv_rows(path: Path, text: str, wanted: dict[str, str]) -> tuple[list[int], dict[str, list[Any]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    lines: list[int] = []
    columns: dict[str, list[Any]] = {role: [] for role in wanted}
    blank: int | None = None
    try:
        header = [name.strip() for name in next(reader)]
        for name in wanted.values():
            _check_column(path, reader.line_num, name, header)
        places = [(columns[role].append, header.index(name)) for role, name in wanted.items()]
        for row in reader:
            if not row:
                blank = blank or reader.line_num
                continue
            if blank:
                raise _error(path, blank, "blank line between rows; remove it")
            if len(row) != len(header):
                raise _error(path, reader.line_num, f"{len(row)} fields where the header has {len(header)}")
            lines.append(reader.line_num)
            for append, place in places:
                append(row[place])
    except csv.Error as exc:
        raise _error(path, reader.line_num, f"not valid CSV ({exc})") from None
    return lines, columns


def _jsonl_rows(path: Path, text: str, wanted: dict[str, str]) -> tuple[list[int], dict[str, list[Any]]]:
    lines: list[int] = []
    columns: dict[str, list[Any]] = {role: [] for role in wanted}
    for number, line in enumerate(text.rstrip().split("\n"), start=1):
        if not line.strip():
            raise _error(path, number, "blank line between rows; remove it")
        try:
            row = json.loads(line)
        except json.JSONDecodeError as exc:
            raise _error(path, number, f"not valid JSON ({exc.msg} at column {exc.colno})") from None
        if not isinstance(row, dict):
            raise _error(path, number, "not a JSON object; each line must hold one")
        for role, name in wanted.items():
            _check_column(path, number, name, row)
            columns[role].append(row[name])
        lines.append(number)
    return lines, columns


def _check_column(path: Path, line: int, name: str, present: Iterable[str]) -> None:
    names = list(present)
    if name not in names:
        raise _error(
            path, line, f"column {name!r} is missing; found {', '.join(names) or 'none'}; set trace.columns"
        )
    if names.count(name) > 1:
        raise _error(path, line, f"column {name!r} occurs {names.count(name)} times; rename one")


def _numbers(values: list[Any]) -> np.ndarray:
    """float64, NaN where a value is not a number. Booleans and nested values of JSON are not numbers."""
    clean = [v if isinstance(v, (str, int, float)) and not isinstance(v, bool) else None for v in values]
    return pd.to_numeric(pd.Series(clean, dtype=object), errors="coerce").to_numpy(dtype=np.float64)


def _error(path: Path, line: int, problem: str) -> UserError:
    return UserError(f"{path}, line {line}: {problem}")
