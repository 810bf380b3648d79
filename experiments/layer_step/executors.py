"""Each backend's linear layers on one rank: random resident adapters, the timed products, and their reference.

An executor is made for one point. `prepare` takes a step's token-to-slot mapping into buffers at fixed addresses, so
that a captured CUDA graph follows it; `linear` computes one fused product with its adapters; `add_reference` adds
the adapters in float64.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from experiments.layer_step.geometry import LoraGeometry, SliceGeometry, lora_geometry, slice_geometry
from experiments.layer_step.lora_products import LoraFactors, LoraProducts, lora_products
from experiments.layer_step.reference import add_lora, add_slice
from experiments.layer_step.spec import Point
from experiments.layer_step.stack import Stack
from tessa.ops.gpu_schedule import wide_limit
from tessa.ops.products import GrowingProducts, StaticProducts
from tessa.ops.routing import route
from tessa.ops.schedule import Schedule
from tessa.ops.slots import aligned
from tessa.ops.step import step_buffers, step_meta

ADAPTER_GAIN = 0.5  # standard deviation that an adapter adds to an output whose own is 1


class Executor(Protocol):
    """One backend's linear layers.

    kernels: what runs the adapters. graph: whether a step can be captured. launches: adapter kernels in one layer.
    params: of one adapter on this rank, over all layers of the stack. stored_params: the same with what its slot pads.
    read_params: those of all slots that one step reads, padded. budget_ratio: an adapter's parameters over LoRA's of
    the point's rank, neither replicas nor padding counted. mode: which of TESSA's products a step uses, or "".
    """

    kernels: str
    graph: bool
    launches: int
    params: int
    stored_params: int
    budget_ratio: float

    @property
    def mode(self) -> str: ...
    @property
    def read_params(self) -> int: ...
    def prepare(self, token_slot: Tensor) -> None: ...
    def linear(self, layer: int, name: str, x: Tensor) -> Tensor: ...
    def add_reference(self, layer: int, name: str, y: Tensor, x: Tensor, token_slot: Tensor) -> None: ...
    def join(self, on: bool) -> None:
        """Whether this rank's inner values replace its share of the gathered ones (S-LoRA); timed without."""


def make_executor(backend: str, stack: Stack, point: Point, seed: int, gpu: bool | None = None) -> Executor:
    """`backend` as in `LayerStepSpec.backends`; `gpu`: the products of a GPU (None: where the stack lies on one)."""
    gpu = stack.device.type == "cuda" if gpu is None else gpu
    name, _, variant = backend.partition(":")
    if name == "base":
        return BaseExecutor(stack)
    if name == "tessa":
        return TessaExecutor(stack, point, seed, variant or "auto", gpu)
    return LoraExecutor(name, stack, point, seed, gpu)


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


class BaseExecutor:
    """The base model alone."""

    kernels, graph = "-", True
    launches = params = stored_params = 0
    budget_ratio = math.nan

    def __init__(self, stack: Stack) -> None:
        self.weights = [layer.weights for layer in stack.layers]

    @property
    def mode(self) -> str:
        return ""

    @property
    def read_params(self) -> int:
        return 0

    def prepare(self, token_slot: Tensor) -> None:
        """The base model reads no adapters."""

    def linear(self, layer: int, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[layer][name])

    def add_reference(self, layer: int, name: str, y: Tensor, x: Tensor, token_slot: Tensor) -> None:
        """Nothing to add."""

    def join(self, on: bool) -> None:
        """Nothing is gathered."""


class LoraExecutor(BaseExecutor):
    """plain_lora, punica, slora and bd_lora: factors of `lora_geometry` and one family of products."""

    def __init__(self, backend: str, stack: Stack, point: Point, seed: int, gpu: bool) -> None:
        super().__init__(stack)
        multiple = 1 if gpu else aligned(1, stack.dtype)
        own, self.geometry = (
            {
                name: lora_geometry(backend, linear, point.rank, stack.tp, step)
                for name, linear in stack.linears.items()
            }
            for step in (1, multiple)
        )
        self.products: LoraProducts = lora_products(
            backend,
            stack.device,
            point.tokens,
            point.resident,
            gpu,
            gpu and has_vllm() and stack.device.type == "cuda",
        )
        gen = torch.Generator(stack.device).manual_seed(seed)
        self.factors = [
            {name: self._factors(g, point, stack, gen) for name, g in self.geometry.items()}
            for _ in stack.layers
        ]
        for layer in self.factors:
            for factors in layer.values():
                self.products.register(factors)
        self.kernels, self.graph = self.products.name, self.products.graph
        self.params, self.stored_params = (
            len(stack.layers) * sum(g.params for g in found.values()) for found in (own, self.geometry)
        )
        self.distinct = point.distinct
        budget = _lora_params(stack, dict.fromkeys(own, point.rank))
        # Of the others a rank may hold replicas, so the whole adapter's rank is what is compared.
        spent = (
            self.params
            if backend == "bd_lora"
            else _lora_params(stack, {name: g.whole for name, g in own.items()})
        )
        self.budget_ratio = spent / budget
        self.launches = sum(self.products.launches(f, point.distinct) for f in self.factors[0].values())
        self.joined = False

    @property
    def read_params(self) -> int:
        return self.distinct * self.stored_params

    @staticmethod
    def _factors(g: LoraGeometry, point: Point, stack: Stack, gen: torch.Generator) -> LoraFactors:
        def normal(std: float, *size: int) -> Tensor:
            return torch.randn(*size, generator=gen, device=stack.device, dtype=torch.float32) * std

        parts = len(g.outs)
        a = normal(1 / math.sqrt(g.d_in), point.resident, parts * g.inner, g.d_in).to(stack.dtype)
        b = normal(ADAPTER_GAIN / math.sqrt(g.whole), point.resident, sum(g.outs), g.whole).to(stack.dtype)
        gathered = normal(1.0, point.tokens, parts, g.whole) if g.gathered else None
        return LoraFactors(g, a, b, gathered)

    def prepare(self, token_slot: Tensor) -> None:
        self.products.prepare(token_slot)

    def linear(self, layer: int, name: str, x: Tensor) -> Tensor:
        y = F.linear(x, self.weights[layer][name])
        factors = self.factors[layer][name]
        inner = self.products.shrink(x, factors)
        if factors.gathered is not None:
            inner = self.products.gathered(inner, factors, self.joined)
        self.products.expand(y, inner, factors)
        return y

    def add_reference(self, layer: int, name: str, y: Tensor, x: Tensor, token_slot: Tensor) -> None:
        factors = self.factors[layer][name]
        if factors.gathered is not None and not self.joined:
            # Timed as on a rank whose gathered values lie ready; its own inner values go nowhere.
            unjoined = LoraGeometry(0, factors.geometry.whole, factors.geometry.outs, factors.geometry.d_in)
            add_lora(y, x, token_slot, factors.a[:, :0], factors.b, unjoined, factors.gathered)
        else:
            add_lora(y, x, token_slot, factors.a, factors.b, factors.geometry, factors.gathered)

    def join(self, on: bool) -> None:
        self.joined = on


class TessaExecutor(BaseExecutor):
    """TESSA's slots through the products that serve it: `StaticProducts` on a GPU, `GrowingProducts` on the CPU."""

    def __init__(self, stack: Stack, point: Point, seed: int, mode: str, gpu: bool) -> None:
        super().__init__(stack)
        self.gpu, self.slots = gpu, point.resident
        self.kernels, self.graph = mode, True
        self.geometry = {name: slice_geometry(linear, point.rank) for name, linear in stack.linears.items()}
        self.schedule = Schedule(mode)  # type: ignore[arg-type]
        self.step: Any = step_buffers(point.tokens, point.resident, stack.device) if self.gpu else None
        gen = torch.Generator(stack.device).manual_seed(seed)
        self.products: list[dict[str, Any]] = []
        self.adapters: list[dict[str, tuple[Tensor, Tensor]]] = []
        for weights in self.weights:
            made = {name: self._slots(weights[name], g, gen) for name, g in self.geometry.items()}
            self.products.append({name: products for name, (products, _) in made.items()})
            self.adapters.append({name: adapter for name, (_, adapter) in made.items()})
        self.multiple = 1 if gpu else aligned(1, stack.dtype)
        self.params = len(stack.layers) * sum(g.params for g in self.geometry.values())
        self.stored_params = len(stack.layers) * sum(g.stored(self.multiple) for g in self.geometry.values())
        self.budget_ratio = self.params / _lora_params(stack, dict.fromkeys(self.geometry, point.rank))
        self.launches = len(self.geometry)
        self.tokens, self.distinct = point.tokens, point.distinct

    def _slots(
        self, weight: Tensor, g: SliceGeometry, gen: torch.Generator
    ) -> tuple[Any, tuple[Tensor, Tensor]]:
        d_out, d_in = weight.shape
        length, limit = (d_out, d_in) if g.axis == "in" else (d_in, d_out)
        gain = ADAPTER_GAIN / math.sqrt(g.width if g.axis == "in" else d_in)
        delta = torch.randn(self.slots, g.width, length, generator=gen, device=weight.device) * gain
        if g.axis == "in":
            start = 0
            for width, out in zip(g.widths, g.outs, strict=True):
                delta[:, width:, start : start + out] = 0
                start += out
        first = torch.randint(0, limit - g.width + 1, (self.slots, 1), generator=gen, device=weight.device)
        index = first + torch.arange(g.width, device=weight.device)
        delta = delta.to(weight.dtype)
        if self.gpu:
            tokens = wide_limit(self.schedule.mode, self.slots, g.width, length)
            products: Any = StaticProducts(self.slots, g.width, g.axis, weight, tokens)
        else:
            products = GrowingProducts(
                self.slots,
                d_out,
                d_in,
                weight.dtype,
                self.schedule,
                weight,
                lambda w: lambda x: F.linear(x, w),
            )
        for slot in range(self.slots):
            rows = (index[slot], delta[slot])
            products.set(slot, *((rows, None) if g.axis == "in" else (None, rows)))
        return products, (delta, index)

    def prepare(self, token_slot: Tensor) -> None:
        if self.gpu:
            step_meta(token_slot, self.slots, out=self.step)
        else:
            self.step = route(token_slot.long(), self.slots)

    def linear(self, layer: int, name: str, x: Tensor) -> Tensor:
        weight = self.weights[layer][name]
        return self.products[layer][name].apply(lambda x, bias: F.linear(x, weight, bias), x, None, self.step)

    def add_reference(self, layer: int, name: str, y: Tensor, x: Tensor, token_slot: Tensor) -> None:
        add_slice(y, x, token_slot, *self.adapters[layer][name], self.geometry[name].axis)

    def _wide(self) -> list[bool]:
        """Per fused product, whether this point's steps are wide; after `prepare`."""
        if self.gpu:
            return [self.tokens <= products.wide_tokens for products in self.products[0].values()]
        return [
            self.schedule.wide(
                self.step, p.part_in if p.part_in.used else p.part_out, self.tokens * self.geometry[name].d_in
            )
            for name, p in self.products[0].items()
        ]

    @property
    def mode(self) -> str:
        wide = self._wide()
        return "wide" if all(wide) else "mixed" if any(wide) else "segmented"

    @property
    def read_params(self) -> int:
        used = [self.slots if wide else self.distinct for wide in self._wide()]
        stored = [g.stored(self.multiple) for g in self.geometry.values()]
        per_layer = sum(n * params for n, params in zip(used, stored, strict=True))
        return len(self.products) * per_layer


def _lora_params(stack: Stack, ranks: Mapping[str, int]) -> float:
    """LoRA's parameters for the stack with the rank of each fused product, one TP rank's share of them. With the
    point's rank it is what every structure's budget is matched to."""
    parts = [(ranks[name], part) for name, linear in stack.linears.items() for part in linear.parts]
    return len(stack.layers) * sum(rank * (part.d_in + part.d_out) for rank, part in parts) / stack.tp
