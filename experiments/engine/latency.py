"""What a latency added to every collective does to a decode step, from the marks of `tessa.vllm.latency`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


def step_times(marks: Sequence[Sequence[float]], tokens: int) -> tuple[list[float], list[int]]:
    """(seconds, collectives) of the decode steps between neighbouring marks (start, tokens, collectives before).

    Only steps of `tokens` tokens that are followed by another such step count: prefill is left out, and so is
    the wait for new requests after the last step.
    """
    pairs = [(a, b) for a, b in pairwise(marks) if a[1] == b[1] == tokens]
    return [b[0] - a[0] for a, b in pairs], [int(b[2] - a[2]) for a, b in pairs]


def slope_of_steps(seen: Mapping[float, Sequence[Mapping[str, Any]]], tokens: int) -> dict[str, Any]:
    """Counters of one cell from the counts seen at latency 0 and at the added one (keys: microseconds).

    ``step_collectives``: all collectives of a decode step, the sampler's gather of logits included.
    ``latency_slope``: by how many times the added latency a step became longer; None without added latency.
    Step times are the 5 % quantiles: whatever else runs on the machine only makes steps longer.
    """
    steps, collectives = {}, []
    for added, runs in seen.items():
        times: list[float] = []
        for run in runs:
            seconds, counts = step_times(run["marks"], tokens)
            times += seconds
            collectives += counts
        steps[added] = sorted(times)[len(times) // 20] if times else None
    plain, most = steps.get(0.0), max(seen)
    added_s = steps[most]
    slope = (added_s - plain) / (most * 1e-6) if most > 0 and plain and added_s else None
    return {
        "step_collectives": statistics.mode(collectives) if collectives else None,
        "step_s_plain": plain,
        "step_s_added": added_s,
        "latency_slope": slope,
    }
