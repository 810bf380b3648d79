"""The correctness gate: an engine's outputs against merged weights, before anything is timed.

The gate sends one batch that mixes requests over several adapters with requests that name none, and compares the
log-probabilities of every prompt token and of a greedy continuation with `experiments.engine.reference`. Dummy
weights have no reference; there the engine is compared with itself alone, which the result says.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.offload import run_module

PROMPT_TOKENS = 24
NEW_TOKENS = 8
PLAIN_REQUESTS = 2
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.15, "float16": 0.03}
"""Largest allowed error of a log-probability, in nats. bfloat16 keeps 8 bits: 2^-8 of logits near 20 is 0.08."""


@dataclass(frozen=True)
class GateRequest:
    """``adapter`` is an index, None for the base model."""

    prompt: list[int]
    adapter: int | None


def not_gated(why: str) -> dict[str, Any]:
    """The gate's answer where nothing can be compared."""
    return {"passed": None, "max_abs_error": None, "reference": "none", "detail": f"not gated: {why}"}


def gate_requests(num_adapters: int, vocab_size: int, first_token: int, count: int) -> list[GateRequest]:
    """The gate's batch, the same for every backend: up to ``count`` adapters with requests without in between."""
    rng = np.random.default_rng(20260)
    tokens = [
        rng.integers(first_token, vocab_size, PROMPT_TOKENS).tolist()
        for _ in range(min(num_adapters, count) + PLAIN_REQUESTS)
    ]
    # Adapters from both ends of the set: an engine that fills its slots in order is asked for the last one too.
    adapters: list[int | None] = [
        i // 2 if i % 2 == 0 else num_adapters - 1 - i // 2 for i in range(len(tokens) - PLAIN_REQUESTS)
    ]
    adapters.insert(len(adapters) // 2, None)
    adapters.append(None)
    return [GateRequest(prompt, adapter) for prompt, adapter in zip(tokens, adapters, strict=True)]


def reference(
    model: str, adapters: Sequence[str], requests: Sequence[GateRequest], device: str, cache: Path
) -> list[dict[str, Any]]:
    """Reference results for the requests, computed once per (model, adapters, requests) and kept in ``cache``.

    Raises:
        UserError: the reference could not be computed, with its last message.
    """
    spec = {
        "model": model,
        "device": device,
        "new_tokens": NEW_TOKENS,
        "requests": [
            {"prompt": r.prompt, "adapter": None if r.adapter is None else adapters[r.adapter]}
            for r in requests
        ],
    }
    identity = json.dumps([spec, [stamp(Path(a)) for a in adapters], stamp(Path(model))], sort_keys=True)
    target = cache / "reference" / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
            description, out = Path(scratch) / "spec.json", Path(scratch) / "out.json"
            description.write_text(json.dumps(spec))
            failure = "the correctness gate's reference could not be computed"
            run_module(failure, "experiments.engine.reference", description, out)
            out.replace(target)
    return json.loads(target.read_text())


def stamp(folder: Path) -> list[Any]:
    """What tells one state of a folder's weights from another: names, sizes and times of change."""
    return sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in folder.glob("*.safetensors"))


def compare(
    requests: Sequence[GateRequest],
    outputs: Sequence[Mapping[str, Any]],
    expected: Sequence[Mapping[str, Any]] | None,
    base_outputs: Sequence[Mapping[str, Any]],
    tolerance: float,
    uses_adapters: bool,
) -> dict[str, Any]:
    """Judge an engine's outputs.

    Args:
        outputs: per request ``prompt_logprobs``, ``tokens`` and ``logprobs``, from the mixed batch.
        expected: the reference, or None where there is none.
        base_outputs: the same prompts served without adapters, in a batch of their own.
        uses_adapters: whether requests that name an adapter must differ from the base model.

    Returns:
        ``passed``, ``max_abs_error`` (nats; NaN without a reference), ``detail``, ``reference``.
    """
    worst, problems = 0.0, []
    for i, (request, output, base) in enumerate(zip(requests, outputs, base_outputs, strict=True)):
        who = "without adapter" if request.adapter is None else f"with adapter {request.adapter}"
        if not output["prompt_logprobs"] or not all(map(math.isfinite, output["prompt_logprobs"])):
            problems.append(f"request {i} {who} has no finite log-probabilities")
            worst = math.inf
            continue
        against_base = _largest(output["prompt_logprobs"], base["prompt_logprobs"])
        if request.adapter is None and against_base > tolerance:
            problems.append(
                f"request {i} {who} changes by {against_base:.2g} when batched with adapter requests"
            )
        if request.adapter is not None and uses_adapters and against_base <= 2 * tolerance:
            problems.append(f"request {i} {who} equals the base model's output: the adapter was not applied")
        if expected is not None:
            error = _error(output, expected[i], tolerance)
            worst = max(worst, error)
            if error > tolerance:
                problems.append(f"request {i} {who} is off the merged weights by {error:.2g}")
    return {
        "passed": not problems,
        "max_abs_error": worst if expected is not None else math.nan,
        "tolerance": tolerance,
        "reference": "merged weights"
        if expected is not None
        else "none (dummy weights): base and mixed batch only",
        "detail": "; ".join(problems[:4]) + (f" and {len(problems) - 4} more" if len(problems) > 4 else ""),
    }


def _largest(a: Sequence[float], b: Sequence[float]) -> float:
    if len(a) != len(b):
        return math.inf
    return float(np.max(np.abs(np.asarray(a) - np.asarray(b))))


def _error(output: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float) -> float:
    """Largest error over the prompt and over the continuation, up to where two tokens were equally likely."""
    worst = _largest(output["prompt_logprobs"], expected["prompt_logprobs"])
    if len(output["tokens"]) != len(expected["tokens"]):
        return math.inf
    for own, right, logprob, wanted, margin in zip(
        output["tokens"],
        expected["tokens"],
        output["logprobs"],
        expected["logprobs"],
        expected["margins"],
        strict=True,
    ):
        if own != right:
            # The engine took another token: right only where the reference had no preference either.
            return worst if margin <= 2 * tolerance else math.inf
        worst = max(worst, abs(logprob - wanted))
    return worst
