"""Stopping in order: signals as KeyboardInterrupt, never in the middle of cleaning up; a process with its children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

STOP_GRACE_S = 30.0


class StopSignals:
    """Turns the first SIGINT, SIGTERM or SIGHUP inside its block into KeyboardInterrupt; later ones are dropped.

    Inside `shielded` the first one waits until the shield ends, so that cleaning up is never cut short. The
    signals are handled rather than masked: a mask holds for one thread, and libraries have others. Outside the
    main thread nothing changes.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._former: dict[int, Any] = {}
        self._stopping = False
        self._shields = 0
        self._waiting: str | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._handle) for number in self.NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._stopping:
            return
        self._stopping = True
        if self._shields:
            self._waiting = signal.Signals(number).name
        else:
            raise KeyboardInterrupt(signal.Signals(number).name)

    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
            if not self._shields and self._waiting is not None:
                name, self._waiting = self._waiting, None
                raise KeyboardInterrupt(name)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a session of its own, and what it has started."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
