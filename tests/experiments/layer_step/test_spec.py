"""Points, sizes and budgets of the layer step; nothing here runs a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.layer_step.geometry import lora_geometry, slice_geometry
from experiments.layer_step.spec import LayerStepSpec, Point, cell_id, points, scaled_shape
from experiments.projection.shapes import COLUMN, fused_linears, model_shape
from tessa.errors import UserError

SHAPE = model_shape("llama-3.1-8b")


def test_every_point_is_there_once_and_the_tp_sweep_comes_first() -> None:
    spec = LayerStepSpec(models=("llama-3.1-8b",))
    planned = points(spec)
    bare = [replace(point, sweep="") for point in planned]
    assert len(set(bare)) == len(bare)
    assert [(p.phase, p.tp) for p in planned[:8]] == [
        (f, t) for f in ("decode", "prefill") for t in (8, 4, 2, 1)
    ]
    assert {p.sequences for p in planned if p.sweep == "batch"} == set(spec.batches) - {spec.batch}
    assert {p.resident for p in planned if p.sweep == "resident"} == {16, 32, 64}
    assert all(p.distinct <= p.sequences and p.distinct <= p.resident for p in planned)
    assert all(p.resident == p.distinct for p in planned if p.sweep == "distinct")


def test_a_batch_has_at_most_one_adapter_a_sequence() -> None:
    assert [
        p.distinct for p in points(LayerStepSpec(models=("qwen3-32b",), batches=(1, 4))) if p.sweep == "batch"
    ] == [
        1,
        4,
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backends": ("tesla",)}, "give a list of base, "),
        ({"backends": "tessa"}, "give a list"),
        ({"backends": ("tessa", "slora")}, r"\['tessa', 'slora'\] lacks base.*add base"),
        ({"backends": ("base", "tessa", "tessa")}, "names tessa twice"),
        ({"models": ()}, "models is empty"),
        ({"device": "gpu"}, "allowed: auto, cpu, cuda"),
        ({"models": ("llama",)}, "unknown model shape"),
        ({"tps": (3,)}, "allowed: 1, 2, 4"),
        ({"batch": 0}, "give 1 or more"),
        ({"scale": 0}, "scale=0 is too small"),
        ({"ranks": (8, 0)}, "ranks=0 is too small"),
        ({"base_fraction": 1.0}, r"\[0, 1\)"),
    ],
)
def test_a_mistake_names_what_is_allowed(change: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        LayerStepSpec(**change)


def test_a_scaled_shape_keeps_its_heads() -> None:
    small = scaled_shape("llama-3.1-8b", 8)
    assert (small.hidden, small.head_dim, small.ffn) == (512, 16, 1792)
    assert (small.heads, small.kv_heads) == (SHAPE.heads, SHAPE.kv_heads)
    with pytest.raises(UserError, match="scale=3"):
        scaled_shape("llama-3.1-8b", 3)


def test_the_cell_changes_with_the_point_the_backend_and_the_settings() -> None:
    point = Point("llama-3.1-8b", 2, "decode", 8, 16, 16, 3, 3)
    cells = {
        cell_id(point, "punica", {"seed": 0}),
        cell_id(replace(point, rank=8), "punica", {"seed": 0}),
        cell_id(point, "slora", {"seed": 0}),
        cell_id(point, "punica", {"seed": 1}),
    }
    assert len(cells) == 4
    assert cell_id(replace(point, sweep="rank"), "punica", {"seed": 0}) in cells


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_factors_shard_as_their_structure_says(tp: int) -> None:
    """Column-parallel: Punica's A is whole, S-LoRA's a share; row-parallel: Punica's B is whole, S-LoRA's a share."""
    for linear in fused_linears(SHAPE, tp):
        whole, sharded = (lora_geometry(name, linear, 16, tp) for name in ("punica", "slora"))
        assert whole.inner == whole.whole == sharded.whole == 16
        assert whole.outs == tuple(part.rank_out for part in linear.parts)
        if linear.kind == COLUMN:
            assert sharded.inner == 16 // tp
            assert sharded.gathered == (tp > 1)
            assert sharded.outs == whole.outs
        else:
            assert sharded.inner == 16
            assert sharded.outs == (SHAPE.hidden // tp,)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_structures_spend_loras_parameters(tp: int) -> None:
    linears = fused_linears(SHAPE, tp)
    spent = sum(16 * (part.d_in + part.d_out) for linear in linears for part in linear.parts) / tp
    block = sum(lora_geometry("bd_lora", linear, 16, tp).params for linear in linears)
    assert block == pytest.approx(spent, rel=0.15)  # a block's rank is a small whole number
    assert sum(slice_geometry(linear, 16).params for linear in linears) == pytest.approx(spent, rel=0.05)
    replicated = sum(lora_geometry("punica", linear, 16, tp).params for linear in linears)
    assert (replicated > 1.2 * spent) == (tp > 1)


def test_one_rank_makes_all_lora_structures_the_same() -> None:
    for linear in fused_linears(SHAPE, 1):
        same = {lora_geometry(name, linear, 16, 1) for name in ("plain_lora", "punica", "slora", "bd_lora")}
        assert len(same) == 1
