"""A checkpoint with one adapter merged into its weights, for the `merged` backend.

``python -m experiments.engine.merge MODEL ADAPTER OUT`` writes it in a child process.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

from experiments.engine.gate import stamp
from experiments.offload import publish, run_module


def ensure_merged(model: Path, adapter: Path, cache: Path) -> Path:
    """Folder of the merged model in ``cache``, made anew where the weights of either have changed."""
    parts = [[str(folder.resolve()), stamp(folder)] for folder in (model, adapter)]
    target = cache / "merged" / hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
            out = Path(scratch) / "model"
            failure = f"the adapter could not be merged into {model.name}"
            run_module(failure, "experiments.engine.merge", model, adapter, out)
            publish(out, target)
    return target


def main(argv: list[str]) -> int:
    from transformers import AutoModelForCausalLM

    from experiments.engine.reference import merged

    model_path, adapter, out = (Path(a) for a in argv)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype="auto")
    with merged(model, adapter):
        model.save_pretrained(out)
    for file in model_path.glob("*token*"):
        shutil.copy(file, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
