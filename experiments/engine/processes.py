"""The processes of an engine, known by their session: signalled and ended together, with nothing left in memory.

A process that is killed cannot remove the shared memory that it made. Python's resource tracker does it once the
others are gone, so it is ended last; what is left then was seen in the processes' maps and is removed here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

SHARED_MEMORY = "/dev/shm/"
KILL_WAIT_S = 15.0
TRACKER_WAIT_S = 5.0
PARK_WAIT_S = 5.0


MARK = "TESSA_ENGINE"
"""Environment variable by which a process is known that has left the session of its engine."""


class ProcessTree:
    """Every process of the session that ``leader`` leads, and those outside of it that descend from it or have
    inherited ``mark``. Processes stay known when their parent has died.
    """

    def __init__(self, leader: int, mark: str) -> None:
        self.leader, self.mark = leader, mark
        self._known: set[psutil.Process] = set()
        self._segments: set[str] = set()

    def members(self) -> set[psutil.Process]:
        """Those that live now."""
        found = set(self._known)
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.getsid(process.pid) == self.leader:
                    found.add(process)
                    found.update(process.children(recursive=True))
        self._known = {process for process in found if process.is_running()}
        return self._known

    def remember_shared_memory(self) -> None:
        """Note the shared memory in use, for the case that all processes die at once."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    self._known.add(process)
        self._segments |= mapped(self.members())

    def send(self, number: int) -> None:
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def park(self) -> None:
        """Stop them in their tracks; returns once they stand still."""
        self.send(signal.SIGSTOP)
        give_up = time.monotonic() + PARK_WAIT_S
        while any(_moves(process) for process in self._known) and time.monotonic() < give_up:
            time.sleep(0.001)

    def kill(self) -> None:
        """End all of them at once and remove what they leave in shared memory."""
        self.remember_shared_memory()
        members = self.members()
        trackers = {process for process in members if _is_tracker(process)}
        _kill(members - trackers, KILL_WAIT_S)
        psutil.wait_procs(trackers, timeout=TRACKER_WAIT_S)
        _kill(self.members(), KILL_WAIT_S)
        left = {name for name in self._segments if os.path.exists(name)}
        if left:
            for name in left - mapped(psutil.process_iter()):
                with contextlib.suppress(OSError):
                    if os.stat(name).st_uid == os.getuid():
                        os.unlink(name)


def mapped(processes: Iterable[psutil.Process]) -> set[str]:
    """Files in shared memory that these processes have mapped; empty where the system does not tell."""
    found: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines():
                name = line.partition(SHARED_MEMORY)[2]
                if name and not name.endswith(" (deleted)"):
                    found.add(SHARED_MEMORY + name)
    return found


def _moves(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _is_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in part for part in process.cmdline())
    except psutil.Error:
        return False


def _kill(processes: set[psutil.Process], timeout_s: float) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=timeout_s)
