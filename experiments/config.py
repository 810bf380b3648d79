"""Schema of a run, and the check that turns a composed Hydra config into typed objects.

Every group of `conf/` has a dataclass here, registered with Hydra under the name `schema`, so that an
unknown key or a wrong type is an error when the config is composed, not when it is used.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from baselines import REGISTRY
from tessa.errors import UserError
from tessa.slices import ALL_MODULES, PLACEMENTS

BACKEND_ORDER = tuple(REGISTRY)
"""The order of backends in every run, table and figure; names that are not listed follow, sorted."""

OFFSETS = ("first", "random")
"""Rules for generated adapters: the others of `tessa.offsets` choose by data, which random weights do not have."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
INTERLEAVE = ("resident", "restart", "off")
BASE_REFERENCE = ("stored", "rerun")
ONLY = ("failed",)
KINDS = ("serving", "projection", "layer_step", "quality")
MOST_ADDED_US = 100_000.0
EXECUTORS = ("mp", "ray")
LOGGERS = ("none", "wandb")
WANDB_MODES = ("auto", "offline", "online")


def backend_rank(name: str) -> tuple[int, str]:
    """Sort key that puts backends in their fixed order."""
    return (BACKEND_ORDER.index(name) if name in BACKEND_ORDER else len(BACKEND_ORDER), name)


@dataclass
class BackendConfig:
    name: str = MISSING
    kernels: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class ArrivalConfig:
    kind: str = "all_at_once"
    rate: float | None = None
    cv: float | None = None
    concurrency: int | None = None


@dataclass
class LengthConfig:
    kind: str = "fixed"
    value: int | None = None
    low: int | None = None
    high: int | None = None
    median: float | None = None
    sigma: float | None = None


@dataclass
class PopularityConfig:
    kind: str = "uniform"
    s: float | None = None
    ratio: float | None = None
    alpha: float | None = None


@dataclass
class TraceConfig:
    format: str = MISSING
    path: str = MISSING
    columns: dict[str, str] = field(default_factory=dict)
    time_unit: str | None = None
    window_start_s: float = 0.0
    window_s: float | None = None
    speedup: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    over: str = "clip"
    zero_length: str = "error"


@dataclass
class SLoraConfig:
    req_rate: float = MISSING
    duration: float = MISSING
    alpha: float = 1.0
    cv: float = 1.0
    input_range: list[int] = field(default_factory=lambda: [8, 512])
    output_range: list[int] = field(default_factory=lambda: [8, 512])


@dataclass
class WorkloadConfig:
    """The keys of `experiments.workload.spec.WorkloadSpec`; the number of adapters comes from `adapters`."""

    name: str = MISSING
    num_requests: int | None = None
    duration_s: float | None = None
    arrivals: ArrivalConfig | None = field(default_factory=ArrivalConfig)
    prompt_tokens: LengthConfig | None = field(default_factory=LengthConfig)
    output_tokens: LengthConfig | None = field(default_factory=LengthConfig)
    popularity: PopularityConfig | None = field(default_factory=PopularityConfig)
    base_fraction: float = 0.0
    min_token_id: int = 3  # the first ids are padding, start and end
    seed: int = 0
    trace: TraceConfig | None = None
    slora: SLoraConfig | None = None


@dataclass
class AdaptersConfig:
    name: str = MISSING
    count: int = 8
    rank_equivalent: int = 4
    ranks: list[int] | None = None
    target_modules: list[str] = field(default_factory=lambda: list(ALL_MODULES))
    max_resident: int | None = None
    placement: str = "across"
    offset: str = "random"
    shards: int = 8
    seed: int = 0


@dataclass
class GateConfig:
    enabled: bool = True
    requests: int = 6
    tolerance: float | None = None


@dataclass
class SloConfig:
    ttft_s: float | None = None
    tpot_s: float | None = None


@dataclass
class CapConfig:
    """Upper limits that shrink an experiment: they act on the workload and the grid, never on the timing."""

    requests: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    adapters: int | None = None
    rate: float | None = None
    grid_values: int | None = None


@dataclass
class MeasureConfig:
    name: str = MISSING
    rounds: int = 3
    warmup: bool = True
    interleave: str = "resident"
    base_reference: str = "stored"
    max_in_flight: int | None = None
    lag_tolerance_s: float = 0.05
    request_timeout_s: float = 120.0
    stall_timeout_s: float = 60.0
    start_timeout_s: float = 600.0
    gate: GateConfig = field(default_factory=GateConfig)
    slo: SloConfig = field(default_factory=SloConfig)
    caps: CapConfig = field(default_factory=CapConfig)


@dataclass
class EngineConfig:
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    enforce_eager: bool | None = None
    kv_cache_gib: float = 0.25
    gpu_memory_utilization: float = 0.9
    distributed_executor: str | None = None
    nnodes: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    added_latency_us: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoggerConfig:
    name: str = "none"
    mode: str = "auto"
    project: str = "tessa-bench"
    entity: str | None = None


@dataclass
class PathsConfig:
    results: str = "results"
    cache: str | None = None
    traces: str = "../shared/traces"


@dataclass
class SiteConfig:
    """What a Slurm site asks of its jobs; read by `conf/hydra/launcher/slurm.yaml`."""

    name: str = MISSING
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    cpus_per_gpu: int | None = None
    mem_gb_per_gpu: float | None = None
    setup: list[str] = field(default_factory=list)
    python: str | None = None
    sbatch: dict[str, Any] = field(default_factory=dict)


@dataclass
class RunConfig:
    """One composed run: an experiment over its grid at one tensor-parallel degree."""

    name: str | None = None
    kind: str = "serving"
    description: str = ""
    tp: int = 1
    dtype: str = "auto"
    backend: BackendConfig | None = None
    backends: list[str] | None = None
    url: str | None = None
    weights: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    adapters: AdaptersConfig = field(default_factory=AdaptersConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    site: SiteConfig = field(default_factory=SiteConfig)
    grid: dict[str, Any] = field(default_factory=dict)
    study: dict[str, Any] = field(default_factory=dict)
    dry_run: bool = False
    only: str | None = None
    force: bool = False
    allow_sha_change: bool = False


SCHEMAS: dict[str, type] = {
    "backend": BackendConfig,
    "workload": WorkloadConfig,
    "adapters": AdaptersConfig,
    "measure": MeasureConfig,
    "logger": LoggerConfig,
    "paths": PathsConfig,
    "site": SiteConfig,
}


def _per_node(ranks: int, nodes: int | None) -> int:
    """Ranks of an engine on each of its machines, rounded up; `check_nodes` refuses what does not divide."""
    return -(-int(ranks) // int(nodes or 1))


def register() -> None:
    """Registers the schemas with Hydra, and `${per_node:ranks,nodes}`; must run before a config is composed.
    Running twice is harmless."""
    OmegaConf.register_new_resolver("per_node", _per_node, replace=True)
    store = ConfigStore.instance()
    for group, node in SCHEMAS.items():
        store.store(group=group, name="schema", node=node)


def build(values: DictConfig | dict[str, Any]) -> RunConfig:
    """Checks a composed config (or a plain dict of one) and returns it typed.

    Raises UserError for an unknown key, a wrong type, or a value out of range.
    """
    plain = OmegaConf.to_container(values, resolve=True) if isinstance(values, DictConfig) else values
    try:
        merged = OmegaConf.merge(OmegaConf.structured(RunConfig), plain)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise UserError(explain(error)) from error
    assert isinstance(config, RunConfig)
    if config.weights is not None:  # short for model.weights
        config.model = {**config.model, "weights": config.weights}
    check(config)
    return config


def explain(error: Exception) -> str:
    """One readable message from an OmegaConf or Hydra error."""
    cause = error.__cause__ if error.__cause__ is not None else error
    text = str(cause)
    message = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    found = re.search(r"full_key: (\S+)", text)
    key = found.group(1) if found else getattr(cause, "full_key", None)
    where = re.match(r"In '([^']+)'", message)
    place = f" in conf/{where.group(1)}.yaml" if where else ""
    if match := re.search(r"Key '([^']+)' (?:is )?not in", text):
        key = key or match.group(1)
        known = _known_keys(key)
        return f"unknown setting {key!r}{place}{_suggest(match.group(1), known, 'settings there')}"
    if "is not a ListConfig" in message:
        return f"{key} takes a list, such as {key}=[...]; a single value stands in brackets too"
    if isinstance(cause, ValidationError) and (match := _CONVERSION.search(message)):
        value, kind = match.groups()
        return f"{key}={value} is not {_KINDS.get(kind.lower(), kind)}; give such a value"
    return f"{key}: {message}" if key and key not in message else message


_CONVERSION = re.compile(r"Value '(.*)' (?:of type '\w+' could not be converted to|is not a valid) (\w+)")
_KINDS = {"integer": "a whole number", "float": "a number", "bool": "true or false"}


def _known_keys(full_key: str) -> list[str]:
    """The settings beside `full_key` in the schema; empty where the schema leaves the keys open."""
    node: Any = OmegaConf.structured(RunConfig)
    for part in full_key.split(".")[:-1]:
        node = node.get(part) if isinstance(node, DictConfig) and part in node else None
        if node is None and part in SCHEMAS:
            node = OmegaConf.structured(SCHEMAS[part])
    return sorted(str(key) for key in node) if isinstance(node, DictConfig) else []


def _suggest(given: str, known: list[str], what: str) -> str:
    if not known:
        return ""
    close = difflib.get_close_matches(given, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Known {what}: {', '.join(known)}"


def unknown(what: str, value: Any, known: list[str]) -> str:
    """The message for a value that is not among the known ones."""
    return f"{what}={value} is not known{_suggest(str(value), known, 'values')}"


def one_of(what: str, value: Any, allowed: tuple[str, ...] | list[str]) -> None:
    """Raises UserError unless `value` is among `allowed`."""
    if value not in allowed:
        raise UserError(unknown(what, value, list(allowed)))


def check(config: RunConfig) -> None:
    """Range checks that the types cannot express. Raises UserError."""
    one_of("kind", config.kind, KINDS)
    one_of("dtype", config.dtype, DTYPES)
    one_of("measure.interleave", config.measure.interleave, INTERLEAVE)
    one_of("measure.base_reference", config.measure.base_reference, BASE_REFERENCE)
    one_of("logger.name", config.logger.name, LOGGERS)
    one_of("logger.mode", config.logger.mode, WANDB_MODES)
    if config.only is not None:
        one_of("only", config.only, ONLY)
    for key, value, least in (
        ("tp", config.tp, 1),
        ("measure.rounds", config.measure.rounds, 1),
        ("measure.gate.requests", config.measure.gate.requests, 1),
        ("adapters.count", config.adapters.count, 1),
        ("adapters.rank_equivalent", config.adapters.rank_equivalent, 1),
        ("adapters.shards", config.adapters.shards, 1),
        ("engine.max_num_seqs", config.engine.max_num_seqs, 1),
    ):
        if value < least:
            raise UserError(f"{key}={value} is too small: give {least} or more")
    added = config.engine.added_latency_us
    if added is not None and not 0.0 <= added <= MOST_ADDED_US:
        raise UserError(f"engine.added_latency_us={added:g} must lie between 0 and {MOST_ADDED_US:g}")
    if added is not None and config.tp < 2:
        raise UserError(f"engine.added_latency_us={added:g} needs collectives to add to: give tp=2 or more")
    check_nodes(config)
    if not 0.0 <= config.workload.base_fraction <= 1.0:
        raise UserError(f"workload.base_fraction={config.workload.base_fraction} must lie between 0 and 1")
    if not config.adapters.target_modules:
        raise UserError("adapters.target_modules is empty: name at least one of " + ", ".join(ALL_MODULES))
    one_of("adapters.placement", config.adapters.placement, PLACEMENTS)
    one_of("adapters.offset", config.adapters.offset, OFFSETS)
    ranks = config.adapters.ranks
    if ranks is not None and (not ranks or min(ranks) < 1):
        raise UserError(
            f"adapters.ranks={ranks} must be a list of ranks of 1 or more, or null for rank_equivalent"
        )
    for module in config.adapters.target_modules:
        one_of("adapters.target_modules", module, ALL_MODULES)
    if config.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", config.name):
        raise UserError(
            f"experiment name {config.name!r} cannot be a folder name: use letters, digits, '_', '-', '.'"
        )


def check_nodes(config: RunConfig) -> None:
    """How the ranks are spread over machines. Raises UserError."""
    nodes = config.engine.nnodes if config.engine.nnodes is not None else 1
    if config.engine.extra.get("pipeline_parallel_size", 1) not in (1, "1"):
        raise UserError(
            "engine.extra.pipeline_parallel_size: stages are not supported, since vLLM 0.32 ends on prompt "
            "log-probabilities with them and so cannot be gated; use tp, over several machines with engine.nnodes"
        )
    if config.engine.distributed_executor is not None:
        one_of("engine.distributed_executor", config.engine.distributed_executor, EXECUTORS)
    if nodes < 1 or config.tp % nodes:
        raise UserError(
            f"engine.nnodes={nodes} must divide the {config.tp} ranks of tp={config.tp}: every machine runs as many"
        )
    if nodes > 1 and config.engine.distributed_executor == "ray":
        raise UserError(
            f"engine.nnodes={nodes} and engine.distributed_executor=ray exclude each other: Ray spreads the "
            "ranks over its own cluster. Leave one of them out."
        )
