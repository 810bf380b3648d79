"""A stack of transformer layers with one rank's weights, and one step through it.

Every layer: add and RMS norm, fused q/k/v, attention, o, add and RMS norm, fused gate/up, SiLU, down. Decode reads
a KV cache of the point's length, of which the step writes the last position; prefill attends causally within each
prompt. Rotary embeddings, the collectives and the output head are left out; they are the same for every backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.layer_step.fused import add_rms_norm, silu_mul
from experiments.layer_step.spec import Point
from experiments.projection.shapes import FusedLinear, ModelShape, fused_linears

LinearCall = Callable[[int, str, Tensor], Tensor]
NAMES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


@dataclass(frozen=True)
class Heads:
    """Attention heads on one rank: `query` heads in `kv` groups of `dim` each."""

    query: int
    kv: int
    dim: int


@dataclass
class Layer:
    weights: dict[str, Tensor]  # per fused product [rank_out, rank_in]
    norms: tuple[Tensor, Tensor]


@dataclass
class Stack:
    """Weights of some layers on one rank, which the points of one model and TP degree share."""

    shape: ModelShape
    tp: int
    linears: dict[str, FusedLinear]
    layers: list[Layer]
    heads: Heads
    dtype: torch.dtype
    device: torch.device


def build_stack(
    shape: ModelShape, tp: int, layers: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Stack:
    """Random weights whose products keep unit variance."""
    gen = torch.Generator(device).manual_seed(seed)
    linears = {linear.name: linear for linear in fused_linears(shape, tp)}

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen, device=device, dtype=torch.float32)

    built = []
    for _ in range(layers):
        weights = {
            name: (normal(f.rank_out, f.rank_in) / math.sqrt(f.rank_in)).to(dtype)
            for name, f in linears.items()
        }
        first, second = ((1 + 0.1 * normal(shape.hidden)).to(dtype) for _ in range(2))
        built.append(Layer(weights, (first, second)))
    heads = Heads(shape.heads // tp, shape.kv_heads_on_rank(tp), shape.head_dim)
    return Stack(shape, tp, linears, built, heads, dtype, device)


def build_caches(stack: Stack, point: Point, seed: int) -> list[Tensor]:
    """KV cache of each layer, ``[2, sequences, kv heads, length, head dim]``."""
    gen = torch.Generator(stack.device).manual_seed(seed)
    size = (2, point.sequences, stack.heads.kv, point.length, stack.heads.dim)
    return [
        torch.randn(*size, generator=gen, device=stack.device, dtype=torch.float32).to(stack.dtype)
        for _ in stack.layers
    ]


def attention(qkv: Tensor, cache: Tensor, point: Point, heads: Heads) -> Tensor:
    """``[T, q + 2 kv heads x dim]`` to ``[T, q heads x dim]``; writes the step's keys and values to the cache."""
    tokens = qkv.shape[0]
    queries = heads.query * heads.dim
    new = qkv[:, queries:].view(tokens, 2, heads.kv, heads.dim)
    if point.phase == "decode":
        cache[:, :, :, -1].copy_(new.permute(1, 0, 2, 3))
        # A group's query heads read the same keys, so they can stand in for positions of one sequence.
        grouped = qkv[:, :queries].view(tokens, heads.kv, heads.query // heads.kv, heads.dim)
        return F.scaled_dot_product_attention(grouped, cache[0], cache[1]).reshape(tokens, queries)
    prompts = (point.sequences, point.length)
    cache.copy_(new.view(*prompts, 2, heads.kv, heads.dim).permute(2, 0, 3, 1, 4))
    q = qkv[:, :queries].view(*prompts, heads.query, heads.dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q, cache[0], cache[1], is_causal=True, enable_gqa=heads.query != heads.kv
    )
    return out.transpose(1, 2).reshape(tokens, queries)


def step(
    stack: Stack, point: Point, caches: list[Tensor], inputs: tuple[Tensor, Tensor], linear: LinearCall
) -> tuple[Tensor, Tensor]:
    """One step over all layers. `inputs`: residual stream and the update to add to it, [T, hidden] each; so is the
    result. `linear(layer, name, x)` computes one fused product with its adapters."""
    residual, update = inputs
    for number, layer in enumerate(stack.layers):
        residual, hidden = add_rms_norm(residual, update, layer.norms[0])
        mixed = attention(linear(number, "qkv_proj", hidden), caches[number], point, stack.heads)
        residual, hidden = add_rms_norm(residual, linear(number, "o_proj", mixed), layer.norms[1])
        update = linear(number, "down_proj", silu_mul(linear(number, "gate_up_proj", hidden)))
    return residual, update
