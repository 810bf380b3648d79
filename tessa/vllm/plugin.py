"""vLLM plugin: lets an adapter backend take vLLM's adapter support over, when the engine's configuration asks.

vLLM loads the entry point in the front end, the engine core and every worker. `register` wraps two methods of the
worker's adapter manager and one of the unquantised linear layer. They act as vLLM wrote them unless
``additional_config["adapter_backend"]`` names a backend: "tessa", or ``module:attribute`` of a
`tessa.backend.AdapterHook` subclass.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tessa.errors import UserError
from tessa.vllm.lifetime import die_with_parent

if TYPE_CHECKING:
    from tessa.backend import AdapterHook

SUPPORTED_VLLM = "0.32.0"
NAMED_HOOKS = {"tessa": "tessa.vllm.hook:TessaHook"}


def resolve_hook(name: str) -> type[AdapterHook]:
    """The hook class that ``adapter_backend`` names.

    Raises:
        UserError: unknown short name, or a path that cannot be imported or is not an `AdapterHook`.
    """
    from tessa.backend import AdapterHook

    path = NAMED_HOOKS.get(name, name)
    module_name, _, attribute = path.partition(":")
    allowed = f"allowed: {', '.join(NAMED_HOOKS)}, or 'module:attribute' of a tessa.backend.AdapterHook"
    if not attribute:
        raise UserError(f"adapter_backend '{name}' is unknown; {allowed}")
    try:
        hook = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"adapter_backend '{name}' cannot be loaded ({error}); {allowed}") from error
    if not (isinstance(hook, type) and issubclass(hook, AdapterHook)):
        raise UserError(f"adapter_backend '{name}' is not an AdapterHook class; {allowed}")
    return hook


@contextmanager
def _installed(hook: AdapterHook) -> Iterator[None]:
    """While vLLM wraps the model's layers, offer it the hook's classes and its step metadata."""
    import vllm.lora.layers.base_linear as base_linear
    import vllm.lora.model_manager as model_manager
    import vllm.lora.utils as lora_utils

    classes, get_wrapper = lora_utils._all_lora_classes, model_manager.get_punica_wrapper
    get_device = base_linear._get_lora_device

    def get_punica_wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook.punica_wrapper(*args, **kwargs) or get_wrapper(*args, **kwargs)

    def _get_lora_device(base_layer: Any) -> Any:
        # vLLM asks the weight, which its 8-bit CPU kernels have packed and dropped.
        try:
            return get_device(base_layer)
        except AttributeError:
            return hook.vllm_config.device_config.device

    base_linear._get_lora_device = _get_lora_device
    lora_utils._all_lora_classes = (*hook.layer_classes(), *classes)
    model_manager.get_punica_wrapper = get_punica_wrapper
    try:
        yield
    finally:
        lora_utils._all_lora_classes = classes
        model_manager.get_punica_wrapper = get_wrapper
        base_linear._get_lora_device = get_device


def _wrap_create(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_lora_manager(self: Any, model: Any, vllm_config: Any) -> Any:
        options = vllm_config.additional_config
        name = options.get("adapter_backend") if isinstance(options, dict) else None
        if name is None:
            return original(self, model, vllm_config)
        import vllm

        if not vllm.__version__.startswith(SUPPORTED_VLLM):
            raise UserError(
                f"adapter_backend '{name}' is written for vLLM {SUPPORTED_VLLM}, found {vllm.__version__}; "
                f"install vllm=={SUPPORTED_VLLM}"
            )
        hook = resolve_hook(name)(options, vllm_config)
        self.adapter_hook = hook
        if self.lora_config.target_modules is None:
            self.lora_config = replace(self.lora_config, target_modules=hook.target_modules(model))
        with _installed(hook):
            wrapped = original(self, model, vllm_config)
        hook.installed(self)
        return wrapped

    return create_lora_manager


def _wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _load_adapter(self: Any, lora_request: Any) -> Any:
        hook = getattr(self, "adapter_hook", None)
        loaded = hook.load_adapter(self, lora_request) if hook is not None else None
        return original(self, lora_request) if loaded is None else loaded

    return _load_adapter


def _wrap_process(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def process_weights_after_loading(self: Any, layer: Any) -> Any:
        """On the CPU vLLM packs the weight and drops it; a hook that widens it needs the plain one kept."""
        from vllm.config import get_current_vllm_config_or_none
        from vllm.platforms import current_platform

        config = get_current_vllm_config_or_none()
        options = config.additional_config if config is not None else None
        if (
            config is not None
            and isinstance(options, dict)
            and "adapter_backend" in options
            and current_platform.is_cpu()
        ):
            hook = resolve_hook(options["adapter_backend"])
            if config.lora_config is not None and hook.keeps_base_weights(options):
                layer.unpacked_weight = layer.weight.data
        return original(self, layer)

    return process_weights_after_loading


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; safe to call more than once in a process."""
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager, WorkerLoRAManager
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    if os.environ.get("TESSA_DIE_WITH_PARENT") == "1":
        die_with_parent()
    if hasattr(WorkerLoRAManager._load_adapter, "__wrapped__"):
        return
    WorkerLoRAManager._load_adapter = _wrap_load(WorkerLoRAManager._load_adapter)
    for manager in (WorkerLoRAManager, LRUCacheWorkerLoRAManager):
        manager.create_lora_manager = _wrap_create(manager.create_lora_manager)
    UnquantizedLinearMethod.process_weights_after_loading = _wrap_process(
        UnquantizedLinearMethod.process_weights_after_loading
    )
