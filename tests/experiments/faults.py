"""What is injected into runs, and what is expected of each: `python tests/experiments/faults.py` prints the table.

`test_faults.py` runs all of them. In every case the other cells go on and no process, socket, port or shared memory
is left.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """command: what the engine is asked when the fault happens; behaviour: see `fault_child.act`.

    status and words: of the cell's row. next: status of the same backend's cell on the next workload, for which the
    engine is started again unless it could not start at all.
    """

    name: str
    command: str
    behaviour: str
    status: str
    words: str
    next: str = "complete"


def _at_start(name: str, behaviour: str, words: str, status: str = "failed") -> Fault:
    return Fault(name, "start", behaviour, status, f"start: {words}", status)


def _at_gate(name: str, behaviour: str, words: str, status: str = "failed") -> Fault:
    return Fault(name, "gate", behaviour, status, f"gate: {words}", status)


def _in_round(name: str, behaviour: str, words: str, status: str = "failed") -> Fault:
    return Fault(name, "run", behaviour, status, f"round 1/1: {words}")


ENDED = "the engine's process ended with"
ENGINE = (
    _at_start("refuses to start", "refuse", "ValueError: no such thing"),
    _at_start("exits while it loads", "exit", f"{ENDED} status 3"),
    _at_start("is killed while it loads", "kill", f"{ENDED} signal SIGKILL"),
    _at_start("crashes while it loads", "segfault", f"{ENDED} signal SIGSEGV"),
    _at_start("has no memory for the model", "memory", f"{ENDED} signal SIGKILL: torch.OutOfMemoryError"),
    _at_start("hangs while it loads", "hang", "no answer from the engine within", "timeout"),
    _at_start("is stopped while it loads", "stopped", "no answer from the engine within", "timeout"),
    _at_start("port in use", "port", "OSError: [Errno 98] Address already in use"),
    _at_start("one of many adapters is broken", "adapter", "ValueError: adapter 'adapter-0002'"),
    _at_start("answers nonsense", "garbage", "an answer that is not JSON"),
    _at_start("closes its end and lives on", "deaf", "the engine's process no longer answers"),
    _at_gate("gives wrong outputs", "wrong", "wrong outputs: adapter 2 is off by 3.0", "incorrect"),
    _at_gate("fails in the gate", "refuse", "ValueError: no such thing"),
    _at_gate("is killed in the gate", "kill", f"{ENDED} signal SIGKILL"),
    _at_gate("hangs in the gate", "hang", "no answer from the engine within", "timeout"),
    Fault(
        "fails in warm-up",
        "warmup",
        "adapter",
        "failed",
        "warm-up: warmup: ValueError: adapter 'adapter-0002'",
    ),
    Fault("dies in warm-up", "warmup", "kill", "failed", f"warm-up: warmup: {ENDED} signal SIGKILL"),
    Fault(
        "hangs in warm-up", "warmup", "hang", "timeout", "warm-up: warmup: no answer from the engine within"
    ),
    _in_round("fails in a round", "refuse", "run: ValueError: no such thing"),
    _in_round("exits in a round", "exit", f"run: {ENDED} status 3"),
    _in_round("is killed in a round", "kill", f"run: {ENDED} signal SIGKILL"),
    _in_round("crashes in a round", "segfault", f"run: {ENDED} signal SIGSEGV"),
    _in_round("aborts in a round", "abort", f"run: {ENDED} signal SIGABRT"),
    _in_round(
        "runs out of memory in a round", "memory", f"run: {ENDED} signal SIGKILL: torch.OutOfMemoryError"
    ),
    _in_round("hangs in a round", "hang", "run: no answer from the engine within", "timeout"),
    _in_round("hangs and ignores signals", "stubborn", "run: no answer from the engine within", "timeout"),
    _in_round("dies in the middle of an answer", "half an answer", f"run: {ENDED} signal SIGKILL"),
    _in_round("leaves an orphan", "orphan", f"run: {ENDED} signal SIGKILL"),
    _in_round("leaves an orphan in a session of its own", "escaped orphan", f"run: {ENDED} signal SIGKILL"),
    _in_round(
        "floods its log and dies", "flood", f"run: {ENDED} signal SIGKILL: RuntimeError: the cause comes last"
    ),
    _in_round("stalls under load", "stalled", "the load stalled: no token for 60 s", "timeout"),
    _in_round("fails all requests", "failing", "the load failed: 20 requests failed in a row"),
    _in_round("leaves no records", "no records", "FileNotFoundError"),
    _in_round("leaves records that cannot be read", "garbled records", "ArrowInvalid"),
    Fault(
        "one request fails",
        "run",
        "error",
        "failed",
        "round 1: 1 of 6 requests did not finish; first error: boom",
    ),
    Fault("one request times out", "run", "timeout", "timeout", "round 1: 1 of 6 requests did not finish"),
    Fault(
        "an output is too short", "run", "short", "invalid", "round 1: 1 of 6 outputs have the wrong length"
    ),
    Fault("a request is missing", "run", "missing", "invalid", "round 1: 5 records for 6 requests"),
    Fault(
        "times that contradict themselves",
        "run",
        "backwards",
        "invalid",
        "round 1: request 0: token times are",
    ),
    Fault(
        "cannot be read after its round", "counters", "kill", "failed", f"round 1/1: counters: {ENDED} signal"
    ),
    Fault("is killed while it is parked", "park", "kill", "failed", f"{ENDED} signal SIGKILL"),
    Fault("does not stop when it is told to", "stop", "stubborn", "complete", ""),
)

STORE = (
    ("the disk is full", "exit 2: the disk is full; finished cells kept, a rerun does the rest"),
    ("the results folder is read-only", "exit 2: the file system is read-only"),
    ("a limit on file sizes", "exit 2: larger than this process may write"),
    ("a file stands where the folder should be", "exit 2: a file is in the way"),
    ("results of another schema version", "exit 2: schema version; nothing is changed"),
    ("a summary that is cut off", "exit 2: cannot be read; the file is named"),
    ("two runs at once", "every cell is measured by one of them"),
    (
        "killed between any two writes (8 places)",
        "the former cell is whole; what was half written is cleared",
    ),
    ("the run is killed, engines alive", "no process left; the next run does exactly the missing cells"),
    ("the run is interrupted, engines alive", "exit 130; no process left; no half-written cell"),
)


def table() -> str:
    lines = ["| fault | when | status | reason | next cell |", "|---|---|---|---|---|"]
    for fault in ENGINE:
        lines.append(
            f"| {fault.name} | {fault.command} | {fault.status} | {fault.words or '–'} | {fault.next} |"
        )
    lines += ["", "| fault of the store or the run | expected |", "|---|---|"]
    lines += [f"| {name} | {expected} |" for name, expected in STORE]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
