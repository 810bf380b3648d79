"""The table at the end of a run: one row per backend and degree, with units, intervals and definitions."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from analysis import quality, style, sweeps
from experiments.config import AdaptersConfig
from experiments.measure import metrics, stats
from tessa.budget import TOLERANCE
from tessa.slices import ALL_MODULES

SETTING = ("experiment", "model", "dtype", "device", "setting")
WIDTH = 110
USUAL = {"placement": AdaptersConfig.placement, "offset": AdaptersConfig.offset}
"""Labels that a setting's description leaves out where they are this."""


@dataclass(frozen=True)
class Column:
    """One column: where it comes from, its heading and unit, and how a value is written."""

    source: str
    heading: str
    unit: str
    write: Callable[[float], str]
    interval: bool = False


def _plain(digits: int, scale: float = 1.0) -> Callable[[float], str]:
    return lambda value: f"{value * scale:,.{digits}f}"


TABLE = (
    Column("requests_per_s", "requests", "1/s", _plain(2)),
    Column("output_tokens_per_s", "tokens out", "1/s", _plain(1), interval=True),
    Column("adapter_cost", "cost", "%", _plain(1, 100), interval=True),
    Column("ttft_s_p50", "TTFT p50", "ms", _plain(0, 1e3)),
    Column("ttft_s_p99", "TTFT p99", "ms", _plain(0, 1e3)),
    Column("tpot_s_p50", "TPOT p50", "ms", _plain(1, 1e3)),
    Column("collectives_per_step", "coll.", "/step", _plain(1)),
    Column("collective_bytes_per_step", "traffic", "KiB/step", _plain(1, 2**-10)),
    Column("adapter_kernels_per_step", "kernels", "/step", _plain(1)),
    Column("adapter_bytes_per_rank", "adapters", "MiB/rank", _plain(2, 2**-20)),
)


SORTED = (
    "num_adapters", "rank_equivalent", "added_latency_us", "request_rate", "prompt_tokens", "concurrency", "popularity",
    "placement", "offset",
)  # fmt: skip


def settings(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """The frame split into what may be compared: one part per experiment, model and setting, in order of size."""
    keys = [key for key in SETTING if key in frame.columns]
    parts = [part for _, part in frame.groupby(keys, dropna=False, sort=False)] if len(frame) else []
    experiments = list(dict.fromkeys(frame["experiment"])) if len(frame) else []

    def order(part: pd.DataFrame) -> list[tuple[float, str]]:
        first = part.iloc[0]
        named = [_sortable(_FIXED.sub(r"\1", number(first.get(column)))) for column in SORTED]
        return [(float(experiments.index(first["experiment"])), ""), *named]

    return sorted(parts, key=order)


def interval(part: pd.DataFrame, column: str, level: float = 0.95) -> stats.Interval:
    """Centre and interval over the complete rounds; adapter cost from ratios within rounds.

    A cost against a base that was not measured in the same rounds has no pairs, and so no interval.
    """
    good = part[part["status"] == "complete"]
    values = good[column].astype(float).to_numpy() if column in good else np.empty(0)
    if column != "adapter_cost":
        return stats.t_interval(values, level)
    known = values[~np.isnan(values)]
    # 1 - cost is the ratio to base in that round, which is what the interval is taken of.
    found = stats.adapter_cost(1.0 - known, np.ones_like(known), level)
    return found if paired(good) else replace(found, low=np.nan, high=np.nan)


def paired(part: pd.DataFrame) -> bool:
    """Whether every adapter cost was formed with base's throughput in the same round."""
    return bool(in_same_round(part[part["adapter_cost"].notna()]).all())


def in_same_round(part: pd.DataFrame) -> pd.Series:
    """True for each row whose adapter cost was formed with base's throughput in the same round."""
    if "adapter_cost_basis" not in part:
        return pd.Series(True, index=part.index)
    return part["adapter_cost_basis"] == "same_round"


def unmatched(frame: pd.DataFrame) -> pd.Series:
    """True for rows whose adapters are known to be more than `TOLERANCE` off LoRA's parameters."""
    return (_numbers(frame, "budget_ratio") - 1).abs() > TOLERANCE


def padded(frame: pd.DataFrame) -> pd.Series:
    """True for rows known to be served at a larger rank than their adapters have."""
    return _numbers(frame, "served_rank") > _numbers(frame, "adapter_rank")


def _numbers(frame: pd.DataFrame, column: str) -> pd.Series:
    if column not in frame:
        return pd.Series(np.nan, index=frame.index)
    return pd.to_numeric(frame[column], errors="coerce").astype("float64")


def end_table(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per (setting, tp, variant), formatted, in the fixed order of backends. NaN shows as a dash.

    Settings that read the same bear their hash.
    """
    rows = []
    hashes: dict[str, set[str]] = {}
    for part in settings(frame):
        for tp, at_tp in part.groupby("tp", sort=True):
            for variant in style.in_order(at_tp):
                mine = at_tp[at_tp["variant"] == variant]
                row = {"setting": describe(mine), "tp": str(tp), "backend": variant}
                row["hash"] = str(mine["setting"].iloc[0]) if "setting" in mine else ""
                hashes.setdefault(row["setting"], set()).add(row["hash"])
                for column in TABLE:
                    row[f"{column.heading}\n{column.unit}"] = _cell(mine, column)
                row["params\nx LoRA"] = _marked(mine, "budget_ratio", 2, "§" if unmatched(mine).any() else "")
                row["rank\nserved"] = _marked(mine, "served_rank", 0, "†" if padded(mine).any() else "")
                row["rounds"] = str(int((mine["status"] == "complete").sum()) or "-")
                row["status"] = ", ".join(dict.fromkeys(mine["status"]))
                if "wrong_by_design" in mine and mine["wrong_by_design"].fillna(False).astype(bool).any():
                    row["status"] += " (outputs wrong by design)"
                rows.append(row)
    for row in rows:
        own = row.pop("hash")
        if len(hashes[row["setting"]]) > 1:
            row["setting"] += f", setting {own}"
    return pd.DataFrame(rows)


def _marked(part: pd.DataFrame, column: str, digits: int, mark: str) -> str:
    """A label's number with a mark behind it; a dash where it is not known."""
    known = _numbers(part, column).dropna()
    return f"{known.iloc[0]:.{digits}f} {mark}".strip() if len(known) else "-"


def _cell(part: pd.DataFrame, column: Column) -> str:
    if column.source == "adapter_cost" and (part["backend"] == "base").all():
        return "-"
    found = interval(part, column.source)
    if not np.isfinite(found.centre):
        return "-"
    text = column.write(found.centre)
    if column.source == "adapter_cost" and not paired(part[part["status"] == "complete"]):
        return f"{text} ‡"
    if column.interval and np.isfinite(found.low):
        text += f" ±{column.write((found.high - found.low) / 2)}"
    return text


def describe(part: pd.DataFrame) -> str:
    """What a setting is, in one line; of what varies within the part, all values or their range."""
    first = part.iloc[0]
    words = [
        str(first["experiment"]),
        f"model {first['model']} {first['dtype']} on {first['device']}",
        _hashes(part),
        " ".join(
            filter(
                None,
                (
                    _values(part, "num_requests" if part["num_requests"].notna().any() else "requests_total"),
                    "requests",
                    _values(part, "arrivals"),
                ),
            )
        ),
    ]
    for column, unit in (("request_rate", "{} requests/s"), ("concurrency", "concurrency {}"),
                         ("prompt_tokens", "prompts of {} tokens"), ("output_tokens", "outputs of {}"),
                         ("added_latency_us", "{} µs added to each collective")):  # fmt: skip
        if column in part and part[column].notna().any():
            values = _values(part, column)
            told = (
                f"{column.partition('_')[0]}s as in the trace" if values == "trace" else unit.format(values)
            )
            words.append(told)
    words.append(f"adapters {_values(part, 'num_adapters')} {_values(part, 'popularity')}")
    words.append(f"rank-equivalent {_values(part, 'rank_equivalent')}")
    for column, usual in USUAL.items():
        if column in part and set(part[column].dropna()) - {usual}:
            words.append(f"{column} {_values(part, column)}")
    if "placement" in part and (part["placement"] == "along").any():
        words.append(f"{_values(part, 'shards')} shards")
    modules = sweeps.in_order("target_modules", part["target_modules"]) if "target_modules" in part else []
    shown = [sweeps.shown("target_modules", value) for value in modules]
    if shown and shown != [sweeps.MODULE_SETS["+".join(ALL_MODULES)]]:
        words.append("on " + ", ".join(shown))
    words.append("/".join(sorted(set(part["provenance"]))))
    sessions = part.groupby("cell")["session"].nunique().max() if "session" in part else 1
    if sessions > 1:
        words.append(f"a cell's rounds from up to {sessions} sessions")
    return ", ".join(words)


def _hashes(part: pd.DataFrame) -> str:
    found = list(dict.fromkeys(str(value)[:8] for value in part["workload_hash"].dropna()))
    return f"workload {found[0]}" if len(found) == 1 else f"{len(found)} workloads"


def _values(part: pd.DataFrame, column: str) -> str:
    """`8`, `1, 4, 16`, `2 to 32`: the distinct values; `fixed(value=64)` as `64`."""
    found: list[Any] = list(part[column].dropna().unique()) if column in part else []
    if len(found) > 3 and all(isinstance(v, int | float | np.number) for v in found):
        return f"{number(min(found))} to {number(max(found))}"
    if len(found) > 3:
        return f"of {len(found)} kinds"
    return ", ".join(_FIXED.sub(r"\1", number(value)) for value in sorted(found, key=_sortable))


_FIXED = re.compile(r"fixed\(value=([^)]*)\)")


def _sortable(value: object) -> tuple[float, str]:
    try:
        return float(value), ""  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0.0, str(value)


def number(value: object) -> str:
    """A label's value as text, empty where there is none."""
    if value is None or value is pd.NA or (isinstance(value, float) and np.isnan(value)):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def render(frame: pd.DataFrame) -> str:
    """The table as text, one block per setting, the definitions below; says so when there is nothing."""
    if frame.empty:
        return "no stored cells"
    if "method" in frame and frame["method"].notna().any():
        trained = frame["method"].notna()
        served = frame[~trained]
        return "\n\n".join([quality.render(frame[trained]), *([render(served)] if len(served) else [])])
    table = end_table(frame)
    blocks = []
    for setting, part in table.groupby("setting", sort=False):
        blocks.append("\n".join([*textwrap.wrap(str(setting), WIDTH), _grid(part.drop(columns="setting"))]))
    failed = frame[frame["status"] != "complete"].drop_duplicates(["experiment", "cell"])
    lines = [f"{row.cell}: {row.status}: {row.reason} (log: {row.log})" for row in failed.itertuples()]
    return "\n\n".join(
        [*blocks, *(["\n".join(lines)] if lines else []), "\n".join([definitions(), *cautions(frame)])]
    )


def cautions(frame: pd.DataFrame) -> list[str]:
    """Why times in the table say nothing about speed, where they do not."""
    found = []
    if "measure" in frame and frame["measure"].eq("smoke").any():
        found.append("measure=smoke shows that everything runs; its times say nothing about speed")
    if "cores" in frame:
        crowded = frame[(frame["device"] == "cpu") & (frame["tp"] > frame["cores"].astype(float))]
        for tp, cores in crowded[["tp", "cores"]].drop_duplicates().itertuples(index=False):
            found.append(
                f"tp {tp:g} on {cores:g} cores: ranks wait for a core, so times say nothing about speed"
            )
    return found


def definitions() -> str:
    """What the table's columns mean, from the one place where metrics are defined."""
    seen = dict.fromkeys(metrics.lookup(column.source)[0] for column in TABLE)
    heads = {metrics.lookup(column.source)[0].name: column.heading for column in TABLE}
    lines = [
        f"{heads[m.name].split()[0] if m.distribution else heads[m.name]} = {m.definition}" for m in seen
    ]
    lines.append(
        "params = parameters over LoRA's at the same rank-equivalent, of the adapter farthest from it; § = more than "
        f"{100 * TOLERANCE:g} % off, so not a matched budget"
    )
    lines.append(
        "rank = the rank at which LoRA factors are stored and computed (TESSA's slices have none); † = larger than the "
        "adapters' own"
    )
    lines.append("‡ = base was not measured in the same rounds, so the cost has no interval")
    lines.append(
        "± is half the 95 % t interval over the rounds; latencies are means over rounds of the percentile"
    )
    return "\n".join(
        wrapped for line in lines for wrapped in textwrap.wrap(line, WIDTH, subsequent_indent="    ")
    )


def _grid(part: pd.DataFrame) -> str:
    """Right-aligned columns under two-line headings; names on the left."""
    heads = [str(column).split("\n") for column in part.columns]
    cells = [[str(value) for value in row] for row in part.itertuples(index=False)]
    widths = [max(*(len(t) for t in head), *(len(row[i]) for row in cells)) for i, head in enumerate(heads)]
    left = {"backend", "status"}

    def line(texts: list[str]) -> str:
        done = [
            text.ljust(width) if heads[i][0] in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(texts, widths, strict=True))
        ]
        return "  ".join(done).rstrip()

    top = line([head[0] for head in heads])
    units = line([head[1] if len(head) > 1 else "" for head in heads])
    return "\n".join([top, units, "-" * max(len(top), len(units)), *map(line, cells)])
