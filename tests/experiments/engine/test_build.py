"""What one engine is given: room for its adapters' ranks, and which rank it then stores and computes."""

from __future__ import annotations

import pytest
import torch

import baselines
from experiments import cli, notes
from experiments import config as schema
from experiments.config import BackendConfig
from experiments.engine.build import engine_args
from experiments.engine.setup import vllm_rank
from experiments.models import load_spec
from tessa.errors import UserError
from tessa.ops.slots import aligned


@pytest.fixture
def groups(composed):
    """Engine groups by variant of a run of all that serve LoRA."""

    def make(device: str, *overrides: str):
        chosen = "backends=[base,plain_lora,punica,'punica:stock',slora,bd_lora,tessa]"
        values = schema.build(composed("experiment=tp_scaling", chosen, *overrides))
        (point,) = cli.plan_run(values, device=device).points
        return {group.variant: group for group in point.groups}

    return make


def arguments(group) -> dict:
    engine = group.engine
    backend = BackendConfig(engine["backend"], engine["kernels"], dict(engine["options"]))
    spec = baselines.get_backend(group.backend)
    return engine_args(spec, backend, group.config, engine, "model", load_spec(group.config.model))


def ranks(found) -> dict[str, tuple[int | None, int | None]]:
    labels = {variant: group.cells[0].labels for variant, group in found.items()}
    return {variant: (named["adapter_rank"], named["served_rank"]) for variant, named in labels.items()}


def test_small_ranks_are_padded_on_a_gpu_and_by_vllms_own_layers(groups):
    cpu = groups("cpu", "model=small", "tp=2")
    assert ranks(cpu) == {
        "base": (None, None),
        "plain_lora": (4, 4),
        "punica": (4, 4),
        "punica:stock": (4, 8),
        "slora": (4, 4),
        "bd_lora": (6, 8),
        "tessa": (None, None),
    }
    gpu = groups("cuda", "model=small", "tp=2", "dtype=float32")
    assert {v: served for v, (_, served) in ranks(gpu).items() if served} == {
        "plain_lora": 4,
        "punica:stock": 8,
        "slora:stock": 8,
        "bd_lora:stock": 8,
    }
    assert ranks(groups("cuda", "model=small", "tp=2", "adapters.rank_equivalent=16"))["punica:stock"] == (
        16,
        16,
    )


def test_what_is_padded_is_said_before_the_run(composed):
    values = composed("experiment=tp_scaling", "model=small", "backends=[base,punica,tessa]")
    plan = cli.plan_run(schema.build(values), device="cuda")
    assert notes.notes(plan) == [
        "served at a larger rank than the adapters have, and so at more memory and compute: "
        "punica:stock at rank-equivalent 4 (8 for 4)"
    ]
    assert notes.notes(cli.plan_run(schema.build(values), device="cpu")) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [1, 5, 16])
def test_the_projects_layers_keep_the_rank_in_whole_16_bytes(groups, dtype, rank):
    found = groups("cpu", "model=small", f"dtype={dtype}", f"adapters.rank_equivalent={rank}")
    assert ranks(found)["punica"] == (rank, aligned(rank, getattr(torch, dtype)))


def test_both_factors_sharded_over_many_ranks_get_a_rank_that_divides(groups):
    found = groups("cuda", "model=llama3_1_70b", "tp=16", "engine.nnodes=2")
    assert arguments(found["slora:stock"])["max_lora_rank"] == 16
    assert arguments(found["punica:stock"])["max_lora_rank"] == 8
    assert ranks(found)["slora:stock"] == (4, 16)


@pytest.mark.parametrize(("rank", "shares", "expected"), [(4, 1, 8), (4, 8, 8), (9, 1, 16), (4, 5, 320)])
def test_vllm_has_a_few_ranks(rank, shares, expected):
    assert vllm_rank(rank, shares) == expected


def test_ranks_that_vllm_cannot_hold_are_refused():
    with pytest.raises(UserError, match=r"rank 513 .*largest max_lora_rank, 512: lower adapters"):
        vllm_rank(513)
    with pytest.raises(UserError, match=r"tp=3 cannot shard a rank of 4 .*Choose a tp that divides"):
        vllm_rank(4, 3)
