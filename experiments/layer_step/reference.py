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
    """Softmax written out, over ``[sequences, kv heads, group, queries, keys]``."""
    tokens, group = qkv.shape[0], heads.query // heads.kv
    length = tokens // point.sequences
    sizes = [heads.query * heads.dim, heads.kv * heads.dim, heads.kv * heads.dim]
    q, k, v = (
        part.view(point.sequences, length, -1, heads.dim).transpose(1, 2) for part in qkv.split(sizes, dim=-1)
    )
    mask = torch.ones(length, length, dtype=torch.bool, device=qkv.device).triu(1)
    if point.phase == "decode":
        k, v = (
            torch.cat([past[:, :, :-1].double(), new], dim=2) for past, new in zip(cache, (k, v), strict=True)
        )
        mask = mask.new_zeros(1, k.shape[2])
    out = []
    for number, keys in enumerate(k):  # one sequence at a time: the scores of all would be large
        scores = (
            q[number].unflatten(0, (heads.kv, group))
            @ keys.unsqueeze(1).transpose(-1, -2)
            / math.sqrt(heads.dim)
        )
        weights = scores.masked_fill(mask, -math.inf).softmax(-1)
        out.append((weights @ v[number].unsqueeze(1)).flatten(0, 1))
    return torch.stack(out).transpose(1, 2).reshape(tokens, -1)
