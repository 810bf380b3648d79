"""A real Slurm on this machine alone, for tests: own configuration, key, socket and ports, stopped by process id.

    python scripts/slurm/local_cluster.py sinfo          # runs a command inside, then takes the cluster down

Needs root and Debian's slurmctld, slurmd, slurm-client and munge (see `missing`). Two nodes with pretended CPUs and
GPUs, both on this machine. Partition `main` has the first and can be preempted by partition `urgent`; `pair` has both.
No accounting, so no sacct.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "scontrol")
PACKAGES = "slurmctld slurmd slurm-client munge"
NODES = ("first", "second")
CPUS, GPUS, MEMORY_MB = 8, 8, 4000
START_S = 180.0

CONF = """\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
# A job that is queued again waits as long as a credential lives; 5 s is the least.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ctld_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
DefMemPerCPU=1
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=2,bf_interval=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
MinJobAge=86400
GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} RealMemory={memory} Gres=gpu:{gpus} Feature=pretended State=UNKNOWN
NodeName=first NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port}
NodeName=second NodeHostname={host} NodeAddr=127.0.0.1 Port={second_port}
PartitionName=main Default=YES Nodes=first MaxTime=12:00:00 PriorityTier=1 GraceTime=240
PartitionName=urgent Nodes=first MaxTime=12:00:00 PriorityTier=10 PreemptMode=OFF
PartitionName=pair Nodes=first,second MaxTime=12:00:00 PriorityTier=1
"""


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    if os.geteuid() != 0:
        return "Slurm's daemons are started as root here, and this is not root"
    absent = [name for name in PROGRAMS if _find(name) is None]
    return f"no {', '.join(absent)}: apt-get install --no-install-recommends {PACKAGES}" if absent else None


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class LocalCluster:
    """Context manager. `environment` is what clients and jobs need beside the process's own."""

    def __enter__(self) -> LocalCluster:
        if reason := missing():
            raise RuntimeError(reason)
        self.folder = Path(tempfile.mkdtemp(prefix="tessa-slurm-"))
        # munged refuses a socket that others cannot reach.
        self.folder.chmod(0o755)
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        try:
            self._configure()
            self._start("munged", *self._munge_options())
            self._until(lambda: (self.folder / "munge.socket").exists(), "munged's socket")
            self._start("slurmctld", "-D", "-c")
            for node in NODES:
                self._start("slurmd", "-D", "-c", "-N", node)
            self._until(
                lambda: self.run("sinfo", "-h", "-p", "pair", "-o", "%T %D") == f"idle {len(NODES)}",
                "idle nodes",
            )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if len(self._daemons) == 2 + len(NODES):
            # Jobs live outside of slurmd's process group, so they are ended through Slurm first.
            for partition in ("main", "urgent", "pair"):
                self.run("scancel", f"--partition={partition}")
            with contextlib.suppress(RuntimeError):
                self._until(lambda: not self.run("squeue", "-h", "-o", "%i"), "the end of all jobs")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *command: str, **options: str) -> str:
        """Standard output of a client command; empty where it fails."""
        return subprocess.run(
            command,
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=60,
            **options,
        ).stdout.strip()

    def _configure(self) -> None:
        host = socket.gethostname().split(".")[0]
        ctld_port, first_port, second_port = _free_ports(3)
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(
            CONF.format(
                host=host,
                folder=self.folder,
                ctld_port=ctld_port,
                first_port=first_port,
                second_port=second_port,
                cpus=CPUS,
                gpus=GPUS,
                memory=MEMORY_MB,
            )
        )
        for index in range(GPUS):
            # A gres needs device files; these are all /dev/null.
            os.mknod(self.folder / f"gpu{index}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))

    def _munge_options(self) -> list[str]:
        names = {
            "key": "key-file",
            "socket": "socket",
            "pid": "pid-file",
            "log": "log-file",
            "seed": "seed-file",
        }
        return ["--foreground", *(f"--{option}={self.folder}/munge.{name}" for name, option in names.items())]

    def _start(self, name: str, *arguments: str) -> None:
        program = _find(name)
        assert program is not None
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons.append(
                subprocess.Popen(
                    [program, *arguments],
                    env={**os.environ, **self.environment},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _until(self, condition: object, what: str) -> None:
        assert callable(condition)
        until = time.monotonic() + START_S
        while not condition():
            if time.monotonic() > until or any(daemon.poll() is not None for daemon in self._daemons):
                names = (
                    "munged.out",
                    "slurmctld.log",
                    "slurmd.out",
                    *(f"slurmd.{node}.log" for node in NODES),
                )
                logs = [self.folder / name for name in names]
                tails = [f"{log.name}: {log.read_text()[-500:]}" for log in logs if log.exists()]
                raise RuntimeError(f"waited in vain for {what}\n" + "\n".join(tails))
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


if __name__ == "__main__":
    with LocalCluster() as cluster:
        sys.exit(subprocess.run(sys.argv[1:], env={**os.environ, **cluster.environment}).returncode)
