"""Counting what an engine does in a step: collectives and their bytes, adapter kernels, adapter memory.

`WorkerExtension` is mixed into vLLM's workers (``worker_extension_cls``) and called through ``collective_rpc``.
Counting replaces methods on live objects and slows the engine, so it is switched on for a few steps outside the
timed runs and undone afterwards. Compiled or captured steps do not pass those methods; they are not counted at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tessa.ops import compiled
from tessa.vllm.latency import COLLECTIVES, attach

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GEMMS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "linear", "onednn_mm", "matmul")
COMPILED = ("add_combined", "dot_rows", "segmented_in", "segmented_out")
# Allocation and bookkeeping, which launch nothing.
FREE = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh", "is_pinned")


@dataclass
class StepCount:
    """One forward pass. Bytes are those of the input tensors that a rank hands to its collectives."""

    tokens: int
    collectives: int = 0
    collective_bytes: int = 0
    all_reduces: int = 0
    all_gathers: int = 0
    adapter_kernels: int = 0
    adapter_gemms: int = 0


class _KernelCounter(TorchDispatchMode):
    """Counts the tensor operations dispatched while it is active and not suspended."""

    def __init__(self, counts: Callable[[], StepCount | None]) -> None:
        super().__init__()
        self.counts = counts
        self.suspended = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        step = self.counts()
        name = func.overloadpacket.__name__
        if step is not None and not self.suspended and not func.is_view and name not in FREE:
            step.adapter_kernels += 1
            step.adapter_gemms += name in GEMMS
        return func(*args, **(kwargs or {}))


class Counting:
    """Installs the counters on a worker's model and tensor-parallel group, and removes them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.steps: list[StepCount] = []
        self.current: StepCount | None = None
        self._undo: list[Callable[[], None]] = []

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original, own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, make(original))
        self._undo.append(lambda: setattr(owner, name, original) if own else delattr(owner, name))

    def install(self) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        if group.device_communicator is not None and group.world_size > 1:
            for name in COLLECTIVES:
                self._replace(
                    group.device_communicator, name, lambda original, name=name: self._counted(original, name)
                )
        self._replace(self.model, "forward", self._stepped)
        for name in COMPILED:  # these are no tensor operations of torch, which the dispatch would see
            self._replace(compiled, name, self._compiled)
        kernels = _KernelCounter(lambda: self.current)
        for layer in self.model.modules():
            if hasattr(layer, "punica_wrapper") and hasattr(layer, "_get_quant_method"):
                self._watch_layer(layer, kernels)

    def _watch_layer(self, layer: Any, kernels: _KernelCounter) -> None:
        """Count a layer's adapter work: all of `apply` but the base product, and the product that is wide."""

        def counted(original: Any) -> Any:
            def apply(*args: Any, **kwargs: Any) -> Any:
                with kernels:
                    return original(*args, **kwargs)

            return apply

        def base(original: Any) -> Any:
            def product(*args: Any, **kwargs: Any) -> Any:
                kernels.suspended = True
                try:
                    return original(*args, **kwargs)
                finally:
                    kernels.suspended = False

            return product

        class Method:
            """The layer's quantisation method with its product left out of the count."""

            def __init__(self, method: Any) -> None:
                self.apply = base(method.apply)

        self._replace(layer, "apply", counted)
        self._replace(layer, "_get_quant_method", lambda original: lambda: Method(original()))
        products = getattr(layer, "products", None)
        if hasattr(products, "wide_gemm"):
            self._replace(products, "wide_gemm", lambda original: lambda: base(original()))

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _counted(self, original: Any, name: str) -> Any:
        def collective(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.current is not None:
                self.current.collectives += 1
                self.current.collective_bytes += tensor.numel() * tensor.element_size()
                self.current.all_reduces += name == "all_reduce"
                self.current.all_gathers += name == "all_gather"
            return original(tensor, *args, **kwargs)

        return collective

    def _compiled(self, original: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            if self.current is not None:
                self.current.adapter_kernels += 1
                self.current.adapter_gemms += 1
            return original(*args, **kwargs)

        return kernel

    def _stepped(self, original: Any) -> Any:
        """Count inside the model's forward alone: the sampler's gather of logits is the same for every backend."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            tokens = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
            with self._step(0 if tokens is None else tokens.shape[0]):
                return original(*args, **kwargs)

        return forward

    @contextmanager
    def _step(self, tokens: int) -> Iterator[None]:
        self.current = StepCount(tokens)
        try:
            yield
        finally:
            self.steps.append(self.current)
            self.current = None


def adapter_bytes(model: torch.nn.Module) -> int:
    """Bytes that a rank holds for its resident adapter slots."""
    total = 0
    for layer in model.modules():
        if hasattr(layer, "products"):
            total += layer.products.nbytes  # type: ignore[operator, union-attr]
        elif hasattr(layer, "lora_a_stacked"):
            total += sum(t.nbytes for t in (*layer.lora_a_stacked, *layer.lora_b_stacked))
    return total


def why_not_counted(vllm_config: VllmConfig) -> str | None:
    """Why an engine's steps cannot be counted, or None where they can."""
    compilation = vllm_config.compilation_config
    if compilation.mode.name == "NONE" and compilation.cudagraph_mode.name == "NONE":
        return None
    return "compiled and captured steps do not pass the methods that count; engine.enforce_eager=true counts them"


class WorkerExtension:
    """Methods that vLLM adds to its worker class; names start with ``tessa_`` so that they collide with none."""

    def tessa_set_schedule(self, mode: str) -> None:
        """Change how TESSA's layers choose their products, to compare schedules on one engine."""
        for layer in self.model_runner.get_model().modules():  # type: ignore[attr-defined]
            products: Any = getattr(layer, "products", None)
            if hasattr(products, "schedule"):
                products.schedule = replace(products.schedule, mode=mode)

    def tessa_add_latency(self, microseconds: float) -> None:
        """Let every collective wait so long from now on (see `tessa.vllm.latency`) and count them anew."""
        if not hasattr(self, "tessa_latency"):
            eager = self.vllm_config.model_config.enforce_eager  # type: ignore[attr-defined]
            self.tessa_latency = attach(self.model_runner.get_model(), eager)  # type: ignore[attr-defined]
        self.tessa_latency.set(microseconds)

    def tessa_latency_counts(self) -> dict[str, Any]:
        """Forward passes and collectives since the latency was last set."""
        return self.tessa_latency.counts()

    def tessa_start_counting(self) -> str | None:
        """Count the steps from now on; returns why that is impossible here, and then counts nothing."""
        reason = why_not_counted(self.vllm_config)  # type: ignore[attr-defined]
        if reason is not None:
            return reason
        self.tessa_counting = Counting(self.model_runner.get_model())  # type: ignore[attr-defined]
        self.tessa_counting.install()
        return None

    def tessa_stop_counting(self) -> list[dict[str, Any]]:
        """The steps since counting began."""
        self.tessa_counting.remove()
        return [asdict(step) for step in self.tessa_counting.steps]

    def tessa_adapter_bytes(self) -> int:
        return adapter_bytes(self.model_runner.get_model())  # type: ignore[attr-defined]
