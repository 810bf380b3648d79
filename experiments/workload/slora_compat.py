"""S-LoRA's synthetic workload, number for number, so that its published settings can be run again.

Its benchmark draws everything from numpy's legacy generator in one fixed order after one seed: adapters
(power law), prompt lengths, output lengths, gaps. `draw` follows that order. S-LoRA's prompts repeat one
word; ours are drawn from the token stream, so that no two share a prefix.
Sources: github.com/S-LoRA/S-LoRA, benchmarks/trace.py and exp_suite.py; model settings from its README.
"""

from __future__ import annotations

import itertools
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


def suite(name: str) -> list[dict[str, Any]]:
    """The cells of a suite in S-LoRA's order, each a mapping for `WorkloadSpec.from_mapping`."""
    if name not in SUITES:
        raise UserError(f"S-LoRA suite {name!r} is not known; choose one of {', '.join(SUITES)}")
    s = SUITES[name]
    return [
        {
            "seed": DEFAULT_SEED,
            "num_adapters": n,
            "slora": {"req_rate": rate, "duration": s["duration"], "alpha": alpha, "cv": cv},
        }
        for n, alpha, rate, cv in itertools.product(s["num_adapters"], s["alpha"], s["req_rate"], s["cv"])
    ]


def adapter_ranks(setting: str, num_adapters: int) -> list[int]:
    """Rank of each adapter: the setting's ranks in turn."""
    if setting not in MODEL_SETTINGS:
        raise UserError(f"S-LoRA setting {setting!r} is not known; choose one of {', '.join(MODEL_SETTINGS)}")
    ranks = MODEL_SETTINGS[setting][1]
    return [ranks[i % len(ranks)] for i in range(num_adapters)]
