"""Errors of the model on data that took no part in its calibration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from experiments.projection import own_cells
from experiments.projection.calibrate import (
    CALIBRATION_MODEL,
    LARGE_BYTES,
    SMALL_BYTES,
    VIDUR_GPUS,
    envelope,
)
from experiments.projection.collectives import all_reduce_s
from experiments.projection.hardware import gpu_named
from experiments.projection.ops import elementwise_s, matmul_s
from experiments.projection.reference import all_reduce, find_reference, layer_ops, slora_figure
from experiments.projection.slora_paper import GPU_NAMES, MODELS, predict
from experiments.projection.step import Setting, step_time
from tessa.slices import ALL_MODULES

# arXiv 2510.23346, abstract: BD-LoRA over S-LoRA on eight A100, the most over its batches and ranks.
BD_LORA_SPEEDUP = {"llama-3.1-8b": 1.63, "llama-3.1-70b": 1.79}


def layer_op_errors(reference: Path) -> pd.DataFrame:
    """Rows of the per-op profile with `predicted_s`, `ratio` (predicted over measured) and `held_out`."""
    frame = layer_ops(reference)
    frame["predicted_s"] = np.nan
    for key, rows in frame.groupby(["gpu", "kind"]):
        short, kind = (str(part) for part in key)
        gpu = gpu_named(VIDUR_GPUS[short])
        tokens, d_out, d_in = (rows[name].to_numpy(float) for name in ("num_tokens", "d_out", "d_in"))
        product = kind == "matmul"
        seconds = matmul_s(gpu, tokens, d_out, d_in) if product else elementwise_s(gpu, kind, tokens, d_out)
        frame.loc[rows.index, "predicted_s"] = seconds
    frame["ratio"] = frame.predicted_s / frame.seconds
    return frame.assign(held_out=frame.model != CALIBRATION_MODEL)


def layer_sum_ratios(errors: pd.DataFrame) -> pd.Series:
    """Predicted over measured time of the whole layer (all ops but attention), held-out models."""
    held = errors[errors.held_out]
    keys = ["gpu", "model", "tp", "num_tokens"]
    sums = held.groupby([*keys, "op"])[["predicted_s", "seconds"]].mean().groupby(keys).sum()
    return sums.predicted_s / sums.seconds


def all_reduce_errors(reference: Path) -> pd.DataFrame:
    """Least time of each octave between the calibrated ends (one node), with the prediction."""
    frames = []
    for short, name in VIDUR_GPUS.items():
        table = all_reduce(reference, short)
        table = table[(table.ranks == table.ranks_per_node) & (table.bytes > SMALL_BYTES)]
        table = table[table.bytes < LARGE_BYTES]
        for ranks in sorted(int(n) for n in table.ranks.unique()):
            least = envelope(table[table.ranks == ranks])
            predicted = [all_reduce_s(gpu_named(name), ranks, float(b), custom=False) for b in least.bytes]
            frames.append(least.assign(gpu=name, predicted_s=predicted))
    frame = pd.concat(frames, ignore_index=True)
    return frame.assign(ratio=frame.predicted_s / frame.seconds)


def slora_errors(reference: Path) -> pd.DataFrame:
    """Measured and predicted losses of S-LoRA's figure, in share of base throughput."""
    rows = []
    for row in slora_figure(reference).to_dict("records"):
        base = float(row["base_only"])
        gpus, adapters = int(row["gpus"]), int(row["adapters"])
        p = predict(MODELS[row["model"]], GPU_NAMES[row["gpu"]], gpus, adapters, base)
        rows.append(
            {
                "model": row["model"],
                "gpus": gpus,
                "adapters": adapters,
                "loss": 1 - float(row["slora"]) / base,
                "predicted_loss": p.loss,
                "loss_without_communication": 1 - float(row["slora_no_lora_communication"]) / base,
                "predicted_loss_without_communication": p.loss_without_communication,
                "base_batch": p.base_batch,
                "batch": p.batch,
            }
        )
    frame = pd.DataFrame(rows)
    frame["error_points"] = 100 * (frame.predicted_loss - frame.loss)
    without = frame.predicted_loss_without_communication - frame.loss_without_communication
    return frame.assign(error_points_without_communication=100 * without)


def base_only_repeats(reference: Path) -> float:
    """Largest relative difference of base-only throughputs that differ in the number of unused adapters alone.

    The figure measured them anew for each; what they differ by is the noise of everything in it.
    """
    groups = slora_figure(reference).groupby(["model", "gpus"]).base_only
    return float((groups.max() / groups.min() - 1).max())


def bd_lora_speedup(model: str, modules: tuple[str, ...] = ALL_MODULES) -> float:
    """The most that BD-LoRA gains over S-LoRA on eight A100 over batches 1 to 128 and ranks 16 to 128."""
    best = 0.0
    for batch in (1, 8, 32, 128):
        for rank in (16, 64, 128):
            setting = Setting(model, "a100-80", 8, batch=batch, rank=rank, distinct=1, modules=modules)
            gain = step_time("slora", setting).total_s / step_time("bd_lora", setting).total_s
            best = max(best, gain)
    return best


def _absolute(ratio: pd.Series) -> pd.Series:
    return (ratio - 1).abs()


def validation(
    cells: pd.DataFrame | None = None, reference_dir: str | Path | None = None
) -> dict[str, float | int | str | None]:
    """All errors as one flat dict; None where the data for an entry is absent. Relative errors are shares.

    `cells`: rows of `experiments.projection.own_cells.points`.
    """
    out: dict[str, float | int | str | None] = dict.fromkeys(
        (
            "layer_ops_median_error",
            "layer_ops_p90_error",
            "layer_ops_worst_error",
            "layer_ops_rows",
            "layer_ops_calibration_median_error",
            "layer_sum_median_error",
            "layer_sum_worst_error",
            "layer_sum_ratio_p10",
            "layer_sum_ratio_p90",
            "all_reduce_median_error",
            "all_reduce_worst_error",
            "all_reduce_ratio_p10",
            "all_reduce_ratio_p90",
            "slora_loss_worst_error_points",
            "slora_loss_median_error_points",
            "slora_loss_with_communication_worst_error_points",
            "slora_loss_without_communication_worst_error_points",
            "slora_loss_2_gpus_worst_error_points",
            "slora_loss_4_gpus_worst_error_points",
            "slora_base_only_repeat_difference",
            "measured_cells_median_error",
            "measured_cells_worst_error",
            "measured_cells",
            "measured_cells_reason",
        )
    )
    reference = find_reference(reference_dir)
    if reference is not None:
        ops = layer_op_errors(reference)
        held = _absolute(ops[ops.held_out].ratio)
        sums, reduce, slora = (
            layer_sum_ratios(ops),
            all_reduce_errors(reference).ratio,
            slora_errors(reference),
        )
        with_comm = slora.error_points.abs()
        without_comm = slora.error_points_without_communication.abs()
        points = pd.concat([with_comm, without_comm])
        gpus = pd.concat([slora.gpus, slora.gpus])
        out |= {
            "layer_ops_median_error": float(held.median()),
            "layer_ops_p90_error": float(held.quantile(0.9)),
            "layer_ops_worst_error": float(held.max()),
            "layer_ops_rows": len(held),
            "layer_ops_calibration_median_error": float(_absolute(ops[~ops.held_out].ratio).median()),
            "layer_sum_median_error": float(_absolute(sums).median()),
            "layer_sum_worst_error": float(_absolute(sums).max()),
            "layer_sum_ratio_p10": float(sums.quantile(0.1)),
            "layer_sum_ratio_p90": float(sums.quantile(0.9)),
            "all_reduce_median_error": float(_absolute(reduce).median()),
            "all_reduce_worst_error": float(_absolute(reduce).max()),
            "all_reduce_ratio_p10": float(reduce.quantile(0.1)),
            "all_reduce_ratio_p90": float(reduce.quantile(0.9)),
            "slora_loss_worst_error_points": float(points.max()),
            "slora_loss_median_error_points": float(points.median()),
            "slora_loss_with_communication_worst_error_points": float(with_comm.max()),
            "slora_loss_without_communication_worst_error_points": float(without_comm.max()),
            "slora_loss_2_gpus_worst_error_points": float(points[gpus == 2].max()),
            "slora_loss_4_gpus_worst_error_points": float(points[gpus == 4].max()),
            "slora_base_only_repeat_difference": base_only_repeats(reference),
        }
    for model, published in BD_LORA_SPEEDUP.items():
        out[f"bd_lora_over_slora_{model}_published"] = published
        out[f"bd_lora_over_slora_{model}_modelled"] = bd_lora_speedup(model)
    errors, out["measured_cells_reason"] = own_cells.errors(cells)
    if errors is not None:
        cell_errors = _absolute(errors.ratio)
        out["measured_cells_median_error"] = float(cell_errors.median())
        out["measured_cells_worst_error"] = float(cell_errors.max())
        out["measured_cells"] = len(errors)
    return out
