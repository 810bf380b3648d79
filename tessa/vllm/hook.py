"""The hook that makes vLLM serve TESSA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.utils import get_adapter_absolute_path, get_supported_lora_modules

from tessa.adapter_io import read_adapter
from tessa.backend import AdapterHook
from tessa.errors import UserError
from tessa.ops.schedule import Schedule
from tessa.slices import Slice
from tessa.vllm.layers import Projection, TessaColumnLinear, TessaLinear, TessaRowLinear, encode_slice
from tessa.vllm.wrapper import RoutingWrapper

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

OPTIONS = ("adapter_backend", "schedule")


class TessaHook(AdapterHook):
    """Wraps column- and row-parallel layers with slots for slice deltas and reads TESSA adapter folders.

    Options in ``additional_config``: ``schedule`` is "auto" (default), "wide" or "segmented".
    """

    def __init__(self, options: Mapping[str, Any], vllm_config: VllmConfig) -> None:
        super().__init__(options, vllm_config)
        self.schedule = Schedule(mode=options.get("schedule", "auto"))
        self.tp_size = vllm_config.parallel_config.tensor_parallel_size

    @classmethod
    def keeps_base_weights(cls, options: Mapping[str, Any]) -> bool:
        return options.get("schedule", "auto") != "segmented"

    def layer_classes(self) -> tuple[type, ...]:
        TessaLinear.schedule = self.schedule
        return (TessaColumnLinear, TessaRowLinear)

    def punica_wrapper(self, *args: Any, **kwargs: Any) -> RoutingWrapper:
        wrapper = RoutingWrapper(*args, **kwargs)
        wrapper.keep_vllm_metadata = False  # only TESSA's layers are wrapped, and they read the routing alone
        return wrapper

    def target_modules(self, model: Any) -> list[str]:
        embeddings = set(getattr(model, "embedding_modules", None) or ())
        return sorted(set(get_supported_lora_modules(model)) - embeddings)

    def load_adapter(self, manager: WorkerLoRAManager, request: LoRARequest) -> LoRAModel:
        path = get_adapter_absolute_path(request.lora_path)
        adapter = read_adapter(path)
        known = self._projections(manager)
        weights: dict[str, LoRALayerWeights] = {}
        for module, s in adapter.slices.items():
            if module not in known:
                raise UserError(
                    f"adapter '{request.lora_name}' ({path}) trains '{module}', which this model does not have or "
                    f"does not serve; it has {self._describe(known)}"
                )
            layer, projection = known[module]
            self._check(request.lora_name, module, layer, projection, s)
            weights[module] = LoRALayerWeights(
                module,
                rank=1,
                lora_alpha=1,
                lora_a=adapter.deltas[module].to(manager.lora_config.lora_dtype),
                lora_b=encode_slice(s),
                scaling=1,
            )
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

    def _check(self, adapter: str, module: str, layer: TessaLinear, projection: Projection, s: Slice) -> None:
        if (s.d_out, s.d_in) != (projection.d_out, projection.d_in):
            raise UserError(
                f"adapter '{adapter}': '{module}' was trained on a weight of [{s.d_out}, {s.d_in}], this model's is "
                f"[{projection.d_out}, {projection.d_in}]; serve it on the base model that it was trained on"
            )
        try:
            layer.local(projection, s)
        except UserError as error:
            raise UserError(f"adapter '{adapter}', '{module}': {error}") from None
