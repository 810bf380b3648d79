"""What TESSA's layers reserve for fixed buffers, without an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from experiments import models
from experiments.config import MeasureConfig, RunConfig
from experiments.engine.build import adapter_set, engine_args
from tessa.offsets import plan_slices
from tessa.ops.schedule import Schedule
from tessa.slices import ALL_MODULES
from tessa.spec import SPEC
from tessa.vllm.hook import TessaHook
from tessa.vllm.layers import LayerOptions, Projection, TessaLinear


@pytest.mark.parametrize("placement", ["across", "along"])
@pytest.mark.parametrize("rank", [1, 2, 4, 5, 8, 16])
def test_every_adapter_of_the_largest_rank_fits_its_slot(placement: str, rank: int) -> None:
    """Rounding in one kind of layer may widen another kind's slices (`widths_for`)."""
    shapes = {
        "l.q_proj": (512, 512),
        "l.gate_proj": (1408, 512),
        "l.up_proj": (1408, 512),
        "l.down_proj": (512, 1408),
    }
    slices = plan_slices(shapes, rank=rank, placement=placement, shards=8)
    for parallel, names in (("column", ("gate_proj", "up_proj")), ("row", ("down_proj",))):
        layer = TessaLinear()
        layer.parallel, layer.tp_size = parallel, 1
        layer.options = LayerOptions(Schedule(), True, placement, rank, 8)
        layer.parts = tuple(Projection(*shapes[f"l.{name}"], (0, 0)) for name in names)
        axis = slices[f"l.{names[0]}"].axis
        widths = [slices[f"l.{name}"].width for name in names]
        assert (max(widths) if axis == "in" else sum(widths)) <= layer.reserved_rows(axis)


def test_an_engine_reserves_room_for_the_placement_of_its_adapters() -> None:
    model = models.load_named("tiny_gqa")
    engine = {
        "backend": "tessa", "tp": 1, "dtype": "float32", "device": "cpu",
        "adapters": {
            "count": 2, "max_resident": 2, "rank_equivalent": 8, "target_modules": list(ALL_MODULES),
            "placement": "along", "offset": "first", "shards": 4, "seed": 0,
        },
        "engine": {"max_num_seqs": 4, "kv_cache_gib": 0.1},
    }  # fmt: skip
    config = RunConfig(name="test", measure=MeasureConfig(name="test"))
    backend = SimpleNamespace(kernels="default", options={"schedule": "auto"})
    arguments = engine_args(SPEC, backend, config, engine, "model", model)
    options = arguments["additional_config"]
    made = adapter_set(SPEC, engine, model)
    assert (options["placement"], options["shards"]) == (made.placement, made.shards) == ("along", 4)
    hook = TessaHook({**options, "products": "static"}, SimpleNamespace(lora_config=object()))
    assert (hook.layer_options.placement, hook.layer_options.shards) == ("along", 4)
    assert hook.layer_options.static
