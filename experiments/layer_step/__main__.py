"""`python -m experiments.layer_step --out DIR`: measures in this process; needs torch, numpy and pandas alone.

`run.py experiment=layer_step` starts it with `--spec`, a JSON file of `LayerStepSpec`; `scripts/gpu_check.sh` with
the options.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from experiments import provenance
from experiments.disk import writable
from experiments.layer_step.rows import RowFile, table
from experiments.layer_step.spec import LayerStepSpec, points
from tessa.errors import UserError

QUICK: dict[str, Any] = {
    "models": ("llama-3.1-8b",),
    "tps": (1, 2),
    "sweep_tp": 2,
    "batch": 8,
    "context": 16,
    "prompts": 2,
    "prompt_tokens": 512,
    "distinct": 3,
    "batches": (1,),
    "ranks": (),
    "distincts": (),
    "residents": (8,),
    "rounds": 2,
    "repeats": 2,
    "layers": 2,
    "scale": 32,
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.layer_step", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for rows.csv and environment.json")
    parser.add_argument("--spec", type=Path, help="JSON file with the fields of LayerStepSpec")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help="auto: a GPU where there is one")
    parser.add_argument("--models", nargs="+", help="shapes by name, such as llama-3.1-8b")
    parser.add_argument("--tps", nargs="+", type=int, help="tensor-parallel degrees whose shards are timed")
    parser.add_argument("--backends", nargs="+", help="such as base slora tessa tessa:wide")
    parser.add_argument("--phases", nargs="+", help="decode, prefill")
    parser.add_argument("--rounds", type=int, help="rounds in which the backends alternate")
    parser.add_argument("--repeats", type=int, help="steps timed in a round")
    parser.add_argument("--budget-s", type=float, help="begin no further point after so many seconds")
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes and few steps, to try the script itself"
    )
    parser.add_argument("--force", action="store_true", help="measure rows again that are there and complete")
    parser.add_argument("--command", help=argparse.SUPPRESS)  # what a caller was given, for the rows
    parser.add_argument("--no-table", action="store_true", help="print no table at the end")
    return parser.parse_args(argv)


def spec_of(args: argparse.Namespace) -> LayerStepSpec:
    """From the file or the defaults, then `--quick`, then the other options."""
    values = json.loads(args.spec.read_text(encoding="utf-8")) if args.spec else {}
    names = {f.name for f in fields(LayerStepSpec)}
    if unknown := set(values) - names:
        raise UserError(f"{args.spec}: unknown settings {sorted(unknown)}; known: {', '.join(sorted(names))}")
    spec = LayerStepSpec(**values)
    if args.quick:
        spec = replace(spec, **QUICK)
    chosen = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    if args.tps and spec.sweep_tp not in args.tps:
        chosen["sweep_tp"] = max(args.tps)
    return replace(spec, **chosen)


def run(spec: LayerStepSpec, out: Path, force: bool = False, command: str | None = None) -> int:
    """Measures what is missing in `out`, point by point; returns the number of rows that are not complete.

    Rows keep `command`: what was typed to make them.
    """
    begin = time.monotonic()
    writable(out)
    from experiments.layer_step.environment import write_environment
    from experiments.layer_step.measure import Bench

    bench, store = Bench(spec), RowFile(out)
    write_environment(out, spec, bench.machine, bench.git)
    settings = bench.machine.settings(spec)
    planned = points(spec)
    wanted = [p for p in planned if force or not store.complete(p, spec.backends, settings)]
    print(
        f"layer_step on {bench.machine.name}, {settings['dtype']}: {len(wanted)} of {len(planned)} points to measure",
        flush=True,
    )
    bad, longest = 0, 0.0
    for number, point in enumerate(wanted):
        used = time.monotonic() - begin
        if spec.budget_s is not None and used + longest > spec.budget_s:
            left = wanted[number:]
            print(f"left out, {used:.0f} of {spec.budget_s:.0f} s used: {len(left)} points")
            for skipped in left:
                print(f"  left out: {skipped.label}")
            break
        start = time.monotonic()
        rows = [row | {"command": command} for row in bench.measure(point)]
        store.add(rows)
        took = time.monotonic() - start
        # The first point also compiles kernels and builds the libraries' state.
        longest = max(longest, took) if number else took / 2
        bad += sum(row["status"] != "complete" for row in rows)
        rest_s = (time.monotonic() - begin) / (number + 1) * (len(wanted) - number - 1)
        done = f"[{number + 1}/{len(wanted)}] {point.label}: {took:.1f} s"
        print(f"{done}, about {rest_s / 60:.0f} min left" if rest_s else done, flush=True)
        for row in rows:
            if row["status"] != "complete":
                print(f"  {row['variant']} {row['status']}: {row['reason']}", flush=True)
    return bad


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        bad = run(spec_of(args), args.out, args.force, args.command or provenance.command())
        if not args.no_table:
            print(table(RowFile(args.out).frame()))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
