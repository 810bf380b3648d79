"""S-LoRA's launcher, with S-LoRA replaced by modules that keep what is done to them."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

LAUNCHER = Path(__file__).resolve().parents[3] / "baselines" / "upstream" / "slora_server.py"


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("TESSA_DIE_WITH_PARENT", raising=False)
    spec = importlib.util.spec_from_file_location("slora_server", LAUNCHER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Tokenizer:
    eos_token_id = 2

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(c) for c in text]


def test_token_ids_pass_unchanged_and_text_is_still_encoded(launcher: Any) -> None:
    tokenizer = launcher.TokenIds(Tokenizer())
    assert tokenizer.encode([5, 6]) == [5, 6]
    assert tokenizer.encode("a") == [1, 97]
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    assert tokenizer.eos_token_id == 2


def test_the_authors_main_runs_with_both_changes(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    manager = ModuleType("slora.server.httpserver.manager")
    manager.get_tokenizer = lambda *args, **kwargs: (seen.update(args=args, **kwargs), Tokenizer())[1]  # type: ignore[attr-defined]
    api_server = ModuleType("slora.server.api_server")

    def main() -> None:
        seen["prompt"] = manager.get_tokenizer("folder", "auto", trust_remote_code=False).encode([9])
        seen["printed"] = api_server.print_mem_stats(None)  # type: ignore[attr-defined]

    api_server.main = main  # type: ignore[attr-defined]
    server, http = ModuleType("slora.server"), ModuleType("slora.server.httpserver")
    server.api_server, http.manager = api_server, manager  # type: ignore[attr-defined]
    torch = SimpleNamespace(
        multiprocessing=SimpleNamespace(set_start_method=lambda how: seen.update(how=how))
    )
    for name, module in {
        "torch": torch,
        "slora": ModuleType("slora"),
        "slora.server": server,
        "slora.server.api_server": api_server,
        "slora.server.httpserver": http,
        "slora.server.httpserver.manager": manager,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    launcher.main()
    assert seen == {
        "how": "spawn",
        "args": ("folder", "auto"),
        "trust_remote_code": False,
        "prompt": [9],
        "printed": None,
    }


def test_it_is_written_for_the_python_of_its_environment() -> None:
    ast.parse(LAUNCHER.read_text(), feature_version=(3, 9))
    runner = LAUNCHER.with_name("punica_runner.py")
    ast.parse(runner.read_text(), feature_version=(3, 10))
