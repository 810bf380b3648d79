"""Alpha-beta model of the collectives of one tensor-parallel group."""

from __future__ import annotations

import math
from collections.abc import Mapping

from experiments.projection.hardware import GPU, SWITCH_BYTES, Link
from tessa.errors import UserError

RANKS_PER_NODE = 8
# vLLM's all-reduce kernel serves messages of up to 8 MiB.
CUSTOM_LIMIT_BYTES = 8 * 1024**2


def link_for(links: Mapping[int, Link], ranks: int) -> Link:
    """The constants for `ranks`; between profiled counts interpolated in log2(ranks), never extrapolated."""
    if ranks in links:
        return links[ranks]
    below, above = [n for n in links if n < ranks], [n for n in links if n > ranks]
    if not below or not above:
        raise UserError(
            f"no collective constants for {ranks} ranks; known: {', '.join(map(str, sorted(links)))}"
        )
    low, high = max(below), min(above)
    if high > RANKS_PER_NODE:
        return links[high]
    w = (math.log2(ranks) - math.log2(low)) / (math.log2(high) - math.log2(low))
    a, b = links[low], links[high]
    return Link(
        a.alpha_s + w * (b.alpha_s - a.alpha_s),
        a.large_alpha_s + w * (b.large_alpha_s - a.large_alpha_s),
        a.bus_bandwidth + w * (b.bus_bandwidth - a.bus_bandwidth),
    )


def link_s(link: Link, message_bytes: float, moved_bytes: float) -> float:
    """Seconds of a collective of `message_bytes` that moves `moved_bytes` over each rank's link."""
    alpha = link.alpha_s if message_bytes < SWITCH_BYTES else link.large_alpha_s
    return alpha + moved_bytes / link.bus_bandwidth


def all_reduce_s(gpu: GPU, ranks: int, message_bytes: float, custom: bool = True) -> float:
    """Seconds of an all-reduce of `message_bytes` on every rank; 0 for one rank.

    `custom`: the engine's own kernel is at hand inside a node, and the faster of it and NCCL is taken.
    """
    if ranks <= 1:
        return 0.0
    moved = message_bytes * 2 * (ranks - 1) / ranks
    seconds = link_s(link_for(gpu.nccl, ranks), message_bytes, moved)
    if custom and ranks <= RANKS_PER_NODE and message_bytes <= CUSTOM_LIMIT_BYTES:
        seconds = min(seconds, link_s(link_for(gpu.custom, ranks), message_bytes, moved))
    return seconds


def all_gather_s(gpu: GPU, ranks: int, total_bytes: float) -> float:
    """Seconds of an all-gather whose result has `total_bytes`; always NCCL, with its all-reduce's fixed cost.

    There is no published profile of small all-gathers here; a ring needs half the steps of an
    all-reduce, a tree about as many. The band of the collectives covers about a third less.
    """
    if ranks <= 1:
        return 0.0
    return link_s(link_for(gpu.nccl, ranks), total_bytes, total_bytes * (ranks - 1) / ranks)


def collective_s(gpu: GPU, ranks: int, kind: str, message_bytes: float, custom: bool = True) -> float:
    """Seconds of one collective by name (`all_reduce`, `all_gather`)."""
    if kind == "all_reduce":
        return all_reduce_s(gpu, ranks, message_bytes, custom)
    if kind == "all_gather":
        return all_gather_s(gpu, ranks, message_bytes)
    raise UserError(f"unknown collective {kind!r}; known: all_reduce, all_gather")
