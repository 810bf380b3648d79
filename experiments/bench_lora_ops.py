"""Benchmark of the LoRA ops on this machine's CPU: this project's grouped products against vLLM's own.

``python -m experiments.bench_lora_ops [--quick] [--out FOLDER]`` runs vLLM's wrapper interface, the call that its LoRA
layers make, for the four fused linear layers of `small`, in decode (32 tokens) and prefill (512 tokens), over numbers
of adapters and ranks, in float32 on one thread, every token with an adapter (vLLM's CPU ops are wrong for tokens
without). The implementations alternate within each repetition; the rows hold medians and how many times ours vLLM's
takes. Outputs are compared before anything is timed.
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

from experiments import provenance
from experiments.bench_rows import check_least, out_folder, store, user_errors_in_a_line

RESULTS = Path("results/lora_ops")
LAYERS = {
    "qkv": (1024, (1024,) * 3),
    "o": (1024, (1024,)),
    "gate_up": (1024, (2816,) * 2),
    "down": (2816, (1024,)),
}
"""Fused layer of `small` -> (d_in, d_out of each of its projections)."""


def layer(
    name: str, slots: int, rank: int
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], torch.Tensor]:
    """A ``[S, 1, r, d_in]`` and B ``[S, 1, d_out, r]`` of each projection, shaped as vLLM's and stored as ours: A as
    views of the returned buffer of all of them, B transposed."""
    rng = torch.Generator().manual_seed(rank)
    d_in, widths = LAYERS[name]
    joint = torch.randn(slots, len(widths), rank, d_in, generator=rng) / d_in**0.5
    a = tuple(joint[:, i : i + 1] for i in range(len(widths)))
    b = tuple(torch.randn(slots, 1, rank, width, generator=rng).transpose(2, 3) for width in widths)
    return a, b, joint


def wrapper(kind: type, tokens: int, slots: int) -> Any:
    return kind(tokens, tokens, torch.device("cpu"), lora_config=SimpleNamespace(max_loras=slots))


def compare(name: str, tokens: int, slots: int, rank: int, prefill: bool, repeats: int) -> dict[str, Any]:
    """Median microseconds of both implementations for one step's adapters of a fused layer."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from baselines.grouped import GroupedWrapper

    d_in, widths = LAYERS[name]
    a, b, joint = layer(name, slots, rank)
    # vLLM's layers hold each projection's factors contiguous, so its op must not be timed on our storage.
    own_a, own_b = (tuple(factor.contiguous() for factor in factors) for factors in (a, b))
    # In prefill each request's tokens follow each other; in decode neighbours are different requests.
    ids = (
        [i * slots // tokens + 1 for i in range(tokens)]
        if prefill
        else [i % slots + 1 for i in range(tokens)]
    )
    mapping = LoRAMapping(tuple(ids), tuple(ids), is_prefill=prefill)
    ours, stock = wrapper(GroupedWrapper, tokens, slots), wrapper(PunicaWrapperCPU, tokens, slots)
    ours.register_joint(joint)
    x = torch.randn(tokens, d_in)
    results, times = {}, {"ours": [], "vllm": []}  # type: ignore[var-annotated]
    for repeat in range(repeats + 1):
        for whose, one, factors in (("ours", ours, (a, b)), ("vllm", stock, (own_a, own_b))):
            one.update_metadata(mapping, list(range(1, slots + 1)), slots + 1, 0)
            y = torch.zeros(tokens, sum(widths))
            began = time.perf_counter()
            one.add_lora_linear(y, x, *factors, 1.0, widths)
            if repeat:
                times[whose].append((time.perf_counter() - began) * 1e6)
            results[whose] = y
    torch.testing.assert_close(results["ours"], results["vllm"], rtol=1e-3, atol=1e-3)
    median = {whose: statistics.median(values) for whose, values in times.items()}
    return {
        "layer": name,
        "phase": "prefill" if prefill else "decode",
        "tokens": tokens,
        "adapters": slots,
        "rank": rank,
        "ours_us": median["ours"],
        "vllm_us": median["vllm"],
        "vllm_over_ours": median["vllm"] / median["ours"],
    }


@user_errors_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_lora_ops",
        description="This project's LoRA ops for the CPU against vLLM's own.",
    )
    parser.add_argument("--repeats", type=int, default=7, help="timings of each point (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two points, to see that it runs")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"folder of rows.csv, a row per point (default {RESULTS}; nothing is stored with --quick)",
    )
    arguments = parser.parse_args(argv)
    check_least(arguments, repeats=1)
    out, git = out_folder(arguments.out, RESULTS, arguments.quick), provenance.git_state()
    torch.set_num_threads(1)
    points = [
        (name, tokens, slots, rank)
        for name in LAYERS
        for tokens in (32, 512)
        for slots in (1, 8, 32)
        for rank in (4, 16, 64)
    ]
    if arguments.quick:
        points = [("qkv", 32, 8, 8), ("down", 64, 8, 8)]
    with torch.inference_mode():
        rows = [compare(n, t, s, r, t > 32, arguments.repeats) for n, t, s, r in points]
    table = pd.DataFrame(rows)
    if out is not None:
        store(table.assign(model="small", dtype="float32", threads=1), "lora_ops", out, git)
    print(table.round(2).to_string(index=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
