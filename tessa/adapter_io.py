"""Read, check and write TESSA adapter folders, without PEFT.

A folder holds ``adapter_config.json`` (``peft_type: TESSA``, the training settings, and the realised
geometry of every adapted module under ``slices``) and ``adapter_model.safetensors`` with one unsharded
delta per module under PEFT's key ``base_model.model.<module path>.tessa_delta``. Pickled weights are never
opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessa.errors import UserError
from tessa.slices import Slice

if TYPE_CHECKING:
    import torch

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PEFT_TYPE = "TESSA"
KEY_PREFIX = "base_model.model."
KEY_SUFFIX = ".tessa_delta"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class TessaAdapter:
    """A checked adapter.

    Attributes:
        config: the parsed ``adapter_config.json``.
        slices: module path (``model.layers.0.self_attn.q_proj``) -> geometry.
        deltas: module path -> unsharded delta, ``[width, d_in]`` for axis out, ``[d_out, width]`` for axis
            in.
    """

    config: dict[str, Any]
    slices: dict[str, Slice]
    deltas: dict[str, torch.Tensor]

    @property
    def num_params(self) -> int:
        return sum(s.num_params for s in self.slices.values())


def delta_key(module: str) -> str:
    """Key of a module's delta in the weights file, as PEFT names it."""
    return f"{KEY_PREFIX}{module}{KEY_SUFFIX}"


def read_config(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Slice]]:
    """The config of an adapter folder and its slices by module path; no weights are read.

    Raises:
        UserError: where the folder or its config is absent, unreadable, of another PEFT type or without
            geometry.
    """
    folder = Path(path)
    file = folder / CONFIG_FILE
    if not folder.is_dir():
        raise UserError(f"no adapter folder at {folder}")
    if not file.is_file():
        raise UserError(f"{folder} has no {CONFIG_FILE}; give a folder that PEFT's save_pretrained wrote")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UserError(f"{file} is not readable JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{file} must hold a JSON object, got {type(config).__name__}")
    peft_type = config.get("peft_type")
    if peft_type != PEFT_TYPE:
        raise UserError(
            f"{file} has peft_type {peft_type!r}, but only {PEFT_TYPE!r} adapters are read here; "
            f"serve other adapters with a backend made for them, or train this one with TessaConfig"
        )
    slices = config.get("slices")
    if not isinstance(slices, dict) or not slices:
        raise UserError(
            f"{file} has no 'slices', the geometry of each adapted module; save the adapter again"
        )
    return config, {m: Slice.from_dict(s, f"{file}, slices of '{m}'") for m, s in slices.items()}


def _weights_file(folder: Path) -> Path:
    file = folder / WEIGHTS_FILE
    if file.is_file():
        return file
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise UserError(
            f"{folder} holds pickled weights ({', '.join(pickles)}), which can run code: never opened; "
            f"save the adapter as {WEIGHTS_FILE} (save_pretrained with safe_serialization=True, the default)"
        )
    raise UserError(f"{folder} has no {WEIGHTS_FILE}")


def read_adapter(path: str | os.PathLike[str], *, check_finite: bool = True) -> TessaAdapter:
    """Read and check an adapter folder; the deltas come to the CPU in the dtype they were saved in.

    Args:
        check_finite: refuse NaN and infinite values. When slots share one product, a NaN in one adapter
            reaches requests that use another, since zero times NaN is NaN.

    Raises:
        UserError: for everything that is wrong with the folder; the message names the file, and the module.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    config, slices = read_config(path)
    file = _weights_file(Path(path))
    keys = {delta_key(module): module for module in slices}
    deltas: dict[str, torch.Tensor] = {}
    try:
        with safe_open(file, framework="pt", device="cpu") as weights:
            found = set(weights.keys())
            if found != set(keys):
                missing, extra = sorted(set(keys) - found), sorted(found - set(keys))
                raise UserError(
                    f"{file} and the slices in {CONFIG_FILE} do not name the same modules; "
                    f"missing deltas: {missing[:4]} ({len(missing)}), "
                    f"unknown tensors: {extra[:4]} ({len(extra)})"
                )
            for key, module in keys.items():
                entry = weights.get_slice(key)
                shape, expected = tuple(entry.get_shape()), slices[module].delta_shape
                if shape != expected:
                    raise UserError(
                        f"{file}: delta of '{module}' has shape {list(shape)}, but its {slices[module]} "
                        f"needs {list(expected)}"
                    )
                if entry.get_dtype() not in FLOAT_DTYPES:
                    raise UserError(
                        f"{file}: delta of '{module}' has dtype {entry.get_dtype()}, allowed: {FLOAT_DTYPES}"
                    )
                deltas[module] = weights.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is not a readable safetensors file: {error}") from None
    if check_finite:
        for module, delta in deltas.items():
            if not torch.isfinite(delta).all():
                raise UserError(
                    f"{file}: delta of '{module}' holds NaN or infinite values; the training diverged"
                )
    return TessaAdapter(config, slices, deltas)


def write_adapter(
    path: str | os.PathLike[str],
    slices: Mapping[str, Slice],
    deltas: Mapping[str, torch.Tensor],
    *,
    base_model_name_or_path: str | None = None,
    rank_equivalent: float | None = None,
    **config: Any,
) -> Path:
    """Write an adapter folder that `read_adapter`, PEFT (after ``import tessa.peft``) and the server read.

    Args:
        slices, deltas: module path -> geometry, and unsharded delta of the shape the geometry states.
        config: further fields of ``TessaConfig``, such as ``placement``, ``shards``, ``offset_rule``,
            ``seed``.

    Raises:
        UserError: where modules, shapes or dtypes do not fit together.
    """
    from safetensors.torch import save

    if not slices or set(slices) != set(deltas):
        raise UserError(
            f"slices and deltas must name the same modules, got {sorted(slices)} and {sorted(deltas)}"
        )
    for module, s in slices.items():
        delta = deltas[module]
        if tuple(delta.shape) != s.delta_shape:
            raise UserError(
                f"delta of '{module}' has shape {list(delta.shape)}, its slice needs {s.delta_shape}"
            )
        if not delta.is_floating_point():
            raise UserError(f"delta of '{module}' has dtype {delta.dtype}; deltas are floating point")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "peft_type": PEFT_TYPE,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name_or_path,
        "inference_mode": True,
        "rank_equivalent": rank_equivalent,
        "target_modules": sorted({module.rsplit(".", 1)[-1] for module in slices}),
        **config,
        "slices": {module: s.to_dict() for module, s in slices.items()},
    }
    weights = {delta_key(m): deltas[m].detach().to("cpu").contiguous() for m in slices}
    _write_whole(folder / WEIGHTS_FILE, save(weights, metadata={"format": "pt"}))
    _write_whole(folder / CONFIG_FILE, json.dumps(content, indent=2, sort_keys=True).encode())
    return folder


def _write_whole(file: Path, data: bytes) -> None:
    """Write through a temporary name, so that a reader finds the whole file or none."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(file)
