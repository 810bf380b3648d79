"""What the page of a study shows that keeps tables of its own: numbers, rows without a result, and their origin."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import figures, layer_step, projection, studies, style
from analysis.load import engine
from experiments.projection.links import predict
from experiments.schedule_costs import summary
from tessa.errors import UserError


@dataclass(frozen=True)
class Table:
    """note: what it holds. text: names of the columns that are set left."""

    note: str
    heads: list[str]
    rows: list[list[str]]
    text: tuple[str, ...] = ()


@dataclass(frozen=True)
class Study:
    """rows: all that count, with the columns that `html.provenance` reads. lost: those without a result, or None."""

    rows: pd.DataFrame
    tables: list[Table]
    lost: Table | None


def study(experiment: str, results: Path, reference: bool = False) -> Study | None:
    """None where the experiment is no such study, or has nothing to show: `figures.draw_all` says why."""
    if experiment not in _NUMBERS:
        return None
    module, kind = figures.STUDIES[experiment]
    folder = results / experiment
    try:
        rows = module.read(results, reference=reference)
        rows = layer_step.newest(rows) if module is layer_step else rows
        tables = _NUMBERS[experiment](rows, folder)
    except UserError:
        return None
    defaults = {"status": "complete", "reason": "", "provenance": kind, "machine": None}
    rows = rows.assign(**{name: value for name, value in defaults.items() if name not in rows})
    said = studies.environment(folder)
    mine = rows["git_sha"] == (said.get("git_start") or {}).get("sha")
    rows = rows.assign(
        cell=range(len(rows)),
        # Only the last run's packages are stored.
        engine=pd.Series(engine(said.get("packages") or {}), index=rows.index).where(mine),
        # A layer step that computes something else than float64 does is no complete row.
        gate="passed" if experiment == "layer_step" else "-",
    )
    return Study(rows, tables, _lost(rows[rows["status"] != "complete"]))


def _lost(rows: pd.DataFrame) -> Table | None:
    """Alike rows together: a backend that fails does so at many points."""
    if rows.empty:
        return None
    found = []
    rows = rows.assign(reason=rows["reason"].fillna(""))
    for (variant, status, reason), mine in rows.groupby(["variant", "status", "reason"], sort=False):
        degrees = ", ".join(str(tp) for tp in sorted(mine["tp"].unique()))
        models = ", ".join(dict.fromkeys(mine["model"]))
        found.append(
            [style.name(str(variant)), models, degrees, str(len(mine)), str(status), str(reason) or "-"]
        )
    heads = ["backend", "models", "TP", "rows", "status", "reason"]
    return Table("", heads, found, ("backend", "models", "TP", "status", "reason"))


def _layer_step(rows: pd.DataFrame, _: Path) -> list[Table]:
    where = layer_step.where(rows)
    shown = [_costs(rows, "adapter_cost_kernels", f"Adapter cost in % of {where}, collectives left out")]
    if layer_step.knows_collectives(rows):
        links = layer_step.links(rows)
        shown.append(
            _costs(rows, "adapter_cost", f"The same in % of the step, with collectives modelled for {links}")
        )
    return shown


def _costs(rows: pd.DataFrame, column: str, note: str) -> Table:
    """Over TP; base is the time of one layer's kernels."""
    rows = layer_step.over_tp(rows)
    rows = rows[rows["status"] == "complete"]
    variants = [v for v in layer_step.NAMED if (rows["variant"] == v).any()]
    off = layer_step.off_budget(rows)
    note = "; ".join(filter(None, [note, layer_step.off_note(rows)]))
    found = []
    for (model, phase, tokens, tp), group in rows.groupby(["model", "phase", "tokens", "tp"]):
        at = group.drop_duplicates("variant", keep="last").set_index("variant")
        base = at["layer_s"].get("base")
        found.append(
            [str(model), str(phase), str(tokens), str(tp), "-" if base is None else f"{1e6 * base:,.1f}"]
            + [_percent(at[column].get(variant)) for variant in variants]
        )
    names = [f"{style.name(v)} †" if v in off else style.name(v) for v in variants]
    heads = ["model", "phase", "tokens", "TP", "base, µs/layer", *names]
    return Table(note, heads, found, ("model", "phase"))


def _projection(rows: pd.DataFrame, folder: Path) -> list[Table]:
    found = []
    for row in projection.claims(rows).to_dict("records"):
        costs = [_band(row, f"C1_{backend}_cost", 100, 1) for backend in ("punica", "slora", "tessa")]
        counts = [_count(row[f"C4_{backend}_collectives"]) for backend in ("slora", "tessa")]
        found.append(
            [
                *(str(row[key]) for key in ("gpu", "model", "tp")), *costs, _percent(row["C2_parameter_share"], 2),
                *counts, _band(row, "C6_tessa_over_slora", 1, 2),
            ]
        )  # fmt: skip
    heads = [
        "GPU", "model", "TP", "C1: Punica, %", "C1: S-LoRA, %", "TESSA's cost, %", "C2: share, %", "C4: S-LoRA",
        "C4: TESSA", "C6: TESSA / S-LoRA",
    ]  # fmt: skip
    note = (
        "Modelled decode step; brackets are the bands of the figures. C1: adapter cost; C2: one adapter's share of the "
        "parameters; C4: collectives that adapters add to a step; C6: throughput over S-LoRA's"
    )
    tables = [Table(note, heads, found, ("GPU", "model"))]
    file = folder / "validation.json"
    if file.is_file():
        errors = json.loads(file.read_text(encoding="utf-8"))
        entries = [[name, _entry(value)] for name, value in errors.items()]
        note = "Errors on data that was held out; relative unless the name says otherwise"
        tables.append(Table(note, ["entry", "value"], entries, ("entry",)))
    return tables


def _collectives(rows: pd.DataFrame, _: Path) -> list[Table]:
    found = []
    predicted = predict(rows)
    for (transport, ranks, kind), mine in predicted.groupby(["transport", "ranks", "kind"], sort=False):
        first = mine.iloc[0]
        off = (mine["ratio"] - 1).abs()[mine["held_out"].astype(bool)]
        found.append(
            [
                str(transport), str(ranks), str(kind), "shared" if first["oversubscribed"] else "own",
                f"{1e6 * first['alpha_s']:.1f}", f"{first['bandwidth'] / 1e9:.2f}",
                _percent(off.median()), _percent(off.max()),
            ]
        )  # fmt: skip
    heads = ["transport", "ranks", "kind", "cores", "alpha, µs", "bandwidth, GB/s", "median error, %",
             "worst error, %"]  # fmt: skip
    note = "The alpha-beta model fitted to timed collectives; errors on sizes and messages that were held out"
    return [Table(note, heads, found, ("transport", "kind", "cores"))]


def _schedules(rows: pd.DataFrame, _: Path) -> list[Table]:
    found = []
    for row in summary(rows).reset_index().to_dict("records"):
        ratios = [f"{row[f'{name}_us'] / row['base_us']:.2f}" for name in ("wide", "segmented", "rule")]
        point = [f"{row[key]:g}" for key in ("tokens", "slots", "distinct")]
        found.append([*point, f"{row['base_us']:,.0f}", *ratios, _percent(row["regret"])])
    heads = ["tokens", "resident", "distinct", "base, µs", "wide", "segmented", "the rule's", "regret, %"]
    note = "One layer's four products over the base products'; regret: the rule's choice over the faster one of each"
    return [Table(note, heads, found)]


_NUMBERS: dict[str, Callable[[pd.DataFrame, Path], list[Table]]] = {
    "layer_step": _layer_step,
    "projection": _projection,
    "collectives": _collectives,
    "schedules": _schedules,
}


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None or pd.isna(value) else f"{100 * value:.{digits}f}"


def _count(value: float) -> str:
    return "-" if pd.isna(value) else f"{value:g}"


def _band(row: Mapping[Any, Any], name: str, scale: float, digits: int) -> str:
    if pd.isna(row[name]):
        return "-"
    value, low, high = (f"{scale * row[name + end]:.{digits}f}" for end in ("", "_low", "_high"))
    return f"{value} [{low}, {high}]"


def _entry(value: float | int | str | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
