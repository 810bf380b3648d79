"""Cross-check of this harness with vLLM's own benchmarks: the same requests, alternating on the same machine.

``python -m experiments.bench_crosscheck [--model small] [--rounds 3] [--requests 64] [--parts ...] [--out FOLDER]``

Parts: ``throughput`` and ``throughput-async`` set ``vllm bench throughput`` (without and with its own
``--async-engine``) beside an engine in process; ``serve`` and ``serve-closed`` set ``vllm bench serve`` beside the
harness's HTTP mode, both at one ``vllm serve``: all requests at once, and with a quarter of them in flight. All engines
get the same arguments. The table holds the ratio harness / vLLM of each metric within rounds, and below it what the
two define differently.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from experiments import config as schema
from experiments import models, provenance
from experiments.backends import known_backends, resolve
from experiments.bench_rows import store
from experiments.disk import check_writable
from experiments.engine.parent import EngineProcess, make_engine
from experiments.grid import EngineGroup, engine_identity
from experiments.measure import summarise
from experiments.measure.stats import ratio_interval
from experiments.measure.types import records_from_frame
from experiments.vllm_bench import (
    CHARACTERS,
    FIRST_ID,
    SEED,
    START_TIMEOUT_S,
    Bench,
    server,
    vllm_serve,
    vllm_throughput,
    write_dataset,
)
from experiments.workload import Workload, build
from tessa.errors import UserError

TOKEN_BUDGET = 2048
METRICS = {
    "requests_per_s": ("requests/s", 0.03),
    "ttft_p50_s": ("median TTFT", 0.05),
    "ttft_from_sending_p50_s": ("median TTFT from sending", 0.05),
    "tpot_p50_s": ("median TPOT", 0.05),
}
PARTS = {
    "throughput": (
        "vllm bench throughput times one call of LLM.generate and the harness times from the first request to the "
        "last token; engine start and warm-up are outside both. The former hands over whole requests, the harness "
        "receives every token through the asyncio front end, as a server does. The former samples at temperature 1, "
        "which it does not let one change, the harness takes the likeliest token."
    ),
    "throughput-async": (
        "Both run the asyncio front end. vllm bench throughput receives all tokens so far with every step, the "
        "harness the new ones; the former samples at temperature 1."
    ),
    "serve": (
        "vllm bench serve counts TTFT from the moment it sends a request, the harness from the scheduled time, here "
        "the start of the load; 'from sending' is the harness's value by vLLM's definition. TPOT is (last token - "
        "first token) / (tokens - 1) in both, and both divide by the time from the start to the last end. vllm bench "
        "sends text that the server tokenises, the harness sends the ids and asks for the ids of the output."
    ),
    "serve-closed": (
        "As for serve. A request's schedule is here the moment its place became free, in the harness alone: vllm "
        "bench starts its clock when the request has got its place."
    ),
}


Keep = Callable[[dict[str, Any]], None]
"""Takes each round as soon as it is over."""


def requests_workload(count: int) -> Workload:
    """Requests of varied lengths on the base model whose prompts are printable characters."""
    return build(
        {
            "seed": SEED,
            "num_requests": count,
            "num_adapters": 0,
            "arrivals": {"kind": "all_at_once"},
            "prompt_tokens": {"kind": "uniform", "low": 32, "high": 96},
            "output_tokens": {"kind": "uniform", "low": 32, "high": 96},
            "popularity": {"kind": "identical"},
            "min_token_id": FIRST_ID,
        },
        vocab_size=FIRST_ID + CHARACTERS,
    )


def engine_group(backend: str, model: str, options: Mapping[str, Any] | None = None) -> EngineGroup:
    """What a run with this backend at tp=1 starts; the token budget is given, as vLLM's default differs by entry."""
    device = provenance.device()
    chosen = known_backends()[backend]
    chosen.options.update(options or {})
    config = schema.RunConfig(backend=resolve(chosen, device), model=asdict(models.load_named(model)))
    config.engine.max_num_batched_tokens = TOKEN_BUDGET
    if device == "cuda":
        config.engine.gpu_memory_utilization = 0.4  # vLLM's benchmark starts a second engine beside it
    return EngineGroup(engine_identity(config, device), "crosscheck", (), config)


def prepare(model: str, count: int, folder: Path, cache: Path) -> tuple[Bench, EngineProcess]:
    """The benchmark's files, and the engine in process, which is not started yet."""
    if models.load_named(model).source != "generated":
        raise UserError(f"--model {model}: use a generated model, tiny or small")
    group = engine_group("base", model)
    group.config.measure.gate.enabled = False
    engine = make_engine(group, folder / "engine.log", cache)
    # Requests must find a place in the batch at once, as they do in a benchmark whose server is not limited.
    arguments = {**engine.setup.engine_args, "max_num_seqs": max(64, count)}
    engine.setup = replace(engine.setup, engine_args=arguments)
    work = requests_workload(count)
    tokenizer = Path(engine.setup.model) / "tokenizer.json"
    dataset = write_dataset(work, tokenizer, folder / "requests.json")
    return Bench(engine.setup, work, work.save(folder), dataset, folder), engine


def harness(engine: EngineProcess, bench: Bench, concurrency: int | None = None) -> dict[str, float]:
    """One load; RuntimeError where it is not complete."""
    result = engine.run(bench.workload_path, {"max_in_flight": concurrency})
    records = records_from_frame(pd.read_parquet(result["records"]))
    row = summarise(records, mode="closed_loop" if concurrency else "all_at_once")
    if row["status"] != "complete":
        raise RuntimeError(f"the harness's load is {row['status']}: {row['status_reason']}")
    sent = pd.Series([(r.first_token_s or 0.0) - (r.sent_s or 0.0) for r in records])
    return {
        "requests_per_s": row["requests_per_s"],
        "ttft_p50_s": row["ttft_s_p50"],
        "ttft_from_sending_p50_s": float(sent.median()),
        "tpot_p50_s": row["tpot_s_p50"],
    }


def alternate(index: int, sides: Mapping[str, Callable[[], dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Both sides of one round; which goes first changes from round to round."""
    names = list(sides) if index % 2 == 0 else list(sides)[::-1]
    return {name: sides[name]() for name in names}


def offline_rounds(
    bench: Bench, engine: EngineProcess, parts: Sequence[str], rounds: int, keep: Keep
) -> None:
    """The engine in process stays up, stopped in its tracks while vLLM's benchmark runs."""

    def own() -> dict[str, float]:
        engine.resume()
        values = harness(engine, bench)
        engine.park()
        return values

    engine.start(START_TIMEOUT_S)
    engine.warmup(bench.workload_path)
    engine.park()
    for index in range(rounds):
        for part in parts:
            more = ("--async-engine",) if part == "throughput-async" else ()
            sides = alternate(index, {"vllm": partial(vllm_throughput, bench, more), "harness": own})
            keep({"part": part, "round": index, **sides})


def served_rounds(
    bench: Bench, model: str, cache: Path, parts: Sequence[str], rounds: int, keep: Keep
) -> None:
    """Both sides load the same server."""
    with server(bench) as url:
        group = engine_group("openai", model, {"url": url, "adapters": "none", "gate": "off"})
        driver = make_engine(group, bench.log("driver"), cache)
        try:
            driver.start(START_TIMEOUT_S)
            driver.warmup(bench.workload_path)
            for index in range(rounds):
                for part in parts:
                    limit = bench.concurrency if part == "serve-closed" else None
                    sides = alternate(
                        index,
                        {
                            "vllm": partial(vllm_serve, bench, url, limit),
                            "harness": partial(harness, driver, bench, limit),
                        },
                    )
                    keep({"part": part, "round": index, **sides})
        finally:
            driver.stop()


def progress(row: Mapping[str, Any]) -> None:
    shown = [f"{side} {row[side]['requests_per_s']:.3g} requests/s" for side in ("harness", "vllm")]
    print(f"{row['part']} round {row['round'] + 1}: {', '.join(shown)}", file=sys.stderr, flush=True)


def table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per part and metric that both sides report: medians over rounds, and the ratio within rounds.

    ``low`` and ``high`` bound the 95 % t interval of the ratio; ``within`` compares its centre with ``limit``.
    """
    out = []
    for part in PARTS:
        mine = [row for row in rows if row["part"] == part]
        for metric, (label, limit) in METRICS.items():
            if not mine or metric not in mine[0]["vllm"]:
                continue
            sides = {side: [row[side][metric] for row in mine] for side in ("harness", "vllm")}
            ratio = ratio_interval(sides["harness"], sides["vllm"])
            out.append(
                {
                    "part": part,
                    "metric": label,
                    **{side: float(pd.Series(values).median()) for side, values in sides.items()},
                    "ratio": ratio.centre,
                    "low": ratio.low,
                    "high": ratio.high,
                    "rounds": ratio.n,
                    "limit": limit,
                    "within": abs(ratio.centre - 1) <= limit,
                }
            )
    return pd.DataFrame(out)


def describe(frame: pd.DataFrame) -> str:
    """The table, and for each part what the two sides define differently."""
    notes = [f"{part}: {PARTS[part]}" for part in PARTS if part in set(frame["part"])]
    return "\n".join([frame.to_string(index=False, float_format=lambda v: f"{v:.4g}"), "", *notes])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.bench_crosscheck",
        description="This harness beside vLLM's own benchmarks, same requests.",
    )
    parser.add_argument("--model", default="small", help="a generated model: tiny or small (default)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of the two, alternating (default %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=64, help="requests of a round (default %(default)s)")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results/crosscheck"),
        help="folder of rows.csv, a row per part and metric, and rounds.json; replaced (default %(default)s)",
    )
    arguments = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that engines are stopped
    git = provenance.git_state()
    rows: list[dict[str, Any]] = []
    try:
        if arguments.rounds < 1 or not 1 <= arguments.requests <= TOKEN_BUDGET:
            raise UserError(
                f"--rounds {arguments.rounds} --requests {arguments.requests}: give 1 or more of both, and at most "
                f"{TOKEN_BUDGET} requests"
            )
        check_writable(arguments.out, "--out")
        cache = models.default_cache()
        offline = [p for p in PARTS if p in arguments.parts and p.startswith("throughput")]
        served = [p for p in PARTS if p in arguments.parts and p.startswith("serve")]
        with tempfile.TemporaryDirectory(prefix="tessa-crosscheck-") as scratch:
            bench, engine = prepare(arguments.model, arguments.requests, Path(scratch), cache)
            engine_args = {k: v for k, v in bench.setup.engine_args.items() if k != "model"}

            def keep(row: dict[str, Any]) -> None:
                rows.append(row)
                progress(row)
                arguments.out.mkdir(parents=True, exist_ok=True)
                part = arguments.out / "rounds.json.part"
                part.write_text(json.dumps({"engine_args": engine_args, "rounds": rows}, indent=1) + "\n")
                part.replace(arguments.out / "rounds.json")

            try:
                if offline:
                    offline_rounds(bench, engine, offline, arguments.rounds, keep)
            finally:
                engine.stop()
            if served:
                served_rounds(bench, arguments.model, cache, served, arguments.rounds, keep)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, KeyboardInterrupt) as error:
        stopped = isinstance(error, KeyboardInterrupt)
        done = f"; the {len(rows)} finished rounds are in {arguments.out}/rounds.json" if rows else ""
        print(f"{'interrupted' if stopped else f'error: {error}'}{done}", file=sys.stderr)
        return 130 if stopped else 1
    frame = table(rows)
    print(describe(frame))
    setting = {"model": arguments.model, "requests": arguments.requests, "workload_hash": bench.workload.hash}
    store(frame.assign(**setting), "crosscheck", arguments.out, git, provenance.device())
    return 0


if __name__ == "__main__":
    sys.exit(main())
