"""Stored cells made by hand, so that analysis is tested without the harness."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baselines import REGISTRY


@pytest.fixture
def store_cell(tmp_path: Path) -> Callable[..., Path]:
    """Writes one cell below tmp_path and returns its folder."""

    def write(
        backend: str,
        speeds: list[float],
        tp: int = 1,
        status: str = "complete",
        base: list[float] | None = None,
        provenance: str = "measured",
        experiment: str = "tp_scaling",
        setting: str = "abcd1234",
        **changes: Any,
    ) -> Path:
        rounds = [
            {
                "round": i,
                "position": 0,
                "session": "s",
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
                },
                "counters": {"collectives_per_step": 2.0, "adapter_bytes_per_rank": 2**20},
                **({"adapter_cost": 1 - speed / base[i], "adapter_cost_basis": "same_round"} if base else {}),
            }
            for i, speed in enumerate(speeds)
        ]
        name = f"{backend}-tp{tp}-{setting}{status}"
        folder = tmp_path / "results" / experiment / name
        folder.mkdir(parents=True)
        git = {"sha": "c" * 40, "dirty": False}
        summary = {
            "schema_version": 1,
            "hash": name,
            "cell": name,
            "experiment": experiment,
            "status": status,
            "reason": None if status == "complete" else "round 2/3: it broke",
            "log": "engine.log",
            "provenance": provenance,
            "labels": {
                "backend": backend,
                "variant": backend,
                "backend_order": list(REGISTRY).index(backend),
                "kernels": "grouped",
                "model": "tiny",
                "dtype": "float32",
                "device": "cpu",
                "tp": tp,
                "workload_hash": "0123456789abcdef",
                "num_adapters": 8,
                "popularity": "uniform",
                "request_rate": None,
                "concurrency": None,
                "arrivals": "all_at_once",
                "num_requests": 32,
                "rank_equivalent": 4,
                "wrong_by_design": False,
                "setting": setting,
            },
            "rounds": rounds,
            "engine_start_s": 3.0,
            "ended": "2026-01-01T00:00:00+00:00",
            "environment": {"git_start": git, "git_submit": git},
            **changes,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
        return folder

    return write
