"""Prompt token ids that share no prefix, so that prefix caching cannot help any backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessa.errors import UserError

# 4 GiB of int32: beyond this a workload no longer fits beside an engine on the machines that run one.
MAX_TOTAL_TOKENS = 1 << 30


def make_prompts(
    lengths: np.ndarray, vocab_size: int, rng: np.random.Generator, min_token_id: int = 0
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Flat prompt tokens int32 [sum(lengths)], offsets int64 [n + 1], and what was achieved.

    Ids lie in min_token_id..vocab_size-1 (V of them). With n <= V every prompt starts with a token that no
    other prompt starts with. With more requests than that, first tokens repeat in rounds of V and the prompts
    of one first token get different second tokens, and so on: any two prompts differ within their first
    k = ceil(log_V n) tokens, where both are that long. Prompts shorter than k are counted.
    """
    n, size = len(lengths), vocab_size - min_token_id
    total = int(lengths.sum())
    if size < 2:
        raise UserError(f"min_token_id {min_token_id} leaves fewer than two of {vocab_size} tokens; lower it")
    if total > MAX_TOTAL_TOKENS:
        raise UserError(
            f"the prompts hold {total} tokens, more than {MAX_TOTAL_TOKENS}; "
            "lower num_requests, the window or the lengths"
        )
    offsets = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    index = np.arange(n, dtype=np.int64)
    heads: list[np.ndarray] = []
    reach = 1  # prompts that the head tokens drawn so far can tell apart
    while reach < n or not heads:
        order = rng.permutation(size) + min_token_id
        heads.append(order[(index // reach) % size].astype(np.int32))
        reach *= size
    flat = rng.integers(min_token_id, vocab_size, total, dtype=np.int32)
    for depth, head in enumerate(heads):
        long_enough = lengths > depth
        flat[offsets[:-1][long_enough] + depth] = head[long_enough]
    return (
        flat,
        offsets,
        {
            "distinct_within_tokens": len(heads),
            "prompts_sharing_first_token": max(0, n - size),
            "prompts_too_short_to_differ": int((lengths < len(heads)).sum()),
        },
    )
