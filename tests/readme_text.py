"""Commands and snippets of the Markdown files that a newcomer follows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:python|make|conda|vllm serve|sbatch|pip) [^`]+)`")


@dataclass(frozen=True)
class Command:
    """One command line, without its comment. marked: the text around it says what it *Needs*."""

    text: str
    marked: bool


def blocks(text: str, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(text) if kind == language]


def commands(file: Path) -> list[Command]:
    """Every command of the fenced bash blocks, and every one in backticks, in order and each once."""
    text = file.read_text(encoding="utf-8")
    found: dict[str, Command] = {}
    for match in FENCE.finditer(text):
        if match[1] in ("bash", "sh", "console"):
            before = text[: match.start()].rstrip().rpartition("\n\n")[2]
            for line in _lines(match[2]):
                found.setdefault(line, Command(line, "*Needs" in before))
    for paragraph in FENCE.sub("", text).split("\n\n"):
        for said in INLINE.findall(paragraph):
            line = " ".join(said.split())
            found.setdefault(line, Command(line, "*Needs" in paragraph))
    return list(found.values())


def serve_command(file: Path) -> str:
    """The file's one `vllm serve` command, which tests/test_readme_snippets.py runs on a real engine."""
    (found,) = [command.text for command in commands(file) if command.text.startswith("vllm serve ")]
    return found


def _lines(block: str) -> list[str]:
    """Commands of a block: continued lines joined, comments cut off, `a && b` taken apart."""
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        bare = re.sub(r"(^|\s)#.*$", "", line).strip()
        found += [" ".join(part.split()) for part in bare.split(" && ") if part.strip()]
    return found
