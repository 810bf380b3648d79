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
)
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

from tessa.ops import cpu
from tessa.ops.routing import Routing
from tessa.ops.schedule import Schedule
from tessa.ops.slots import SlotPart
from tessa.slices import LocalSlice, Slice

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


class TessaLinear:
    """Slots and products of a TESSA layer; mixed in before the vLLM layer class that owns `forward`."""

    parallel: str
    base_layer: Any
    tp_size: int
    tp_rank: int
    punica_wrapper: PunicaWrapperBase
    # Set on the class by the hook before vLLM wraps the model's layers: how each step picks its products.
    schedule: Schedule

    def projections(self) -> tuple[Projection, ...]:
        """The projections fused in this layer, in the order of its output."""
        raise TypeError(f"{type(self).__name__} does not say which projections it holds")

    def create_lora_weights(self, max_loras: int, lora_config: LoRAConfig, model_config: Any = None) -> None:
        self.lora_config = lora_config
        self.parts = self.projections()
        self.n_slices = len(self.parts)
        d_out = self.parts[-1].rows[1]
        d_in = self.parts[0].d_in // (self.tp_size if self.parallel == "row" else 1)
        dtype, device = lora_config.lora_dtype, self.device  # type: ignore[attr-defined]
        self.slot_in = SlotPart(max_loras, d_out, dtype, device)
        self.slot_out = SlotPart(max_loras, d_in, dtype, device)
        self._wide: tuple[tuple[int, int], Any] | None = None

    @property
    def lora_a_stacked(self) -> tuple[torch.Tensor, ...]:
        """Shapes alone, for vLLM's warm-up, which makes an all-zero adapter from them."""
        slots = self.slot_in.num_slots
        return tuple(
            torch.empty(slots, 1, 1, p.d_in, dtype=self.slot_in.dtype, device="meta") for p in self.parts
        )

    @property
    def lora_b_stacked(self) -> tuple[torch.Tensor, ...]:
        slots = self.slot_in.num_slots
        return tuple(
            torch.empty(slots, 1, p.d_out, 1, dtype=self.slot_in.dtype, device="meta") for p in self.parts
        )

    def reset_lora(self, index: int) -> None:
        self.slot_in.clear(index)
        self.slot_out.clear(index)

    def local(self, projection: Projection, s: Slice) -> LocalSlice:
        """This rank's share of a projection's slice; UserError where the slice does not fit this TP degree."""
        return s.local(self.tp_rank, self.tp_size, self.parallel, replicas=projection.replicas)  # type: ignore[arg-type]

    def set_lora(
        self,
        index: int,
        lora_a: torch.Tensor | Sequence[torch.Tensor | None],
        lora_b: torch.Tensor | Sequence[torch.Tensor | None],
    ) -> None:
        deltas = [lora_a] if isinstance(lora_a, torch.Tensor) else list(lora_a)
        geometry = [lora_b] if isinstance(lora_b, torch.Tensor) else list(lora_b)
        self.reset_lora(index)
        if any(g is not None and g.is_floating_point() for g in geometry):
            return  # vLLM's all-zero warm-up adapter: an empty slot is what it computes
        ins: list[tuple[Projection, LocalSlice, torch.Tensor]] = []
        outs: list[tuple[Projection, LocalSlice, torch.Tensor]] = []
        for projection, delta, encoded in zip(self.parts, deltas, geometry, strict=True):
            if delta is None or encoded is None:
                continue
            s = decode_slice(encoded)
            held = self.local(projection, s)
            (ins if s.axis == "in" else outs).append((projection, held, held.take(delta)))
        if ins:
            self._set_in(index, ins)
        if outs:
            rows = [torch.tensor(h.shifted(p.rows[0]).indices, dtype=torch.int64) for p, h, _ in outs]
            self.slot_out.set(index, torch.cat(rows), torch.cat([delta for _, _, delta in outs]))

    def _set_in(self, index: int, ins: list[tuple[Projection, LocalSlice, torch.Tensor]]) -> None:
        """Fused projections read one input, so their slices share rows of the slot where their columns coincide."""
        wanted = [torch.tensor(held.indices, dtype=torch.int64) for _, held, _ in ins]
        columns = torch.unique(torch.cat(wanted))
        delta = torch.zeros(len(columns), self.slot_in.length, dtype=ins[0][2].dtype)
        for (projection, _, part), own in zip(ins, wanted, strict=True):
            start, stop = projection.rows
            delta[torch.searchsorted(columns, own), start:stop] = part.t()
        self.slot_in.set(index, columns, delta)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        routing: Routing = self.punica_wrapper.routing  # type: ignore[attr-defined]
        use_in, use_out = self.slot_in.used > 0, self.slot_out.used > 0
        if not routing.rows or not (use_in or use_out):
            return self._base(x, bias)
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        part = self.slot_in if use_in else self.slot_out
        one_part = use_in != use_out
        if one_part and self.can_widen and self.schedule.wide(routing, part, x.shape[0] * x.shape[1]):
            y = self._wide_product(x, routing, use_in)
            if bias is not None:
                y += bias
        else:
            y = self._base(x, bias)
            if use_in:
                cpu.segmented_in(y, x, self.slot_in, routing)
            if use_out:
                cpu.segmented_out(y, x, self.slot_out, routing)
        return y.view(*shape[:-1], y.shape[-1])

    @property
    def can_widen(self) -> bool:
        """Whether the base weight is at hand unquantised and unpacked."""
        return hasattr(self.base_layer, "unpacked_weight")

    def _base(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._get_quant_method().apply(self.base_layer, x, bias)  # type: ignore[attr-defined]

    def _wide_product(self, x: torch.Tensor, routing: Routing, use_in: bool) -> torch.Tensor:
        product = self._wide_gemm()
        if use_in:
            return product(cpu.widen_input(x, self.slot_in, routing))
        return cpu.narrow_output(product(x), self.parts[-1].rows[1], self.slot_out, routing)

    def _wide_gemm(self) -> Any:
        """The packed product over ``[W, D_1 ... D_S]``, rebuilt when a slot has changed."""
        version = (self.slot_in.version, self.slot_out.version)
        if self._wide is None or self._wide[0] != version:
            weight = self.base_layer.unpacked_weight
            wide = (
                cpu.wide_weight_in(weight, self.slot_in)
                if self.slot_in.used
                else cpu.wide_weight_out(weight, self.slot_out)
            )
            self._wide = (version, packed_gemm(wide))
        return self._wide[1]


def packed_gemm(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """``x -> x @ weight.T`` through the same packed kernel that vLLM chooses for the base layers on this CPU."""
    holder = torch.nn.Module()
    holder.weight = torch.nn.Parameter(weight, requires_grad=False)
    dispatch_cpu_unquantized_gemm(holder, remove_weight=True)
    return lambda x: holder.cpu_linear(x, holder.weight, None)


class TessaColumnLinear(TessaLinear, ColumnParallelLinearWithLoRA):
    """q/k/v, gate/up and single column-parallel layers; `forward` is vLLM's."""

    parallel = "column"

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

    parallel = "row"

    def projections(self) -> tuple[Projection, ...]:
        layer = self.base_layer
        return (Projection(layer.output_size, layer.input_size, (0, layer.output_size)),)

    @classmethod
    def can_replace_layer(
        cls, source_layer: Any, lora_config: Any, packed_modules_list: list[str], model_config: Any = None
    ) -> bool:
        return type(source_layer) is maybe_get_oot_by_class(RowParallelLinear)
