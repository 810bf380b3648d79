"""Where the last run's rows come from: code, packages, device; rows say for themselves what they were measured with.

Works without the packages that only the harness needs.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from experiments import provenance
from experiments.layer_step.spec import LayerStepSpec

if TYPE_CHECKING:
    from experiments.layer_step.measure import Machine


def write_environment(out: Path, spec: LayerStepSpec, machine: Machine, git: dict[str, Any]) -> None:
    """`environment.json` and `spec.json` in `out`."""
    environment = {
        "git_submit": provenance.submit_state(),
        "git_start": git,
        "packages": {**provenance.package_versions(), "torch": torch.__version__, "cuda": torch.version.cuda},
        "device": machine.name,
        "machine": machine.machine,
        "dtype": str(machine.dtype),
        "cache_bytes": machine.cache_bytes,
        "threads": torch.get_num_threads(),
        "gpus": list(provenance.gpus()),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    for name, value in (("environment.json", environment), ("spec.json", asdict(spec))):
        part = out / f"{name}.part"
        part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        part.replace(out / name)
