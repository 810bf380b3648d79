"""What one engine start needs, as plain data that travels to the child process."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments import claims
from tessa.errors import UserError

_SCRATCH = re.compile(r"tessa-engine-([0-9a-f]{12}\.\d+)-\w+")

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM 0.32.0 accepts for ``max_lora_rank``."""


@dataclass(frozen=True)
class EngineSetup:
    """One engine.

    Attributes:
        backend: registry name, for messages.
        model: model folder or hub name.
        adapters: folders of the adapters by index; empty where requests name none.
        engine_args: arguments of ``vllm.AsyncEngineArgs``.
        env: environment variables of the engine's processes.
        gate: what the correctness gate compares with (see `experiments.engine.gate`), or None.
        wrong_by_design: the outputs are meant to be wrong, so there is no gate.
        device: "cpu" or "cuda".
        fork: start vLLM's processes by forking this one instead of having each import vLLM anew. That takes half the
            time, but OpenMP's threads are then not bound to cores, so it is for tests of outputs, not for numbers.
    """

    backend: str
    model: str
    adapters: tuple[str, ...]
    engine_args: Mapping[str, Any]
    env: Mapping[str, str] = field(default_factory=dict)
    gate: Mapping[str, Any] | None = None
    wrong_by_design: bool = False
    device: str = "cpu"
    fork: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> EngineSetup:
        values = json.loads(text)
        values["adapters"] = tuple(values["adapters"])
        return cls(**values)


def vllm_rank(rank: int, shares: int = 1) -> int:
    """The smallest ``max_lora_rank`` that vLLM accepts, that holds ``rank`` and that divides into equal ``shares``.

    Raises:
        UserError: there is none.
    """
    for allowed in VLLM_RANKS:
        if rank <= allowed and allowed % shares == 0:
            return allowed
    known = ", ".join(map(str, VLLM_RANKS))
    if rank > VLLM_RANKS[-1]:
        raise UserError(
            f"an adapter of rank {rank} exceeds vLLM's largest max_lora_rank, {VLLM_RANKS[-1]}: lower "
            "adapters.rank_equivalent or adapters.ranks"
        )
    raise UserError(
        f"tp={shares} cannot shard a rank of {rank} or more: vLLM's fully sharded LoRA layers cut max_lora_rank into "
        f"tp equal shares, and it is one of {known}. Choose a tp that divides one of them, or leave the backend out"
    )


def cpu_env(tp: int, threads: int | None = None) -> dict[str, str]:
    """Environment of an engine on the CPU: each rank bound to its own share of the cores.

    With more ranks than cores the cores are shared in turn, which works and says nothing about speed.
    """
    cores = sorted(os.sched_getaffinity(0))
    per_rank = threads or max(1, len(cores) // tp)
    shares = [[cores[(rank * per_rank + i) % len(cores)] for i in range(per_rank)] for rank in range(tp)]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_PLUGINS": "tessa",
        # Kept kernels are loaded at once; with it, every start runs the C++ preprocessor to see whether they fit.
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }


COMMON_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_COLOR": "0",
    "PYTHONUNBUFFERED": "1",
    # A parent that dies takes the engine along; see tessa.vllm.lifetime.
    "TESSA_DIE_WITH_PARENT": "1",
}


LONGEST_SCRATCH = 69  # the path of a socket holds 107 characters, and vLLM's names take 37


def new_scratch() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder for one engine. Those of runs that were killed are removed on the way."""
    for folder in Path(tempfile.gettempdir()).glob("tessa-engine-*"):
        owner = _SCRATCH.fullmatch(folder.name)
        if owner is not None and claims.owner_is_dead(owner[1]):
            shutil.rmtree(folder, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=f"tessa-engine-{claims.owner_tag()}-")


def scratch_env(folder: str) -> dict[str, str]:
    """Puts an engine's sockets and other temporary files where they go away with it, however it ends."""
    if len(folder) > LONGEST_SCRATCH:
        return {}
    # Compiled kernels are worth keeping, so their folder stays where it is by default.
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    return {
        "TMPDIR": folder,
        "VLLM_RPC_BASE_PATH": folder,
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(inductor)),
    }


def offline_env(model: str) -> dict[str, str]:
    """A local model never asks the hub, so a machine without network does not wait for it."""
    return {"HF_HUB_OFFLINE": "1"} if Path(model).is_dir() else {}
