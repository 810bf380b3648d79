"""The analytic model on a CPU machine's own measured cells: constants from half of them, errors on the others.

Seconds per output token of a run whose batch stays full (all requests at once, or a closed loop) are taken as

    [step + layer L + byte 4 W/n + collective C + kernel K] / B  +  (product W/u + adapter A/u) 2 (1 + P/O)

with B running requests, P and O prompt and output tokens, L layers, W weights in matrix products, n ranks, u cores in
use, C collectives and K adapter kernels of a decode step as counted, and A weights of one adapter on all ranks. The
seven constants are properties of the machine (seconds per step, layer, byte, collective, kernel, multiply-add pair of
a product and of an adapter), fitted with non-negative least squares of relative errors; nothing else is fitted.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import nnls

FEATURES = ("step", "layer", "byte", "collective", "kernel", "product", "adapter")
MIN_CELLS = 16
"""Fewer do not say anything about the half that is held out."""
_FULL = ("all_at_once", "closed_loop")


def point(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the model needs of one stored cell, or None where it does not describe such cells."""
    config, labels = summary.get("config"), summary["labels"]
    if summary["status"] != "complete" or summary["provenance"] != "measured" or not config:
        return None
    if config.get("device") != "cpu" or labels.get("wrong_by_design"):
        return None
    if labels.get("measure") == "smoke":
        return None  # its times say nothing about speed
    try:
        spec, shape = config["workload"]["spec"], config["model"]["architecture"]
        arrivals = spec["arrivals"]
        prompt, output = (float(spec[side]["value"]) for side in ("prompt_tokens", "output_tokens"))
        requests, seats = int(spec["num_requests"]), int(config["engine"]["max_num_seqs"])
        hidden, inner, layers = (
            int(shape[k]) for k in ("hidden_size", "intermediate_size", "num_hidden_layers")
        )
        heads, keys = int(shape["num_attention_heads"]), int(shape["num_key_value_heads"])
        dim = int(shape.get("head_dim") or hidden // heads)
        counters = summary["counters"]
        kernels = float(counters["adapter_kernels_per_step"])
        collectives = float(counters["collectives_per_step"])
        slots = max(1, int(config["adapters"]["max_resident"]))
        adapter = float(counters["adapter_bytes_per_rank"]) / 4 / slots
        rates = [float(entry["metrics"]["output_tokens_per_s"]) for entry in summary["rounds"]]
        cores = int(summary["environment"]["hardware"]["cores"])
    except (KeyError, TypeError, ValueError):
        return None
    tp = int(config["tp"])
    if arrivals["kind"] not in _FULL or tp > cores or not all(rate > 0 for rate in rates):
        return None  # with more ranks than cores, ranks wait for the processor
    batch = min(requests, seats, int(arrivals.get("concurrency") or requests))
    weights = layers * (hidden * (2 * heads + 2 * keys) * dim + 3 * hidden * inner)
    weights += hidden * int(config["model"]["vocab_size"])
    used = tp * max(1, cores // tp)
    work = 2 * (1 + prompt / output)
    return {
        "key": f"{summary['experiment']}|{summary['cell']}",
        "experiment": summary["experiment"],
        "variant": labels["variant"],
        "model": labels["model"],
        "tp": tp,
        "batch": batch,
        "machine": f"{summary['environment']['hardware'].get('cpu')}, {cores} cores, {config['dtype']}",
        "seconds": 1 / float(np.median(rates)),
        "step": 1 / batch,
        "layer": layers / batch,
        "byte": 4 * weights / tp / batch,
        "collective": (collectives + (tp > 1)) / batch,  # the sampler's gather of logits is not counted
        "kernel": kernels / batch,
        "product": work * weights / used,
        "adapter": work * adapter * tp / used if kernels else 0.0,
    }


def points(summaries: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row per cell that the model describes."""
    return pd.DataFrame([found for summary in summaries if (found := point(summary)) is not None])


def errors(cells: pd.DataFrame | None) -> tuple[pd.DataFrame | None, str | None]:
    """(held-out cells with `predicted_s` and `ratio`, None), or (None, why there is no such number).

    Of several machines the one with most cells counts. About half of the cells calibrate, chosen by a hash of what the
    model knows of them, so that cells which look the same to it are never on both sides.
    """
    if cells is None or cells.empty:
        return None, "no measured cells of a CPU engine with a full batch (all at once or closed loop)"
    machine = cells.machine.value_counts().index[0]
    mine = cells[cells.machine == machine].reset_index(drop=True)
    if len(mine) < MIN_CELLS:
        return (
            None,
            f"{len(mine)} such cells on one machine, {MIN_CELLS} needed; run tp_scaling or batch_sweep",
        )
    x = mine[list(FEATURES)].to_numpy(float)
    held = np.array([zlib.crc32(",".join(f"{v:.6g}" for v in row).encode()) % 2 == 1 for row in x])
    if min(held.sum(), (~held).sum()) < MIN_CELLS // 4:
        return None, "too few of the cells fall in one of the halves; more cells are needed"
    scale = np.maximum(x[~held].max(axis=0), 1e-30)
    weight = 1 / mine.seconds.to_numpy()
    cost, _ = nnls((x / scale * weight[:, None])[~held], np.ones((~held).sum()))
    predicted = (x / scale) @ cost
    found = mine.assign(predicted_s=predicted, ratio=predicted / mine.seconds, held_out=held)
    found.attrs["constants"] = dict(zip(FEATURES, cost / scale, strict=True))
    return found[held], None
