"""What a latency added to every collective does to a decode step, from the marks of `tessa.vllm.latency`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple


class Step(NamedTuple):
    """A decode step: seconds from its start to the next one's, its collectives, and the seconds inside them."""

    seconds: float
    collectives: int
    collective_s: float


def decode_steps(marks: Sequence[Sequence[float]], tokens: int) -> list[Step]:
    """The decode steps between neighbouring marks (fields of `tessa.vllm.latency.StepMark`).

    Only steps of `tokens` tokens that are followed by another such step count: prefill is left out, and so is
    the wait for new requests after the last step.
    """
    pairs = [(a, b) for a, b in pairwise(marks) if a[1] == b[1] == tokens]
    return [Step(b[0] - a[0], int(b[2] - a[2]), b[3] - a[3]) for a, b in pairs]


def _least(values: Iterable[float]) -> float | None:
    """The 5 % quantile: whatever else runs on the machine only makes steps longer."""
    found = sorted(values)
    return found[len(found) // 20] if found else None


def slope_of_steps(seen: Mapping[float, Sequence[Mapping[str, Any]]], tokens: int) -> dict[str, Any]:
    """Counters of one cell from the counts seen at latency 0 and at the added one (keys: microseconds).

    ``step_collectives``: all collectives of a decode step, the sampler's gather of logits included.
    ``latency_slope``: by how many times the added latency a step became longer; None without added latency.
    ``step_rest_s_*``: as ``step_s_*`` without the time inside the collectives, whose waits stay: what of a longer
    step is the wait itself. Collectives may take longer after a wait, as their threads have gone to sleep.
    All times are 5 % quantiles.
    """
    steps = {
        added: [s for run in runs for s in decode_steps(run["marks"], tokens)] for added, runs in seen.items()
    }
    collectives = [s.collectives for found in steps.values() for s in found]
    most = max(seen)
    without, longest = steps.get(0.0, []), steps[most]
    plain, added_s = _least(s.seconds for s in without), _least(s.seconds for s in longest)
    slope = (added_s - plain) / (most * 1e-6) if most > 0 and plain and added_s else None
    return {
        "step_collectives": statistics.mode(collectives) if collectives else None,
        "step_s_plain": plain,
        "step_s_added": added_s,
        "step_rest_s_plain": _least(s.seconds - s.collective_s for s in without),
        "step_rest_s_added": _least(s.seconds - s.collective_s for s in longest),
        "latency_slope": slope,
    }
