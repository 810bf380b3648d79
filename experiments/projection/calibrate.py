"""Fits the constants of `hardware` to the calibration part of the published profiles; prints them as Python.

Calibration part: layer operations of Llama-2-7b alone (every other model is held out); all-reduce up to 64
KiB (fixed cost) and from 16 MiB (bandwidth), one node; sizes between are held out. Run `python -m
experiments.projection.calibrate`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from experiments.projection.hardware import GPUS, ElementwiseConstants, Link, MatmulConstants
from experiments.projection.ops import elementwise_s, matmul_s
from experiments.projection.reference import all_reduce, find_reference, layer_ops
from tessa.errors import UserError

CALIBRATION_MODEL = "llama-2-7b"
SMALL_BYTES = 64 * 1024
LARGE_BYTES = 16 * 1024**2
VIDUR_GPUS = {"a100": "a100-80", "h100": "h100"}


def _columns(rows: pd.DataFrame) -> dict[str, np.ndarray]:
    return {name: rows[name].to_numpy(float) for name in ("num_tokens", "d_out", "d_in", "seconds")}


def fit_matmul(frame: pd.DataFrame, gpu_name: str) -> MatmulConstants:
    """Least squares of log errors over the five constants; robust, since library choices make outliers."""
    gpu, rows = GPUS[gpu_name], _columns(frame[frame.kind == "matmul"])
    scale = np.array([1e-6, 1, 1, 10, 1])

    def residual(p: np.ndarray) -> np.ndarray:
        constants = MatmulConstants(*(p * scale))
        return np.log(
            matmul_s(gpu, rows["num_tokens"], rows["d_out"], rows["d_in"], constants) / rows["seconds"]
        )

    fit = least_squares(
        residual,
        [4, 0.85, 0.8, 1, 2],
        bounds=([0, 0.3, 0.3, 0, 1], [20, 0.93, 1.1, 8, 8]),
        loss="soft_l1",
        f_scale=0.1,
    )
    return MatmulConstants(*(fit.x * scale))


def fit_elementwise(frame: pd.DataFrame, gpu_name: str, kind: str) -> ElementwiseConstants:
    """Fixed cost, row latency and bandwidth share of one kind of row-wise kernel."""
    gpu, rows = GPUS[gpu_name], _columns(frame[frame.kind == kind])
    scale = np.array([1e-6, 1e-10, 1])

    def residual(p: np.ndarray) -> np.ndarray:
        constants = ElementwiseConstants(*(p * scale))
        return np.log(
            elementwise_s(gpu, kind, rows["num_tokens"], rows["d_out"], constants) / rows["seconds"]
        )

    fit = least_squares(
        residual, [2, 3, 0.8], bounds=([0.5, 0, 0.1], [10, 50, 1.0]), loss="soft_l1", f_scale=0.1
    )
    return ElementwiseConstants(*(fit.x * scale))


def envelope(frame: pd.DataFrame, per_octave: int = 1) -> pd.DataFrame:
    """The least time in each octave of message size (rows of `frame`): peers that came late do not count."""
    bins = np.floor(np.log2(frame.bytes) * per_octave)
    return frame.loc[frame.groupby(bins).seconds.idxmin()]


def fit_links(reference: Path, gpu: str) -> dict[int, Link]:
    """Fixed cost: least time of small messages; bandwidth and large messages' fixed cost: a line.

    Waiting for late peers only adds, so fewer ranks never get a larger fixed cost than more ranks.
    """
    links: dict[int, Link] = {}
    table = all_reduce(reference, gpu)
    for ranks in sorted(int(n) for n in table.ranks.unique()):
        group = table[table.ranks == ranks]
        group = group[group.ranks_per_node == group.ranks_per_node.max()]
        alpha = float(group[group.bytes <= SMALL_BYTES].seconds.min())
        large = envelope(group[group.bytes >= LARGE_BYTES], per_octave=8)
        moved, seconds = large.bytes.to_numpy() * 2 * (ranks - 1) / ranks, large.seconds.to_numpy()

        def residual(p: np.ndarray, moved: np.ndarray = moved, seconds: np.ndarray = seconds) -> np.ndarray:
            return (p[0] * 1e-6 + moved / (p[1] * 1e9)) / seconds - 1

        fit = least_squares(residual, [alpha * 1e6 + 5, 150], bounds=([alpha * 1e6, 1], [100, 1000]))
        links[ranks] = Link(alpha, float(fit.x[0]) * 1e-6, float(fit.x[1]) * 1e9)
    for ranks in links:
        links[ranks] = replace(links[ranks], alpha_s=min(links[n].alpha_s for n in links if n >= ranks))
    return links


def calibrate(reference_dir: str | Path | None = None) -> dict[str, dict[str, object]]:
    """All fitted constants by GPU name. UserError where the reference data is absent."""
    reference = find_reference(reference_dir)
    if reference is None:
        raise UserError("no reference data: set TESSA_SHARED to the folder that holds reference/")
    frame = layer_ops(reference)
    frame = frame[frame.model == CALIBRATION_MODEL]
    out: dict[str, dict[str, object]] = {}
    for short, name in VIDUR_GPUS.items():
        part = frame[frame.gpu == short]
        kinds = {kind: fit_elementwise(part, name, kind) for kind in ("norm", "rope", "act", "add")}
        out[name] = {
            "matmul": fit_matmul(part, name),
            "elementwise": kinds,
            "nccl": fit_links(reference, short),
        }
    return out


if __name__ == "__main__":
    for name, constants in calibrate().items():
        print(name)
        for key, value in constants.items():
            print(f"  {key}: {value}")
