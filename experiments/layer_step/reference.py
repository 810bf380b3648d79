"""The same step in float64, written independently of what is timed."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from experiments.layer_step.fused import EPS
from experiments.layer_step.geometry import LoraGeometry
from experiments.layer_step.spec import Point
from experiments.layer_step.stack import Heads, Stack

AddAdapters = Callable[[int, str, Tensor, Tensor], None]
"""``add(layer, name, y, x)``: adds every token's adapter to ``y`` in place, all float64."""


def add_lora(
    y: Tensor,
    x: Tensor,
    token_slot: Tensor,
    a: Tensor,
    b: Tensor,
    geometry: LoraGeometry,
    gathered: Tensor | None,
) -> None:
    """a ``[S, n inner, d_in]``, b ``[S, rows, whole]``; `gathered` ``[T, n, whole]`` are the inner values as all ranks
    hold them, of which this rank's own are recomputed (None: the rank's own are all there is)."""
    parts, starts = len(geometry.outs), geometry.starts
    for slot in token_slot[token_slot >= 0].unique().tolist():
        rows = (token_slot == slot).nonzero().flatten()
        own = (x[rows] @ a[slot].double().T).view(len(rows), parts, geometry.inner)
        if gathered is not None:
            inner = gathered[rows].double()
            inner[:, :, : geometry.inner] = own
        else:
            inner = own
        for p in range(parts):
            lo, hi = starts[p], starts[p + 1]
            y[rows, lo:hi] += inner[:, p] @ b[slot, lo:hi].double().T


def add_slice(y: Tensor, x: Tensor, token_slot: Tensor, delta: Tensor, index: Tensor, axis: str) -> None:
    """delta ``[S, K, length]``, index ``[S, K]`` with distinct entries."""
    for slot in token_slot[token_slot >= 0].unique().tolist():
        rows, at = (token_slot == slot).nonzero().flatten(), index[slot].long()
        if axis == "in":
            y[rows] += x[rows][:, at] @ delta[slot].double()
        else:
            y[rows[:, None], at[None, :]] += x[rows] @ delta[slot].double().T


def reference_step(
    stack: Stack, point: Point, caches: list[Tensor], inputs: tuple[Tensor, Tensor], add: AddAdapters
) -> tuple[Tensor, Tensor]:
    """What `stack.step` must give; caches are not changed."""
    residual, update = (value.double() for value in inputs)
    for number, layer in enumerate(stack.layers):

        def linear(name: str, x: Tensor, number: int = number) -> Tensor:
            y = x @ stack.layers[number].weights[name].double().T
            add(number, name, y, x)
            return y

        residual = residual + update
        mixed = _attention(
            linear("qkv_proj", _norm(residual, layer.norms[0])), caches[number], point, stack.heads
        )
        residual = residual + linear("o_proj", mixed)
        gate, up = linear("gate_up_proj", _norm(residual, layer.norms[1])).chunk(2, dim=-1)
        update = linear("down_proj", gate * torch.sigmoid(gate) * up)
    return residual, update


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight.double()


def _attention(qkv: Tensor, cache: Tensor, point: Point, heads: Heads) -> Tensor:
    tokens, group = qkv.shape[0], heads.query // heads.kv
    q, k, v = qkv.split([heads.query * heads.dim, heads.kv * heads.dim, heads.kv * heads.dim], dim=-1)
    q = q.view(tokens, heads.query, heads.dim)
    k, v = (t.view(tokens, heads.kv, heads.dim) for t in (k, v))
    out = torch.empty_like(q)
    for sequence in range(point.sequences):
        if point.phase == "decode":
            here = slice(sequence, sequence + 1)
            past = cache[:, sequence, :, :-1].double().transpose(1, 2)
            keys, values = torch.cat([past[0], k[here]]), torch.cat([past[1], v[here]])
            mask = None
        else:
            here = slice(sequence * point.length, (sequence + 1) * point.length)
            keys, values = k[here], v[here]
            mask = torch.ones(point.length, point.length, dtype=torch.bool, device=q.device).triu(1)
        keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
        scores = torch.einsum("thd,shd->hts", q[here], keys) / math.sqrt(heads.dim)
        if mask is not None:
            scores = scores.masked_fill(mask, -math.inf)
        out[here] = torch.einsum("hts,shd->thd", scores.softmax(-1), values)
    return out.reshape(tokens, -1)
