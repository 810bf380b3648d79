"""The PEFT tuner: plans the slices of a model and replaces its target modules."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, _maybe_include_all_linear_layers
from torch import Tensor, nn

from tessa.budget import budget_of
from tessa.errors import UserError
from tessa.offsets import placement_of, plan_slices
from tessa.peft.config import DEFAULT_TARGETS, TessaConfig
from tessa.peft.layer import TessaLayer, linear_shape
from tessa.slices import Slice, axis_of


class TessaModel(BaseTuner):
    """A model with TESSA adapters, made by `peft.get_peft_model` with a `TessaConfig`."""

    prefix = "tessa_"
    tuner_layer_cls = TessaLayer
    # PEFT asks for defaults by model type; TESSA's are the same for all, see `TessaConfig`.
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012  (declared so by PEFT)

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        _fill_targets(peft_config)
        return peft_config

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        """Plan the slices if the config holds none, and check those it holds against the model."""
        if not peft_config.slices:
            choose_slices(model, peft_config)
            return
        modules = dict(_linear_candidates(model))
        absent = sorted(set(peft_config.slices) - set(modules))
        if absent:
            raise UserError(
                f"the adapter has slices of {len(absent)} modules that the model lacks: {absent[:4]}; "
                f"it was trained on another base model"
            )

    @staticmethod
    def _check_target_module_exists(peft_config: Any, key: str) -> Any:
        return key in peft_config.slices

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        s = Slice.from_dict(peft_config.slices[current_key], current_key)
        layer = target if isinstance(target, TessaLayer) else TessaLayer(target)
        layer.add_adapter(adapter_name, s, peft_config.init_weights, peft_config.inference_mode)
        if layer is not target:
            if adapter_name not in self.active_adapters:
                layer.requires_grad_(False)  # an adapter added beside the active one is not trained yet
            self._replace_module(parent, target_name, layer, target)


def choose_slices(
    model: nn.Module, config: TessaConfig, batches: Iterable[Mapping[str, Tensor]] | None = None
) -> dict[str, Slice]:
    """Plan the slices of a model and store them in the config.

    `peft.get_peft_model` calls this itself; call it before only to give data to the offset rule "gradient",
    or to look at the plan.

    Args:
        batches: keyword arguments of the model, labels included, for the rule "gradient".

    Raises:
        UserError: where no module matches, or a rule lacks what it needs.
    """
    modules = target_layers(model, config)
    energy: dict[str, npt.NDArray[np.float64]] | None = None
    if config.offset_rule == "weight":
        energy = {name: _weight_energy(name, layer, config) for name, layer in modules.items()}
    elif config.offset_rule == "gradient":
        if batches is None:
            raise UserError(
                "offset_rule 'gradient' needs data: call tessa.peft.choose_slices(model, config, batches) "
                "with a few training batches before get_peft_model"
            )
        energy = gradient_energy(model, config, batches)
    slices = plan_slices(
        {name: linear_shape(layer, name) for name, layer in modules.items()},
        rank=config.rank_equivalent,
        placement=config.placement,
        shards=config.shards,
        rule=config.offset_rule,
        seed=config.seed,
        multiple=config.width_multiple,
        offset_multiple=config.offset_multiple,
        energy=energy,
    )
    budget = budget_of(slices, config.rank_equivalent)
    if not budget.matched:
        warnings.warn(
            f"the adapter's budget is not matched with LoRA's\n{budget.render()}",
            stacklevel=2,
        )
    config.set_slices(slices)
    return slices


def gradient_energy(
    model: nn.Module, config: TessaConfig, batches: Iterable[Mapping[str, Tensor]]
) -> dict[str, npt.NDArray[np.float64]]:
    """Squared gradients of the loss by position of each target module's sliced dimension, summed over
    batches.

    One weight's gradient exists at a time: it is reduced as soon as the backward pass has formed it. The
    model runs in evaluation mode; modes and ``requires_grad`` are restored.

    Args:
        batches: keyword arguments for ``model(**batch)``, which must return a ``loss``.

    Returns:
        module path -> energies ``[d_out]`` (axis out) or ``[d_in]`` (axis in), float64.
    """
    layers = target_layers(model, config)
    sums: dict[str, Tensor] = {}
    training = model.training
    required = {parameter: parameter.requires_grad for parameter in model.parameters()}
    hooks = []
    model.requires_grad_(False)
    model.eval()
    try:
        for name, layer in layers.items():
            weight = _plain_weight(name, layer, "gradient")
            weight.requires_grad_(True)
            other = 1 if _axis(name, config) == "out" else 0
            sums[name] = torch.zeros(weight.shape[1 - other], dtype=torch.float64, device=weight.device)

            def reduce(parameter: Tensor, total: Tensor = sums[name], other: int = other) -> None:
                assert parameter.grad is not None
                total += parameter.grad.float().square().sum(other)
                parameter.grad = None

            hooks.append(weight.register_post_accumulate_grad_hook(reduce))
        seen = False
        for batch in batches:
            model(**batch).loss.backward()
            seen = True
        if not seen:
            raise UserError("offset_rule 'gradient' got no batches; give at least one")
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, flag in required.items():
            parameter.requires_grad_(flag)
        model.train(training)
    return {name: total.cpu().numpy() for name, total in sums.items()}


def target_layers(model: nn.Module, config: TessaConfig) -> dict[str, nn.Module]:
    """Module path -> base layer of every module that the config targets.

    Raises:
        UserError: where none matches.
    """
    _fill_targets(config)
    _maybe_include_all_linear_layers(config, model)
    found = {
        name: layer
        for name, layer in _linear_candidates(model)
        if BaseTuner._check_target_module_exists(config, name)
    }
    if not found:
        layers = [name for name, layer in _linear_candidates(model) if hasattr(layer, "in_features")]
        raise UserError(
            f"target_modules {config.target_modules!r} match nothing in the model; its linear layers are "
            f"{sorted({name.rsplit('.', 1)[-1] for name in layers})}"
        )
    return found


def _fill_targets(config: TessaConfig) -> None:
    if config.slices:
        config.target_modules = {name.rsplit(".", 1)[-1] for name in config.slices}
    elif config.target_modules is None:
        config.target_modules = set(DEFAULT_TARGETS)


def _linear_candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules by path; for an adapter's wrapper its base layer, and nothing else of its inside."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(prefix) for prefix in inside):
            continue
        if isinstance(module, BaseTunerLayer):
            inside.append(f"{name}.")
            module = module.get_base_layer()
        yield name, module


def _axis(name: str, config: TessaConfig) -> str:
    return axis_of(name, placement_of(name, config.placement))


def _plain_weight(name: str, layer: nn.Module, rule: str) -> Tensor:
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise UserError(
            f"offset_rule '{rule}' needs floating-point weights, but '{name}' is quantised; use 'random'"
        )
    return weight


def _weight_energy(name: str, layer: nn.Module, config: TessaConfig) -> npt.NDArray[np.float64]:
    weight = _plain_weight(name, layer, "weight").detach()
    other = 1 if _axis(name, config) == "out" else 0
    return weight.float().square().sum(other).double().cpu().numpy()
