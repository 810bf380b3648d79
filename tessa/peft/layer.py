"""A linear layer with TESSA adapters."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from tessa.errors import UserError
from tessa.peft.function import SliceLinear, add_slice
from tessa.slices import Slice

RANDOM_INIT_STD = 0.02


def linear_shape(layer: nn.Module, name: str = "layer") -> tuple[int, int]:
    """(d_out, d_in) of a linear layer, quantised or not.

    Raises:
        UserError: where the module does not state ``in_features`` and ``out_features``.
    """
    d_out, d_in = getattr(layer, "out_features", None), getattr(layer, "in_features", None)
    if not isinstance(d_out, int) or not isinstance(d_in, int) or isinstance(layer, nn.Bilinear):
        raise UserError(
            f"target module '{name}' is a {type(layer).__name__}; TESSA adapts linear layers. "
            f"Choose `target_modules` that are linear"
        )
    return d_out, d_in


class TessaLayer(nn.Module, BaseTunerLayer):
    """Wraps a linear layer; each adapter adds one slice delta.

    Attributes:
        tessa_delta: adapter name -> delta, of the shape its slice states.
        tessa_slices: adapter name -> geometry.
    """

    adapter_layer_names = ("tessa_delta",)
    other_param_names = ("tessa_slices",)

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.tessa_delta = nn.ParameterDict()
        self.tessa_slices: dict[str, Slice] = {}
        # Base values under a merged delta: restoring them undoes a merge exactly in every dtype.
        self._under_merge: dict[str, Tensor] = {}
        self._disable_adapters = False
        self.merged_adapters = []
        self.out_features, self.in_features = linear_shape(self.get_base_layer())

    def add_adapter(self, adapter_name: str, s: Slice, init_weights: bool, inference_mode: bool) -> None:
        """Add an adapter with zero delta, or a random one for tests (``init_weights=False``).

        Raises:
            UserError: where the slice is not one of this layer.
        """
        if (s.d_out, s.d_in) != (self.out_features, self.in_features):
            raise UserError(
                f"adapter '{adapter_name}' has a slice of a [{s.d_out}, {s.d_in}] weight, but the layer's "
                f"is [{self.out_features}, {self.in_features}]; it was trained on another base model"
            )
        delta = torch.zeros(s.delta_shape)
        if not init_weights:
            nn.init.normal_(delta, std=RANDOM_INIT_STD)
        self.tessa_slices[adapter_name] = s
        self.tessa_delta[adapter_name] = nn.Parameter(delta)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=inference_mode)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.disable_adapters or self.merged:
            if self.merged and self.disable_adapters:
                self.unmerge()
            return self.base_layer(x, *args, **kwargs)
        names = [name for name in self.active_adapters if name in self.tessa_delta]
        if names and self._can_fuse(x):
            base, first = self.base_layer, names.pop(0)
            y = SliceLinear.apply(
                x, base.weight, base.bias, self.tessa_delta[first], self.tessa_slices[first]
            )
        else:
            y = self.base_layer(x, *args, **kwargs)
        for name in names:
            y = add_slice(y, x, self.tessa_delta[name], self.tessa_slices[name])
        return y

    def _can_fuse(self, x: Tensor) -> bool:
        """Whether base and delta can run as one function: a plain frozen linear layer in the dtype of x.

        Autocast (which would convert operands) and hooks on the base layer (which must run) rule it out.
        """
        base = self.base_layer
        return (
            type(base) is nn.Linear
            and not base.weight.requires_grad
            and (base.bias is None or not base.bias.requires_grad)
            and x.dtype == base.weight.dtype
            and not (
                torch.is_autocast_enabled(x.device.type)
                and torch.get_autocast_dtype(x.device.type) != x.dtype
            )
            and not base._forward_hooks
            and not base._forward_pre_hooks
            and not base._backward_hooks
            and not base._backward_pre_hooks
        )

    def _window(self, weight: Tensor, s: Slice) -> Tensor:
        """View of the weight's sliced rows ``[P, c/P, d_in]`` or columns ``[d_out, P, c/P]``."""
        dim = 0 if s.axis == "out" else 1
        return weight.unflatten(dim, (s.segments, s.part)).narrow(dim + 1, s.offset, s.segment_width)

    def get_delta_weight(self, adapter_name: str) -> Tensor:
        """The adapter as an update of the whole weight, ``[d_out, d_in]``, zero outside its slice."""
        s, delta = self.tessa_slices[adapter_name], self.tessa_delta[adapter_name]
        full = torch.zeros(s.d_out, s.d_in, dtype=delta.dtype, device=delta.device)
        window = self._window(full, s)
        window.copy_(delta.detach().reshape(window.shape))
        return full

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add the deltas into the base weight; the sum is formed in the wider of the two dtypes.

        Args:
            safe_merge: refuse a delta that makes a weight NaN or infinite, leaving the weight as it was.

        Raises:
            UserError: for a base layer without a floating-point weight, or with ``safe_merge`` a broken
                delta.
        """
        names = check_adapters_to_merge(self, adapter_names)
        names = [name for name in names if name in self.tessa_delta]
        if not names:
            return
        weight = self.weight
        if not weight.is_floating_point() or weight.shape != (self.out_features, self.in_features):
            raise UserError(
                f"a {type(self.get_base_layer()).__name__} has no plain weight to merge into; "
                f"load the base model unquantised to merge, or keep the adapter separate"
            )
        for name in names:
            window = self._window(weight.data, self.tessa_slices[name])
            delta = self.tessa_delta[name].detach().to(window.device).reshape(window.shape)
            merged = window + delta
            if safe_merge and not torch.isfinite(merged).all():
                raise UserError(
                    f"merging adapter '{name}' gives NaN or infinite weights; the adapter is broken"
                )
            self._under_merge[name] = window.clone()
            window.copy_(merged)
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Restore the base weight bit for bit, last merged first, since slices may overlap."""
        while self.merged_adapters:
            name = self.merged_adapters.pop()
            window = self._window(self.weight.data, self.tessa_slices[name])
            window.copy_(self._under_merge.pop(name))

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        return True

    def __repr__(self) -> str:
        return f"tessa.{super().__repr__()}"

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}: {s.axis}[{s.offset}+{s.segment_width}]x{s.segments}"
            for name, s in self.tessa_slices.items()
        )
