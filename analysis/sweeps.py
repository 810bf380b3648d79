"""What each experiment varies, and which cells belong in one figure."""

from __future__ import annotations

import copy
import hashlib
import json
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from tessa.slices import ALL_MODULES, ATTENTION, MLP


@dataclass(frozen=True)
class Sweep:
    """x: the column along the axis. facet: the column with a panel for each value. varied: paths in a cell's
    `config.json` that may differ within one figure. categorical: values are names, shown as groups of bars. columns:
    the metrics, a row of panels each."""

    x: str
    label: str
    varied: tuple[str, ...]
    facet: str | None = None
    categorical: bool = False
    columns: tuple[str, ...] = ("adapter_cost", "output_tokens_per_s")


SPEC = "workload.spec."
SWEEPS = {
    "adapter_count": Sweep(
        "num_adapters",
        "resident adapters",
        ("adapters.count", "adapters.max_resident", SPEC + "num_adapters", SPEC + "popularity"),
        facet="popularity",
    ),
    "batch_sweep": Sweep(
        "concurrency",
        "concurrent requests",
        (SPEC + "arrivals.concurrency", SPEC + "prompt_tokens"),
        facet="prompt_tokens",
    ),
    "budget_sweep": Sweep(
        "rank_equivalent",
        "budget (rank-equivalents)",
        ("adapters.rank_equivalent", "adapters.target_modules"),
        facet="target_modules",
    ),
    "popularity": Sweep("popularity", "adapter popularity", (SPEC + "popularity",), categorical=True),
    "rate_sweep": Sweep(
        "request_rate",
        "request rate (requests/s)",
        (SPEC + "arrivals.rate", SPEC + "num_requests", SPEC + "duration_s"),
    ),
    "trace_replay": Sweep(
        "trace",
        "trace",
        # Windows, speed-ups and limits of one trace are different workloads, and stay apart.
        (SPEC + "trace.sha256", SPEC + "trace.format", SPEC + "num_requests"),
        categorical=True,
    ),
    "interconnect": Sweep(
        "added_latency_us", "added latency per collective (µs)", ("engine.added_latency_us",)
    ),
}
POPULARITY = {
    "identical": "identical",
    "distinct": "distinct",
    "uniform": "uniform",
    "zipf": "Zipf",
    "punica_geometric": "Punica geom.",
    "slora_power": "S-LoRA power",
    "trace": "trace's own",
}
MODULE_SETS = {"+".join(ATTENTION): "attention", "+".join(MLP): "MLP", "+".join(ALL_MODULES): "all seven"}


def family_of(experiment: str, labels: Mapping[str, Any], config: Mapping[str, Any] | None) -> str:
    """Eight hex digits that cells share if they differ in nothing but backend, TP degree and what is swept.

    Without a stored config the labels have to do; what they do not say is then taken to be equal.
    """
    sweep = SWEEPS.get(experiment)
    if config is not None:
        rest = copy.deepcopy(dict(config))
        # A workload's hash follows from its spec; `setting` is the hash of all this with nothing taken out.
        for path in (
            "backend",
            "kernels",
            "options",
            "tp",
            "workload.hash",
            *(sweep.varied if sweep else ()),
        ):
            _drop(rest, path)
    else:
        swept = {sweep.x, sweep.facet, "workload_hash", "setting", "num_requests"} if sweep else set()
        # These follow from the backend and its degree.
        own = {"adapter_parameters", "budget_ratio", "adapter_rank", "served_rank"}
        named = {"backend", "variant", "backend_order", "kernels", "tp", "wrong_by_design", *own, *swept}
        rest = {key: value for key, value in labels.items() if key not in named}
    text = json.dumps(rest, sort_keys=True, default=str)
    return hashlib.sha256(f"{experiment}:{text}".encode()).hexdigest()[:8]


def _drop(node: Any, path: str) -> None:
    *way, last = path.split(".")
    for part in way:
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict):
        node.pop(last, None)


def families(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The frame split into what belongs in one figure; sweeps over something else than TP also by TP degree."""
    if frame.empty:
        return []
    parts = []
    for (experiment, _, _), part in frame.groupby(
        ["experiment", "model", "family"], dropna=False, sort=False
    ):
        if experiment in SWEEPS or experiment == "breakdown":
            parts += [at_tp for _, at_tp in part.groupby("tp", sort=True)]
        else:
            parts.append(part)
    return parts


def stem(part: pd.DataFrame) -> str:
    """File name of a family's figure, the same whatever else is stored."""
    first = part.iloc[0]
    by_tp = first["experiment"] in SWEEPS or first["experiment"] == "breakdown"
    tp = f"_tp{first['tp']}" if by_tp else ""
    return f"{first['experiment']}_{first['model']}{tp}_{first['family']}"


def in_order(column: str, values: pd.Series) -> list[Any]:
    """Distinct values: numbers by size, popularities from one adapter for all to one each, others as stored."""
    found = list(dict.fromkeys(values.dropna()))
    if column == "popularity":
        order = ["identical", "slora_power", "punica_geometric", "zipf", "uniform", "distinct", "trace"]
        return sorted(found, key=lambda v: (order.index(k) if (k := _kind(v)) in order else 99, str(v)))
    if column == "target_modules":
        known = list(MODULE_SETS)
        return sorted(found, key=lambda v: (known.index(v) if v in known else -1, v))
    if column == "prompt_tokens":
        return sorted(found, key=lambda v: (_kind(v), _number(v)))
    return sorted(found) if all(isinstance(v, numbers.Real) for v in found) else found


def shown(column: str, value: Any) -> str:
    """A value as a tick or a panel's title: `Zipf 1`, `attention`, `prompts of 256`."""
    text = f"{float(value):g}" if isinstance(value, numbers.Real) else str(value)
    if column == "popularity":
        kind = _kind(text)
        number = _number(text)
        return POPULARITY.get(kind, kind) + (f" {number:g}" if number and "(" in text else "")
    if column == "target_modules":
        return MODULE_SETS.get(text, text.replace("_proj", ""))
    if column == "prompt_tokens":
        return f"prompts of {_number(text):g}" if _kind(text) == "fixed" else f"prompts {text}"
    return text


def _kind(value: Any) -> str:
    return str(value).partition("(")[0]


def _number(value: Any) -> float:
    inner = str(value).partition("(")[2].rstrip(")").split(",")[0]
    try:
        return float(inner.partition("=")[2])
    except ValueError:
        return 0.0
