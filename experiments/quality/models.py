"""Base models of the quality experiment: trained here, converted from a package, or on disk or a hub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.quality import base, smollm2
from experiments.quality.spec import QualitySpec
from tessa.errors import UserError

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int, float], None]


def ensure(spec: QualitySpec, cache: Path, progress: Progress | None = None) -> Path:
    """The checkpoint's folder, made first where the project makes it; a hub's model goes into the hub's own cache."""
    if spec.model == "skills":
        return base.ensure_base(base.settings(spec.base), cache, progress)
    if spec.model == "smollm2":
        return smollm2.ensure(cache)
    folder = Path(spec.model).expanduser()
    if folder.is_dir():
        return folder
    if spec.model.startswith((".", "/", "~")):
        raise UserError(f"study.model={spec.model}: there is no such folder")
    from experiments import model_build, models

    try:
        known = models.ModelSpec(
            name=spec.model.rsplit("/", 1)[-1], source="hub", weights="hub", hub_id=spec.model
        )
        return model_build.download(known)
    except UserError as error:
        raise UserError(
            f"study.model={spec.model} could not be downloaded; give a folder, or accept the model's licence and set "
            f"HF_TOKEN ({str(error).splitlines()[0]})"
        ) from error


def load(folder: Path, spec: QualitySpec) -> Any:
    """The model in the dtype it is trained in."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, spec.dtype))


def torch_device(spec: QualitySpec) -> torch.device:
    import torch

    chosen = spec.device
    if chosen == "auto":
        chosen = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(chosen)
