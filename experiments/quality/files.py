"""JSON files of published data, with errors that name the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tessa.errors import UserError


def read_json(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON list or of JSON lines. UserError names the file, and the line that is wrong."""
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise UserError(f"{path} is not a JSON list: {error}") from None
    else:
        rows = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise UserError(f"{path}:{number} is not JSON: {error}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{path}: entry {number} is no object")
    return rows


def text(row: dict[str, Any], key: str, path: Path, number: int) -> str:
    """A row's text. UserError where it is absent or of another type; `number` counts rows from 1."""
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{path}: entry {number} has no text under {key!r}; it has {sorted(row)}")
    return value
