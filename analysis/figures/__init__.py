"""Figures from the stored cells: one form per experiment, each as PNG and PDF with a caption in JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from analysis import collectives, layer_step, projection, schedules, studies, style, sweeps
from analysis import interconnect as latencies
from analysis import quality as scores
from analysis.figures import breakdown, interconnect, marks, quality, rate, replay, scaling
from analysis.figures.save import about, caption, commands, distinct, save, write_caption
from tessa.errors import UserError

import matplotlib.pyplot as plt  # isort: skip

__all__ = ["EXPERIMENTS", "STUDIES", "Drawn", "caption", "draw", "draw_all", "only_reference"]

EXPERIMENTS = (
    "tp_scaling", "adapter_count", "popularity", "rate_sweep", "trace_replay", "budget_sweep", "batch_sweep",
    "breakdown", "quality", "layer_step", "interconnect", "projection", "collectives", "schedules",
)  # fmt: skip
STUDIES: dict[str, tuple[Any, str]] = {
    "layer_step": (layer_step, "emulated"),
    "projection": (projection, "modelled"),
    "collectives": (collectives, "measured"),
    "schedules": (schedules, "measured"),
}
"""Experiments with tables of their own: the module that reads and draws them, and the provenance of their numbers."""
_BENCHMARKS = {part.FOLDER: part.COMMAND for part in (collectives, schedules)}
DIRTY = "uncommitted"
"""Status of rows that a reference figure leaves out: the tree had uncommitted changes, or its commit is unknown."""


@dataclass
class Drawn:
    """paths: the PNG files. missing: what could not be drawn, in words."""

    paths: list[Path] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def only_reference(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the numbers of trees that were not clean taken out; such a cell is a gap of status DIRTY."""
    unclean = studies.unclean(frame) & (frame["status"] == "complete")
    if not unclean.any():
        return frame
    out = frame.copy()
    numbers = [c for c in out.select_dtypes("number").columns if c not in _KEPT]
    out[numbers] = out[numbers].astype("float64")
    out["reason"] = out["reason"].astype(object)
    out.loc[unclean, numbers] = float("nan")
    out.loc[unclean, "status"] = DIRTY
    out.loc[unclean, "reason"] = "its tree had uncommitted changes or no known commit"
    return out


_KEPT = (
    "tp", "num_adapters", "repeat", "schema_version", "backend_order", "request_rate", "concurrency",
    "rank_equivalent", "num_requests", "added_latency_us", "max_resident",
)  # fmt: skip


def draw(
    frame: pd.DataFrame, folder: Path, results: Path | None = None, reference: bool = False
) -> list[Path]:
    """The figure of every family of cells in the frame; returns the PNG paths. `results` is needed for traces."""
    frame = only_reference(frame) if reference else frame
    trained = frame["method"].notna() if "method" in frame else pd.Series(False, index=frame.index)
    paths = _draw_trained(scores.rows(frame[trained]), folder, reference)
    frame = frame[~trained]
    for part in sweeps.families(frame):
        if not (part["status"] == "complete").any():
            continue  # nothing but gaps, which the caller lists
        stem = sweeps.stem(part)
        notes: dict[str, object] = {}
        with plt.rc_context(style.RC):
            figures = _figures(part, results or folder.parent, notes)
        said = about(part, reference, notes)
        paths += [save(figure, folder, f"{stem}{suffix}", said) for suffix, figure in figures.items()]
    return paths


def _draw_trained(table: pd.DataFrame, folder: Path, reference: bool) -> list[Path]:
    """The figures of every quality experiment, from the rows that count."""
    paths = []
    settings = table[["experiment", "setting"]].drop_duplicates()["experiment"].value_counts().to_dict()
    for (experiment, setting), part in table.groupby(["experiment", "setting"], sort=False):
        stem = str(experiment) if settings[experiment] == 1 else f"{experiment}_{setting}"
        said = {
            **_study(str(experiment), ["measured"], part, reference),
            "caption": f"{experiment}, {quality.note(part, quality.BARS)}",
        }
        with plt.rc_context(style.RC):
            drawn = quality.draw(scores.with_mean(part))
        paths += [save(figure, folder, f"{stem}{suffix}", said) for suffix, figure in drawn.items()]
    return paths


def _figures(part: pd.DataFrame, results: Path, notes: dict[str, object]) -> dict[str, Figure]:
    """Suffix of the file's name -> figure; what a caption needs beside goes into `notes`."""
    experiment = str(part["experiment"].iloc[0])
    if experiment == "rate_sweep" and rate.chosen_columns(part):
        notes["knee_rule"] = rate.KNEE_RULE
        notes["knees"] = {variant: at.text() for variant, at in rate.knees(part).items()}
        return {"": rate.against_rate(part)}
    if experiment == "breakdown":
        notes["breakdown_rule"] = breakdown.RULE
        figure = breakdown.split(part)
        return {"": figure if figure is not None else scaling.over_tp(part)}
    if experiment == "interconnect" and len(latencies.predictions(part)):
        return {"": interconnect.against_latency(part, notes)}
    sweep = sweeps.SWEEPS.get(experiment)
    # Without two values there is no axis; the bars say more.
    fewest = 1 if sweep is not None and sweep.categorical else 2
    if sweep is None or sweep.x not in part or part[sweep.x].nunique() < fewest:
        return {"": scaling.over_tp(part)}
    if sweep.categorical:
        found = {"": scaling.over_names(part, sweep)}
        if experiment == "trace_replay":
            for trace in sweeps.in_order("trace", part["trace"]):
                figure = replay.over_time(part, results, trace)
                if figure is not None:
                    found["_" + str(trace).replace(" ", "_")] = figure
        return found
    drawn = scaling.over_sweep(part, sweep)
    return {"" if i == 0 else f"_{i + 1}": figure for i, figure in enumerate(drawn)}


def draw_all(
    frame: pd.DataFrame,
    results: Path,
    folder: Path,
    reference: bool = False,
    experiments: tuple[str, ...] = EXPERIMENTS,
) -> Drawn:
    """Every figure that the results folder allows, and what is missing for the others."""
    wanted = frame[frame["experiment"].isin(experiments)] if experiments != EXPERIMENTS else frame
    done = Drawn(draw(wanted, folder, results, reference))
    for experiment in experiments:
        if experiment in STUDIES:
            try:
                _draw_study(done, experiment, results, folder, reference)
                continue
            except UserError as error:
                done.missing.append(f"{experiment}: {str(error).replace(f'{results}/', '')}")
                continue
        elif (wanted["experiment"] == experiment).any():
            continue
        done.missing.append(
            f"{experiment}: no figure is drawn of it; its numbers are in {results / experiment}"
            if (results / experiment).is_dir()
            else f"{experiment}: no results; make them with: python run.py experiment={experiment}"
        )
    bad = wanted[wanted["status"] != "complete"].drop_duplicates(["experiment", "cell"])
    done.missing += [f"{row.folder}: {row.status}: {row.reason}" for row in bad.itertuples()]
    if reference:
        unclean = only_reference(wanted)
        unclean = unclean[unclean["status"] == DIRTY].drop_duplicates(["experiment", "cell"])
        done.missing += [
            f"{row.folder}: left out of reference figures: {row.reason}" for row in unclean.itertuples()
        ]
    return done


def _draw_study(done: Drawn, experiment: str, results: Path, folder: Path, reference: bool) -> None:
    study, kind = STUDIES[experiment]
    rows = study.read(results, reference=reference)
    paths = [path for path in study.draw(results, folder, reference) if path.suffix == ".png"]
    for path in paths:
        kinds = [kind, "modelled"] if path.stem == layer_step.WITH_COLLECTIVES else [kind]
        write_caption(folder, path.stem, _study(experiment, kinds, rows, reference))
    done.paths += paths
    if reference and (left := len(study.read(results)) - len(rows)):
        done.missing.append(
            f"{experiment}: {left} rows left out of reference figures: their tree was not clean"
        )


def _commands(experiment: str, rows: pd.DataFrame, reference: bool) -> dict[str, object]:
    if experiment not in STUDIES or ("command" in rows and rows["command"].notna().all()):
        return commands(rows, reference)
    return {"commands": [_BENCHMARKS.get(experiment, f"python run.py experiment={experiment}")]}


def _study(experiment: str, kinds: list[str], rows: pd.DataFrame, reference: bool) -> dict[str, object]:
    """The caption of a figure that is drawn from more than cells of one setting. kinds: provenances of its numbers."""
    machines = distinct(rows, "machine")
    words = [
        f"{experiment}, {'/'.join(kinds)}",
        f"commit {', '.join(marks.commits(rows)) or 'unknown'}",
        *machines,
    ]
    return {
        "experiment": experiment,
        "caption": "; ".join(words),
        **_commands(experiment, rows, reference),
        "redraw": "python -m analysis figures" + (" --reference" if reference else ""),
        "provenance": kinds,
        "commits": sorted(str(sha) for sha in rows["git_sha"].dropna().unique()),
        "uncommitted_changes": bool(rows["git_dirty"].fillna(True).astype(bool).any()),
        "machines": machines,
        "reference": reference,
    }
