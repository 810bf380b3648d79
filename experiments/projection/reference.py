"""Where the published figures lie, and the frames that calibration and validation read from them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.projection.shapes import fused_linears, model_shape
from tessa.errors import UserError

VIDUR_MODELS = {
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-2-70b-hf": "llama-2-70b",
    "meta-llama/Meta-Llama-3-8B": "llama-3.1-8b",
    "meta-llama/Meta-Llama-3-70B": "llama-3.1-70b",
}
OP_KINDS = {
    "attn_pre_proj": "matmul",
    "attn_post_proj": "matmul",
    "mlp_up_proj": "matmul",
    "mlp_down_proj": "matmul",
    "input_layernorm": "norm",
    "post_attention_layernorm": "norm",
    "attn_rope": "rope",
    "mlp_act": "act",
    "add": "add",
}
_FUSED = {"attn_pre_proj": 0, "attn_post_proj": 1, "mlp_up_proj": 2, "mlp_down_proj": 3}


def find_reference(reference_dir: str | Path | None = None) -> Path | None:
    """The folder of published figures: the argument, $TESSA_SHARED/reference, ../shared/reference or None."""
    if reference_dir is not None:
        path = Path(reference_dir)
        if not path.is_dir():
            raise UserError(
                f"no folder of reference data at {path}; give the folder that holds vidur_layer_ops.csv"
            )
        return path
    shared = Path(os.environ.get("TESSA_SHARED", Path(__file__).resolve().parents[2].parent / "shared"))
    return shared / "reference" if (shared / "reference").is_dir() else None


def layer_ops(reference: Path) -> pd.DataFrame:
    """Per-op `seconds` with `kind`, `d_out`, `d_in` on the rank (row-wise kernels: `d_out` is the width)."""
    frame = pd.read_csv(reference / "vidur_layer_ops.csv")
    frame["model"] = frame["model"].map(VIDUR_MODELS)
    frame["kind"] = frame["op"].map(OP_KINDS)
    sizes = [_op_size(op, model, tp) for op, model, tp in zip(frame.op, frame.model, frame.tp, strict=True)]
    frame["d_out"], frame["d_in"] = np.array(sizes, dtype=float).T
    frame["seconds"] = frame["median_ms"] / 1e3
    return frame.dropna(subset=["model", "kind"]).reset_index(drop=True)


def _op_size(op: str, model: str, tp: int) -> tuple[int, int]:
    shape = model_shape(model)
    if op in _FUSED:
        linear = fused_linears(shape, tp)[_FUSED[op]]
        return linear.rank_out, linear.rank_in
    if op == "attn_rope":
        return (shape.heads // tp + shape.kv_heads_on_rank(tp)) * shape.head_dim, 0
    return (shape.ffn // tp, 0) if op == "mlp_act" else (shape.hidden, 0)


def all_reduce(reference: Path, gpu: str) -> pd.DataFrame:
    """All-reduce minima: `ranks`, `ranks_per_node`, `bytes`, `seconds` (least of the profiled minima)."""
    frame = pd.read_csv(reference / f"vidur_{gpu}_dgx_all_reduce.csv", index_col=0)
    frame = frame.rename(
        columns={
            "num_workers": "ranks",
            "devices_per_node": "ranks_per_node",
            "size": "bytes",
            "time_stats.all_reduce.min": "ms",
        }
    )
    grouped = frame.groupby(["ranks", "ranks_per_node", "bytes"], as_index=False)["ms"].min()
    return grouped.assign(seconds=grouped["ms"] / 1e3).drop(columns="ms")


def slora_figure(reference: Path) -> pd.DataFrame:
    """S-LoRA's tensor-parallel figure: model, gpus, gpu, adapters and requests/s of the three variants."""
    data = json.loads((reference / "slora" / "tp_figure8.json").read_text())
    rows = [{**row, **dict(zip(data["columns"], row["values"], strict=True))} for row in data["rows"]]
    return pd.DataFrame(rows).drop(columns="values")
