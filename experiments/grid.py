"""From one composed config to the ordered list of cells, grouped so that one engine serves many of them.

A cell is everything that determines a result; its rounds live inside it. An engine group is the cells of
one (backend, kernels, model, tp, dtype, adapters, engine options). A point is the engine groups that differ
in the backend alone: they are run side by side and compared.

Order: points as the grid spells them (the last key varies fastest), in a point the workloads as the grid
spells them, for each workload (and latency added to its collectives) the backends in their
fixed order.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from baselines import REGISTRY, get_backend
from experiments import backends as backends_module
from experiments import config as schema
from experiments import models
from experiments.config import BackendConfig, RunConfig
from experiments.engine.build import adapter_labels, check_adapters
from experiments.identity import (
    BACKEND_KEYS,
    canonical_hash,
    engine_identity,
    labels,
    measure_identity,
    start_identity,
    workload_spec,
)
from tessa.errors import UserError

GRID_ROOTS = ("workload", "adapters", "engine", "backend", "dtype")


class BuiltWorkload(Protocol):
    """What the grid needs of `experiments.workload.types.Workload`."""

    hash: str
    meta: dict[str, Any]

    def __len__(self) -> int: ...


WorkloadBuilder = Callable[[dict[str, Any]], BuiltWorkload]


@dataclass(frozen=True)
class Cell:
    """One result: identity, its hash, and the columns it is known by in tables."""

    experiment: str
    identity: dict[str, Any] = field(hash=False)
    labels: dict[str, Any] = field(hash=False)
    hash: str

    @property
    def backend(self) -> str:
        return str(self.identity["backend"])

    @property
    def variant(self) -> str:
        """The backend as shown to a user: `punica`, or `punica:stock` for chosen kernels."""
        return backends_module.variant_name(self.backend, self.identity["kernels"], self.identity["options"])

    @property
    def name(self) -> str:
        """Folder name; the hash's first 12 digits keep it short on every file system."""
        return f"{self.backend}-tp{self.identity['tp']}-{self.hash[:12]}"

    @property
    def workload_hash(self) -> str:
        return str(self.identity["workload"]["hash"])

    @property
    def added_latency_us(self) -> float | None:
        """Latency added to every collective, None where the engine runs as it is."""
        return self.identity["engine"].get("added_latency_us")

    @property
    def case(self) -> str:
        """What sets the cell apart from others on its engine: the workload, and an added latency."""
        added = self.added_latency_us
        return self.workload_hash if added is None else f"{self.workload_hash}+{added:g}us"


@dataclass(frozen=True)
class EngineGroup:
    """Cells that one engine serves. `engine` is the identity without workload and measure."""

    engine: dict[str, Any] = field(hash=False)
    key: str
    cells: tuple[Cell, ...]
    config: RunConfig = field(hash=False, compare=False)

    @property
    def backend(self) -> str:
        return str(self.engine["backend"])

    @property
    def variant(self) -> str:
        return backends_module.variant_name(self.backend, self.engine["kernels"], self.engine["options"])


@dataclass(frozen=True)
class Point:
    """Engine groups compared with each other, and the cases (see `Cell.case`) of their cells in order."""

    key: str
    groups: tuple[EngineGroup, ...]
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    experiment: str
    points: tuple[Point, ...]
    workloads: Mapping[str, BuiltWorkload] = field(hash=False)

    @property
    def cells(self) -> list[Cell]:
        """All cells in the order in which they run."""
        return [
            cell
            for point in self.points
            for case in point.cases
            for group in point.groups
            for cell in group.cells
            if cell.case == case
        ]


def expand(
    config: RunConfig, backends: Mapping[str, BackendConfig], device: str, build: WorkloadBuilder
) -> Plan:
    """The plan of a run.

    `backends` holds the config of every known backend, `device` is `cpu` or `cuda`, `build` makes a workload
    from `workload_spec`'s dict. Raises UserError for a wrong grid, an unknown backend, a bad workload, or adapters that
    a backend cannot serve.
    """
    if config.name is None:
        raise UserError("no experiment chosen: pass experiment=<name>, for example experiment=tp_scaling")
    chosen = choose_backends(config, backends)
    built: dict[str, BuiltWorkload] = {}
    by_spec: dict[str, BuiltWorkload] = {}
    groups: dict[str, dict[str, list[Cell]]] = {}
    engines: dict[str, tuple[dict[str, Any], RunConfig]] = {}
    adapters: dict[str, dict[str, Any]] = {}
    order: dict[str, list[str]] = {}
    seen: set[str] = set()
    for values in combinations(config):
        base = apply(config, values)
        spec = workload_spec(base)
        spec_key = canonical_hash(spec)
        if spec_key not in by_spec:
            by_spec[spec_key] = build(spec)
        workload = by_spec[spec_key]
        built[workload.hash] = workload
        for backend in chosen:
            chosen_backend = backends_module.resolve(_with_overrides(backend, values, config.url), device)
            one = dataclasses.replace(base, backend=chosen_backend)
            engine = engine_identity(one, device)
            identity = {
                **engine,
                "workload": {"hash": workload.hash, "spec": workload.meta["spec"]},
                "measure": measure_identity(one),
            }
            engine = start_identity(engine)
            point_key = canonical_hash({k: v for k, v in engine.items() if k not in BACKEND_KEYS})
            engine_key = canonical_hash(engine)
            if engine_key not in adapters:
                model = models.load_spec(one.model)
                check_adapters(engine, model)
                adapters[engine_key] = adapter_labels(engine, model)
            named = {**labels(identity), **adapters[engine_key], "measure": config.measure.name}
            cell = Cell(config.name, identity, named, canonical_hash(identity))
            if cell.hash in seen:
                continue
            seen.add(cell.hash)
            engines.setdefault(engine_key, (engine, one))
            groups.setdefault(point_key, {}).setdefault(engine_key, []).append(cell)
            if cell.case not in order.setdefault(point_key, []):
                order[point_key].append(cell.case)
    points = [
        Point(
            key=point_key,
            groups=tuple(
                EngineGroup(engines[key][0], key, tuple(cells), engines[key][1])
                for key, cells in members.items()
            ),
            cases=tuple(order[point_key]),
        )
        for point_key, members in groups.items()
    ]
    return Plan(config.name, tuple(points), built)


def choose_backends(config: RunConfig, known: Mapping[str, BackendConfig]) -> list[BackendConfig]:
    """Backends of a run in fixed order: `backend=`, else `backends=`, else the grid's `backends`.

    An entry is a name, with kernels and options behind it if wanted: `punica:stock`, `slora:compute=off`.
    """
    if config.backend is not None:
        return [config.backend]
    names = config.backends if config.backends is not None else config.grid.get("backends")
    if not names:
        raise UserError(
            f"no backend chosen: pass backend=<name> or backends=[...]. Known: {', '.join(known)}"
        )
    if isinstance(names, str):
        raise UserError(f"backends={names} must be a list: write backends=[{names}]")
    chosen: dict[str, BackendConfig] = {}
    for entry in names:
        name, *variant = str(entry).split(":")
        schema.one_of("backend", name, sorted(known, key=schema.backend_rank))
        backend = copy.deepcopy(known[name])
        for part in variant:
            option, is_option, value = part.partition("=")
            if is_option:
                backend.options[option] = value
            else:
                backend.kernels = part
        if str(entry) in chosen:
            raise UserError(f"backends={list(names)} names {entry} twice; give each once")
        chosen[str(entry)] = backend
    # Sorting keeps the given order among the variants of one backend.
    return sorted(chosen.values(), key=lambda backend: schema.backend_rank(backend.name))


def combinations(config: RunConfig) -> list[dict[str, Any]]:
    """Every combination of the grid's values but the backends; the last key varies fastest."""
    axes: dict[str, list[Any]] = {}
    for key, values in flatten(config.grid).items():
        if key == "backends":
            continue
        if key.split(".")[0] not in GRID_ROOTS:
            raise UserError(
                f"grid key {key!r} cannot be swept here: use keys below {', '.join(GRID_ROOTS)}, or "
                "`backends`; tensor-parallel degrees go on the command line, tp=2 or -m tp=1,2,4"
            )
        if not isinstance(values, list) or not values:
            raise UserError(f"grid.{key}={values} must be a list with at least one value")
        axes[key] = thin(values, config.measure.caps.grid_values)
    return [dict(zip(axes, combo, strict=True)) for combo in itertools.product(*axes.values())]


def flatten(grid: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys, in order: `{a: {b: [1]}}` and `{a.b: [1]}` mean the same."""
    flat: dict[str, Any] = {}
    for key, value in grid.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def thin(values: list[Any], limit: int | None) -> list[Any]:
    """At most `limit` of the values: the first, the last, and evenly between."""
    if limit is None or len(values) <= limit:
        return list(values)
    if limit <= 1:
        return values[:1]
    return [values[round(i * (len(values) - 1) / (limit - 1))] for i in range(limit)]


def apply(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """A copy of the config with grid values set; a dict as value replaces the whole section."""
    if not values:
        return config
    plain = dataclasses.asdict(config)
    for key, value in values.items():
        if key.startswith("backend."):
            continue
        *path, last = key.split(".")
        node = plain
        for part in path:
            node = node.get(part, {}) if isinstance(node, dict) else {}
        if not isinstance(node, dict) or (last not in node and path != ["engine", "extra"]):
            known = ", ".join(sorted(node)) if isinstance(node, dict) and node else "none"
            raise UserError(f"grid key {key!r} is no setting. Known settings there: {known}")
        node[last] = copy.deepcopy(value)
    return schema.build(plain)


def _with_overrides(backend: BackendConfig, values: Mapping[str, Any], url: str | None) -> BackendConfig:
    """The backend with the grid's `backend.*` values, and with the run's url where it takes one."""
    result = copy.deepcopy(backend)
    if url is not None and result.name in REGISTRY and "url" in get_backend(result.name).settings:
        result.options.setdefault("url", url)
    for key, value in values.items():
        if key == "backend.kernels":
            result.kernels = str(value)
        elif key.startswith("backend.options."):
            result.options[key.removeprefix("backend.options.")] = value
        elif key.startswith("backend."):
            raise UserError(
                f"grid key {key!r} cannot be swept: use backend.kernels or backend.options.<name>"
            )
    return result
