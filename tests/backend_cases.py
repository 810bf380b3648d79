"""Engines of every backend with mixed adapters, and what must hold of each, for tests/experiments/engine/test_backends.

Adapters differ in one batch: ranks 8 to 64 (or the rank-equivalents), attention alone, MLP alone, all projections; for
TESSA also placements and offsets.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tests_support import model_values
from warm import WarmEngine

from experiments import models
from experiments.adapters import AdapterSet, ensure_adapters
from experiments.config import GateConfig, MeasureConfig, RunConfig
from experiments.engine import gate as gating
from experiments.engine.build import build_setup
from experiments.engine.gate import GateRequest
from experiments.engine.parent import EngineProcess
from experiments.engine.setup import EngineSetup
from tessa.budget import matched_bd_rank
from tessa.ops.gpu_schedule import MODES
from tessa.slices import ALL_MODULES, ATTENTION

MODEL = "tiny_gqa"  # 8 heads over 2 KV heads: at TP 4 two ranks share each KV head
SPEC = models.load_named(MODEL)
LORA = ("plain_lora", "punica", "slora", "bd_lora")
WITHOUT_ADAPTERS = ("base", "base_enabled", "merged")
SLOTS = 4
MLP = ("gate_proj", "up_proj", "down_proj")
MIXTURE: list[dict[str, Any]] = [
    {"rank": 8, "modules": ALL_MODULES, "placement": "across", "offset": "random"},
    {"rank": 16, "modules": ALL_MODULES, "placement": "along", "offset": "first"},
    {"rank": 32, "modules": ATTENTION, "placement": "along", "offset": "random"},
    {"rank": 64, "modules": MLP, "placement": "across", "offset": "first"},
]
# TESSA's products are wide only where all slots of a layer hold one placement, so one placement fills the slots first.
PLACED = [
    MIXTURE[0],
    MIXTURE[3],
    {"rank": 32, "modules": ATTENTION, "placement": "across", "offset": "first"},
    {"rank": 16, "modules": ALL_MODULES, "placement": "across", "offset": "first"},
    MIXTURE[1],
    MIXTURE[2],
]


def mixture(cache: Path, form: str, tp: int, kinds: Sequence[dict[str, Any]] = MIXTURE) -> list[str]:
    """Folders of the adapters in one format, kept in the cache so that their reference is computed once."""
    shapes = SPEC.linear_shapes()
    folders = []
    for i, one in enumerate(kinds):
        own = {m: s for m, s in shapes.items() if m.rsplit(".", 1)[-1] in one["modules"]}
        rank = matched_bd_rank(own, one["rank"], tp) if form == "bd_lora" else one["rank"]
        if form == "tessa":
            rank = one["rank"] // 4  # slices of a quarter of these small layers would overlap all of them
        blocks = tp if form == "bd_lora" else 1
        adapters = AdapterSet(
            form,
            own,
            (rank,),
            placement=one["placement"],
            offset=one["offset"],
            shards=4,
            blocks=blocks,
            seed=i,
        )
        folders += map(str, ensure_adapters(adapters, cache))
    return folders


def requests_over(*adapters: int) -> list[GateRequest]:
    """The gate's batch over these adapters, with requests without one in between."""
    made = gating.gate_requests(len(adapters), SPEC.vocab_size, 3, len(adapters))
    return [r if r.adapter is None else replace(r, adapter=adapters[r.adapter]) for r in made]


def setup_for(
    backend: str,
    tp: int,
    cache: Path,
    folders: list[str] | None = None,
    batch: Sequence[GateRequest] | None = None,
    **changes: Any,
) -> EngineSetup:
    """An engine as a run would start it; with ``folders`` in place of its adapters, and a gate over all of them or over
    ``batch``."""
    engine = {
        "backend": backend,
        "kernels": changes.pop("kernels", "auto"),
        "options": changes.pop("options", {}),
        "tp": tp,
        "dtype": "float32",
        "device": "cpu",
        "adapters": {
            "count": 4,
            "max_resident": SLOTS,
            "rank_equivalent": 96,  # room for the largest of MIXTURE, in blocks too
            "target_modules": list(ALL_MODULES),
            "placement": "across",
            "offset": "first",
            "shards": 8,
            "seed": 0,
        },
        "engine": {"max_num_seqs": 16, "kv_cache_gib": 0.0625, "max_model_len": 256, **changes},
    }
    measure = MeasureConfig(name="test", gate=GateConfig(enabled=folders is None))
    config = RunConfig(name="test", tp=tp, model=model_values(MODEL), measure=measure)
    setup = build_setup(config, engine, cache)
    if folders is None:
        return setup
    requests = requests_over(*range(len(folders))) if batch is None else batch
    expected = gating.reference(setup.model, folders, requests, "cpu", cache)
    gate = {"requests": [asdict(r) for r in requests], "expected": expected}
    return dataclasses.replace(setup, adapters=tuple(folders), gate=gate)


class Running:
    """An engine for the length of a block."""

    def __init__(self, setup: EngineSetup, log: Path) -> None:
        self.engine = WarmEngine(setup, log)

    def __enter__(self) -> EngineProcess:
        try:
            self.engine.start(600)
        except Exception as error:
            self.engine.stop()
            tail = self.engine.log_path.read_text()[-3000:]
            raise AssertionError(f"{error}\n{tail}") from error
        return self.engine

    def __exit__(self, *_: object) -> None:
        self.engine.stop()


def expected_collectives(backend: str, tp: int) -> tuple[int, int]:
    """All-reduces and all-gathers of one step's forward pass.

    The base model all-reduces the embedding and, in each layer, o and down. S-LoRA adds an all-reduce for each of
    o and down and an all-gather for each fused column-parallel layer (vLLM's fully sharded layers).
    """
    if tp == 1:
        return 0, 0
    reduces, gathers = 1 + 2 * SPEC.num_layers, 0
    if backend == "slora":
        reduces, gathers = reduces + 2 * SPEC.num_layers, 2 * SPEC.num_layers
    return reduces, gathers


def check_collectives(counters: dict[str, Any], backend: str, tp: int) -> None:
    expected = expected_collectives(backend, tp)
    assert (counters["all_reduces_per_step"], counters["all_gathers_per_step"]) == expected
    assert counters["collectives_per_step"] == sum(expected)


def check_lora(backend: str, tp: int, cache: Path, folder: Path) -> None:
    """Outputs equal merged weights; collectives, products and memory are those of the backend's structure."""
    form = "bd_lora" if backend == "bd_lora" else "lora"
    with Running(setup_for(backend, tp, cache, mixture(cache, form, tp)), folder / "log") as engine:
        result = engine.gate({})
        counters = engine.counters()
    assert result["passed"], result
    assert result["max_abs_error"] < 1e-4
    check_collectives(counters, backend, tp)
    assert counters["adapter_kernels_per_step"] > 0
    assert counters["adapter_bytes_per_rank"] > 0
    if backend in ("punica", "slora"):
        # Shrink once per fused layer, expand once per projection: 4 + 7 products.
        assert counters["adapter_gemms_per_step"] == 11 * SPEC.num_layers, counters


def check_without_adapters(backend: str, tp: int, cache: Path, folder: Path) -> None:
    """Outputs equal the reference; collectives are the base model's, whether adapters are possible or not."""
    with Running(setup_for(backend, tp, cache), folder / "log") as engine:
        result = engine.gate({})
        counters = engine.counters()
    assert result["passed"], result
    assert result["max_abs_error"] < 1e-4
    check_collectives(counters, backend, tp)
    assert (counters["adapter_bytes_per_rank"] > 0) == (backend == "base_enabled")


def check_tessa(tp: int, cache: Path, folder: Path) -> None:
    """As `check_lora` under every schedule, on adapters of both placements and of one; the gate sees a wrong delta."""
    sound = mixture(cache, "tessa", tp, PLACED)
    served = [*sound, str(off_by_a_tenth(Path(sound[1]), folder / "broken"))]
    both, one, broken = requests_over(0, 1, 4, 5), requests_over(0, 1, 2, 3), requests_over(0, 1)
    setup = setup_for("tessa", tp, cache, sound, [*both, *one, *broken])
    assert setup.gate is not None
    right = iter(setup.gate["expected"])
    expected = [[next(right) for _ in batch] for batch in (both, one, broken)]
    counted = {}
    with Running(dataclasses.replace(setup, adapters=tuple(served)), folder / "log") as engine:
        for schedule in MODES:
            engine.rpc("tessa_set_schedule", schedule)
            for requests, answers in zip((both, one), expected, strict=False):
                result = judge(engine, requests, answers)
                assert result["passed"], (schedule, result)
            counted[schedule] = engine.counters()
        wrong = [replace(r, adapter=len(sound)) if r.adapter == 1 else r for r in broken]
        result = judge(engine, wrong, expected[2])
    assert not result["passed"]
    assert f"with adapter {len(sound)} is off the merged weights" in result["detail"]
    for counters in counted.values():
        check_collectives(counters, "tessa", tp)
        assert counters["adapter_kernels_per_step"] > 0
        assert counters["adapter_bytes_per_rank"] > 0
    # The counted step's adapters share a placement: one product for each fused layer, or columns of the base's own.
    assert counted["segmented"]["adapter_gemms_per_step"] == 4 * SPEC.num_layers
    assert counted["wide"]["adapter_gemms_per_step"] == 0


def judge(
    engine: EngineProcess, requests: Sequence[GateRequest], expected: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The gate's judgement on a batch of one's own."""
    plain = engine._call("probe", requests=[asdict(replace(r, adapter=None)) for r in requests])["outputs"]
    mixed = engine._call("probe", requests=[asdict(r) for r in requests])["outputs"]
    return gating.compare(requests, mixed, expected, plain, gating.TOLERANCE["float32"], True)


def off_by_a_tenth(folder: Path, target: Path) -> Path:
    """A copy of an adapter in which one delta is a tenth larger."""
    shutil.copytree(folder, target)
    weights = load_file(target / "adapter_model.safetensors")
    key = next(k for k in weights if "down_proj" in k)
    weights[key] = weights[key] * 1.1
    save_file(weights, target / "adapter_model.safetensors", metadata={"format": "pt"})
    return target
