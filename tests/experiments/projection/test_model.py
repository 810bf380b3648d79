"""The analytic model: limits that must hold whatever the constants, and the counts per backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.projection.backends import AdapterLoad, bound_s, layer_work
from experiments.projection.collectives import all_gather_s, all_reduce_s
from experiments.projection.hardware import GPUS, gpu_named
from experiments.projection.ops import elementwise_s, matmul_bytes, matmul_s
from experiments.projection.runner import row
from experiments.projection.shapes import fused_linears, model_shape
from experiments.projection.step import Setting, step_time, with_prefill_share
from tessa.errors import UserError
from tessa.slices import ATTENTION

SETTING = Setting("llama-3.1-8b", "h100", 4)
LORA = ("punica", "slora", "bd_lora")


def test_layer_weights_match_the_published_sizes() -> None:
    shape = model_shape("llama-3.1-8b")
    total = shape.layers * shape.layer_weights + 2 * shape.vocab * shape.hidden
    assert total == pytest.approx(8.03e9, rel=0.01)
    assert model_shape("qwen3-32b").layers * model_shape("qwen3-32b").layer_weights == pytest.approx(
        31.2e9, rel=0.01
    )


def test_shards_of_all_ranks_cover_the_layer_and_kv_heads_are_replicated() -> None:
    shape = model_shape("llama-3.1-8b")
    elements = [sum(f.rank_out * f.rank_in for f in fused_linears(shape, tp)) * tp for tp in (1, 8, 16)]
    assert elements[0] == elements[1] == shape.layer_weights
    replicated = shape.hidden * 2 * shape.kv_heads * shape.head_dim
    assert elements[2] == shape.layer_weights + replicated


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("tokens", [1, 16, 512, 8192])
def test_a_product_is_never_faster_than_the_roofline(gpu: str, tokens: int) -> None:
    device = gpu_named(gpu)
    d_out, d_in = np.array([512, 4096, 28672]), np.array([4096, 1024, 8192])
    bytes_s = matmul_bytes(tokens, d_out, d_in) / device.memory_bandwidth
    flops_s = 2 * tokens * d_out * d_in / device.peak_flops
    assert np.all(matmul_s(device, tokens, d_out, d_in) > np.maximum(bytes_s, flops_s))


def test_large_products_and_rows_scale_with_their_size() -> None:
    gpu = gpu_named("h100")
    ratio = matmul_s(gpu, 16384, 28672, 8192) / matmul_s(gpu, 8192, 28672, 8192)
    assert ratio == pytest.approx(2, rel=0.05)
    assert elementwise_s(gpu, "act", 16384, 14336) > 1.8 * elementwise_s(gpu, "act", 8192, 14336)


def test_collectives_grow_with_bytes_and_vanish_on_one_rank() -> None:
    gpu = gpu_named("h100")
    assert all_reduce_s(gpu, 1, 1e6) == all_gather_s(gpu, 1, 1e6) == 0
    assert all_reduce_s(gpu, 8, 64e6) > 4 * all_reduce_s(gpu, 8, 8e6)
    small = 4096
    assert all_reduce_s(gpu, 8, small, custom=True) < all_reduce_s(gpu, 8, small, custom=False)
    with pytest.raises(UserError, match="no collective constants"):
        all_reduce_s(gpu, 64, small)


@pytest.mark.parametrize(
    ("backend", "kernels", "kinds"),
    [
        ("base", 0, []),
        ("merged", 0, []),
        ("base_enabled", 8, []),
        ("punica", 8, []),
        ("bd_lora", 8, []),
        ("slora", 8, ["all_gather", "all_reduce", "all_gather", "all_reduce"]),
        ("tessa", 4, []),
        ("tessa_wide", 4, []),
        ("tessa_segmented", 4, []),
    ],
)
def test_kernels_and_collectives_of_one_layer(backend: str, kernels: int, kinds: list[str]) -> None:
    load = AdapterLoad(tokens=32, distinct=8, rank=16)
    work = layer_work(backend, gpu_named("h100"), model_shape("llama-3.1-8b"), 4, load)
    assert work.kernels == kernels
    assert [kind for kind, _ in work.collectives] == kinds


def test_slora_gathers_fp32_inner_values_of_the_whole_rank() -> None:
    load = AdapterLoad(tokens=32, distinct=8, rank=16, modules=ATTENTION)
    work = layer_work("slora", gpu_named("h100"), model_shape("llama-3.1-8b"), 4, load)
    assert work.collectives == [("all_gather", 4 * 32 * 3 * 16), ("all_reduce", 4 * 32 * 16)]


def test_matched_budget_and_what_does_not_shrink_with_tp() -> None:
    shape, gpu = model_shape("llama-3.1-8b"), gpu_named("h100")
    load = AdapterLoad(tokens=32, distinct=8, rank=16)

    def read(backend: str, tp: int) -> float:
        return layer_work(backend, gpu, shape, tp, load).read_bytes

    parts = [p for f in fused_linears(shape, 1) for p in f.parts]
    budget = 2 * 8 * sum(16 * (p.d_in + p.d_out) for p in parts)
    for backend in (*LORA, "tessa_segmented"):
        assert read(backend, 1) == pytest.approx(budget)
    for backend in ("slora", "bd_lora", "tessa_segmented"):
        assert read(backend, 8) == pytest.approx(budget / 8, rel=0.01)
    assert read("punica", 8) > 3 * budget / 8
    assert bound_s(gpu, shape, 8, load) == pytest.approx(budget / 8 / gpu.memory_bandwidth)


def test_wide_reads_every_slot_and_one_adapter_stays_as_large() -> None:
    few, idle = replace(SETTING, distinct=4), replace(SETTING, distinct=4, resident=64)
    read = {s.resident: step_time("tessa_wide", s).adapter_read_bytes for s in (few, idle)}
    assert read[64] == pytest.approx(16 * read[None])
    first, *others = (
        step_time(b, s).one_adapter_bytes for b in ("tessa_wide", "tessa_segmented") for s in (few, idle)
    )
    assert others == pytest.approx([first] * 3)
    share = row("tessa_wide", idle)
    assert share["rank_parameter_share"] == pytest.approx(share["parameter_share"], rel=0.01)


def test_adapters_cost_something_and_no_structure_beats_the_bound() -> None:
    base = step_time("base", SETTING).total_s
    for backend in (*LORA, "tessa", "plain_lora"):
        time = step_time(backend, SETTING)
        assert time.total_s - base > time.bound_s
    assert step_time("merged", SETTING).total_s == base
    assert base < step_time("base_enabled", SETTING).total_s < step_time("punica", SETTING).total_s


def test_tessa_takes_the_mode_of_the_rule_that_serves_and_wide_pays_for_idle_slots() -> None:
    few, many = replace(SETTING, resident=8), replace(SETTING, resident=1024)
    for setting, mode in ((few, "wide"), (many, "segmented")):
        assert step_time("tessa", setting).mode == mode
        assert step_time("tessa", setting).total_s == step_time(f"tessa_{mode}", setting).total_s
    assert step_time("tessa_wide", many).total_s > 1.5 * step_time("tessa_wide", few).total_s
    assert step_time("tessa_segmented", many).total_s == step_time("tessa_segmented", few).total_s


def test_plain_lora_cannot_be_captured_and_is_bound_by_launches() -> None:
    one, many = (step_time("plain_lora", replace(SETTING, distinct=n)) for n in (1, 16))
    assert many.gap_s > 0
    assert many.total_s > 5 * one.total_s


def test_prefill_share_sets_the_prompt_tokens() -> None:
    setting = with_prefill_share(SETTING, 0.75)
    assert setting.prefill_tokens == 96
    assert step_time("base", setting).total_s > step_time("base", SETTING).total_s
    with pytest.raises(UserError, match="prefill share"):
        with_prefill_share(SETTING, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"tp": 3}, "does not divide"), ({"model": "x"}, "unknown model shape"), ({"gpu": "x"}, "unknown GPU")],
)
def test_wrong_settings_say_what_is_allowed(change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        step_time("base", replace(SETTING, **change))
    with pytest.raises(UserError, match="unknown backend"):
        step_time("lora", SETTING)
