"""The hook that makes vLLM serve TESSA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import get_adapter_absolute_path
from vllm.platforms import current_platform

from tessa.adapter_io import read_adapter
from tessa.backend import AdapterHook
from tessa.errors import UserError
from tessa.ops.schedule import Schedule
from tessa.slices import PLACEMENTS, Slice
from tessa.vllm.layers import (
    LayerOptions,
    Projection,
    TessaColumnLinear,
    TessaLinear,
    TessaRowLinear,
    encode_slice,
)
from tessa.vllm.wrapper import RoutingWrapper, StaticWrapper

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

PRODUCTS = ("growing", "static")


class TessaHook(AdapterHook):
    """Wraps column- and row-parallel layers with slots for slice deltas and reads TESSA adapter folders.

    Options in ``additional_config``:

    - ``schedule``: "auto" (default), "wide" or "segmented".
    - ``products``: "growing" (default on the CPU) or "static" (default on a GPU), see `tessa.ops.products`.
    - ``placement`` ("across"), ``shards`` (8): what static buffers make room for. Their width comes from
      ``lora_rank``, the largest rank-equivalent, by default vLLM's ``max_lora_rank``.
    """

    def __init__(self, options: Mapping[str, Any], vllm_config: VllmConfig) -> None:
        super().__init__(options, vllm_config)
        products = options.get("products", "growing" if current_platform.is_cpu() else "static")
        if products not in PRODUCTS:
            raise UserError(f"products '{products}' is unknown; allowed: {', '.join(PRODUCTS)}")
        if products == "growing" and not current_platform.is_cpu():
            raise UserError("products 'growing' run on the CPU alone; leave the option out on a GPU")
        placement = options.get("placement", "across")
        if placement not in PLACEMENTS:
            raise UserError(f"placement '{placement}' is unknown; allowed: {', '.join(PLACEMENTS)}")
        assert vllm_config.lora_config is not None
        self.layer_options = LayerOptions(
            schedule=Schedule(mode=options.get("schedule", "auto")),
            static=products == "static",
            placement=placement,
            rank=float(options.get("lora_rank") or vllm_config.lora_config.max_lora_rank),
            shards=int(options.get("shards", 8)),
        )

    @classmethod
    def keeps_base_weights(cls, options: Mapping[str, Any]) -> bool:
        return options.get("schedule", "auto") != "segmented" or options.get("products") == "static"

    def layer_classes(self) -> tuple[type, ...]:
        TessaLinear.options = self.layer_options
        return (TessaColumnLinear, TessaRowLinear)

    def punica_wrapper(self, *args: Any, **kwargs: Any) -> RoutingWrapper | StaticWrapper:
        if self.layer_options.static:
            return StaticWrapper(*args, **kwargs)
        wrapper = RoutingWrapper(*args, **kwargs)
        wrapper.keep_vllm_metadata = False  # only TESSA's layers are wrapped, and they read the routing alone
        return wrapper

    def load_adapter(self, manager: WorkerLoRAManager, request: LoRARequest) -> LoRAModel:
        path = get_adapter_absolute_path(request.lora_path)
        adapter = read_adapter(path)
        known = self._projections(manager)
        unknown = sorted(set(adapter.slices) - set(known))
        if unknown:
            raise UserError(
                f"adapter '{request.lora_name}' ({path}) trains '{unknown[0]}', which this model does not have or "
                f"does not serve ({len(unknown)} such modules); it has {self._describe(known)}"
            )
        self._check(request.lora_name, adapter.slices, known)
        dtype = manager.lora_config.lora_dtype
        weights = {
            module: LoRALayerWeights(
                module,
                rank=1,
                lora_alpha=1,
                lora_a=adapter.deltas[module].to(dtype),
                lora_b=encode_slice(s),
                scaling=1,
            )
            for module, s in adapter.slices.items()
        }
        return LoRAModel(request.lora_int_id, 1, weights)

    def _projections(self, manager: WorkerLoRAManager) -> dict[str, tuple[TessaLinear, Projection]]:
        """Every projection that has slots, by the path an adapter names it with."""
        wrapped = manager._adapter_manager
        found: dict[str, tuple[TessaLinear, Projection]] = {}
        for name, layer in wrapped.modules.items():
            if isinstance(layer, TessaLinear):
                names = wrapped.packed_modules.get(name, [name])
                found.update((n, (layer, p)) for n, p in zip(names, layer.parts, strict=True))
        return found

    @staticmethod
    def _describe(known: Mapping[str, Any]) -> str:
        return ", ".join(sorted({name.rsplit(".", 1)[-1] for name in known})) + f" in {len(known)} layers"

    @staticmethod
    def _check(
        adapter: str, slices: Mapping[str, Slice], known: Mapping[str, tuple[TessaLinear, Projection]]
    ) -> None:
        by_layer: dict[int, tuple[TessaLinear, dict[int, Slice], str]] = {}
        for module, s in slices.items():
            layer, projection = known[module]
            if (s.d_out, s.d_in) != (projection.d_out, projection.d_in):
                raise UserError(
                    f"adapter '{adapter}': '{module}' was trained on a weight of [{s.d_out}, {s.d_in}], this model's "
                    f"is [{projection.d_out}, {projection.d_in}]; serve it on the base model that it was trained on"
                )
            found = by_layer.setdefault(id(layer), (layer, {}, module))
            found[1][layer.parts.index(projection)] = s
        for layer, own, module in by_layer.values():
            try:
                layer.check([own.get(i) for i in range(len(layer.parts))])
            except ValueError as error:
                raise UserError(f"adapter '{adapter}', '{module}': {error}") from None
