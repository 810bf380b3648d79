"""Experiments that start no serving engine: `kind: projection`, `layer_step` and `quality`, each with its own settings.

Their settings stand under `study:` in the experiment's file and are the fields of `ProjectionSpec`, `LayerStepSpec`
and `QualitySpec`; an unknown one is an error.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import provenance
from experiments.kinds import check_kinds
from experiments.stopping import StopSignals, stop
from experiments.store import summaries
from tessa.errors import UserError
from tessa.vllm.lifetime import die_with_parent

if TYPE_CHECKING:
    from experiments.config import RunConfig

Report = Callable[[Path, str, "list[str] | None"], object]
"""Prints the table and draws the figures of a run: its results folder, its experiment, and its cells (None: all)."""

_NOT_SHORTENED = {
    "projection": "projection does not read `measure`; it computes its numbers, in seconds",
    "layer_step": "layer_step does not read `measure`; study.models, study.rounds and their like say how much is "
    "measured, and `python -m experiments.layer_step --quick --out DIR` tries it on tiny shapes",
}
"""Studies to which `measure` says nothing: small rows beside theirs would take their place in the figures."""


def spec_from(kind: type[Any], values: dict[str, Any]) -> Any:
    """`kind(**values)` with lists as tuples. UserError names an unknown setting and the known ones, or a value of a
    wrong type."""
    names = [f.name for f in fields(kind)]
    for key in values:
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise UserError(
                f"unknown setting 'study.{key}'{hint} Known settings there: {', '.join(sorted(names))}"
            )
    check_kinds(kind, values, "study")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


def execute(config: RunConfig, mode: str = "run", report: Report | None = None) -> int:
    """Runs a study, or with `mode` "status" or `dry_run` says what it would do. Returns the exit status."""
    if config.tp != 1:
        instead = "trains on one device" if config.kind == "quality" else f"takes study.tps=[{config.tp}]"
        raise UserError(f"tp={config.tp} is an engine's; experiment={config.name} {instead}")
    if config.kind in _NOT_SHORTENED and config.measure.name != "demo":  # demo: the default
        print(f"measure={config.measure.name}: {_NOT_SHORTENED[config.kind]}")
    run = {"projection": _projection, "layer_step": _layer_step, "quality": _quality}[config.kind]
    results = Path(config.paths.results).expanduser()
    looking = mode == "status" or config.dry_run
    status = run(config, results, looking)
    if report is not None and not looking:
        report(results, str(config.name) if config.kind == "quality" else config.kind, None)
    return status


def _projection(config: RunConfig, results: Path, looking: bool) -> int:
    from experiments.projection.runner import ProjectionSpec, run

    spec = spec_from(ProjectionSpec, config.study)
    out = results / "projection"
    if looking:
        there = "there" if (out / "projection.parquet").is_file() else "missing"
        print(
            f"projection: {out} is {there}; {len(spec.models)} models, {len(spec.gpus)} GPUs, tp {list(spec.tps)}"
        )
        return 0
    from experiments.projection.own_cells import points

    run(spec, out, cells=points(summaries(results)))
    return 0


def _layer_step(config: RunConfig, results: Path, looking: bool) -> int:
    from experiments.layer_step.rows import RowFile, table
    from experiments.layer_step.spec import LayerStepSpec, points

    spec = spec_from(LayerStepSpec, config.study)
    out = results / "layer_step"
    if looking:
        planned = points(spec)
        stored = len(RowFile(out).frame())
        print(f"layer_step: {len(planned)} points of {len(spec.backends)} backends, {stored} rows stored")
        for point in planned:
            print(f"  {point.label}")
        return 0
    status = _measure(asdict(spec), out, config.force)
    print(table(RowFile(out).frame()))
    return status


def _quality(config: RunConfig, results: Path, looking: bool) -> int:
    from experiments import models
    from experiments.quality import study
    from experiments.quality.spec import QualitySpec, check, with_smoke

    check(spec_from(QualitySpec, config.study))  # a mistake in what measure=smoke replaces is one too
    spec = spec_from(QualitySpec, with_smoke(config.study, config.measure.name))
    cache = Path(config.paths.cache).expanduser() if config.paths.cache else models.default_cache()
    return study.run(
        str(config.name),
        spec,
        results,
        cache.absolute(),
        provenance.device(),
        looking,
        config.only,
        config.force,
    )


def _measure(spec: dict[str, Any], out: Path, force: bool) -> int:
    """The measuring process, in a session of its own; it ends when this one does, however that ends.

    SIGINT, SIGTERM and SIGHUP end it with its children and are then raised as KeyboardInterrupt.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "spec.json"
        file.write_text(json.dumps(spec), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "experiments.layer_step",
            "--no-table",
            "--spec",
            str(file),
            "--out",
            str(out),
        ]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(provenance.REPO), os.environ.get("PYTHONPATH", "")]).rstrip(
                ":"
            ),
        }
        command += ["--force"] if force else []
        if typed := provenance.command():
            command += ["--command", typed]
        with StopSignals() as signals:
            child = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=die_with_parent)
            try:
                return child.wait()
            finally:
                if child.poll() is None:
                    with signals.shielded():
                        stop(child)
