"""A process in place of an engine: it serves as one does, until $FAULT says otherwise.

$FAULT is JSON, ``{command: behaviour}``; $ONCE a file that is made when a fault has happened, which happens once then.
Like an engine it holds shared memory, a socket in its temporary folder and a port of the loopback interface.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

from tessa.vllm.lifetime import die_with_parent

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]


def behaviour(command: str) -> str | None:
    what = json.loads(os.environ.get("FAULT", "{}")).get(command)
    once = os.environ.get("ONCE")
    if what is not None and once is not None:
        try:
            Path(once).touch(exist_ok=False)
        except FileExistsError:
            return None
    return what


def act(what: str, answers: Any) -> dict[str, Any] | None:
    """Does it. Returns an answer's value where the fault is in what the engine says."""
    if what == "refuse":
        raise ValueError("no such thing")
    if what == "port":
        with socket.socket() as taken, socket.socket() as wanted:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            wanted.bind(taken.getsockname())
    if what == "adapter":
        raise ValueError("adapter 'adapter-0002': adapter_model.safetensors is cut off")
    if what == "memory":
        print("torch.OutOfMemoryError: no room for 2 GiB", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "flood":
        for _ in range(4000):
            print("x" * 1000)
        print("RuntimeError: the cause comes last", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("kill", "segfault", "abort", "stopped"):
        names = {"kill": "KILL", "segfault": "SEGV", "abort": "ABRT", "stopped": "STOP"}
        os.kill(os.getpid(), signal.Signals[f"SIG{names[what]}"])
    if what == "exit":
        sys.exit(3)
    if what in ("orphan", "escaped orphan"):
        subprocess.Popen(SLEEPER, start_new_session=what.startswith("escaped"))
        os.kill(os.getpid(), signal.SIGKILL)
    if what in ("hang", "stubborn"):
        if what == "stubborn":
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        while True:
            signal.pause()
    if what == "deaf":
        answers.close()
        while True:
            signal.pause()
    if what == "half an answer":
        answers.write('{"ok": tr')
        answers.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "garbage":
        answers.write("Segmentation fault (not really)\n")
        answers.flush()
    if what == "wrong":
        return {"passed": False, "max_abs_error": 3.0, "detail": "adapter 2 is off by 3.0"}
    if what == "stalled":
        return {"status": "stalled", "reason": "no token for 60 s"}
    if what == "failing":
        return {"status": "failed", "reason": "20 requests failed in a row"}
    return None


def serve(commands: Any, answers: Any) -> None:
    values: dict[str, dict[str, Any]] = {
        "gate": {"passed": True, "max_abs_error": 0.0, "detail": "equal"},
        "run": {"status": "ok", "reason": None, "wall_s": 1.0, "mode": "all_at_once"},
        "counters": {"collectives_per_step": 2.0},
    }
    while line := commands.readline():
        message = json.loads(line)
        command, arguments = message["command"], message.get("arguments", {})
        what = behaviour(command)
        try:
            said = act(what, answers) if what is not None else None
        except Exception as error:
            answer = {
                "ok": False,
                "error": type(error).__name__,
                "message": str(error),
                "traceback": "Traceback",
            }
        else:
            if command == "run" and what != "no records":
                records = Path(os.environ["RECORDS"]) / Path(arguments["workload"]).name
                if what == "garbled records":
                    Path(arguments["records"]).write_bytes(b"PAR1 and no more")
                else:
                    other = records.with_name(f"{what}-{records.name}")
                    shutil.copy(other if other.exists() else records, arguments["records"])
            answer = {"ok": True, "value": {**values.get(command, {}), **(said or {})}}
        if command == "stop":
            return
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> int:
    die_with_parent()
    memory = SharedMemory(create=True, size=4096)
    inside, port = socket.socket(socket.AF_UNIX), socket.socket()
    inside.bind(f"{os.environ['TMPDIR']}/engine.sock")
    port.bind(("127.0.0.1", 0))
    port.listen()
    print(f"holds {memory.name} and port {port.getsockname()[1]}", flush=True)
    with os.fdopen(int(sys.argv[2])) as commands, os.fdopen(int(sys.argv[3]), "w") as answers:
        serve(commands, answers)
    memory.close()
    memory.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
