"""vLLM linear layers with TESSA's slots beside the base weight.

An adapter reaches `set_lora` as vLLM passes a LoRA: ``lora_a`` is the unsharded delta and ``lora_b`` its geometry
(`encode_slice`), as lists where vLLM fuses projections (q/k/v, gate/up).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import ColumnParallelLinearWithLoRA, RowParallelLinearWithLoRA
from vllm.model_executor.custom_op import maybe_get_oot_by_class
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from tessa.budget import most_width_for
from tessa.errors import UserError
from tessa.ops.gpu_schedule import wide_limit
from tessa.ops.products import GrowingProducts, Products, StaticProducts
from tessa.ops.schedule import Schedule
from tessa.slices import LocalSlice, Parallel, Placement, Slice

if TYPE_CHECKING:
    from vllm.lora.punica_wrapper import PunicaWrapperBase

_AXES = ("in", "out")


def encode_slice(s: Slice) -> torch.Tensor:
    """A slice's geometry as an int64 tensor, so that it travels where vLLM expects a LoRA factor."""
    return torch.tensor(
        [_AXES.index(s.axis), s.offset, s.width, s.segments, s.d_out, s.d_in], dtype=torch.int64
    )


def decode_slice(t: torch.Tensor) -> Slice:
    axis, offset, width, segments, d_out, d_in = t.tolist()
    return Slice(_AXES[axis], offset, width, segments, d_out, d_in)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Projection:
    """One projection inside a (possibly fused) layer: unsharded sizes, and its rows in the rank's fused output."""

    d_out: int
    d_in: int
    rows: tuple[int, int]
    replicas: int = 1


@dataclass(frozen=True)
class LayerOptions:
    """How the engine's layers keep their slots; the hook sets it before vLLM wraps the model's layers.

    Attributes:
        static: buffers at fixed addresses (`StaticProducts`), needed where steps are captured in graphs.
        placement: the placement that static buffers have room for.
        rank: the largest rank-equivalent, from which static buffers take their width.
        shards: P, for the width of slices along the sharded dimension.
    """

    schedule: Schedule
    static: bool
    placement: Placement
    rank: float
    shards: int


class TessaLinear:
    """Slots and products of a TESSA layer; mixed in before the vLLM layer class that owns `forward`."""

    parallel: Parallel
    options: LayerOptions
    base_layer: Any
    tp_size: int
    tp_rank: int
    punica_wrapper: PunicaWrapperBase

    def projections(self) -> tuple[Projection, ...]:
        """The projections fused in this layer, in the order of its output."""
        raise TypeError(f"{type(self).__name__} does not say which projections it holds")

    def create_lora_weights(self, max_loras: int, lora_config: LoRAConfig, model_config: Any = None) -> None:
        self.lora_config, self.num_slots = lora_config, max_loras
        self.parts = self.projections()
        self.n_slices = len(self.parts)
        self.d_out = self.parts[-1].rows[1]
        self.d_in = self.parts[0].d_in // (self.tp_size if self.parallel == "row" else 1)
        weight = plain_weight(self.base_layer)
        options = self.options
        if not options.static:
            self.products: Products = GrowingProducts(
                max_loras,
                self.d_out,
                self.d_in,
                adapter_dtype(lora_config),
                options.schedule,
                weight,
                packed_gemm,
            )
            return
        if weight is None:
            raise UserError(
                f"TESSA's fixed buffers need an unquantised base weight, which {type(self.base_layer).__name__} does "
                "not have here; serve this model with an unquantised checkpoint"
            )
        axis = "in" if (options.placement == "across") == (self.parallel == "column") else "out"
        width = self.reserved_rows(axis)
        limit = wide_limit(options.schedule.mode, max_loras, width, self.d_out if axis == "in" else self.d_in)
        static = StaticProducts(max_loras, width, axis, weight, limit)
        if self.base_layer.weight.numel():
            self.base_layer.weight.data = static.base_weight
        self.products = static

    def reserved_rows(self, axis: str) -> int:
        """Rows that the largest adapter needs on this rank: fused projections share columns and stack rows."""
        options = self.options
        along = options.placement == "along"
        segments = options.shards if along else 1
        widths = []
        for p in self.parts:
            width = most_width_for(options.rank, p.d_out, p.d_in, axis, segments)  # type: ignore[arg-type]
            widths.append(width * p.replicas // self.tp_size if along else width)
        return max(widths) if axis == "in" else sum(widths)

    @property
    def lora_a_stacked(self) -> tuple[torch.Tensor, ...]:
        """Shapes alone, for vLLM's warm-up, which makes an all-zero adapter from them."""
        return tuple(torch.empty(self.num_slots, 1, 1, p.d_in, device="meta") for p in self.parts)

    @property
    def lora_b_stacked(self) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty(self.num_slots, 1, p.d_out, 1, device="meta") for p in self.parts)

    def reset_lora(self, index: int) -> None:
        self.products.clear(index)

    def local(self, projection: Projection, s: Slice) -> LocalSlice:
        """This rank's share of a projection's slice; UserError where the slice does not fit this TP degree."""
        return s.local(self.tp_rank, self.tp_size, self.parallel, replicas=projection.replicas)

    def check(self, slices: Sequence[Slice | None]) -> None:
        """Refuse an adapter that does not fit this layer; ``slices`` follow `projections`."""
        held = [(p, self.local(p, s)) for p, s in zip(self.parts, slices, strict=True) if s is not None]
        columns = {i for _, local in held if local.axis == "in" for i in local.indices}
        self.products.check(len(columns), sum(local.width for _, local in held if local.axis == "out"))

    def set_lora(
        self,
        index: int,
        lora_a: torch.Tensor | Sequence[torch.Tensor | None],
        lora_b: torch.Tensor | Sequence[torch.Tensor | None],
    ) -> None:
        deltas = [lora_a] if isinstance(lora_a, torch.Tensor) else list(lora_a)
        geometry = [lora_b] if isinstance(lora_b, torch.Tensor) else list(lora_b)
        if any(g is not None and g.is_floating_point() for g in geometry):
            self.products.clear(index)  # vLLM's all-zero warm-up adapter: an empty slot is what it computes
            return
        held: list[tuple[Projection, LocalSlice, torch.Tensor]] = []
        for projection, delta, encoded in zip(self.parts, deltas, geometry, strict=True):
            if delta is not None and encoded is not None:
                local = self.local(projection, decode_slice(encoded))
                held.append((projection, local, local.take(delta)))
        ins = [entry for entry in held if entry[1].axis == "in"]
        outs = [entry for entry in held if entry[1].axis == "out"]
        self.products.set(index, self._columns(ins) if ins else None, self._rows(outs) if outs else None)

    @staticmethod
    def _rows(outs: list[tuple[Projection, LocalSlice, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Output positions in the fused output, and their delta rows."""
        rows = [torch.tensor(local.shifted(p.rows[0]).indices, dtype=torch.int64) for p, local, _ in outs]
        return torch.cat(rows), torch.cat([delta for _, _, delta in outs])

    def _columns(
        self, ins: list[tuple[Projection, LocalSlice, torch.Tensor]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fused projections read one input, so their slices share rows of the slot where their columns coincide."""
        wanted = [torch.tensor(local.indices, dtype=torch.int64) for _, local, _ in ins]
        columns = torch.unique(torch.cat(wanted))
        delta = torch.zeros(len(columns), self.d_out, dtype=ins[0][2].dtype)
        for (projection, _, part), own in zip(ins, wanted, strict=True):
            start, stop = projection.rows
            delta[torch.searchsorted(columns, own), start:stop] = part.t()
        return columns, delta

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        y = self.products.apply(self._base, flat, bias, self.punica_wrapper.step)  # type: ignore[attr-defined]
        return y.view(*x.shape[:-1], y.shape[-1])

    def _base(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._get_quant_method().apply(self.base_layer, x, bias)  # type: ignore[attr-defined]


def adapter_dtype(lora_config: LoRAConfig) -> torch.dtype:
    """The dtype in which the engine computes adapters, which vLLM has resolved by the time layers are made."""
    assert isinstance(lora_config.lora_dtype, torch.dtype)
    return lora_config.lora_dtype


def plain_weight(layer: Any) -> torch.Tensor | None:
    """A layer's unquantised weight ``[d_out, d_in]``, None where there is none (any more)."""
    kept = getattr(layer, "unpacked_weight", None)
    if kept is not None:
        return kept
    weight = getattr(layer, "weight", None)
    unquantised = isinstance(layer.quant_method, UnquantizedLinearMethod)
    return weight.data if unquantised and weight is not None and weight.numel() else None


def packed_gemm(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """``x -> x @ weight.T`` through the same packed kernel that vLLM chooses for the base layers on this CPU."""
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(holder, remove_weight=True)
    linear: Any = holder.cpu_linear
    return lambda x: linear(x, holder.weight, None)


class TessaColumnLinear(TessaLinear, ColumnParallelLinearWithLoRA):
    """q/k/v, gate/up and single column-parallel layers; `forward` is vLLM's."""

    parallel: Parallel = "column"

    def projections(self) -> tuple[Projection, ...]:
        layer = self.base_layer
        if isinstance(layer, QKVParallelLinear):
            heads = (layer.total_num_heads, layer.total_num_kv_heads, layer.total_num_kv_heads)
            local = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
            sizes = [(n * layer.head_size, m * layer.head_size) for n, m in zip(heads, local, strict=True)]
            replicas = (1, layer.num_kv_head_replicas, layer.num_kv_head_replicas)
        else:
            full = (
                layer.output_sizes if isinstance(layer, MergedColumnParallelLinear) else [layer.output_size]
            )
            sizes = [(size, size // self.tp_size) for size in full]
            replicas = (1,) * len(sizes)
        stops = list(accumulate(local for _, local in sizes))
        return tuple(
            Projection(d_out, layer.input_size, (stop - local, stop), copies)
            for (d_out, local), stop, copies in zip(sizes, stops, replicas, strict=True)
        )

    @classmethod
    def can_replace_layer(
        cls, source_layer: Any, lora_config: Any, packed_modules_list: list[str], model_config: Any = None
    ) -> bool:
        kind = type(source_layer)
        if kind is maybe_get_oot_by_class(QKVParallelLinear):
            return len(packed_modules_list) == 3
        if kind is maybe_get_oot_by_class(MergedColumnParallelLinear):
            return len(packed_modules_list) == len(source_layer.output_sizes)
        return kind is maybe_get_oot_by_class(ColumnParallelLinear)


class TessaRowLinear(TessaLinear, RowParallelLinearWithLoRA):
    """o and down: the delta adds to the partial sum that the base layer all-reduces anyway."""

    parallel: Parallel = "row"

    def projections(self) -> tuple[Projection, ...]:
        layer = self.base_layer
        return (Projection(layer.output_size, layer.input_size, (0, layer.output_size)),)

    @classmethod
    def can_replace_layer(
        cls, source_layer: Any, lora_config: Any, packed_modules_list: list[str], model_config: Any = None
    ) -> bool:
        return type(source_layer) is maybe_get_oot_by_class(RowParallelLinear)
