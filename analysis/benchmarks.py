"""Benchmarks that store one table each, as Markdown for the README: LoRA ops, training, the cross-check, the load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd

from analysis import studies
from analysis.figures import marks


def lora_ops(rows: pd.DataFrame) -> str:
    """How many times ours vLLM's CPU ops take, over adapters and ranks, per fused layer and phase."""
    lines = ["| layer | phase | points | least | median | greatest |", "|---" * 6 + "|"]
    for (layer, phase), mine in rows.groupby(["layer", "phase"], sort=False):
        ratio = mine["vllm_over_ours"]
        shown = (f"{value:.1f}" for value in (ratio.min(), ratio.median(), ratio.max()))
        lines.append(f"| {layer} | {phase} | {len(mine)} | " + " | ".join(shown) + " |")
    first = rows.iloc[0]
    adapters, ranks = (", ".join(f"{v:g}" for v in sorted(rows[k].unique())) for k in ("adapters", "rank"))
    return (
        f"LoRA ops on the CPU, time of vLLM's own over ours: {first['model']} {first['dtype']}, "
        f"{first['threads']:g} thread, {adapters} adapters of rank {ranks}; {_where(rows)}:\n\n"
        + "\n".join(lines)
    )


def training(rows: pd.DataFrame) -> str:
    """Step time and memory of TESSA's training over LoRA's."""
    lines = [
        "| method | parameters | step time / LoRA | step peak / LoRA | all memory / LoRA |",
        "|---" * 5 + "|",
    ]
    for row in rows.to_dict("records"):
        low, centre, high = (row[f"time_over_lora{end}"] for end in ("_low", "", "_high"))
        lines.append(
            f"| {row['method']} | {row['parameters']:,} | {centre:.2f} [{low:.2f}, {high:.2f}] | "
            f"{row['step_peak_over_lora']:.2f} | {row['memory_over_lora']:.2f} |"
        )
    first = rows.iloc[0]
    size = f"hidden {first['hidden']:g}"
    if pd.notna(first.get("intermediate")):
        size += f", intermediate {first['intermediate']:g}"
    precision = str(first["dtype"])
    if pd.notna(first.get("autocast")):
        precision += f" with autocast to {first['autocast']}"
    recomputed = ", activations recomputed in the backward pass" if first.get("checkpointing", False) else ""
    return (
        f"Training step, {size}, {first['layers']:g} layers, rank-equivalent {first['rank']:g}, "
        f"{first['batch']:g} sequences of {first['tokens']:g} tokens, {precision}{recomputed}; medians and quartiles "
        f"of {first['rounds']:g} rounds; {_where(rows)}:\n\n" + "\n".join(lines)
    )


def crosscheck(rows: pd.DataFrame) -> str:
    """The harness over vLLM's own benchmarks."""
    lines = ["| vLLM's benchmark | metric | harness / vLLM | limit |", "|---" * 4 + "|"]
    for row in rows.to_dict("records"):
        ratio = f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        lines.append(f"| {row['part']} | {row['metric']} | {ratio} | ± {row['limit']:.2f} |")
    first = rows.iloc[0]
    return (
        f"This harness beside `vllm bench`, {first['model']}, {first['requests']:g} requests; 95 % t intervals over "
        f"{rows['rounds'].min():g} rounds; {_where(rows)}:\n\n" + "\n".join(lines)
    )


def schedule_lag(rows: pd.DataFrame) -> str:
    """How late the load generator sends, with an engine that costs nothing."""
    row = rows.iloc[0]
    p50, p99, limit = (1e3 * row[key] for key in ("schedule_lag_s_p50", "schedule_lag_s_p99", "tolerance_s"))
    return (
        f"Schedule lag of the load generator with an engine that costs nothing, {row['requests']:g} requests at "
        f"{row['rate']:g}/s: p50 {p50:.2f} ms, p99 {p99:.2f} ms (limit {limit:g} ms); {_where(rows)}."
    )


TABLES: dict[str, Callable[[pd.DataFrame], str]] = {
    "lora_ops": lora_ops,
    "training": training,
    "crosscheck": crosscheck,
    "schedule_lag": schedule_lag,
}
"""Folder below the results -> its table."""


def tables(results: Path, reference: bool = True) -> list[str]:
    """The Markdown of every benchmark that is stored there; for a `reference`, those of trees with uncommitted changes
    are left out."""
    found = []
    for name, render in TABLES.items():
        path = results / name / "rows.csv"
        rows = pd.read_csv(path, dtype={"git_sha": str}) if path.is_file() else pd.DataFrame()
        if len(rows) and not (reference and studies.unclean(rows).any()):
            found.append(render(rows))
    return found


def _where(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    place, device = str(first["machine"]), first.get("device")
    if pd.notna(device) and device != place:
        place = f"{device}: {place}"
    return f"{place}, commit {', '.join(marks.commits(rows))}"
