"""Punica's runner with a model that needs no GPU: its token is the sum of a sequence's tokens and its adapter."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

RUNNER = Path(__file__).resolve().parents[3] / "baselines" / "upstream" / "punica_runner.py"


def load_runner() -> Any:
    """The runner as a module; it lies in a folder that Punica's environment does not import from."""
    spec = importlib.util.spec_from_file_location("punica_runner", RUNNER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["punica_runner"] = module
    spec.loader.exec_module(module)
    return module


class ScriptedModel:
    def step(self, new: Any, running: Any) -> list[tuple[int, float]]:
        batch = ([] if new is None else [new]) + list(running)
        return [((sum(s.prompt) + sum(s.tokens) + 7 * s.adapter) % 100, -1.0 - s.adapter) for s in batch]

    def release(self, sequence: Any) -> None:
        """There is no cache."""


def main() -> int:
    runner = load_runner()

    class Scripted(runner.Server):  # type: ignore[name-defined, misc]
        def start(self) -> dict[str, Any]:
            self.model = ScriptedModel()
            return {
                "adapters": self.setup["adapters"],
                "max_batch": self.setup["engine_args"]["max_batch"],
            }

    setup = json.loads(Path(sys.argv[1]).read_text())
    with os.fdopen(int(sys.argv[2])) as commands, os.fdopen(int(sys.argv[3]), "w") as answers:
        runner.serve(Scripted(setup), commands, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
