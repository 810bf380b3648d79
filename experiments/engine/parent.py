"""An engine in a child process with its own session: started, driven, parked and killed from here.

This process imports neither torch nor vLLM. A child that fails hands its traceback back as data; one that dies or
hangs is killed with all its descendants.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from baselines import get_backend
from experiments.engine.processes import MARK, ProcessTree
from experiments.engine.setup import COMMON_ENV, EngineSetup, new_scratch, scratch_env

DEFAULT_TIMEOUT_S = 900.0
"""Without an answer for so long, a child counts as hung."""
SELF_LIMITING = ("run", "warmup")
"""A load may last for hours and has limits of its own, so a sign of life starts the time-out anew there. Elsewhere it
says nothing: the child's event loop lives on while its server never gets healthy."""
STOP_GRACE_S = 15.0
# What vLLM's processes say when another of its processes has failed.
GENERIC = (
    "Engine core initialization failed",
    "EngineDeadError",
    "WorkerProc initialization failed",
    "process died unexpectedly",
)


class EngineError(RuntimeError):
    """What went wrong with an engine, as the runner stores it.

    Attributes:
        kind: "failed" or "timeout".
        reason: one line.
        traceback: the child's traceback, where it sent one.
        records: file with the requests of a round that failed, until the engine is stopped.
    """

    records: Path | None = None

    def __init__(self, kind: str, reason: str, log_path: Path, traceback: str | None = None) -> None:
        super().__init__(reason)
        self.kind, self.reason, self.log_path, self.traceback = kind, reason, log_path, traceback


class EngineProcess:
    """The parent's side of one engine (the `experiments.runner.Engine` protocol)."""

    child_module = "experiments.engine.child"

    def __init__(self, setup: EngineSetup, log_path: Path) -> None:
        self.setup, self.log_path = setup, log_path
        self._process: subprocess.Popen[bytes] | None = None
        self._scratch = new_scratch()
        self._commands: Any = None
        self._answers_fd: int | None = None
        self._buffer = b""
        self._runs = 0
        self._tree: ProcessTree | None = None
        self._counters: dict[str, Any] | None = None
        self._latency: dict[float, dict[str, Any]] = {}
        self._added_us: float | None = None
        self.started: dict[str, Any] = {}

    def command(self) -> list[str]:
        """The child's command line but for its three arguments: the setup's file and the two pipes."""
        return [sys.executable, "-m", self.child_module]

    def start(self, timeout_s: float) -> None:
        """Start the child and its engine; returns when it serves."""
        setup_file = Path(self._scratch.name) / "setup.json"
        setup_file.write_text(self.setup.to_json())
        child_in, parent_out = os.pipe()
        parent_in, child_out = os.pipe()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            **scratch_env(self._scratch.name),
            **COMMON_ENV,
            MARK: self._scratch.name,
            **self.setup.env,
        }
        with self.log_path.open("ab") as log:
            self._process = self.launch([str(setup_file)], environment, log, (child_in, child_out))
        os.close(child_in)
        os.close(child_out)
        self._tree = ProcessTree(self._process.pid, self._scratch.name)
        self._commands = os.fdopen(parent_out, "w")
        self._answers_fd = parent_in
        self.started = self._call("start", timeout_s=timeout_s)
        self._tree.remember_shared_memory()

    def launch(
        self, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes], pipes: tuple[int, int]
    ) -> subprocess.Popen[bytes]:
        """Start the child, in a session of its own, with the pipes of its commands and answers."""
        return subprocess.Popen(
            [*self.command(), *arguments, *map(str, pipes)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            pass_fds=pipes,
            start_new_session=True,
        )

    def gate(self, options: dict[str, Any]) -> dict[str, Any]:
        return self._call("gate", options=options)

    def warmup(self, workload_path: Path) -> None:
        self._call("warmup", workload=str(workload_path))

    def run(self, workload_path: Path, options: dict[str, Any]) -> dict[str, Any]:
        """One round: ``records`` (parquet path), ``wall_s``, ``counters``, and the load's status."""
        self._runs += 1
        records = Path(self._scratch.name) / f"records-{self._runs}.parquet"
        result = self._call("run", workload=str(workload_path), options=options, records=str(records))
        if result["status"] != "ok":
            kind = "timeout" if result["status"] in ("stalled", "timeout") else "failed"
            error = EngineError(kind, f"the load {result['status']}: {result['reason']}", self.log_path)
            error.records = records
            raise error
        if self._counters is None:
            try:
                self._counters = self.counters()
            except EngineError as error:
                error.records = records
                raise
        counters = dict(self._counters)
        if self._added_us is not None:
            counted = {name: result[name] for name in ("engine_steps", "engine_collectives")}
            counters |= {**self._latency[self._added_us], **counted}
        return {**result, "records": records, "counters": counters}

    def add_latency(self, microseconds: float) -> None:
        """Let every collective wait so long from now on; the first time also see what that does to a step."""
        check = microseconds not in self._latency
        found = self._call("add_latency", microseconds=microseconds, check=check)
        if check:
            self._latency[microseconds] = found
        self._added_us = microseconds

    def counters(self) -> dict[str, Any]:
        counted = self._call("counters")
        loads = sorted(self.started.get("adapter_load_s") or [])
        if loads:
            counted["adapter_load_s_median"] = loads[len(loads) // 2]
        return counted

    def rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the workers' extension; one answer per rank."""
        return self._call("rpc", method=method, arguments=list(arguments))["ranks"]

    def park(self) -> None:
        """Stop every process of the engine in its tracks: it keeps its memory and uses no processor time."""
        if self._process is not None and self._tree is not None:
            self._tree.park()

    def resume(self) -> None:
        if self._process is not None and self._tree is not None:
            self._tree.send(signal.SIGCONT)

    def stop(self) -> None:
        """End every process of the engine, politely first; harmless when nothing runs."""
        process, tree = self._process, self._tree
        if process is None or tree is None:
            return
        try:
            tree.send(signal.SIGCONT)
            if process.poll() is None:
                self._commands.write(json.dumps({"command": "stop"}) + "\n")
                self._commands.flush()
                process.wait(STOP_GRACE_S)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            pass
        finally:  # an interrupt while the engine takes its time must not leave it behind
            tree.kill()
            process.wait()
            for closing in (self._commands.close, self._close_answers, self._scratch.cleanup):
                with contextlib.suppress(OSError):
                    closing()
            self._process = None  # only now: one that is cut off before can be called again

    def _close_answers(self) -> None:
        if self._answers_fd is not None:
            os.close(self._answers_fd)
            self._answers_fd = None

    def _call(self, command: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, **arguments: Any) -> Any:
        if self._process is None:
            raise EngineError("failed", f"{command}: the engine is not running", self.log_path)
        try:
            self._commands.write(json.dumps({"command": command, "arguments": arguments}) + "\n")
            self._commands.flush()
        except OSError:
            raise self._died(command) from None
        answer: dict[str, Any] = {"alive": True}
        deadline = time.monotonic() + timeout_s
        while answer.get("alive"):
            line = self._read_line(command, deadline, timeout_s)
            if command in SELF_LIMITING:
                deadline = time.monotonic() + timeout_s
            try:
                answer = json.loads(line)
            except ValueError:
                raise EngineError(
                    "failed", f"{command}: an answer that is not JSON: {line[:80]!r}", self.log_path
                ) from None
        if not answer["ok"]:
            raise EngineError("failed", self._reason(command, answer), self.log_path, answer["traceback"])
        return answer["value"]

    def _reason(self, command: str, answer: dict[str, Any]) -> str:
        first = (answer["message"].strip().splitlines() or [""])[0]
        cause = root_cause(self.log_path)
        text = f"{command}: {answer['error']}: {first}"
        return f"{text} ({cause})" if cause and cause not in text else text

    def _read_line(self, command: str, deadline: float, timeout_s: float) -> bytes:
        assert self._answers_fd is not None
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                advice = "; raise measure.start_timeout_s if it needs longer" if command == "start" else ""
                raise EngineError(
                    "timeout",
                    f"{command}: no answer from the engine within {timeout_s:.0f} s{advice}",
                    self.log_path,
                )
            ready, _, _ = select.select([self._answers_fd, *self._watched()], [], [], left)
            if self._answers_fd in ready:
                data = os.read(self._answers_fd, 1 << 16)
                if not data:
                    raise self._died(command)
                self._buffer += data
            elif ready:
                self._look(command)
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _watched(self) -> list[Any]:
        """What else, beside the child's answer, ends the wait for it: `_look` is called when one has news."""
        return []

    def _look(self, command: str) -> None:
        """Raises EngineError where the news end the engine."""

    def _died(self, command: str) -> EngineError:
        assert self._process is not None
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            what = "the engine's process no longer answers, though it lives"
        else:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
            what = f"the engine's process ended with {how}"
        cause = root_cause(self.log_path)
        return EngineError("failed", f"{command}: {what}" + (f": {cause}" if cause else ""), self.log_path)


def root_cause(log_path: Path) -> str:
    """The last line of the log that names an exception, which is where vLLM's own message ends up."""
    try:
        lines = log_path.read_text(errors="replace").splitlines()[-400:]
    except OSError:
        return ""
    for line in reversed(lines):
        text = line.rsplit("] ", 1)[-1].strip()
        head = text.split(":", 1)[0]
        named = head.replace(".", "").isidentifier() and head.endswith(("Error", "Exception")) and ":" in text
        if named and not any(phrase in text for phrase in GENERIC):
            return text[:400]
    return ""


def make_engine(group: Any, log_path: Path, cache: Path) -> EngineProcess:
    """The engine of an `experiments.grid.EngineGroup`: its model, adapters and reference are made first.

    Raises:
        UserError: the model, the adapters or the backend's settings do not fit together.
    """
    spec = get_backend(group.backend)
    if spec.external:
        from experiments.engine.external import engine_class

        return engine_class(spec).create(group, log_path, cache)
    from experiments.engine.build import build_setup

    setup = build_setup(group.config, group.engine, cache)
    if (group.config.engine.nnodes or 1) > 1:
        from experiments.engine.spread import spread

        return spread(setup, log_path, cache, group.config.engine)
    return EngineProcess(setup, log_path)
