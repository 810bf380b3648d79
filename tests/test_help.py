"""Every command line of the project says how it is called, what it is for, and what each option means."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
FOLDERS = ("analysis", "baselines", "experiments", "scripts", "tessa")
PARSERS = sorted(
    file
    for folder in FOLDERS
    for file in (REPO / folder).rglob("*.py")
    if "ArgumentParser(" in file.read_text()
)


def calls(file: Path, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == name:
                yield node


def keywords(call: ast.Call) -> set[str | None]:
    return {word.arg for word in call.keywords}


@pytest.mark.parametrize("file", PARSERS, ids=lambda file: str(file.relative_to(REPO)))
def test_a_parser_and_its_options_explain_themselves(file: Path) -> None:
    for call in calls(file, "ArgumentParser"):
        assert {"prog", "description"} <= keywords(call), f"line {call.lineno}: prog= and description="
    for call in calls(file, "add_argument"):
        assert "help" in keywords(call), f"line {call.lineno}: {ast.unparse(call)} has no help"


def test_there_are_parsers() -> None:
    assert len(PARSERS) > 8
