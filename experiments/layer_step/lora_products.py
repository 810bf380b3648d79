"""The LoRA baselines' products: vLLM's Triton kernels, this project's, those of the CPU, one pair an adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from baselines import grouped_ops
from experiments.layer_step.geometry import LoraGeometry
from tessa.ops import compiled
from tessa.ops.routing import Routing, route
from tessa.ops.step import step_buffers, step_meta


@dataclass
class LoraFactors:
    """a ``[S, n inner, d_in]``, b ``[S, rows, whole]``; gathered ``[T, n, whole]`` float32: what all ranks' inner
    values would be, where the structure gathers them, else None."""

    geometry: LoraGeometry
    a: Tensor
    b: Tensor
    gathered: Tensor | None
    part_start: Tensor | None = None
    a_list: list[Tensor] = field(default_factory=list)
    b_list: list[Tensor] = field(default_factory=list)

    def b_parts(self) -> list[Tensor]:
        starts = self.geometry.starts
        return [self.b[:, lo:hi] for lo, hi in pairwise(starts)]


class LoraProducts:
    """One family of products. `prepare` before a step; then `shrink` and `expand` for each fused product."""

    name = ""
    graph = True

    def register(self, factors: LoraFactors) -> None:
        """Called once for all factors before the first step."""

    def launches(self, factors: LoraFactors, distinct: int) -> int:
        """Adapter kernels of one fused product."""
        raise TypeError(f"{type(self).__name__} does not say what it launches")

    def prepare(self, token_slot: Tensor) -> None:
        raise TypeError(f"{type(self).__name__} cannot prepare a step")

    def shrink(self, x: Tensor, factors: LoraFactors) -> Any:
        raise TypeError(f"{type(self).__name__} cannot shrink")

    def expand(self, y: Tensor, inner: Any, factors: LoraFactors) -> None:
        raise TypeError(f"{type(self).__name__} cannot expand")

    def gathered(self, inner: Any, factors: LoraFactors, join: bool) -> Any:
        """The gathered inner values in this family's form; `join` puts this rank's own among them."""
        raise TypeError(f"{type(self).__name__} cannot gather")


def _with_own(whole: Tensor, own: Tensor, join: bool) -> Tensor:
    if join:
        whole = whole.clone()
        whole[..., : own.shape[-1]] = own
    return whole


class TorchProducts(LoraProducts):
    """The ops that serve these baselines on the CPU (`baselines.grouped_ops`): `compiled` kernels or `grouped` library
    products, as the shape decides; or one product per factor and adapter (`dense`)."""

    def __init__(self, device: torch.device, tokens: int, slots: int, per_adapter: bool) -> None:
        # Its products' shapes follow the batch, so a captured graph would be of one batch alone.
        self.graph = not per_adapter
        self.device, self.tokens, self.slots, self.per_adapter = device, tokens, slots, per_adapter
        self.name = "dense" if per_adapter else ""
        self.step: Routing

    def register(self, factors: LoraFactors) -> None:
        # B is stored transposed, as the served baselines store it.
        factors.b_list = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in factors.b_parts()]
        if not self.per_adapter:
            ran = {"compiled" if found else "grouped" for found in self._compiled(factors)}
            self.name = "+".join(sorted({*filter(None, self.name.split("+")), *ran}))

    def _compiled(self, factors: LoraFactors) -> tuple[bool, bool]:
        """Whether shrink and expand run compiled kernels, where every token has an adapter."""
        pairs = (factors.a.shape[1], factors.a), (factors.geometry.whole, factors.b)
        shrink, expand = (
            not self.per_adapter and compiled.usable(self.tokens, width, weights) for width, weights in pairs
        )
        return shrink, expand

    def launches(self, factors: LoraFactors, distinct: int) -> int:
        """A gather, a product and an addition where a library runs; a compiled kernel does all three."""
        products = distinct if self.per_adapter else 1
        shrink, expand = (1 if found else 1 + products for found in self._compiled(factors))
        return shrink + expand * len(factors.geometry.outs)

    def prepare(self, token_slot: Tensor) -> None:
        self.step = route(token_slot.cpu().long(), self.slots).to(self.device)

    def shrink(self, x: Tensor, factors: LoraFactors) -> Tensor:
        """[rows, n, inner] in slot order."""
        inner = grouped_ops.shrink(x, factors.a, self.step, self.per_adapter)
        return inner.view(inner.shape[0], len(factors.geometry.outs), factors.geometry.inner)

    def expand(self, y: Tensor, inner: Tensor, factors: LoraFactors) -> None:
        values, whole = inner.flatten(1), factors.geometry.whole
        for p, (b, start) in enumerate(zip(factors.b_list, factors.geometry.starts, strict=False)):
            grouped_ops.expand(y, start, values, p * whole, b, self.step, self.per_adapter)

    def gathered(self, inner: Tensor, factors: LoraFactors, join: bool) -> Tensor:
        assert factors.gathered is not None
        return _with_own(self.step.gather(factors.gathered).to(inner.dtype), inner, join)


class TritonProducts(LoraProducts):
    """This project's kernels (`baselines.lora_kernels`)."""

    name = "triton"

    def __init__(self, device: torch.device, tokens: int, slots: int) -> None:
        self.slots = slots
        self.step = step_buffers(tokens, slots, device)

    def register(self, factors: LoraFactors) -> None:
        starts = factors.geometry.starts
        factors.part_start = torch.tensor(starts, dtype=torch.int32, device=factors.a.device)

    def launches(self, factors: LoraFactors, distinct: int) -> int:
        from baselines.lora_kernels import shrink_config

        tokens = self.step.token_slot.shape[0]
        config = shrink_config(tokens, factors.a.shape[1], factors.a.shape[2], factors.a.dtype)
        return 2 + (config["SPLIT_K"] > 1)

    def prepare(self, token_slot: Tensor) -> None:
        step_meta(token_slot, self.slots, out=self.step)

    def shrink(self, x: Tensor, factors: LoraFactors) -> Tensor:
        """[T, n inner], float32."""
        from baselines.lora_kernels import shrink

        inner = torch.empty(x.shape[0], factors.a.shape[1], dtype=torch.float32, device=x.device)
        shrink(inner, x, factors.a, self.step.order, self.step.seg_start)
        return inner

    def expand(self, y: Tensor, inner: Tensor, factors: LoraFactors) -> None:
        from baselines.lora_kernels import expand

        widest = max(factors.geometry.outs)
        assert factors.part_start is not None
        expand(y, inner, factors.b, self.step.order, self.step.seg_start, factors.part_start, widest)

    def gathered(self, inner: Tensor, factors: LoraFactors, join: bool) -> Tensor:
        assert factors.gathered is not None
        own = inner.view(inner.shape[0], len(factors.geometry.outs), factors.geometry.inner)
        return _with_own(factors.gathered, own, join).flatten(1)


class VllmProducts(LoraProducts):
    """vLLM's own Triton kernels, called as its LoRA layers call them."""

    name = "vllm"

    def __init__(self, device: torch.device, tokens: int, slots: int) -> None:
        from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink

        self.lora_shrink, self.lora_expand = lora_shrink, lora_expand
        self.tokens = tokens
        self.meta = LoRAKernelMeta.make(slots, tokens, device=device)

    def register(self, factors: LoraFactors) -> None:
        n, inner = len(factors.geometry.outs), factors.geometry.inner
        stacked = factors.a.view(factors.a.shape[0], n, inner, factors.geometry.d_in)
        factors.a_list = [stacked[:, p].contiguous() for p in range(n)]
        factors.b_list = [b.contiguous() for b in factors.b_parts()]

    def launches(self, factors: LoraFactors, distinct: int) -> int:
        return 3

    def prepare(self, token_slot: Tensor) -> None:
        self.meta.prepare_tensors(token_slot)
        self.args = self.meta.meta_args(self.tokens, True)

    def shrink(self, x: Tensor, factors: LoraFactors) -> Tensor:
        """[n, T, inner], float32."""
        g = factors.geometry
        inner = torch.empty(len(g.outs), x.shape[0], g.inner, dtype=torch.float32, device=x.device)
        self.lora_shrink(x, factors.a_list, inner, *self.args, 1.0)
        return inner

    def expand(self, y: Tensor, inner: Tensor, factors: LoraFactors) -> None:
        self.lora_expand(inner, factors.b_list, y, *self.args, offset_start=0, add_inputs=True)

    def gathered(self, inner: Tensor, factors: LoraFactors, join: bool) -> Tensor:
        assert factors.gathered is not None
        return _with_own(factors.gathered.transpose(0, 1), inner, join)


def lora_products(
    backend: str, device: torch.device, tokens: int, slots: int, gpu: bool, vllm: bool
) -> LoraProducts:
    """The family that a backend runs on: `plain_lora` per adapter everywhere, the others grouped."""
    if backend == "plain_lora" or not gpu:
        return TorchProducts(device, tokens, slots, per_adapter=backend == "plain_lora")
    return VllmProducts(device, tokens, slots) if vllm else TritonProducts(device, tokens, slots)
