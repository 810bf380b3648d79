"""Benchmark of TESSA's two schedules on this machine's CPU: what a resident slot and a distinct adapter cost.

``python -m experiments.bench_schedules [--tp 1] [--rank 4] [--quick] [--out FOLDER]`` times the four linear
layers of one transformer layer of `small`, one tensor-parallel rank's shard, base product included, for numbers of
tokens, resident slots and distinct adapters. Base, wide and segmented alternate within each repetition, and the
median is kept. The table shows both schedules over the base product, what the rule of `tessa.ops.schedule`
chooses, and its regret: its time over the better schedule's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from experiments import models, provenance
from experiments.bench_rows import check_least, out_folder, store, user_errors_in_a_line
from experiments.schedule_costs import summary
from tessa.budget import width_for
from tessa.ops.products import GrowingProducts
from tessa.ops.routing import route
from tessa.ops.schedule import Schedule

RESULTS = Path("results/schedules")
Gemm = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """One fused layer on one rank; ``axis`` is the slice's under placement `across`."""

    name: str
    d_out: int
    d_in: int
    axis: str
    width: int


def layer_shapes(model: str, tp: int, rank: float) -> list[Shape]:
    spec = models.load_named(model)
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return [
        Shape("qkv", (queries + 2 * keys) // tp, hidden, "in", width_for(rank, queries, hidden, "in")),
        Shape("o", hidden, queries // tp, "out", width_for(rank, hidden, queries, "out")),
        Shape("gate_up", 2 * inner // tp, hidden, "in", width_for(rank, inner, hidden, "in")),
        Shape("down", hidden, inner // tp, "out", width_for(rank, hidden, inner, "out")),
    ]


def packed(weight: torch.Tensor) -> Gemm:
    """The kernel that vLLM gives its base layers here; torch's own where vLLM is not installed."""
    try:
        from tessa.vllm.layers import packed_gemm
    except ImportError:
        return lambda x: torch.nn.functional.linear(x, weight)
    return packed_gemm(weight)


class Layer:
    """A layer's base product and its slots, filled with adapters at offsets of their own."""

    def __init__(self, shape: Shape, slots: int) -> None:
        rng = torch.Generator().manual_seed(slots)
        self.shape = shape
        weight = torch.randn(shape.d_out, shape.d_in, generator=rng)
        gemm = packed(weight.clone())
        self.base = lambda x, bias: gemm(x)
        self.products = GrowingProducts(
            slots, shape.d_out, shape.d_in, torch.float32, Schedule(), weight, packed
        )
        length, dim = (shape.d_out, shape.d_in) if shape.axis == "in" else (shape.d_in, shape.d_out)
        for slot in range(slots):
            start = int(torch.randint(0, dim - shape.width + 1, (), generator=rng))
            rows = torch.arange(start, start + shape.width), torch.randn(shape.width, length, generator=rng)
            self.products.set(slot, *((rows, None) if shape.axis == "in" else (None, rows)))

    def times(self, tokens: int, distinct: int, repeats: int) -> dict[str, float]:
        """Median microseconds of the base product, of both schedules, and what the rule chooses."""
        slots = self.products.part_in.num_slots
        step = route(
            torch.arange(tokens) * (slots // distinct) % slots
            if distinct > 1
            else torch.zeros(tokens, dtype=torch.int64),
            slots,
        )
        x = torch.randn(tokens, self.shape.d_in)
        wide, segmented = Schedule("wide"), Schedule("segmented")

        def timed(schedule: Schedule | None) -> float:
            began = time.perf_counter()
            if schedule is None:
                self.base(x, None)
            else:
                self.products.schedule = schedule
                self.products.apply(self.base, x, None, step)
            return (time.perf_counter() - began) * 1e6

        for schedule in (None, wide, segmented):
            timed(schedule)
        rounds = [[timed(s) for s in (None, wide, segmented)] for _ in range(repeats)]
        part = self.products.part_in if self.shape.axis == "in" else self.products.part_out
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        return {
            "base_us": medians[0],
            "wide_us": medians[1],
            "segmented_us": medians[2],
            "chose_wide": Schedule().wide(step, part, x.numel()),
            "slots": slots,
            "distinct": len(step.groups),
            "rows": step.rows,
            "used": part.used,
            "length": part.length,
        }


def measure(
    model: str, tp: int, rank: float, points: Sequence[tuple[int, int, int]], repeats: int
) -> pd.DataFrame:
    """One row per layer and (tokens, slots, distinct)."""
    rows = []
    shapes = layer_shapes(model, tp, rank)
    for slots in sorted({s for _, s, _ in points}):
        for shape in shapes:
            layer = Layer(shape, slots)
            for tokens, _, distinct in (p for p in points if p[1] == slots):
                rows.append(
                    {"layer": shape.name, "d_out": shape.d_out, "d_in": shape.d_in, "tokens": tokens}
                    | layer.times(tokens, distinct, repeats)
                )
    return pd.DataFrame(rows)


def shown(rows: pd.DataFrame) -> pd.DataFrame:
    """All four layers of a transformer layer together, one row per (tokens, slots, distinct)."""
    table = summary(rows)
    over = {name: table[f"{name}_us"] / table["base_us"] for name in ("wide", "segmented", "rule")}
    wide_layers = table["wide_layers"].astype(str) + " of 4"
    columns = {f"{name}/base": ratio for name, ratio in over.items()}
    return pd.DataFrame(
        {
            "base us": table["base_us"].round(0),
            **columns,
            "wide layers": wide_layers,
            "regret": table["regret"],
        }
    ).round(3)


def points(quick: bool) -> list[tuple[int, int, int]]:
    """(tokens, slots, distinct): slots grow, all in use; distinct adapters grow among 64 slots; tokens grow."""
    if quick:
        return [(32, 1, 1), (32, 8, 8)]
    slots = [(64, s, s) for s in (1, 2, 4, 8, 16, 32)]
    distinct = [(64, 64, g) for g in (1, 2, 4, 8, 16, 32, 64)]
    tokens = [(t, 8, min(t, 8)) for t in (1, 2, 4, 8, 16, 64, 128, 512)]
    return [*slots, *distinct, *tokens]


@user_errors_in_a_line
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_schedules",
        description="Cost of resident slots and distinct adapters, wide and segmented.",
    )
    parser.add_argument(
        "--model", default="small", help="a file of conf/model without .yaml (default %(default)s)"
    )
    parser.add_argument(
        "--tp", type=int, default=1, help="the shapes of one rank of so many (default %(default)s)"
    )
    parser.add_argument("--rank", type=float, default=4, help="rank-equivalent of every adapter")
    parser.add_argument("--repeats", type=int, default=15, help="timings of each point (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two points, to see that it runs")
    parser.add_argument(
        "--out",
        type=Path,
        help=f"folder of rows.csv, a row per layer and point (default {RESULTS}; nothing is stored with --quick)",
    )
    arguments = parser.parse_args(argv)
    check_least(arguments, tp=1, repeats=1, threads=1)
    out, git = out_folder(arguments.out, RESULTS, arguments.quick), provenance.git_state()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        rows = measure(
            arguments.model, arguments.tp, arguments.rank, points(arguments.quick), arguments.repeats
        )
    setting = {name: getattr(arguments, name) for name in ("model", "tp", "rank", "threads", "repeats")}
    if out is not None:
        store(rows.assign(**setting), "schedules", out, git)
    print(shown(rows).to_string())
    return 0


if __name__ == "__main__":
    sys.exit(main())
