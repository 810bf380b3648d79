"""What a serving backend is: the part that the harness reads, and the part that runs inside vLLM's workers.

`BackendSpec` is plain data, importable without torch or vLLM. `AdapterHook` is the interface between the vLLM
plugin (`tessa.vllm.plugin`) and a backend; a hook is named by ``module:attribute`` in the engine's
``additional_config["adapter_backend"]``, so vLLM finds it in every process without a registry of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.punica_wrapper import PunicaWrapperBase
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

AdapterFormat = Literal["none", "merged", "lora", "bd_lora", "tessa", "server"]


@dataclass(frozen=True)
class BackendSpec:
    """One way to serve adapters.

    Attributes:
        name: registry name.
        title: how tables and figures call it.
        adapter_format: the adapter structure it serves. "none" serves the base model alone, "merged" one adapter
            folded into the weights, "server" whatever a server that is already running has loaded.
        summary: what it does per layer type, its sharding, its collectives, its source.
        hook: ``module:attribute`` of the `AdapterHook` class, or None for vLLM's own path.
        engine_args: vLLM engine arguments beyond those that all backends share.
        kernels: implementations that ``kernels=`` accepts; the first is the default.
        options: backend options (``backend_options``) with their allowed values; the first is the default.
        settings: further backend options, whose values are free text, with their defaults.
        wrong_by_design: option settings whose outputs are wrong on purpose, so that the correctness gate does not
            apply to them and the result is marked.
        external: the backend runs outside vLLM through its own launcher.
        engine: ``module:class`` that makes the engines of an external backend; `experiments.engine.external` says
            what the class offers.
    """

    name: str
    title: str
    adapter_format: AdapterFormat
    summary: str
    hook: str | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    kernels: tuple[str, ...] = ("default",)
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    wrong_by_design: tuple[tuple[str, str], ...] = ()
    external: bool = False
    engine: str | None = None

    @property
    def uses_adapters(self) -> bool:
        """Whether requests name an adapter when they reach the engine."""
        return self.adapter_format not in ("none", "merged")


class AdapterHook:
    """How a backend changes vLLM's adapter support inside a worker; the defaults change nothing.

    One instance lives as long as the worker's adapter manager. Every method is called in the worker process.

    Args:
        options: the engine's ``additional_config``, unchanged.
        vllm_config: the engine's configuration.
    """

    def __init__(self, options: Mapping[str, Any], vllm_config: VllmConfig) -> None:
        self.options = options
        self.vllm_config = vllm_config

    @classmethod
    def keeps_base_weights(cls, options: Mapping[str, Any]) -> bool:
        """Whether the linear layers' plain weights are needed beside what vLLM packs for the CPU."""
        return False

    def layer_classes(self) -> tuple[type, ...]:
        """Subclasses of ``vllm.lora.layers.BaseLayerWithLoRA``, asked before vLLM's own to wrap a layer."""
        return ()

    def punica_wrapper(self, *args: Any, **kwargs: Any) -> PunicaWrapperBase | None:
        """The object that holds a step's token-to-slot mapping and the adapter ops; None keeps vLLM's.

        Called with the arguments of ``vllm.lora.punica_wrapper.get_punica_wrapper``.
        """
        return None

    def target_modules(self, model: Any) -> list[str]:
        """Module names to wrap where the user named none: every linear layer that vLLM can adapt."""
        from vllm.lora.utils import get_supported_lora_modules

        embeddings = set(getattr(model, "embedding_modules", None) or ())
        return sorted(set(get_supported_lora_modules(model)) - embeddings)

    def load_adapter(self, manager: WorkerLoRAManager, request: LoRARequest) -> LoRAModel | None:
        """Read an adapter folder; None leaves it to vLLM.

        Raises:
            UserError: the folder does not hold an adapter that this backend can serve.
        """
        return None

    def installed(self, manager: WorkerLoRAManager) -> None:
        """Called once when the model's layers have been wrapped."""
