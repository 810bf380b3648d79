"""Evidence for the claims: values with interval, provenance and setting, from cells, layer step and projection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import tables
from analysis.ratios import Ratio, within_rounds
from analysis.shares import ITEM_BYTES
from experiments.measure import stats
from tessa.errors import UserError

PROVENANCES = ("measured", "emulated", "modelled")
LORA = ("punica", "slora")
"""The LoRA backends that a claim about LoRA is held against; plain_lora is the naive one and is not."""
WIDE = "tessa:schedule=wide"


@dataclass(frozen=True)
class Evidence:
    """One number. value, low, high: in the claim's unit, NaN where not known. reference: what else the rule needs, such
    as the same cost at the lowest TP degree, with its interval where it has one. gpu: of a GPU; of C5, of a published
    base model and its tasks. judged: False for a number that is only listed beside the others."""

    backend: str
    tp: int
    value: float
    low: float
    high: float
    provenance: str
    setting: str
    gpu: bool = False
    reference: float = np.nan
    reference_tp: int = 0
    note: str = ""
    judged: bool = True
    reference_low: float = np.nan
    reference_high: float = np.nan

    @property
    def growth_separated(self) -> bool:
        """Whether the value lies above that at the lower degree `reference_tp`, and their intervals do not overlap."""
        return self.tp > self.reference_tp and self.low > self.reference_high

    @property
    def above(self) -> float:
        """The end of the interval that a claim of 'more than' is held against; the value itself without one."""
        return self.low if np.isfinite(self.low) else self.value

    @property
    def below(self) -> float:
        """The other end."""
        return self.high if np.isfinite(self.high) else self.value


def tessa_over_slora(frame: pd.DataFrame) -> list[Evidence]:
    """C6: throughput over S-LoRA's in every setting and degree that has both in one session, at a matched budget.

    Adapters known to be off LoRA's parameters or served at a larger rank than they have are left out. The greatest
    ratio is judged, so the intervals hold together: each at level 1 - 0.05 / their number. A single round has no
    interval and is only listed.
    """

    def ratio(part: pd.DataFrame, level: float = 0.95) -> Ratio:
        return within_rounds(part, "output_tokens_per_s", "tessa", "slora", level)

    matched = frame[~(tables.unmatched(frame) | tables.padded(frame))]
    parts = [(part, tp) for part, tp in _parts(matched) if (r := ratio(part)).paired and r.interval.n]
    found = []
    level = together(sum(ratio(part).interval.n > 1 for part, _ in parts))
    for part, tp in parts:
        i = ratio(part, level).interval
        entry = _of(part, "tessa", tp, (i.centre, i.low, i.high))
        found.append(replace(entry, judged=i.n > 1))
    return found


def lora_cost(frame: pd.DataFrame) -> list[Evidence]:
    """C1: adapter cost in percent at the highest degree of each setting and LoRA backend, beside the lowest's with its
    interval.

    Costs against base in another session do not count. Intervals, those at both degrees, hold together as those of
    `tessa_over_slora` do, and a single round is only listed.
    """
    cases = []
    for part in tables.settings(frame):
        for backend in LORA:
            mine = part[(part["variant"] == backend) & part["adapter_cost"].notna()]
            mine = mine[tables.in_same_round(mine)]
            if len(mine):
                cases.append((mine, backend))

    def cost(mine: pd.DataFrame, tp: int, level: float = 0.95) -> stats.Interval:
        return tables.interval(mine[mine["tp"] == tp], "adapter_cost", level)

    ends = [(int(mine["tp"].min()), int(mine["tp"].max())) for mine, _ in cases]
    known = [cost(mine, tp).n > 1 for (mine, _), two in zip(cases, ends, strict=True) for tp in {*two}]
    level = together(sum(known))
    found = []
    for (mine, backend), (least, most) in zip(cases, ends, strict=True):
        highest, lowest = cost(mine, most, level), cost(mine, least, level)
        values = (100 * highest.centre, 100 * highest.low, 100 * highest.high)
        entry = _of(mine, backend, most, values, 100 * lowest.centre, least)
        low, high = 100 * lowest.low, 100 * lowest.high
        found.append(replace(entry, judged=highest.n > 1, reference_low=low, reference_high=high))
    return found


def together(count: int) -> float:
    """Level of each of `count` intervals that all hold at once with 95 % (Bonferroni)."""
    return 1 - 0.05 / max(1, count)


def lora_shares(frame: pd.DataFrame) -> list[Evidence]:
    """C2: the greater of compute share and memory share (counted bytes per rank) of one LoRA adapter, in percent.

    `reference` is 1 for a published model's shapes (`source: hub`), 0 for those of any other.
    """
    found = []
    for part, tp in _parts(frame):
        for backend in LORA:
            mine = part[(part["variant"] == backend) & (part["status"] == "complete")]
            if mine.empty or "lora_compute_share" not in mine:
                continue
            row = mine.iloc[0]
            slots = row["max_resident"] if pd.notna(row.get("max_resident")) else row["num_adapters"]
            compute = 100 * float(row["lora_compute_share"])
            held = float(row["adapter_bytes_per_rank"]) / float(slots)
            memory = 100 * held * tp / (float(row["model_parameters"]) * ITEM_BYTES.get(str(row["dtype"]), 4))
            if not np.isfinite([compute, memory]).all():
                continue
            note = (
                f"model {row['model']}, rank {tables.number(row.get('rank_equivalent'))}: compute {compute:.2f} %, "
                f"memory of a rank {memory:.2f} %"
            )
            published = float(row.get("model_source") == "hub")
            values = (max(compute, memory), np.nan, np.nan)
            found.append(_of(mine, backend, tp, values, published, tp, note))
    return found


def own_products(frame: pd.DataFrame) -> list[Evidence]:
    """C3: matrix products that TESSA's adapters add to a decode step; the reference is Punica's number.

    Of TESSA as it chooses by itself, and, where it was run, with the wide product forced.
    """
    return _counted(frame, "adapter_gemms_per_step", "punica", least_tp=1) + _counted(
        frame, "adapter_gemms_per_step", "punica", least_tp=1, variant=WIDE
    )


def own_collectives(frame: pd.DataFrame) -> list[Evidence]:
    """C4: collectives that TESSA's adapters add to a step over two or more ranks; the reference is S-LoRA's number.

    An engine's count holds the base model's own collectives, so base's count in the same setting is taken off.
    """
    return _counted(frame, "collectives_per_step", "slora", least_tp=2, over_base=True)


def _counted(
    frame: pd.DataFrame,
    column: str,
    other: str,
    least_tp: int,
    over_base: bool = False,
    variant: str = "tessa",
) -> list[Evidence]:
    found = []
    for part, tp in _parts(frame):
        counts = {
            backend: part.loc[(part["variant"] == backend) & (part["status"] == "complete"), column].dropna()
            for backend in (variant, other, "base")
            if column in part
        }
        if tp < least_tp or not counts or counts[variant].empty:
            continue
        own = 0.0
        if over_base:
            if counts["base"].empty:
                continue
            own = float(counts["base"].max())
        count = float(counts[variant].max()) - own
        reference = float(counts[other].min()) - own if len(counts[other]) else np.nan
        found.append(_of(part, variant, tp, (count, np.nan, np.nan), reference, tp))
    return found


def from_layer_step(results: Path, reference: bool = False) -> dict[str, list[Evidence]]:
    """Emulated evidence of C1, C4 and C6 from the newest decode rows over TP; empty without a layer step.

    Only rows of one setting are set against each other.
    """
    from analysis import layer_step

    try:
        rows = layer_step.newest(layer_step.read(results, reference))
    except UserError:
        return {}
    rows = rows[(rows["status"] == "complete") & (rows["phase"] == "decode")]
    keys = ["model", *layer_step.SIZES]
    # A point that is in several sweeps has one row, which may name another sweep than that over tp.
    rows = rows.merge(rows.loc[rows["sweep"] == "tp", keys].drop_duplicates())
    several = rows[keys].drop_duplicates()["model"].value_counts() > 1
    found: dict[str, list[Evidence]] = {"C1": [], "C4": [], "C6": []}
    for _, part in rows.groupby(keys, sort=False):
        at = {(r["variant"], int(r["tp"])): r for r in part.to_dict("records")}
        degrees = sorted({tp for _, tp in at})
        one = part.iloc[0]
        model, device, scale = str(one["model"]), str(one["device"]), one["scale"]
        where = (
            f"one layer's kernels, {model}{'' if scale == 1 else f' / {scale:g}'} {one['dtype']} on {device}"
        )
        if several[model]:
            where += (
                f", {one['sequences']} sequences of {one['length']} tokens, rank {one['rank']}, {one['distinct']} of "
                f"{one['resident']} adapters"
            )
        gpu = device != "cpu"

        def add(claim: str, backend: str, tp: int, value: float, **more: Any) -> None:
            if np.isfinite(value):
                found[claim].append(
                    Evidence(backend, tp, value, np.nan, np.nan, "emulated", where, gpu, **more)  # noqa: B023
                )

        for backend in LORA:
            own = [tp for tp in degrees if (backend, tp) in at]
            if own:
                kind = "adapter_cost" if np.isfinite(at[backend, own[-1]].get("adapter_cost", np.nan)) else ""
                column = kind or "adapter_cost_kernels"
                note = "with modelled collectives" if kind else "without collectives"
                last, first = (
                    at[backend, own[-1]].get(column, np.nan),
                    at[backend, own[0]].get(column, np.nan),
                )
                add("C1", backend, own[-1], 100 * last, reference=100 * first, reference_tp=own[0], note=note)
        for tp in degrees:
            tessa, slora = at.get(("tessa", tp)), at.get(("slora", tp))
            if tessa is None:
                continue
            if slora is not None:
                add("C6", "tessa", tp, slora.get("step_s", np.nan) / tessa.get("step_s", np.nan))
            if tp > 1:
                other = np.nan if slora is None else slora.get("adapter_collectives_per_step", np.nan)
                add(
                    "C4",
                    "tessa",
                    tp,
                    tessa.get("adapter_collectives_per_step", np.nan),
                    reference=other,
                    reference_tp=tp,
                )
    return found


def from_projection(results: Path, reference: bool = False) -> dict[str, list[Evidence]]:
    """Modelled evidence of C1, C2, C4 and C6; empty without a projection."""
    from analysis import projection

    try:
        table = projection.claims(projection.read(results, reference=reference))
    except UserError:
        return {}
    found: dict[str, list[Evidence]] = {"C1": [], "C2": [], "C4": [], "C6": []}
    for (gpu, model), rows in table.groupby(["gpu", "model"], sort=False):
        rows = rows.sort_values("tp")
        where = f"{model} bfloat16 on {gpu}"
        for backend in LORA:
            known = rows[rows[f"C1_{backend}_cost"].notna()]
            if known.empty:
                continue
            first, last = known.iloc[0], known.iloc[-1]
            least, most = int(first["tp"]), int(last["tp"])
            value, low, high = (100 * float(last[f"C1_{backend}_cost{end}"]) for end in ("", "_low", "_high"))
            lowest, lowest_low, lowest_high = (
                100 * float(first[f"C1_{backend}_cost{end}"]) for end in ("", "_low", "_high")
            )
            found["C1"].append(
                Evidence(
                    backend, most, value, low, high, "modelled", where, True, lowest, least,
                    reference_low=lowest_low, reference_high=lowest_high,
                )
            )  # fmt: skip
        share = 100 * float(rows["C2_parameter_share"].iloc[0])
        if np.isfinite(share):
            found["C2"].append(
                Evidence("punica", 1, share, np.nan, np.nan, "modelled", where, True, note="parameters")
            )
        for tp, row in zip(map(int, rows["tp"]), rows.to_dict("records"), strict=True):
            count, other = float(row["C4_tessa_collectives"]), float(row["C4_slora_collectives"])
            if tp > 1 and np.isfinite(count):
                found["C4"].append(
                    Evidence("tessa", tp, count, np.nan, np.nan, "modelled", where, True, other, tp)
                )
            value, low, high = (float(row[f"C6_tessa_over_slora{end}"]) for end in ("", "_low", "_high"))
            if np.isfinite(value):
                found["C6"].append(Evidence("tessa", tp, value, low, high, "modelled", where, True))
    return found


def _parts(frame: pd.DataFrame) -> list[tuple[pd.DataFrame, int]]:
    return [
        (at, int(at["tp"].iloc[0]))
        for part in tables.settings(frame)
        for _, at in part.groupby("tp", sort=True)
    ]


def _of(
    part: pd.DataFrame,
    backend: str,
    tp: int,
    values: tuple[float, float, float],
    reference: float = np.nan,
    reference_tp: int = 0,
    note: str = "",
) -> Evidence:
    kinds = [p for p in PROVENANCES if p in set(part["provenance"])]
    gpu = str(part["device"].iloc[0]) != "cpu"
    # Numbers of different provenance in one setting count as the weaker.
    return Evidence(
        backend, tp, *values, kinds[-1], tables.describe(part), gpu, reference, reference_tp, note
    )
