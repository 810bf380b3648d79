"""Computes the projection's grids and writes them as files that the analysis reads.

Output folder: `projection.parquet` (one row per backend and point, with bands), `crossovers.parquet` (where TESSA
stops being the fastest), `validation.json`, `assumptions.json`, `environment.json` (the code's commit), and with
reference data the two `validation_*.parquet`.
Every row has `provenance` = `modelled`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd

from experiments import provenance
from experiments.disk import writable
from experiments.kinds import check_counts, check_lists
from experiments.projection.bands import COLLECTIVE_RATIO, LAYER_RATIO, cost_estimate, speedup_estimate
from experiments.projection.bands import step_estimate as estimate
from experiments.projection.hardware import (
    ADAPTER_KERNELS,
    ADAPTER_KERNELS_FAST,
    ADAPTER_KERNELS_SLOW,
    HOST,
    gpu_named,
)
from experiments.projection.ops import BYTES
from experiments.projection.reference import find_reference
from experiments.projection.shapes import fused_linears, model_shape
from experiments.projection.step import Setting, StepTime, step_time, with_prefill_share
from experiments.projection.validate import layer_op_errors, slora_errors, validation
from tessa.errors import UserError

SCHEMA_VERSION = 2
DEFAULT_BACKENDS = (
    "base", "base_enabled", "merged", "plain_lora", "punica", "slora", "bd_lora", "tessa",
)  # fmt: skip
RIVALS = ("punica", "slora", "bd_lora")
MODES = ("tessa_wide", "tessa_segmented")


@dataclass(frozen=True, slots=True)
class ProjectionSpec:
    """What to project. Sweeps start from `batch`, `rank`, ... and vary one axis at a time."""

    models: Sequence[str] = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b")
    gpus: Sequence[str] = ("a100-80", "h100", "h200")
    tps: Sequence[int] = (1, 2, 4, 8, 16)
    backends: Sequence[str] = DEFAULT_BACKENDS
    batch: int = 32
    context: int = 512
    rank: int = 16
    distinct: int = 8
    custom_all_reduce: Sequence[bool] = (True, False)
    sweep_tp: int = 8
    batches: Sequence[int] = (1, 4, 8, 16, 32, 64, 128, 256)
    ranks: Sequence[int] = (4, 8, 16, 32, 64, 128, 256)
    distincts: Sequence[int] = (1, 2, 4, 8, 16, 32)
    residents: Sequence[int] = (8, 16, 32, 64, 128, 256)
    prefill_shares: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98)
    added_latencies_us: Sequence[float] = (0.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0)

    def __post_init__(self) -> None:
        check_lists(self, "models", "gpus", "tps", "backends", "custom_all_reduce")
        check_counts(self, "batch", "context", "rank", "distinct", "sweep_tp", "tps")
        for model in self.models:
            model_shape(model)
        for gpu in self.gpus:
            gpu_named(gpu)


def _splits(model: str, tp: int) -> bool:
    try:
        fused_linears(model_shape(model), tp)
    except UserError:
        return False
    return True


def _sweeps(spec: ProjectionSpec) -> Iterator[tuple[str, float, Setting]]:
    """(sweep, x, setting): over tp with and without custom all-reduce, then one axis at a time at `sweep_tp`."""
    for model in spec.models:
        for gpu in spec.gpus:
            start = Setting(model, gpu, spec.sweep_tp, spec.batch, spec.context, 0, rank=spec.rank)
            start = replace(start, distinct=spec.distinct)
            for custom in spec.custom_all_reduce:
                for tp in (t for t in spec.tps if _splits(model, t)):
                    yield "tp", tp, replace(start, tp=tp, custom_all_reduce=custom)
            if not _splits(model, spec.sweep_tp):
                continue
            for batch in spec.batches:
                yield "batch", batch, replace(start, batch=batch)
            for rank in spec.ranks:
                yield "rank", rank, replace(start, rank=rank)
            for distinct in (d for d in spec.distincts if d <= spec.batch):
                yield "distinct", distinct, replace(start, distinct=distinct)
            for resident in (r for r in spec.residents if r >= spec.distinct):
                yield "resident", resident, replace(start, resident=resident)
            for share in spec.prefill_shares:
                yield "prefill_share", share, with_prefill_share(start, share)
            for added in spec.added_latencies_us if spec.sweep_tp > 1 else ():
                yield "added_latency_us", added, replace(start, added_latency_s=added * 1e-6)


def parameter_share(setting: Setting) -> float:
    """Parameters of one adapter over those of the linear layers; also its share of their FLOPs per token."""
    shape = model_shape(setting.model)
    parts = [p for linear in fused_linears(shape, 1) for p in linear.parts if p.name in setting.modules]
    return sum(setting.rank * (p.d_in + p.d_out) for p in parts) / shape.layer_weights


def rank_weight_bytes(setting: Setting) -> float:
    """Bytes of the linear layers' weights on one rank."""
    shape = model_shape(setting.model)
    one = sum(linear.rank_out * linear.rank_in for linear in fused_linears(shape, setting.tp))
    return float(BYTES * shape.layers * one)


def communication_share(time: StepTime) -> dict[str, float]:
    """Share of the step that the adapters' collectives take, with the band of the collectives' errors."""
    rest = time.total_s - time.adapter_comm_s
    ends = {"comm_share": 1.0, "comm_share_low": COLLECTIVE_RATIO[1], "comm_share_high": COLLECTIVE_RATIO[0]}
    return {
        name: time.adapter_comm_s / ratio / (rest + time.adapter_comm_s / ratio)
        for name, ratio in ends.items()
    }


def row(backend: str, setting: Setting) -> dict[str, object]:
    """One modelled row: throughput, adapter cost and speed-up over `slora` with bands, and all parts."""
    time, seconds = step_time(backend, setting), estimate(backend, setting)
    cost = cost_estimate(backend, setting)
    speedup = speedup_estimate(backend, "slora", setting)
    load = setting.load()
    return {
        "experiment": "projection",
        "provenance": "modelled",
        "status": "complete",
        "schema_version": SCHEMA_VERSION,
        "backend": backend,
        "model": setting.model,
        "gpu": setting.gpu,
        "tp": setting.tp,
        "dtype": "bfloat16",
        "batch": setting.batch,
        "context": setting.context,
        "prefill_tokens": setting.prefill_tokens,
        "rank": setting.rank,
        "distinct": load.used,
        "resident": load.slots,
        "custom_all_reduce": setting.custom_all_reduce,
        "step_s": seconds.value,
        "step_s_low": seconds.low,
        "step_s_high": seconds.high,
        "output_tokens_per_s": setting.batch / seconds.value,
        "output_tokens_per_s_low": setting.batch / seconds.high,
        "output_tokens_per_s_high": setting.batch / seconds.low,
        "adapter_cost": cost.value,
        "adapter_cost_low": cost.low,
        "adapter_cost_high": cost.high,
        "speedup_over_slora": speedup.value,
        "speedup_over_slora_low": speedup.low,
        "speedup_over_slora_high": speedup.high,
        "base_s": time.base_s,
        "base_comm_s": time.base_comm_s,
        "adapter_s": time.adapter_s,
        "adapter_comm_s": time.adapter_comm_s,
        "gap_s": time.gap_s,
        "bound_s": time.bound_s,
        "bound_cost": 1 - 1 / (1 + time.bound_s / step_time("base", setting).total_s),
        "adapter_kernels_per_step": time.adapter_kernels,
        "adapter_collectives_per_step": time.adapter_collectives,
        "adapter_collective_bytes_per_step": time.adapter_collective_bytes,
        "adapter_read_bytes_per_step": time.adapter_read_bytes,
        "parameter_share": parameter_share(setting),
        "rank_parameter_share": time.one_adapter_bytes / rank_weight_bytes(setting),
        **communication_share(time),
        "mode": time.mode,
    }


def project(spec: ProjectionSpec) -> pd.DataFrame:
    """All rows of the projection, one per backend and point, with `sweep` and `x`."""
    rows = []
    for sweep, x, setting in _sweeps(spec):
        backends = [*spec.backends, *(MODES if sweep != "tp" else ())]
        rows += [{"sweep": sweep, "x": x, **row(backend, setting)} for backend in backends]
    return pd.DataFrame(rows)


def crossovers(frame: pd.DataFrame) -> pd.DataFrame:
    """Per sweep and rival: the least x at which `tessa` is slower than the rival, or NaN where it never is."""
    rows = []
    keys = ["sweep", "model", "gpu"]
    for key, group in frame[frame.sweep != "tp"].groupby(keys):
        table = group.pivot_table(index="x", columns="backend", values="step_s")
        for rival in (r for r in RIVALS if r in table):
            for mode in (m for m in ("tessa", *MODES) if m in table):
                behind = table.index[table[mode] > table[rival]]
                crossing = float(behind.min()) if len(behind) else float("nan")
                rows.append(
                    {**dict(zip(keys, key, strict=True)), "backend": mode, "rival": rival, "x": crossing}
                )
    return pd.DataFrame(rows).assign(provenance="modelled")


def run(
    spec: ProjectionSpec,
    out_dir: str | Path,
    cells: pd.DataFrame | None = None,
    reference_dir: str | Path | None = None,
) -> Path:
    """Writes the projection's files under `out_dir` and returns it. `cells`: see `validation`."""
    out, git = writable(Path(out_dir)), provenance.git_state()
    frame = project(spec)
    assumptions = {
        "schema_version": SCHEMA_VERSION,
        "spec": asdict(spec),
        "adapter_kernels": asdict(ADAPTER_KERNELS),
        "adapter_kernels_fast": asdict(ADAPTER_KERNELS_FAST),
        "adapter_kernels_slow": asdict(ADAPTER_KERNELS_SLOW),
        "host": asdict(HOST),
        "layer_ratio_p10_p90": LAYER_RATIO,
        "collective_ratio_p10_p90": COLLECTIVE_RATIO,
    }
    tables = {"projection.parquet": frame, "crossovers.parquet": crossovers(frame)}
    reference = find_reference(reference_dir)
    if reference is not None:
        tables["validation_layer_ops.parquet"] = layer_op_errors(reference)
        tables["validation_slora.parquet"] = slora_errors(reference)
    for name, table in tables.items():
        part = out / f"{name}.part"
        table.to_parquet(part, index=False)
        part.replace(out / name)
    environment = {
        "git_submit": provenance.submit_state(),
        "git_start": git,
        "packages": provenance.package_versions(),
        "command": provenance.command(),
    }
    texts = {
        "assumptions.json": assumptions,
        "environment.json": environment,
        "validation.json": validation(cells, reference_dir),
    }
    for name, data in texts.items():
        part = out / f"{name}.part"
        part.write_text(json.dumps(data, indent=2) + "\n")
        part.replace(out / name)
    return out
