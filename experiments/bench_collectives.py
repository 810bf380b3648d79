"""Collectives on real ranks of this machine's CPU, against the alpha-beta model that the projection uses.

``python -m experiments.bench_collectives [--tp 2 4] [--transports shm gloo gloo_netns] [--out FOLDER]`` times
all-reduce, all-gather and gather over message sizes, and the messages of one layer of `small` at rank 8 as base,
S-LoRA and TESSA send them, with vLLM's communicator for the CPU:

- ``shm``: vLLM's shared-memory collectives;
- ``gloo``: PyTorch's gloo over the loopback device;
- ``gloo_netns``: gloo between two network namespaces joined by a veth pair, half of the ranks in each, which is two
  hosts to the network stack; needs root and iproute2, and is left out with the reason where they are missing.

In a gather only the root waits for anybody. The others wait here for the root to be done before they begin the next
one (`Turns`): ranks that run ahead make vLLM's shared-memory collectives stall for ever, and are not in step.

Rows go to ``FOLDER/rows.csv`` (default ``results/collectives``), fitted constants to ``links.csv``. More ranks than
cores share cores: such rows say `oversubscribed`, and their times hold waits for the processor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments import provenance
from experiments.bench_rows import check_least, store, user_errors_in_a_line
from experiments.disk import check_writable
from experiments.projection.links import calls_per_layer, per_layer, predict
from tessa.errors import UserError

TRANSPORTS = ("shm", "gloo", "gloo_netns")
SWEEP_BYTES = tuple(1024 * 4**i for i in range(7))  # 1 KiB to 4 MiB
HIDDEN, TOKENS, RANK = 1024, (8, 32), 8
KINDS = ("all_reduce", "all_gather", "gather")
HOSTS = ("10.231.7.1", "10.231.7.2")
ROUND_S = 0.15
ROUNDS = 9
TIMEOUT_S = 240.0


def messages() -> list[dict[str, Any]]:
    """What is timed: backend (or `sweep`), kind, message bytes, how often a layer sends it, tokens of the step."""
    rows = [
        {"backend": "sweep", "kind": kind, "message_bytes": size, "count": 1, "tokens": 0}
        for kind in KINDS
        for size in SWEEP_BYTES
    ]
    for tokens in TOKENS[-1:]:
        for backend, calls in calls_per_layer(HIDDEN, tokens, RANK).items():
            rows += [
                {"backend": backend, "kind": kind, "message_bytes": size, "count": count, "tokens": tokens}
                for kind, size, count in calls
            ]
    return rows


def rank_main(options: dict[str, Any]) -> None:
    """One rank: times every message and writes the medians of its rounds as JSON."""
    os.environ["VLLM_DIST_IDENT"] = options["ident"]
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[options["rank"] % len(cores)]})
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.platforms import current_platform

    torch.set_num_threads(1)
    current_platform.import_kernels()
    if options["transport"] == "shm" and not hasattr(torch.ops._C, "init_shm_manager"):
        raise RuntimeError(
            "vLLM's build for this processor has no shared-memory collectives (its AVX-512 builds have them), so its "
            "engines use gloo here"
        )
    ranks = options["ranks"]
    dist.init_process_group("gloo", init_method=options["init"], rank=options["rank"], world_size=ranks)
    group = dist.new_group(list(range(ranks)), backend="gloo")
    name = "tp:0" if options["transport"] == "shm" else "bench:0"  # vLLM shares memory in groups so named
    communicator = CpuCommunicator(group, torch.device("cpu"), group, name)
    shared = communicator.supports_tensor_dict
    if shared != (options["transport"] == "shm"):
        raise RuntimeError(f"wanted {options['transport']}, got {'shm' if shared else 'gloo'}")
    turns = Turns(Path(options["turns"]), options["rank"])

    def gather(tensor: Any) -> None:
        communicator.gather(tensor)
        turns.end()

    calls = []
    for message in options["messages"]:
        kind = message["kind"]
        elements = max(1, message["message_bytes"] // 4 // (1 if kind == "all_reduce" else ranks))
        call = gather if kind == "gather" else getattr(communicator, kind)
        calls.append((call, torch.zeros(1, elements)))  # sums of zeros do not grow, however many
    repeats = [_repeats(dist, group, call, tensor) for call, tensor in calls]
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(options["rounds"]):
        for i, (call, tensor) in enumerate(calls):
            seconds[i].append(_timed(dist, group, call, tensor, repeats[i]))
    Path(options["out"]).write_text(json.dumps(seconds))
    dist.barrier(group)
    dist.destroy_process_group()


class Turns:
    """Rank 0 ends a turn, and the others wait until it has; by a counter in a file that all of them map."""

    def __init__(self, file: Path, rank: int) -> None:
        self._done = np.memmap(file, dtype=np.int64, mode="r+", shape=(1,))
        self._root, self._turn = rank == 0, 0

    def end(self) -> None:
        self._turn += 1
        if self._root:
            self._done[0] = self._turn
        while self._done[0] < self._turn:
            os.sched_yield()


def _timed(dist: Any, group: Any, call: Any, tensor: Any, repeats: int) -> float:
    """Seconds of one call, from `repeats` in a row."""
    dist.barrier(group)
    began = time.perf_counter()
    for _ in range(repeats):
        call(tensor)
    return (time.perf_counter() - began) / repeats


def _repeats(dist: Any, group: Any, call: Any, tensor: Any) -> int:
    """Calls that fill a round; rank 0 decides, since all ranks must make as many."""
    import torch

    _timed(dist, group, call, tensor, 2)
    once = _timed(dist, group, call, tensor, 5)
    count = torch.tensor([max(3, min(2000, int(ROUND_S / max(once, 1e-7))))])
    dist.broadcast(count, 0, group)
    return int(count.item())


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a veth pair with the addresses `HOSTS`. UserError where not permitted."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise UserError("two network namespaces need root and iproute2")
    names = (f"tb{os.getpid()}a", f"tb{os.getpid()}b")
    links = (f"tv{os.getpid() % 100000}a", f"tv{os.getpid() % 100000}b")

    def ip(*arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, host in zip(names, links, HOSTS, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{host}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:  # the veth pair goes with its namespaces
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measure(transport: str, ranks: int, rounds: int = ROUNDS) -> pd.DataFrame:
    """One row per message: `seconds` is the median over rounds of the slowest rank. RuntimeError with a rank's log."""
    calls = messages()
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(namespaces()) if transport == "gloo_netns" else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tessa-collectives-")))
        host = HOSTS[0] if names else "127.0.0.1"
        options: dict[str, Any] = {
            "transport": transport,
            "ranks": ranks,
            "rounds": rounds,
            "messages": calls,
            "init": f"tcp://{host}:{free_port()}",
            "turns": str(folder / "turns"),
            "ident": f"tessa{os.getpid()}{transport}{ranks}",
        }
        np.zeros(1, np.int64).tofile(folder / "turns")
        children = []
        for rank in range(ranks):
            file = folder / f"{rank}.json"
            file.write_text(json.dumps({**options, "rank": rank, "out": str(folder / f"{rank}.out")}))
            command = [sys.executable, "-m", "experiments.bench_collectives", "--rank-file", str(file)]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": ""}
            if names:
                half = 2 * rank // ranks
                command = ["ip", "netns", "exec", names[half], *command]
                env["GLOO_SOCKET_IFNAME"] = f"tv{os.getpid() % 100000}{'ab'[half]}"
            else:
                env["GLOO_SOCKET_IFNAME"] = "lo"
            log = (folder / f"{rank}.log").open("wb")
            children.append(
                subprocess.Popen(
                    command, env=env, cwd=provenance.REPO, stdout=log, stderr=log, start_new_session=True
                )
            )
            log.close()
        try:
            codes = [child.wait(TIMEOUT_S) for child in children]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"timed out after {TIMEOUT_S:.0f} s") from None
        finally:
            for child in children:
                if child.poll() is None:
                    child.kill()
                    child.wait()
            for segment in Path("/dev/shm").glob(f"{options['ident']}-*"):  # a killed rank leaves its own
                segment.unlink()
        if any(codes):
            texts = (log.read_text(errors="replace").strip() for log in sorted(folder.glob("*.log")))
            last = [
                line.partition("RuntimeError: ")[2] or line for t in texts for line in t.splitlines()[-1:]
            ]
            raise RuntimeError("; ".join(dict.fromkeys(last)) or f"a rank ended with status {max(codes)}")
        timed = [json.loads((folder / f"{rank}.out").read_text()) for rank in range(ranks)]
    slowest = pd.DataFrame([[max(r) for r in zip(*each, strict=True)] for each in zip(*timed, strict=True)])
    cores = len(os.sched_getaffinity(0))
    return pd.DataFrame(calls).assign(
        transport=transport,
        ranks=ranks,
        seconds=slowest.median(axis=1),
        seconds_low=slowest.min(axis=1),
        seconds_high=slowest.max(axis=1),
        rounds=rounds,
        oversubscribed=ranks > cores,
    )


def run(transports: Sequence[str], tps: Sequence[int], out: Path, rounds: int) -> pd.DataFrame:
    """Measures, stores and returns all rows; a transport that cannot run here is named and left out."""
    git = provenance.git_state()
    frames = []
    for transport in transports:
        for ranks in tps:
            print(f"timing {transport}, {ranks} ranks", file=sys.stderr, flush=True)
            try:
                frames.append(measure(transport, ranks, rounds))
            except (UserError, RuntimeError) as error:
                print(f"left out: {transport}, {ranks} ranks: {error}", file=sys.stderr)
    if not frames:
        raise UserError("nothing was measured: see the reasons above")
    return store(pd.concat(frames, ignore_index=True), "collectives", out, git)


@user_errors_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_collectives", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4], help="ranks of each group (default 2 4)")
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=TRANSPORTS,
        default=list(TRANSPORTS),
        help="how ranks reach each other (default: all)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/collectives"),
        help="folder of the tables (default %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=ROUNDS,
        help="times that all sizes are gone through (default %(default)s)",
    )
    parser.add_argument("--rank-file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.rank_file is not None:
        rank_main(json.loads(arguments.rank_file.read_text()))
        return 0
    check_least(arguments, rounds=1)
    if min(arguments.tp) < 2:
        raise UserError(f"--tp {min(arguments.tp)}: collectives need 2 ranks or more")
    out = check_writable(arguments.out, "--out")
    rows = run(arguments.transports, arguments.tp, out, arguments.rounds)
    found = predict(rows)
    links = found.drop_duplicates(["transport", "ranks", "kind"])
    held = found[found.held_out].assign(error=lambda f: (f.ratio - 1).abs())
    errors = held.groupby(["transport", "ranks", "kind"]).error.agg(["median", "max"]).reset_index()
    table = links[["transport", "ranks", "kind", "alpha_s", "bandwidth"]].merge(errors)
    table.to_csv(out / "links.csv", index=False)
    shown = table.assign(alpha_us=table.alpha_s * 1e6, GB_s=table.bandwidth / 1e9).drop(
        columns=["alpha_s", "bandwidth"]
    )
    print(shown.round(3).to_string(index=False))
    layers = per_layer(found).assign(
        measured_us=lambda f: f.seconds * 1e6, predicted_us=lambda f: f.predicted_s * 1e6
    )
    print(f"\ncollectives of one layer of `small`, rank {RANK}, 32 tokens:")
    print(layers.drop(columns=["seconds", "predicted_s"]).round(2).to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
