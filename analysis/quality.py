"""Adaptation quality from the stored cells: means over seeds, and differences to LoRA paired over seeds.

A row of the frame is a training's score on one task. Scores that count have the role `test`; those of the role
`search` chose the learning rates, on validation data.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from experiments.measure import stats
from experiments.quality.published import expected

METHODS = ("base", "full", "lora", "bd_lora", "tessa")
INSIDE = {True: "yes", False: "no", None: "-"}
MEAN = "mean of tasks"
MATCHED = 0.05
KEYS = ["method", "placement", "offset_rule", "targets", "rank_equivalent"]
NAMES = {"lora": "LoRA", "bd_lora": "BD-LoRA", "tessa": "TESSA", "full": "full fine-tuning", "base": "base"}


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The complete rows that count; empty where there are none. `structure` names the trained structure."""
    if "method" not in frame:
        return pd.DataFrame(columns=[*frame.columns, *KEYS, "structure", "seed", "task", "value"])
    found = frame[frame["method"].notna() & (frame["status"] == "complete")]
    found = found[found["role"].eq("test") & found["value"].notna()].copy()
    found["value"] = found["value"].astype(float)
    found["structure"] = structure(found)
    return found


def structure(table: pd.DataFrame) -> pd.Series:
    """`lora`, `tessa across random`, `lora attention`: what distinguishes a structure beside its budget."""
    parts = [table[key].fillna("").astype(str) for key in KEYS[:3]]
    parts.append(table["targets"].fillna("").astype(str).replace({"all": ""}))
    named = parts[0]
    for part in parts[1:]:
        named = (named + " " + part).str.strip()
    return named


def name(kind: str) -> str:
    """`TESSA across, random` of `tessa across random`."""
    method, *rest = kind.split(" ")
    return " ".join([NAMES.get(method, method), ", ".join(rest)]).strip()


def with_mean(table: pd.DataFrame) -> pd.DataFrame:
    """The rows with one more task, MEAN: each training's mean over its tasks. Nothing is added to a single task."""
    if table["task"].nunique() < 2:
        return table
    mean = table.groupby("cell", sort=False, as_index=False).first()
    mean["value"] = mean["cell"].map(table.groupby("cell")["value"].mean())
    # Tasks have their own documents, so their errors are independent.
    if "stderr" in table:
        square = table["stderr"].astype(float) ** 2
        mean["stderr"] = mean["cell"].map(np.sqrt(square.groupby(table["cell"]).sum()) / mean_count(table))
    mean["task"] = MEAN
    return pd.concat([table, mean], ignore_index=True)


def mean_count(table: pd.DataFrame) -> pd.Series:
    return table.groupby("cell")["task"].nunique()


def in_order(kinds: pd.Series) -> list[str]:
    """Structures by method in the fixed order, then by name."""
    found = [str(kind) for kind in kinds.unique()]
    return sorted(found, key=lambda kind: (METHODS.index(kind.partition(" ")[0]), kind))


@dataclass(frozen=True)
class Point:
    """One structure at one budget on one task; `score` and its interval are over seeds, `difference` is to LoRA's on
    the same modules at the same rank-equivalent, paired over seeds, None where there is no such LoRA.

    p: of the paired t test. inside: whether the mean lies within or above LoRA's 95 % interval, None
    where that has none. matched: whether
    parameters are within 5 % of LoRA's.
    """

    experiment: str
    task: str
    structure: str
    rank_equivalent: float | None
    params: float
    ratio: float
    rate: float | None
    score: stats.Interval
    difference: stats.Interval | None = None
    p: float = np.nan
    inside: bool | None = None
    matched: bool = True
    provenance: str = "measured"
    setting: str = ""


def points(table: pd.DataFrame) -> Iterator[Point]:
    """Every structure, budget and task, in a fixed order. Give it `with_mean(rows(frame))`."""
    for (experiment, setting), part in table.groupby(["experiment", "setting"], sort=False):
        for task in dict.fromkeys(part["task"]):
            mine = part[part["task"] == task]
            for kind in in_order(mine["structure"]):
                for budget, own in mine[mine["structure"] == kind].groupby("rank_equivalent", dropna=False):
                    yield _point((str(experiment), str(setting)), str(task), kind, budget, own, mine)


def _point(
    study: tuple[str, str], task: str, kind: str, budget: float, own: pd.DataFrame, all_: pd.DataFrame
) -> Point:
    first = own.iloc[0]
    point = Point(
        experiment=study[0],
        setting=study[1],
        task=task,
        structure=kind,
        rank_equivalent=None if pd.isna(budget) else float(budget),
        params=float(own["trainable_params"].astype(float).mean()),
        ratio=float(first["budget_ratio"]) if pd.notna(first.get("budget_ratio")) else np.nan,
        rate=float(first["learning_rate"]) if pd.notna(first.get("learning_rate")) else None,
        score=stats.t_interval(by_seed(own).to_numpy()),
        provenance=str(first["provenance"]),
    )
    lora = all_[(all_["method"] == "lora") & (all_["rank_equivalent"] == budget)]
    lora = lora[lora["targets"] == first["targets"]]
    if lora.empty or first["method"] in ("lora", "base", "full"):
        return point
    both = pd.concat({"own": by_seed(own), "lora": by_seed(lora)}, axis=1, join="inner").dropna()
    reference = stats.t_interval(by_seed(lora).to_numpy())
    change = (both["own"] - both["lora"]).to_numpy()
    p = np.nan
    if len(both) > 1 and np.ptp(change) > 0:
        p = float(scipy_stats.ttest_rel(both["own"], both["lora"]).pvalue)
    return Point(
        **{
            **point.__dict__,
            "difference": stats.t_interval(change),
            "p": p,
            "inside": bool(point.score.centre >= reference.low) if np.isfinite(reference.low) else None,
            "matched": not np.isfinite(point.ratio) or abs(point.ratio - 1) <= MATCHED,
        }
    )


def by_seed(table: pd.DataFrame) -> pd.Series:
    return table.groupby("seed")["value"].mean()


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """One formatted row per structure and budget: parameters, rate, score per task, mean, difference to LoRA."""
    found = list(points(with_mean(rows(frame))))
    out: dict[tuple[str, str, str, float | None], dict[str, str]] = {}
    for point in found:
        row = out.setdefault(
            (point.experiment, point.setting, point.structure, point.rank_equivalent),
            {
                "experiment": point.experiment,
                "setting": point.setting,
                "structure": name(point.structure),
                "r": "-" if point.rank_equivalent is None else f"{point.rank_equivalent:g}",
                "params": f"{point.params:,.0f}",
                "of LoRA's": f"{point.ratio:.2f}" if np.isfinite(point.ratio) else "-",
                "rate": "-" if point.rate is None else f"{point.rate:g}",
                "seeds": str(point.score.n),
            },
        )
        row[point.task] = _percent(point.score)
        last = point.task == MEAN or MEAN not in {p.task for p in found if p.experiment == point.experiment}
        if last and point.difference is not None:
            row["- LoRA"] = _percent(point.difference, sign=True)
            row["p"] = f"{point.p:.3f}" if np.isfinite(point.p) else "-"
            row["in LoRA's"] = INSIDE[point.inside] if point.matched else "not matched"
    return pd.DataFrame(list(out.values())).fillna("-")


def _percent(found: stats.Interval, sign: bool = False) -> str:
    text = f"{100 * found.centre:{'+' if sign else ''}.1f}"
    return text + (f" ±{50 * (found.high - found.low):.1f}" if np.isfinite(found.low) else "")


DEFINITIONS = (
    "scores in % of right answers; ± is half the 95 % t interval over seeds; - LoRA is the difference paired over "
    "seeds at the same rank-equivalent and modules, p of its paired t test; in LoRA's: the mean is within or above "
    "LoRA's 95 % interval (parameters within 5 % of LoRA's); rate is the learning rate, chosen on validation data"
)


def render(frame: pd.DataFrame, width: int = 110) -> str:
    """The table as text with what its columns mean, and the published scores of the protocol where there are some."""
    formatted = table(frame)
    if formatted.empty:
        return "no scored trainings"
    blocks = []
    for (experiment, setting), part in formatted.groupby(["experiment", "setting"], sort=False):
        mine = rows(frame)
        mine = mine[(mine["experiment"] == experiment) & (mine["setting"] == setting)]
        head = (
            f"{experiment}: model {mine['model'].iloc[0]} {mine['dtype'].iloc[0]} on {mine['device'].iloc[0]}"
        )
        blocks += [head, part.drop(columns=["experiment", "setting"]).to_string(index=False)]
        for line in expected(str(mine["protocol"].iloc[0])):
            blocks.append(f"published: {line}")
    failed = frame[frame["method"].notna() & (frame["status"] != "complete")].drop_duplicates("cell")
    blocks += [f"{row.cell}: {row.status}: {row.reason}" for row in failed.itertuples()]
    return "\n".join([*blocks, textwrap.fill(DEFINITIONS, width)])
