"""Every metric's name, unit, definition and computation, side by side.

Tables print the definitions from here (`lookup`). Percentiles interpolate linearly between order statistics
(numpy's default). Latencies count from the *scheduled* time. "Requests" in a latency or throughput are those of
status ok; failed ones count as misses in shares of all requests (SLO attainment, goodput, satisfaction).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.measure.arrays import MetricOptions, RunArrays
from experiments.measure.types import RequestRecord
from tessa.errors import UserError

STATS = ("mean", "p50", "p90", "p95", "p99")
SLORA_TTFT_S = 6.0


@dataclass(frozen=True)
class Metric:
    """`compute` gives one number, or for a distribution the values that its statistics are taken of.

    better: "higher", "lower" or None. compute None: the value is measured or derived outside this module.
    """

    name: str
    label: str
    unit: str
    definition: str
    better: str | None
    distribution: bool = False
    compute: Callable[[RunArrays], float | np.ndarray] | None = None


METRICS: dict[str, Metric] = {}


def _metric(
    name: str, label: str, unit: str, definition: str, better: str | None, distribution: bool = False
):
    def register(compute: Callable[[RunArrays], float | np.ndarray] | None):
        METRICS[name] = Metric(name, label, unit, definition, better, distribution, compute)
        return compute

    return register


@_metric(
    "requests_per_s",
    "Throughput",
    "requests/s",
    "finished requests / (last end - start of the load)",
    "higher",
)
def _requests_per_s(r: RunArrays) -> float:
    return r.per_second(r.ok.sum())


@_metric(
    "output_tokens_per_s",
    "Output throughput",
    "tokens/s",
    "generated tokens of finished requests / (last end - start of the load)",
    "higher",
)
def _output_tokens_per_s(r: RunArrays) -> float:
    return r.per_second(r.output[r.ok].sum())


@_metric(
    "total_tokens_per_s",
    "Total throughput",
    "tokens/s",
    "prompt and generated tokens of finished requests / (last end - start of the load)",
    "higher",
)
def _total_tokens_per_s(r: RunArrays) -> float:
    return r.per_second((r.prompt + r.output)[r.ok].sum())


@_metric(
    "requests_per_s_steady",
    "Steady throughput",
    "requests/s",
    "requests that ended in the steady window / its length; the window runs from the moment the share `ramp` "
    "of all output tokens has come to the moment all but the share `drain` have",
    "higher",
)
def _requests_per_s_steady(r: RunArrays) -> float:
    return r.per_steady_second(r.in_steady(r.end[r.ok]).sum())


@_metric(
    "output_tokens_per_s_steady",
    "Steady output throughput",
    "tokens/s",
    "tokens generated in the steady window / its length",
    "higher",
)
def _output_tokens_per_s_steady(r: RunArrays) -> float:
    return r.per_steady_second(r.in_steady(r.token_times).sum())


@_metric(
    "total_tokens_per_s_steady",
    "Steady total throughput",
    "tokens/s",
    "(tokens generated in the steady window + prompt tokens of requests whose first token came in it) "
    "/ its length",
    "higher",
)
def _total_tokens_per_s_steady(r: RunArrays) -> float:
    prompts = r.prompt[r.ok][r.in_steady(r.first[r.ok])].sum()
    return r.per_steady_second(r.in_steady(r.token_times).sum() + prompts)


@_metric(
    "ttft_s", "TTFT", "s", "time to first token: first token - scheduled arrival, per request", "lower", True
)
def _ttft(r: RunArrays) -> np.ndarray:
    return r.ttft[r.ok]


@_metric(
    "tpot_s",
    "TPOT",
    "s",
    "time per output token: (last token - first token) / (output tokens - 1), per request of two or more",
    "lower",
    True,
)
def _tpot(r: RunArrays) -> np.ndarray:
    values = r.tpot[r.ok]
    return values[~np.isnan(values)]


@_metric(
    "itl_s",
    "ITL",
    "s",
    "inter-token latency: time between successive tokens of a request, over all tokens of all requests; "
    "0 between tokens that came together",
    "lower",
    True,
)
def _itl(r: RunArrays) -> np.ndarray:
    return np.concatenate(r.gaps) if r.gaps else np.empty(0)


@_metric("e2e_s", "End-to-end latency", "s", "end - scheduled arrival, per request", "lower", True)
def _e2e(r: RunArrays) -> np.ndarray:
    return (r.end - r.scheduled)[r.ok]


@_metric(
    "schedule_lag_s",
    "Schedule lag",
    "s",
    "sent - scheduled arrival, per request sent: how late the load generator itself was",
    "lower",
    True,
)
def _schedule_lag(r: RunArrays) -> np.ndarray:
    lag = r.sent - r.scheduled
    return lag[~np.isnan(lag)]


@_metric(
    "scheduled_rate",
    "Scheduled rate",
    "requests/s",
    "(requests - 1) / (last - first scheduled arrival), open loop",
    None,
)
def _scheduled_rate(r: RunArrays) -> float:
    return _rate(r.scheduled)


@_metric("sent_rate", "Sent rate", "requests/s", "(requests sent - 1) / (last - first sending)", None)
def _sent_rate(r: RunArrays) -> float:
    return _rate(r.sent[~np.isnan(r.sent)])


@_metric(
    "mean_in_flight",
    "Requests in flight",
    "requests",
    "sum of (end - sent) over finished requests / (last end - start of the load)",
    None,
)
def _mean_in_flight(r: RunArrays) -> float:
    return r.per_second((r.end - r.sent)[r.ok].sum())


@_metric(
    "slo_attainment",
    "SLO attainment",
    "share",
    "requests that finished with TTFT <= slo_ttft_s and TPOT <= slo_tpot_s / all requests; a request of one "
    "token is judged by TTFT alone; NaN if no limit is set",
    "higher",
)
def _slo_attainment(r: RunArrays) -> float:
    return float(r.meets_slo().mean()) if _has_slo(r) else np.nan


@_metric(
    "goodput_requests_per_s",
    "Goodput",
    "requests/s",
    "requests that meet the SLO / (last end - start of the load); NaN if no limit is set",
    "higher",
)
def _goodput(r: RunArrays) -> float:
    return r.per_second(r.meets_slo().sum()) if _has_slo(r) else np.nan


@_metric(
    "slora_satisfaction",
    "S-LoRA satisfaction",
    "share",
    "mean over all requests of max(0, 1 - (TTFT / 6 s)^2), 0 for a failed one",
    "higher",
)
def _slora_satisfaction(r: RunArrays) -> float:
    value = np.maximum(0.0, 1.0 - (r.ttft / SLORA_TTFT_S) ** 2)
    return float(np.where(r.ok, value, 0.0).mean())


@_metric(
    "slora_attainment",
    "S-LoRA SLO attainment",
    "share",
    "requests that finished with TTFT < 6 s / all requests",
    "higher",
)
def _slora_attainment(r: RunArrays) -> float:
    return float((r.ok & (r.ttft < SLORA_TTFT_S)).mean())


@_metric(
    "fairness_jain",
    "Fairness (Jain)",
    "index",
    "(sum x)^2 / (k sum x^2) over the k adapters with a finished request, x = their output tokens / their "
    "summed end-to-end seconds; 1 is equal speed, 1/k one adapter served alone",
    "higher",
)
def _fairness(r: RunArrays) -> float:
    ids = np.unique(r.adapter[r.ok & (r.adapter >= 0)])
    e2e = r.end - r.scheduled
    speeds = []
    for a in ids:
        mine = r.ok & (r.adapter == a)
        speeds.append(r.output[mine].sum() / e2e[mine].sum() if e2e[mine].sum() > 0 else np.nan)
    return jain_index(speeds)


# Filled by the engine's counters and by `stats`; defined here so that tables and axes find them.
_ELSEWHERE = (
    ("adapter_cost", "Adapter cost", "share", "1 - output throughput / that of `base` in the same round"),
    (
        "collectives_per_step",
        "Collectives",
        "per step",
        "collectives of a decode step of 8 tokens, the base model's own included, counted",
    ),
    (
        "collective_bytes_per_step",
        "Collective bytes",
        "bytes/step",
        "bytes that one rank hands to them in that step, counted",
    ),
    (
        "adapter_kernels_per_step",
        "Adapter kernels",
        "per step",
        "tensor operations that adapters add to that step on one rank, counted",
    ),
    ("adapter_bytes_per_rank", "Adapter memory", "bytes", "bytes of adapter weights held by one rank"),
)
for _fields in _ELSEWHERE:
    _metric(*_fields, better="lower")(None)


def compute(arrays: RunArrays) -> dict[str, float]:
    """Column -> value of every metric computed here; a distribution gives a column per statistic."""
    out: dict[str, float] = {}
    for metric in METRICS.values():
        if metric.compute is None:
            continue
        value = metric.compute(arrays)
        if metric.distribution:
            out.update({f"{metric.name}_{stat}": v for stat, v in statistics(np.asarray(value)).items()})
        else:
            out[metric.name] = float(value)
    return out


def columns() -> list[str]:
    """Names of the columns that `compute` fills, in order."""
    names: list[str] = []
    for m in METRICS.values():
        if m.compute is not None:
            names += [f"{m.name}_{stat}" for stat in STATS] if m.distribution else [m.name]
    return names


def statistics(values: np.ndarray) -> dict[str, float]:
    """The STATS of values; NaN for none."""
    if values.size == 0:
        return dict.fromkeys(STATS, np.nan)
    quantiles = np.percentile(values, [float(s[1:]) for s in STATS[1:]])
    return dict(zip(STATS, [float(values.mean()), *map(float, quantiles)], strict=True))


def jain_index(values: Sequence[float] | np.ndarray) -> float:
    """(sum x)^2 / (k sum x^2) (Jain, Chiu, Hawe 1984); NaN for no value or if one is NaN."""
    x = np.asarray(values, dtype=np.float64)
    return float(x.sum() ** 2 / (x.size * (x**2).sum())) if x.size and (x**2).sum() > 0 else np.nan


def lookup(column: str) -> tuple[Metric, str | None]:
    """The metric of a column and its statistic ("p99"), None where it has none; UserError if unknown."""
    if column in METRICS and not METRICS[column].distribution:
        return METRICS[column], None
    name, _, stat = column.rpartition("_")
    if stat in STATS and name in METRICS and METRICS[name].distribution:
        return METRICS[name], stat
    raise UserError(f"metric {column!r} is not known; choose one of {', '.join(columns())}")


def per_adapter(records: Sequence[RequestRecord], options: MetricOptions | None = None) -> pd.DataFrame:
    """One row per adapter (-1: base model): counts, shares, mean/p50/p99 of the latencies.

    Throughputs are the adapter's tokens over the duration of the whole run, so they add up to the run's.
    """
    options = options or MetricOptions()
    whole = RunArrays(records, options)
    groups: dict[int, list[RequestRecord]] = {}
    for r in records:
        groups.setdefault(-1 if r.adapter is None else r.adapter, []).append(r)
    rows = []
    for adapter, mine in sorted(groups.items()):
        arrays = RunArrays(mine, options)
        row: dict[str, float] = {
            "adapter": adapter,
            "requests": arrays.n,
            "requests_ok": int(arrays.ok.sum()),
            "output_tokens": int(arrays.output[arrays.ok].sum()),
            "output_tokens_per_s": whole.per_second(arrays.output[arrays.ok].sum()),
        }
        values = compute(arrays)
        keep = [f"{m}_{s}" for m in ("ttft_s", "tpot_s", "itl_s", "e2e_s") for s in ("mean", "p50", "p99")]
        row.update({name: values[name] for name in [*keep, "slo_attainment", "slora_satisfaction"]})
        rows.append(row)
    return pd.DataFrame(rows)


def _rate(times: np.ndarray) -> float:
    span = times.max() - times.min() if times.size > 1 else 0.0
    return float((times.size - 1) / span) if span > 0 else np.nan


def _has_slo(r: RunArrays) -> bool:
    return r.options.slo_ttft_s is not None or r.options.slo_tpot_s is not None
