"""The cells of a plan as text: their status, and a rough estimate of the time that they need; how their rounds are
interleaved, here and in a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import psutil

from experiments import models
from experiments.config import MeasureConfig, RunConfig
from experiments.console import duration
from experiments.grid import Cell, EngineGroup, Plan, Point
from experiments.store import Store, to_run

PROCESS_GIB = 0.65
"""Memory of one process that has imported vLLM: measured 0.5 to 0.6 for each of front end, core and worker."""
MEMORY_SHARE = 0.9
ENGINE_START_S = 40.0
"""Start, gate and warm-up of one engine on a CPU with a small model, where no stored cell tells."""
CPU_TOKENS_PER_S = 150.0
GPU_TOKENS_PER_S = 3000.0


def status_lines(plan: Plan, store: Store) -> list[str]:
    """One line per cell with its status, then the counts."""
    lines, counts = [], Counter[str]()
    for cell in plan.cells:
        status, why = _status(cell, store)
        counts[status] += 1
        lines.append(f"  {status:<11} {cell.name:<34} {describe(cell)}{why}")
    total = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return [f"{plan.experiment}: {len(plan.cells)} cells in {store.folder}", *lines, f"total: {total}"]


def dry_run_lines(plan: Plan, store: Store, config: RunConfig) -> list[str]:
    """The cells in the order in which they would run, engine starts, and the estimated time."""
    lines, seconds, cells, starts = [], 0.0, 0, 0
    for point in plan.points:
        wanted: dict[str, EngineGroup] = {}
        for case in point.cases:
            for group in point.groups:
                for cell in (c for c in group.cells if c.case == case):
                    status, _ = _status(cell, store)
                    run = status != "running" and to_run(status, config.only, config.force)
                    part = estimate_cell(cell, store, config, work_of(plan, cell)) if run else 0.0
                    note = f"about {duration(part)}" if run else "kept"
                    lines.append(f"  {status:<11} {note:<14} {cell.name:<34} {describe(cell)}")
                    seconds, cells = seconds + part, cells + run
                    if run:
                        wanted[group.key] = group
        groups = list(wanted.values())
        groups += reference_groups(config.measure, point, groups)
        mode, _ = interleaving(config.measure, groups)
        starts += len(groups) * (config.measure.rounds if mode == "restart" else 1)
    seconds += starts * ENGINE_START_S
    head = f"{plan.experiment}: {len(plan.cells)} cells, {cells} to run, {starts} engine starts"
    return [head, *lines, f"roughly {duration(seconds)} in all; nothing was run (dry_run=true)"]


def describe(cell: Cell) -> str:
    """What sets a cell apart, in words."""
    labels = cell.labels
    rate = f" rate={labels['request_rate']:g}/s" if labels["request_rate"] is not None else ""
    added = f" +{cell.added_latency_us:g}us" if cell.added_latency_us is not None else ""
    loop = f" concurrency={labels['concurrency']}" if labels["concurrency"] is not None else ""
    return (
        f"{cell.variant} tp={labels['tp']} {labels['model']} {labels['dtype']} "
        f"workload={cell.workload_hash[:8]} {labels['popularity']}{rate}{loop}{added} "
        f"adapters={labels['num_adapters']} r={labels['rank_equivalent']} "
        f"modules={labels['target_modules'].replace('_proj', '')}"
    )


def estimate_cell(cell: Cell, store: Store, config: RunConfig, work: dict[str, Any]) -> float:
    """Seconds for all rounds of a cell: from its own last run, else from the load and a rate of thumb."""
    stored = store.summary(cell.name, cell.hash)
    walls = [entry["wall_s"] for entry in (stored or {}).get("rounds", []) if entry.get("wall_s")]
    if walls:
        return config.measure.rounds * sum(walls) / len(walls)
    rate = CPU_TOKENS_PER_S if cell.identity["device"] == "cpu" else GPU_TOKENS_PER_S
    return config.measure.rounds * max(work["last_arrival_s"], work["tokens"] / rate)


def work_of(plan: Plan, cell: Cell) -> dict[str, Any]:
    """Output tokens and the last arrival of a cell's workload, as its builder reported them."""
    realised = plan.workloads[cell.workload_hash].meta.get("realised", {})
    return {
        "tokens": realised.get("total_output_tokens", 0),
        "last_arrival_s": realised.get("last_arrival_s", 0.0),
    }


def _status(cell: Cell, store: Store) -> tuple[str, str]:
    summary = store.summary(cell.name, cell.hash)
    holder = store.claimed_by(cell.name)
    if holder is not None:
        return "running", f"  ({holder})"
    if summary is None:
        return "missing", ""
    return str(summary["status"]), f"  ({summary['reason']})" if summary.get("reason") else ""


def engine_gib(group: EngineGroup) -> float:
    """Memory of one engine on the CPU, in GiB: its processes, KV cache, and each rank's weights twice (as loaded
    and as packed for the kernels)."""
    tp = int(group.engine["tp"])
    model = models.load_spec(group.config.model)
    width = 4 if group.engine["dtype"] == "float32" else 2
    linear = sum(d_out * d_in for d_out, d_in in model.linear_shapes().values())
    weights = width * (linear + 2 * model.vocab_size * model.hidden_size) / 2**30
    return (2 + tp) * PROCESS_GIB + tp * float(group.engine["engine"]["kv_cache_gib"]) + 2 * weights


def side_by_side(groups: Sequence[EngineGroup]) -> str | None:
    """Why these engines cannot all be up at once; None where they can."""
    if any(group.engine["device"] != "cpu" for group in groups):
        return "an engine takes the whole GPU"
    need = sum(engine_gib(group) for group in groups)
    have = psutil.virtual_memory().available / 2**30
    if need > MEMORY_SHARE * have:
        return f"{len(groups)} engines need about {need:.0f} GiB and {have:.0f} GiB are free"
    return None


def interleaving(measure: MeasureConfig, groups: Sequence[EngineGroup]) -> tuple[str, str | None]:
    """How the rounds of these engines are interleaved, and why where that is not as configured."""
    reason = side_by_side(groups) if measure.interleave == "resident" and len(groups) > 1 else None
    return (measure.interleave if reason is None else "restart"), reason


def reference_groups(
    measure: MeasureConfig, point: Point, groups: Sequence[EngineGroup]
) -> list[EngineGroup]:
    """The engines of base that are measured again beside `groups`, the late engines of a point; none where base is
    among them, or nothing is to be measured."""
    if measure.base_reference != "rerun" or measure.interleave == "off" or not groups:
        return []
    if any(group.backend == "base" for group in groups):
        return []
    return [group for group in point.groups if group.backend == "base"]
