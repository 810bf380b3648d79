"""What `run.py` does once Hydra has composed a config: check, plan, then run, list or report."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from baselines import get_backend
from experiments import config as schema
from experiments import models, provenance, studies
from experiments.backends import known_backends
from experiments.config import RunConfig
from experiments.console import Console
from experiments.estimate import dry_run_lines, status_lines
from experiments.grid import Cell, Plan, expand
from experiments.loggers import make_logger
from experiments.notes import check_swept, limits, notes
from experiments.runner import EngineFactory, Outcome, Runner
from experiments.store import Store
from experiments.workload import spec as workload_spec
from experiments.workload.types import Workload
from tessa.errors import UserError

EXIT_OK, EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, 130
WARM_UP_OUTPUT = 16
TEST_ENGINE = "TESSA_TEST_ENGINE"


def plan_run(config: RunConfig, device: str | None = None) -> Plan:
    """Every check that needs no engine, then the plan. Raises UserError."""
    if config.kind != "serving":
        raise UserError(
            f"experiment {config.name!r} (kind {config.kind}) is not a grid of served cells, so no launcher can "
            "spread it; run it in one job, without -m"
        )
    model = models.load_spec(config.model)
    models.check_parallel(model, config.tp)
    build = functools.partial(workload_spec.build, vocab_size=model.vocab_size)
    device = device or provenance.device()
    check_executor(config, device)
    plan = expand(config, known_backends(), device, build)
    longest = config.engine.max_model_len or model.max_model_len
    for workload in plan.workloads.values():
        assert isinstance(workload, Workload)
        check_load(workload, config.measure.max_in_flight)
        need = int((workload.prompt_lengths + workload.output_tokens).max())
        if need > longest:
            raise UserError(
                f"the workload has a request of {need} tokens (prompt and output), model {model.name!r} is "
                f"run with at most {longest}. Shorten the workload, or raise engine.max_model_len up to the "
                f"model's {model.architecture.get('max_position_embeddings', longest)}."
            )
    return plan


def check_load(workload: Workload, max_in_flight: int | None) -> None:
    """Whether the load can be sent as its labels say. Raises UserError."""
    mode, concurrency = workload.load_mode["mode"], workload.load_mode["concurrency"]
    if max_in_flight is not None and mode != "all_at_once":
        what = "would no longer be sent at its rate" if mode == "open_loop" else "has its own limit"
        raise UserError(
            f"measure.max_in_flight={max_in_flight} is for workloads whose requests come all at once; this one "
            f"({mode.replace('_', ' ')}) {what}. Leave it out, or take workload=closed_loop with "
            f"workload.arrivals.concurrency={max_in_flight}"
        )
    if concurrency is not None and concurrency > len(workload):
        raise UserError(
            f"workload.arrivals.concurrency={concurrency} needs as many requests, the workload has {len(workload)}: "
            "raise workload.num_requests or lower the concurrency"
        )


def check_executor(config: RunConfig, device: str) -> None:
    """Whether the engines can be spread as the configuration says. Raises UserError."""
    if config.engine.distributed_executor == "ray" and device == "cpu":
        raise UserError(
            "engine.distributed_executor=ray needs GPUs: vLLM says 'current platform cpu does not support ray'. "
            "On the CPU, engine.nnodes=N spreads an engine over machines."
        )
    if config.engine.distributed_executor == "ray" and importlib.util.find_spec("ray") is None:
        raise UserError(
            "engine.distributed_executor=ray needs Ray in this environment: pip install 'ray[default]'"
        )


def warm_up(workload: Workload, vocab_size: int, num_adapters: int) -> Workload:
    """A small load that touches every adapter once, and the base model once if the workload uses it."""
    with_base = bool((workload.adapter < 0).any())
    used = max(num_adapters, 1)
    return workload_spec.build(
        {
            "seed": 1 + int(workload.meta["spec"]["seed"]),
            "num_requests": used + with_base,
            "arrivals": {"kind": "all_at_once"},
            "prompt_tokens": {
                "kind": "fixed",
                "value": int(sorted(workload.prompt_lengths)[len(workload) // 2]),
            },
            "output_tokens": {
                "kind": "fixed",
                "value": min(WARM_UP_OUTPUT, int(sorted(workload.output_tokens)[len(workload) // 2])),
            },
            "popularity": {"kind": "distinct"},
            "num_adapters": num_adapters,
            "min_token_id": int(workload.meta["spec"]["min_token_id"]),
            "base_fraction": 1.0 / (used + 1) if with_base else 0.0,
        },
        vocab_size,
    )


class Workloads:
    """Writes a plan's workload files on first use."""

    def __init__(self, plan: Plan, config: RunConfig, cache: Path) -> None:
        self._plan, self._folder = plan, cache / "workloads"
        self._vocab = models.load_spec(config.model).vocab_size
        self._paths: dict[str, tuple[Path, Path]] = {}

    def __call__(self, workload_hash: str) -> tuple[Path, Path]:
        if workload_hash not in self._paths:
            load = self._plan.workloads[workload_hash]
            assert isinstance(load, Workload)
            warm = warm_up(load, self._vocab, int(load.meta["spec"]["num_adapters"]))
            self._paths[workload_hash] = (load.save(self._folder), warm.save(self._folder))
        return self._paths[workload_hash]


def cache_folder(config: RunConfig) -> Path:
    chosen = Path(config.paths.cache).expanduser() if config.paths.cache else models.default_cache()
    return chosen.absolute()


def engine_factory(cache: Path) -> EngineFactory:
    """Real engines, each in a child process. Imported late: planning needs none."""
    from experiments.engine.parent import make_engine

    return functools.partial(make_engine, cache=cache)


def check_external(plan: Plan, wanted: Callable[[Cell], bool]) -> None:
    """Raises UserError where a backend outside of vLLM is to run and cannot, before any engine starts."""
    from experiments.engine.external import check_groups

    groups = [g for point in plan.points for g in point.groups if any(wanted(cell) for cell in g.cells)]
    for group in groups:
        if (group.config.engine.nnodes or 1) > 1 and get_backend(group.backend).external:
            raise UserError(
                f"engine.nnodes={group.config.engine.nnodes} is for the engines that this project starts; backend "
                f"{group.backend!r} is a server of its own. Leave engine.nnodes out."
            )
    check_groups(groups)


def factory_of_tests(results: Path) -> EngineFactory | None:
    """The factory of the project's own tests, `module:attribute` in $TESSA_TEST_ENGINE; None when unset.

    It reaches runs that a test starts as processes or Slurm jobs. Raises UserError unless the results lie in
    the temporary folder, so that a scripted engine's numbers never stand beside measured ones.
    """
    name = os.environ.get(TEST_ENGINE)
    if not name:
        return None
    if not results.resolve().is_relative_to(Path(tempfile.gettempdir()).resolve()):
        raise UserError(
            f"{TEST_ENGINE} is set: it is for this project's tests and writes only below "
            f"{tempfile.gettempdir()}, not to {results}. Unset it."
        )
    module, _, attribute = name.partition(":")
    factory: EngineFactory = getattr(importlib.import_module(module), attribute)
    return factory


def execute(
    composed: DictConfig,
    mode: str = "run",
    factory: EngineFactory | None = None,
    report: studies.Report | None = None,
    overrides: Sequence[str] = (),
) -> int:
    """One job: `mode` is `run` or `status`. Returns the exit status; user mistakes are printed, not raised.

    `overrides`: what was typed behind `run.py`. `factory` makes the engines (None: real ones). `report` is called after
    a run with the results folder, the experiment and the names of the cells, to print the table and draw the figure.
    """
    try:
        config = schema.build(composed)
        check_swept(config, overrides)
        return _execute(config, mode, factory, report)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        print("interrupted: finished cells are stored; the same command runs the rest", file=sys.stderr)
        return EXIT_INTERRUPTED


def _execute(
    config: RunConfig,
    mode: str,
    factory: EngineFactory | None,
    report: studies.Report | None,
) -> int:
    if config.kind != "serving":
        return studies.execute(config, mode, report)
    plan = plan_run(config)
    results = Path(config.paths.results).expanduser()
    looking = mode == "status" or config.dry_run
    store = Store(results, plan.experiment, create=not looking)
    if looking:
        lines = status_lines(plan, store) if mode == "status" else dry_run_lines(plan, store, config)
        print("\n".join([*lines, *([*limits(config), *notes(plan)] if mode != "status" else ())]))
        return EXIT_OK
    provenance.check_same_code(provenance.submit_state(), provenance.git_state(), config.allow_sha_change)
    console = Console()
    for line in (*limits(config), *notes(plan)):
        console.note(line)
    cache = cache_folder(config)
    runner = Runner(
        plan=plan,
        store=store,
        measure=config.measure,
        factory=factory or factory_of_tests(results) or engine_factory(cache),
        workload_paths=Workloads(plan, config, cache),
        console=console,
        logger=make_logger(config.logger, str(cache), console.note),
        only=config.only,
        force=config.force,
    )
    if factory is None and not os.environ.get(TEST_ENGINE):
        check_external(plan, runner.wanted)
    outcome = runner.run()
    if report is not None:
        report(results, plan.experiment, [cell.name for cell in plan.cells])
    return summarise(outcome, console)


def summarise(outcome: Outcome, console: Console) -> int:
    """The last line of a run, and its exit status."""
    complete = len(outcome.done) - len(outcome.failed)
    parts = [f"{complete} cells complete"]
    if outcome.failed:
        parts.append(f"{len(outcome.failed)} not ({', '.join(sorted(outcome.failed))}); a rerun retries them")
    if outcome.skipped:
        parts.append(f"{outcome.skipped} left as they were")
    if outcome.elsewhere:
        parts.append(f"{len(outcome.elsewhere)} being run elsewhere")
    console.note("; ".join(parts))
    return EXIT_FAILED if outcome.failed else EXIT_OK


def explain_hydra(error: Exception) -> str:
    """A Hydra or OmegaConf error as one message about what the user wrote."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, given = error.missing_cfg_file.rpartition("/")
        options = sorted(set(error.options or ()) - {"schema"}, key=schema.backend_rank)
        return schema.unknown(group or "config", given, options)
    if explained := several(str(error)):
        return explained
    for part in (error, error.__cause__):
        if isinstance(part, OverrideParseException):
            return unreadable(str(part.override), str(part.message).splitlines()[0])
    return schema.explain(error)


def several(text: str) -> str | None:
    """What Hydra's "Ambiguous value for argument" means; None for another error."""
    found = re.search(r"Ambiguous value for argument '([^']+)'", text)
    return (
        found and f"{found[1]} gives several values: pass -m before the settings to run them all, or give one"
    )


def unreadable(given: str, why: str) -> str:
    """An override that Hydra's grammar does not take. `why` is its own word, which often only repeats the override."""
    if "=" not in given and not given.startswith("~"):
        return (
            f"cannot read {given!r}: after the mode (status, or none) come settings as key=value, such as tp=2; "
            "`python run.py --help` lists them"
        )
    cause = "" if given in why else f" ({why})"
    return (
        f"cannot read {given!r}{cause}: settings are key=value, lists [a,b], and a value with any of : , = {{ }} or a "
        "space stands in quotes of its own, such as \"backends=[base,'slora:compute=off']\""
    )


def guarded(compose_and_run: Callable[[], Any]) -> int | None:
    """Runs Hydra's entry; a mistake in the config ends in one message and exit status 2.

    Returns None when Hydra ran (the jobs hold their own exit status).
    """
    try:
        compose_and_run()
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {explain_hydra(error)}", file=sys.stderr)
        return EXIT_USER
    except UserError as error:  # from a launcher: the jobs handle their own
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return None
