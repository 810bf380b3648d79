"""Every backend on the real engine: outputs against merged weights, counters against what its structure says.

One engine start serves all checks of a (backend, TP degree). Adapters differ in one batch: ranks 8 to 64 (or the
rank-equivalents), attention alone, MLP alone, all projections; for TESSA also placements and offsets.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tests_support import model_values

from experiments import models
from experiments.adapters import AdapterSet, ensure_adapters
from experiments.config import ALL_MODULES, GateConfig, MeasureConfig, RunConfig
from experiments.engine import gate as gating
from experiments.engine.build import build_setup
from experiments.engine.parent import EngineProcess
from experiments.engine.setup import EngineSetup
from tessa.budget import matched_bd_rank

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

MODEL = "tiny_gqa"  # 8 heads over 2 KV heads: at TP 4 two ranks share each KV head
ADAPTED = ("plain_lora", "punica", "slora", "bd_lora", "tessa")
LAYERS = models.load_named(MODEL).num_layers
MIXTURE: list[dict[str, Any]] = [
    {"rank": 8, "modules": ALL_MODULES, "placement": "across", "offset": "random"},
    {"rank": 16, "modules": ALL_MODULES, "placement": "along", "offset": "first"},
    {
        "rank": 32,
        "modules": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "placement": "along",
        "offset": "random",
    },
    {"rank": 64, "modules": ("gate_proj", "up_proj", "down_proj"), "placement": "across", "offset": "first"},
]


def mixture(cache: Path, form: str, tp: int) -> list[str]:
    """Folders of the four adapters in one format, kept in the cache so that their reference is computed once."""
    shapes = models.load_named(MODEL).linear_shapes()
    folders = []
    for i, one in enumerate(MIXTURE):
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


def setup_for(
    backend: str, tp: int, cache: Path, folders: list[str] | None = None, **changes: Any
) -> EngineSetup:
    """An engine as a run would start it, with the adapters exchanged for ``folders``."""
    spec = models.load_named(MODEL)
    engine = {
        "backend": backend,
        "kernels": changes.pop("kernels", "auto"),
        "options": changes.pop("options", {}),
        "tp": tp,
        "dtype": "float32",
        "device": "cpu",
        "adapters": {
            "count": 4,
            "max_resident": 4,
            "rank_equivalent": 96,  # room for the largest of MIXTURE, in blocks too
            "target_modules": list(ALL_MODULES),
            "placement": changes.pop("placement", "across"),
            "offset": "first",
            "shards": 8,
            "seed": 0,
        },
        "engine": {"max_num_seqs": 16, "kv_cache_gib": 0.0625, "max_model_len": 256, **changes},
    }
    measure = MeasureConfig(name="test", gate=GateConfig(enabled=folders is None))
    config = RunConfig(name="test", tp=tp, model=model_values(MODEL), measure=measure)
    setup = dataclasses.replace(build_setup(config, engine, cache), fork=True)
    if folders is None:
        return setup
    requests = gating.gate_requests(len(folders), spec.vocab_size, 3, len(folders))
    expected = gating.reference(setup.model, folders, requests, "cpu", cache)
    gate = {"requests": [dataclasses.asdict(r) for r in requests], "expected": expected}
    return dataclasses.replace(setup, adapters=tuple(folders), gate=gate)


class Running:
    """An engine for the length of a block."""

    def __init__(self, setup: EngineSetup, log: Path) -> None:
        self.engine = EngineProcess(setup, log)

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


def expected_collectives(backend: str, tp: int, layers: int) -> tuple[int, int]:
    """All-reduces and all-gathers of one step's forward pass.

    The base model all-reduces the embedding and, in each layer, o and down. S-LoRA adds an all-reduce for each of
    o and down and an all-gather for each fused column-parallel layer (vLLM's fully sharded layers).
    """
    if tp == 1:
        return 0, 0
    reduces, gathers = 1 + 2 * layers, 0
    if backend == "slora":
        reduces, gathers = reduces + 2 * layers, 2 * layers
    return reduces, gathers


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("backend", ADAPTED)
def test_adapters_equal_merged_weights_and_cost_what_their_structure_says(
    backend: str, tp: int, cache: Path, tmp_path: Path
) -> None:
    form = {"bd_lora": "bd_lora", "tessa": "tessa"}.get(backend, "lora")
    setup = setup_for(backend, tp, cache, mixture(cache, form, tp))
    with Running(setup, tmp_path / "log") as engine:
        schedules = ["wide", "segmented", "auto"] if backend == "tessa" else [None]
        for schedule in schedules:
            if schedule is not None:
                engine.rpc("tessa_set_schedule", schedule)
            result = engine.gate({})
            assert result["passed"], (schedule, result)
            assert result["max_abs_error"] < 1e-4
        counters = engine.counters()
    assert (counters["all_reduces_per_step"], counters["all_gathers_per_step"]) == expected_collectives(
        backend, tp, LAYERS
    )
    assert counters["collectives_per_step"] == sum(expected_collectives(backend, tp, LAYERS))
    assert counters["adapter_kernels_per_step"] > 0
    assert counters["adapter_bytes_per_rank"] > 0
    if backend == "tessa":
        # One product for each of the four fused layers and each axis that the mixture slices.
        assert counters["adapter_gemms_per_step"] >= 4 * LAYERS
    if form == "lora" and backend != "plain_lora":
        # Shrink once per fused layer, expand once per projection: 4 + 7 products.
        per_layer = counters["adapter_gemms_per_step"] / LAYERS
        assert per_layer == (4 + 7 if backend == "punica" or tp == 1 else 11), counters


@pytest.mark.parametrize("backend", ["base", "base_enabled", "merged"])
def test_backends_without_adapters(backend: str, cache: Path, tmp_path: Path) -> None:
    with Running(setup_for(backend, 1, cache), tmp_path / "log") as engine:
        result = engine.gate({})
        assert result["passed"], result
        assert result["max_abs_error"] < 1e-4
        counters = engine.counters()
    assert counters["collectives_per_step"] == 0
    assert (counters["adapter_bytes_per_rank"] > 0) == (backend == "base_enabled")


@pytest.mark.parametrize("placement", ["across", "along"])
def test_the_gpus_fixed_buffers_give_the_same_outputs(placement: str, cache: Path, tmp_path: Path) -> None:
    """The products that a GPU uses, on the CPU's implementation of the same ops."""
    made = zip(mixture(cache, "tessa", 2), MIXTURE, strict=True)
    folders = [folder for folder, one in made if one["placement"] == placement]
    setup = setup_for("tessa", 2, cache, folders, placement=placement)
    arguments = dict(setup.engine_args)
    arguments["additional_config"] = {**arguments["additional_config"], "products": "static"}
    with Running(dataclasses.replace(setup, engine_args=arguments), tmp_path / "log") as engine:
        result = engine.gate({})
    assert result["passed"], result


def test_bfloat16_stays_within_its_tolerance(cache: Path, tmp_path: Path) -> None:
    setup = setup_for("tessa", 1, cache, mixture(cache, "tessa", 1))
    arguments = {**setup.engine_args, "dtype": "bfloat16"}
    with Running(dataclasses.replace(setup, engine_args=arguments), tmp_path / "log") as engine:
        result = engine.gate({})
    assert result["passed"], result
    assert result["max_abs_error"] > 1e-4, "bfloat16 was not used"


def test_a_broken_adapter_fails_the_gate(cache: Path, tmp_path: Path) -> None:
    """The engine serves a copy of adapter 1 in which one delta is a tenth larger than the reference's."""
    folders = mixture(cache, "tessa", 1)
    setup = setup_for("tessa", 1, cache, folders)
    broken = tmp_path / "broken"
    shutil.copytree(folders[1], broken)
    weights = load_file(broken / "adapter_model.safetensors")
    key = next(k for k in weights if "down_proj" in k)
    weights[key] = weights[key] * 1.1
    save_file(weights, broken / "adapter_model.safetensors", metadata={"format": "pt"})
    served = (folders[0], str(broken), *folders[2:])
    with Running(dataclasses.replace(setup, adapters=served), tmp_path / "log") as engine:
        result = engine.gate({})
    assert not result["passed"]
    assert "with adapter 1 is off the merged weights" in result["detail"]


def test_vllms_own_cpu_ops_are_caught_by_the_gate(cache: Path, tmp_path: Path) -> None:
    """vLLM gives a request without adapter the last slot's adapter when all slots are taken."""
    setup = setup_for("punica", 1, cache, mixture(cache, "lora", 1), kernels="stock")
    with Running(setup, tmp_path / "log") as engine:
        result = engine.gate({})
    assert not result["passed"]
    assert "without adapter" in result["detail"]
    assert json.loads(json.dumps(result)) == result
