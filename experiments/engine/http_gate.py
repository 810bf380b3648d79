"""The correctness gate for servers that give no log-probabilities of prompts: greedy continuations are compared.

Two continuations are compared token by token up to the first difference; there, the log-probabilities must be as
close as the tolerance allows for the difference to count as a tie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.engine.gate import GateRequest


def compare_continuations(
    requests: Sequence[GateRequest],
    outputs: Sequence[Mapping[str, Any]],
    expected: Sequence[Mapping[str, Any]] | None,
    base_outputs: Sequence[Mapping[str, Any]],
    tolerance: float,
) -> dict[str, Any]:
    """Judge ``tokens`` and ``logprobs`` of a batch that mixes adapters with requests that name none.

    Args:
        expected: the merged reference (`experiments.engine.gate.reference`), or None where there is none.
        base_outputs: the same prompts without adapters.

    Returns:
        As `experiments.engine.gate.compare`.
    """
    worst, problems = 0.0, []
    for i, (request, output, base) in enumerate(zip(requests, outputs, base_outputs, strict=True)):
        who = "without adapter" if request.adapter is None else f"with adapter {request.adapter}"
        if not output["logprobs"] or not all(map(math.isfinite, output["logprobs"])):
            problems.append(f"request {i} {who} has no finite log-probabilities")
            worst = math.inf
            continue
        against_base = distance(output, base, tolerance)
        if request.adapter is None and against_base > tolerance:
            problems.append(
                f"request {i} {who} changes by {against_base:.2g} when batched with adapter requests"
            )
        if request.adapter is not None and against_base <= 10 * tolerance:
            problems.append(f"request {i} {who} equals the base model's output: the adapter was not applied")
        if expected is not None:
            error = distance(output, expected[i], tolerance)
            worst = max(worst, error)
            if error > tolerance:
                problems.append(f"request {i} {who} is off the merged weights by {error:.2g}")
    return {
        "passed": not problems,
        "max_abs_error": worst if expected is not None else None,
        "tolerance": tolerance,
        "reference": "merged weights, greedy continuations"
        if expected is not None
        else "none: the server with itself, greedy continuations",
        "detail": "; ".join(problems[:4]) + (f" and {len(problems) - 4} more" if len(problems) > 4 else ""),
    }


def distance(own: Mapping[str, Any], other: Mapping[str, Any], tolerance: float) -> float:
    """Largest difference of log-probabilities over the common tokens; infinite where the tokens really differ.

    Other tokens are a tie, and end the comparison, where both took their own with a log-probability within twice
    the tolerance of the other's: two models that agree rank nearly equal tokens either way.
    """
    if len(own["tokens"]) != len(other["tokens"]):
        return math.inf
    worst = 0.0
    for a, b, p, q in zip(own["tokens"], other["tokens"], own["logprobs"], other["logprobs"], strict=True):
        if a != b:
            return worst if abs(p - q) <= 2 * tolerance else math.inf
        worst = max(worst, abs(p - q))
    return worst
