"""Scripted engines for runs in other processes: `TESSA_TEST_ENGINE=scripted:make`, this folder in PYTHONPATH.

`TESSA_TEST_SCRIPT` is JSON: {"<adapters.seed>": "<what tessa's engine does in its first round>"}. Each happens
once: a file below $TESSA_TEST_ONCE remembers it, so that a job that starts again, or a rerun, goes through.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from experiments.engine.nodes import meeting_file, nodes_of

_file = Path(__file__).resolve().parents[1] / "experiments" / "conftest.py"
_spec = importlib.util.spec_from_file_location("scripted_fleet", _file)
assert _spec is not None
assert _spec.loader is not None
_conftest = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_conftest)


def make(group: Any, log: Path) -> Any:
    fleet = _conftest.Fleet()
    action = json.loads(os.environ.get("TESSA_TEST_SCRIPT", "{}")).get(str(group.config.adapters.seed))
    if group.backend == "tessa" and action is not None:
        fleet.script["tessa", "run"] = lambda engine: _once(group.config.adapters.seed, action)
    made = fleet(group, log)
    if (group.config.engine.nnodes or 1) > 1:
        fleet.script[group.backend, "start"] = lambda engine: _gather(engine, group.config)
    return made


def _gather(engine: Any, config: Any) -> None:
    """Waits for the other machines, as a real engine does, and keeps their ranks."""
    settings = config.engine
    file = meeting_file(Path(config.paths.cache))
    nodes = nodes_of(settings.nnodes, settings.master_addr, settings.master_port, file)
    nodes.gather(3600.0)
    engine.nodes = [{"rank": node.rank, **node.about} for node in nodes.nodes]


def _once(seed: int, action: str) -> None:
    mark = Path(os.environ["TESSA_TEST_ONCE"]) / f"{seed}-{action}"
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return
    if action == "raise":
        raise _conftest.ScriptedError("failed", "the device burnt down")
    if action == "exit":
        sys.exit(7)
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "killall":
        # Everything of the job at once, as the kernel does when memory runs out.
        os.killpg(os.getpgrp(), signal.SIGKILL)
    while True:  # hang, until the job is stopped from outside
        time.sleep(0.1)
