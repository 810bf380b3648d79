"""Benchmark of the LoRA ops on this machine's CPU: this project's grouped products against vLLM's own.

``python -m experiments.bench_lora_ops [--quick] [--out FILE.csv]`` runs vLLM's wrapper interface, the call that
its LoRA layers make, for a fused q/k/v layer of `small`, in decode (32 tokens) and prefill (512 tokens), over numbers
of adapters and ranks, every token with an adapter (vLLM's CPU ops are wrong for tokens without). The
implementations alternate within each repetition; the table gives medians and how many times vLLM's time ours takes.
Outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch

HIDDEN, PARTS = 1024, 3


def layer(slots: int, rank: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], torch.Tensor]:
    """A ``[S, 1, r, d_in]`` and B ``[S, 1, d_out, r]`` of q, k, v as vLLM shapes them, and the buffer of all A."""
    rng = torch.Generator().manual_seed(rank)
    joint = torch.randn(slots, PARTS, rank, HIDDEN, generator=rng) / HIDDEN**0.5
    a = tuple(joint[:, i : i + 1] for i in range(PARTS))
    b = tuple(torch.randn(slots, 1, rank, HIDDEN, generator=rng).transpose(2, 3) for _ in range(PARTS))
    return a, b, joint


def wrapper(kind: type, tokens: int, slots: int) -> Any:
    return kind(tokens, tokens, torch.device("cpu"), lora_config=SimpleNamespace(max_loras=slots))


def compare(tokens: int, slots: int, rank: int, prefill: bool, repeats: int) -> dict[str, Any]:
    """Median microseconds of both implementations for one step's q/k/v adapters."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from baselines.grouped import GroupedWrapper

    a, b, joint = layer(slots, rank)
    # In prefill each request's tokens follow each other; in decode neighbours are different requests.
    ids = (
        [i * slots // tokens + 1 for i in range(tokens)]
        if prefill
        else [i % slots + 1 for i in range(tokens)]
    )
    mapping = LoRAMapping(tuple(ids), tuple(ids), is_prefill=prefill)
    ours, stock = wrapper(GroupedWrapper, tokens, slots), wrapper(PunicaWrapperCPU, tokens, slots)
    ours.register_joint(joint)
    x = torch.randn(tokens, HIDDEN)
    results, times = {}, {"ours": [], "vllm": []}  # type: ignore[var-annotated]
    for repeat in range(repeats + 1):
        for name, one in (("ours", ours), ("vllm", stock)):
            one.update_metadata(mapping, list(range(1, slots + 1)), slots + 1, 0)
            y = torch.zeros(tokens, PARTS * HIDDEN)
            began = time.perf_counter()
            one.add_lora_linear(y, x, a, b, 1.0, (HIDDEN,) * PARTS)
            if repeat:
                times[name].append((time.perf_counter() - began) * 1e6)
            results[name] = y
    torch.testing.assert_close(results["ours"], results["vllm"], rtol=1e-3, atol=1e-3)
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "phase": "prefill" if prefill else "decode",
        "tokens": tokens,
        "adapters": slots,
        "rank": rank,
        "ours us": round(median["ours"]),
        "vLLM us": round(median["vllm"]),
        "vLLM / ours": round(median["vllm"] / median["ours"], 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_lora_ops",
        description="This project's LoRA ops for the CPU against vLLM's own.",
    )
    parser.add_argument("--repeats", type=int, default=15, help="timings of each point (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two points, to see that it runs")
    parser.add_argument("--out", type=Path, help="also write the table as CSV")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    points = [(tokens, slots, rank) for tokens in (32, 512) for slots in (1, 8, 32) for rank in (4, 16, 64)]
    if arguments.quick:
        points = [(32, 8, 8), (64, 8, 8)]
    with torch.inference_mode():
        rows = [compare(t, s, r, t > 32, arguments.repeats) for t, s, r in points]
    table = pd.DataFrame(rows)
    if arguments.out:
        table.to_csv(arguments.out, index=False)
    print(table.to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
