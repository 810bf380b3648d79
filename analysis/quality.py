"""Adaptation quality from the stored cells: means over seeds, and differences paired over seeds: to LoRA, and between
TESSA's placements and offset rules.

A row of the frame is a training's score on one task. Scores that count have the role `test`; those of the role
`search` chose the learning rates, on validation data.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats as scipy_stats

from experiments.measure import stats
from experiments.quality.published import expected
from experiments.quality.spec import METHODS
from tessa.budget import TOLERANCE
from tessa.slices import PLACEMENTS

INSIDE = {True: "yes", False: "no", None: "-"}
MEAN = "mean of tasks"
ADJUSTED = "p (Holm)"
SMOKE = "measure=smoke shows that everything runs; its scores say nothing about quality"
DEFAULT_RULE = "random"
STRUCTURE = ["experiment", "setting", "structure", "rank_equivalent"]
KEYS = ["method", "placement", "offset_rule", "targets", "rank_equivalent"]
NAMES = {"lora": "LoRA", "bd_lora": "BD-LoRA", "tessa": "TESSA", "full": "full fine-tuning", "base": "base"}


def rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The complete rows that count; empty where there are none. `structure` names the trained structure.

    Where trainings with several learning rates are stored, as after a search over a wider grid, those with the rate
    that was trained last count alone: it is the one that the last search chose.
    """
    if "method" not in frame or "value" not in frame:
        needed = [*frame.columns, *KEYS, "structure", "seed", "task", "value"]
        return pd.DataFrame(columns=list(dict.fromkeys(needed)))
    found = frame[frame["method"].notna() & (frame["status"] == "complete")]
    found = found.assign(structure=structure(found))
    test = found[found["role"].eq("test") & found["value"].notna()].reset_index(drop=True)
    test["value"] = test["value"].astype(float)
    rates = test["learning_rate"].astype(float)
    by_age = test.assign(learning_rate=rates).sort_values("ended", kind="stable")
    newest = by_age.groupby(STRUCTURE, dropna=False)["learning_rate"].transform("last").reindex(test.index)
    return test[rates.isna() | (rates == newest)]


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
    """The rows with one more task, MEAN: the mean over its tasks of each training that has several."""
    several = table[table.groupby("cell")["task"].transform("nunique") > 1]
    if several.empty:
        return table
    mean = several.groupby("cell", sort=False, as_index=False).first()
    mean["value"] = mean["cell"].map(several.groupby("cell")["value"].mean())
    # Tasks have their own documents, so their errors are independent.
    if "stderr" in table:
        square = several["stderr"].astype(float) ** 2
        total = np.sqrt(square.groupby(several["cell"]).sum())
        mean["stderr"] = mean["cell"].map(total / mean_count(several))
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

    p: of the paired t test, not adjusted. inside: whether the mean lies within or above LoRA's 95 % interval, None
    where that has none. matched: whether parameters are within 5 % of LoRA's. changes: what `difference` is the mean
    of, one per seed. saturated: whether all trainings of both are at 0 or all at 100 %, so that nothing can differ.
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
    changes: tuple[float, ...] = ()
    saturated: bool = False


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
    own_scores, lora_scores = _both(own, lora)
    reference = stats.t_interval(by_seed(lora).to_numpy())
    change = own_scores - lora_scores
    ends = {float(score) for score in (*own_scores, *lora_scores)}
    return Point(
        **{
            **point.__dict__,
            "difference": stats.t_interval(change),
            "p": p_value(change),
            "inside": bool(point.score.centre >= reference.low) if np.isfinite(reference.low) else None,
            "matched": not np.isfinite(point.ratio) or abs(point.ratio - 1) <= TOLERANCE,
            "changes": tuple(map(float, change)),
            "saturated": ends in ({0.0}, {1.0}),
        }
    )


def _both(first: pd.DataFrame, second: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Scores of the two on the seeds that both have, in the same order."""
    both = pd.concat([by_seed(first), by_seed(second)], axis=1, join="inner").dropna().to_numpy()
    return both[:, 0], both[:, 1]


def p_value(changes: np.ndarray) -> float:
    """Of the paired t test; NaN where it is not defined: less than two differences, or none at all in any. 0 where all
    are the same other number, as the interval of no width says that stands beside it."""
    if len(changes) < 2 or np.abs(changes).max() < 1e-12:
        return np.nan
    if np.ptp(changes) < 1e-12:  # alike but for rounding
        return 0.0
    return float(scipy_stats.ttest_1samp(changes, 0.0).pvalue)


def holm(p: Sequence[float]) -> np.ndarray:
    """p values adjusted for being looked at together (Holm, 1979): the i-th smallest of m times m - i + 1, no less than
    a smaller one's and at most 1. NaN, a test that is not defined, stays and does not count."""
    values = np.asarray(p, dtype=np.float64)
    there = np.flatnonzero(np.isfinite(values))
    order = there[np.argsort(values[there], kind="stable")]
    out = np.full(len(values), np.nan)
    out[order] = np.minimum(1.0, np.maximum.accumulate(values[order] * np.arange(len(order), 0, -1)))
    return out


def by_seed(table: pd.DataFrame) -> pd.Series:
    return table.groupby("seed")["value"].mean()


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """One formatted row per structure and budget: parameters, rate, score per task, mean, difference to LoRA."""
    found = list(points(with_mean(rows(frame))))
    tried = _tried(frame)
    averaged = {_point_key(point) for point in found if point.task == MEAN}
    out: dict[tuple[str, str, str, float | None], dict[str, str]] = {}
    tests: dict[tuple[str, str], list[tuple[dict[str, str], float]]] = {}
    for point in found:
        key = _point_key(point)
        row = out.setdefault(
            key,
            {
                "experiment": point.experiment,
                "setting": point.setting,
                "structure": name(point.structure),
                "r": "-" if point.rank_equivalent is None else f"{point.rank_equivalent:g}",
                "params": f"{point.params:,.0f}",
                "of LoRA's": f"{point.ratio:.2f}" if np.isfinite(point.ratio) else "-",
                "rate": _rate(point.rate, tried.get(key, set())),
                "seeds": str(point.score.n),
            },
        )
        row[point.task] = _percent(point.score)
        if (point.task == MEAN or key not in averaged) and point.difference is not None:
            row["- LoRA"] = _percent(point.difference, sign=True)
            row[ADJUSTED] = "-"
            row["in LoRA's"] = INSIDE[point.inside] if point.matched else "not matched"
            tests.setdefault(key[:2], []).append((row, point.p))
    for together in tests.values():
        _adjust(together)
    return pd.DataFrame(list(out.values())).fillna("-")


def _point_key(point: Point) -> tuple[str, str, str, float | None]:
    return point.experiment, point.setting, point.structure, point.rank_equivalent


def comparisons(frame: pd.DataFrame) -> pd.DataFrame:
    """One formatted row per pair of TESSA's slices: `across` - `along` with the same offset rule, and each offset rule
    - `random` with the same placement; on the same modules at the same rank-equivalent, parameters within 5 %.

    Of the mean of tasks where there are several, paired over seeds; p is adjusted over all rows of a setting.
    """
    scores = with_mean(rows(frame))
    scores = scores[scores["method"].eq("tessa")]
    out: list[dict[str, str]] = []
    for (experiment, setting), part in scores.groupby(["experiment", "setting"], sort=False):
        part = part[part["task"] == part["task"].iloc[-1]]  # the mean is appended last
        tests = []
        for (targets, budget), same in part.groupby(["targets", "rank_equivalent"]):
            by_slice = {
                (str(place), str(rule)): own
                for (place, rule), own in same.groupby(["placement", "offset_rule"])
            }
            params = {key: own["trainable_params"].astype(float).mean() for key, own in by_slice.items()}
            for label, first, second in _pairs(list(by_slice)):
                one, other = _both(by_slice[first], by_slice[second])
                if len(one) == 0 or abs(params[first] / params[second] - 1) > TOLERANCE:
                    continue
                row = {
                    "experiment": str(experiment),
                    "setting": str(setting),
                    "slices compared": label + ("" if targets == "all" else f", {targets}"),
                    "r": f"{budget:g}",
                    "difference": _percent(stats.t_interval(one - other), sign=True),
                    ADJUSTED: "-",
                }
                tests.append((row, p_value(one - other)))
        _adjust(tests)
        out += [row for row, _ in tests]
    return pd.DataFrame(out)


def _pairs(slices: list[tuple[str, str]]) -> Iterator[tuple[str, tuple[str, str], tuple[str, str]]]:
    """Label and the two (placement, offset rule) of each comparison that `slices` allow."""
    rules = list(dict.fromkeys(rule for _, rule in slices))
    for rule in rules:
        first, second = ((place, rule) for place in PLACEMENTS)
        if {first, second} <= set(slices):
            yield f"{' - '.join(PLACEMENTS)}, {rule}", first, second
    for place in PLACEMENTS:
        for rule in rules:
            first, second = (place, rule), (place, DEFAULT_RULE)
            if rule != DEFAULT_RULE and {first, second} <= set(slices):
                yield f"{rule} - {DEFAULT_RULE}, {place}", first, second


def _adjust(tests: list[tuple[dict[str, str], float]]) -> None:
    """Puts the adjusted p of tests that stand in one table into their rows."""
    for (row, _), p in zip(tests, holm([p for _, p in tests]), strict=True):
        if np.isfinite(p):
            row[ADJUSTED] = "<0.001" if p < 0.0005 else f"{p:.3f}"


def _tried(frame: pd.DataFrame) -> dict[tuple[str, str, str, float | None], set[float]]:
    """Learning rates that the search tried, also where that failed, by experiment, setting, structure and budget."""
    if "role" not in frame:
        return {}
    found = frame[frame["method"].notna() & frame["role"].eq("search")]
    found = found[found["learning_rate"].notna()]
    out: dict[tuple[str, str, str, float | None], set[float]] = {}
    names = zip(found["experiment"], found["setting"], structure(found), strict=True)
    numbers = found[["rank_equivalent", "learning_rate"]].astype(float).to_numpy()
    for (experiment, setting, kind), (budget, rate) in zip(names, numbers, strict=True):
        key = (str(experiment), str(setting), str(kind), float(budget) if np.isfinite(budget) else None)
        out.setdefault(key, set()).add(float(rate))
    return out


def _rate(rate: float | None, tried: set[float]) -> str:
    if rate is None:
        return "-"
    ends = {min(tried): " (lowest)", max(tried): " (highest)"} if len(tried) > 1 else {}
    return f"{rate:g}{ends.get(rate, '')}"


def _percent(found: stats.Interval, sign: bool = False) -> str:
    text = f"{100 * found.centre:{'+' if sign else ''}.1f}"
    return text + (f" ±{50 * (found.high - found.low):.1f}" if np.isfinite(found.low) else "")


DEFINITIONS = (
    "scores in % of right answers; ± is half of one 95 % t interval over seeds, not widened for the number of rows; "
    "- LoRA is the difference paired over seeds at the same rank-equivalent and modules, "
    f"{ADJUSTED} that of its paired t test, adjusted for all of the table; in LoRA's: the mean is within or above "
    "LoRA's 95 % interval (parameters within 5 % of LoRA's); rate is the learning rate, the best on validation data "
    "where several were tried; (lowest) or (highest): it ends those tried, so a better one may lie beyond"
)
COMPARED = (
    "TESSA's slices at equal budget (parameters within 5 %): difference of the scores paired over seeds, "
    f"± as above, {ADJUSTED} adjusted for all of this table"
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
        pairs = comparisons(mine)
        if len(pairs):
            blocks += [COMPARED, pairs.drop(columns=["experiment", "setting"]).to_string(index=False)]
        for line in expected(str(mine["protocol"].iloc[0])):
            blocks.append(f"published: {line}")
    failed = frame[frame["method"].notna() & (frame["status"] != "complete")].drop_duplicates("cell")
    blocks += [f"{row.cell}: {row.status}: {row.reason}" for row in failed.itertuples()]
    return "\n".join([*blocks, textwrap.fill(DEFINITIONS, width), *cautions(frame)])


def cautions(frame: pd.DataFrame) -> list[str]:
    return [SMOKE] if "measure" in frame and frame["measure"].eq("smoke").any() else []
