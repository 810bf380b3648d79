"""S-LoRA's synthetic workload, number for number, so that its published settings can be run again.

Its benchmark draws everything from numpy's legacy generator in one fixed order after one seed: adapters
(power law), prompt lengths, output lengths, gaps. `draw` follows that order. S-LoRA's prompts repeat one
word; ours are drawn from the token stream, so that no two share a prefix.
`python -m experiments.workload.slora_compat SUITE SETTING` prints the command that runs one of its published suites.
Sources: github.com/S-LoRA/S-LoRA, benchmarks/trace.py and exp_suite.py; model settings from its README.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessa.errors import UserError

DEFAULT_SEED = 42


@dataclass(frozen=True)
class SLoraSpec:
    """Rates in requests/s, duration in seconds; ranges are [low, high) token counts."""

    req_rate: float
    duration: float
    alpha: float = 1.0
    cv: float = 1.0
    input_range: tuple[int, int] = (8, 512)
    output_range: tuple[int, int] = (8, 512)

    def __post_init__(self) -> None:
        for name in ("req_rate", "duration", "alpha", "cv"):
            if not (np.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise UserError(f"slora.{name} is {getattr(self, name)}; give a number above 0")
        for name in ("input_range", "output_range"):
            pair = tuple(getattr(self, name))
            if len(pair) != 2 or not all(isinstance(v, int) for v in pair) or not 1 <= pair[0] < pair[1]:
                raise UserError(
                    f"slora.{name} is {list(pair)}; give [low, high) with 1 <= low < high, e.g. [8, 512]"
                )
            object.__setattr__(self, name, pair)
        if int(self.req_rate * self.duration) < 1:
            raise UserError(
                f"slora: {self.req_rate} requests/s for {self.duration} s is no request; raise one of them"
            )


def draw(
    spec: SLoraSpec, num_adapters: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """arrival_s float64, prompt lengths int64, output lengths int64, adapter int32: each [n].

    n = int(req_rate * duration); adapter = int(power(alpha) * num_adapters), all -1 if num_adapters is 0;
    gaps ~ gamma(1/cv^2, cv^2/req_rate).
    """
    legacy = np.random.RandomState(seed)
    n = int(spec.req_rate * spec.duration)
    adapter = (legacy.power(spec.alpha, n) * max(num_adapters, 1)).astype(int)
    prompts = legacy.randint(*spec.input_range, n)
    outputs = legacy.randint(*spec.output_range, n)
    gaps = legacy.gamma(1 / (spec.cv * spec.cv), spec.cv * spec.cv / spec.req_rate, n)
    if num_adapters == 0:
        adapter = np.full(n, -1)
    return np.cumsum(gaps), prompts.astype(np.int64), outputs.astype(np.int64), adapter.astype(np.int32)


# Base model and the adapter ranks its adapters cycle through. S1-S4 are in exp_suite.py, S5 and S6 (the
# tensor-parallel ones) in the README; their load is not published, so rate and duration have to be given for
# them.
MODEL_SETTINGS: dict[str, tuple[str, tuple[int, ...]]] = {
    "S1": ("Llama-7B", (8,)),
    "S2": ("Llama-7B", (64, 32, 16, 8)),
    "S3": ("Llama-13B", (16,)),
    "S4": ("Llama-13B", (64, 32, 16)),
    "S5": ("Llama-30B", (32,)),
    "S6": ("Llama-70B", (64,)),
}


def _suite(settings: str, adapters: list[int], rate: list[float], **over: Any) -> dict[str, Any]:
    return {"settings": settings.split(), "num_adapters": adapters, "req_rate": rate} | (
        {"alpha": [1], "cv": [1], "duration": 300} | over
    )


# Settings, swept values and seconds of the paper's suites; lengths are [8, 512) both ways in all of them.
SUITES: dict[str, dict[str, Any]] = {
    "a10g-num-adapter": _suite("S1 S2", [1, 20, 50, 100, 200], [2]),
    "a10g-alpha": _suite("S1 S2", [200], [2], alpha=[0.1, 0.3, 0.6, 1]),
    "a10g-cv": _suite("S1 S2", [200], [2], cv=[1, 2, 4, 6, 8]),
    "a10g-req-rate": _suite("S1 S2", [200], [1, 1.5, 2, 2.5]),
    "a100-80-S2-num-adapter": _suite("S2", [1, 20, 50, 100, 200], [10]),
    "a100-80-S4-num-adapter": _suite("S4", [0, 1, 100, 200, 400], [6]),
    "a100-80-S4-req-rate": _suite("S4", [400], [1, 2, 4, 6, 8]),
    "a100-80-S4-cv": _suite("S4", [400], [6], cv=[1, 2, 4, 6, 8]),
    "a100-80-S3-num-adapter-vllm": _suite("S3", [2], [10], duration=120),
    "a100-80-table": _suite("S1 S2", [2, 5, 100, 1000, 2000], [10], duration=120),
    "ablation-cluster": _suite("S2 S4", [32], [2], alpha=[0.1, 0.3, 0.6, 1], duration=120),
    "ablation-cluster-cv": _suite("S2", [32], [2], alpha=[1, 2, 4, 6, 8], cv=[8], duration=120),
}


def overrides(suite: str, setting: str) -> list[str]:
    """What `run.py` needs for one of S-LoRA's suites with the adapter ranks of one of its settings.

    The model is not among them: the settings' Llamas have to be named with `model=` where their weights are.

    Raises:
        UserError: an unknown suite or setting.
    """
    for what, name, known in (("suite", suite, SUITES), ("setting", setting, MODEL_SETTINGS)):
        if name not in known:
            raise UserError(f"S-LoRA {what} {name!r} is not known; choose one of {', '.join(known)}")
    s = SUITES[suite]
    adapters = [
        n for n in s["num_adapters"] if n
    ]  # without an adapter: the backend `base`, which always runs along
    values = {
        "experiment": "tp_scaling",
        "name": f"slora-{suite}-{setting}",
        "workload": "slora",
        "measure": "paper",
        "workload.seed": DEFAULT_SEED,
        "workload.slora.duration": s["duration"],
        "workload.slora.input_range": [8, 512],
        "workload.slora.output_range": [8, 512],
        "adapters.ranks": list(MODEL_SETTINGS[setting][1]),
        "+grid.adapters.count": adapters,
        **{f"+grid.workload.slora.{key}": s[key] for key in ("alpha", "req_rate", "cv")},
    }
    return [
        f"{key}={json.dumps(v, separators=(',', ':')) if isinstance(v, list) else v}"
        for key, v in values.items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.workload.slora_compat",
        description="Print the command that runs one of S-LoRA's published suites.",
    )
    parser.add_argument("suite", choices=SUITES, metavar="SUITE", help=", ".join(SUITES))
    models = "; ".join(f"{name}: {model}, ranks {ranks}" for name, (model, ranks) in MODEL_SETTINGS.items())
    parser.add_argument("setting", choices=MODEL_SETTINGS, metavar="SETTING", help=models)
    arguments = parser.parse_args(argv)
    print(shlex.join(["python", "run.py", *overrides(arguments.suite, arguments.setting)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
