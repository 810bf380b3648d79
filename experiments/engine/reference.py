"""The correctness gate's reference: Hugging Face with the adapter merged into the weights, in float32.

Runs as ``python -m experiments.engine.reference SPEC.json OUT.json`` in its own process, so that the engine under
test and its reference share no code and no memory. Merging is done here by hand from the adapter's files.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Tensor = Any


def merged_deltas(folder: Path) -> dict[str, Callable[[Tensor], None]]:
    """For each adapted module path, a function that adds the adapter's delta to a weight ``[d_out, d_in]``."""
    import torch
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = {
        key.removeprefix("base_model.model."): t.float()
        for key, t in load_file(folder / "adapter_model.safetensors").items()
    }
    if config["peft_type"] == "TESSA":
        return {
            module: _slice_adder(s, tensors[f"{module}.tessa_delta"])
            for module, s in config["slices"].items()
        }
    scale = config["lora_alpha"] / config["r"]
    modules = sorted({key.rsplit(".lora_", 1)[0] for key in tensors})
    deltas = {}
    for module in modules:
        a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
        if config.get("use_bdlora"):
            # One factor is stored as its blocks side by side: block i of B holds the outputs i and block i of A
            # the inputs i.
            blocks = config["use_bdlora"]["nblocks"]
            if b.shape[1] != a.shape[0]:
                b = torch.block_diag(*b.chunk(blocks, 0))
            elif module.rsplit(".", 1)[-1] in config["use_bdlora"]["target_modules_bd_a"]:
                a = torch.block_diag(*a.chunk(blocks, 0))
        deltas[module] = _adder(scale * (b @ a))
    return deltas


def _adder(delta: Tensor) -> Callable[[Tensor], None]:
    return lambda weight: weight.add_(delta.to(weight))


def _slice_adder(s: Mapping[str, Any], delta: Tensor) -> Callable[[Tensor], None]:
    dim = s["d_out"] if s["axis"] == "out" else s["d_in"]
    part, width = dim // s["segments"], s["width"] // s["segments"]
    where = [i * part + s["offset"] + j for i in range(s["segments"]) for j in range(width)]

    def add(weight: Tensor) -> None:
        if s["axis"] == "out":
            weight[where] += delta.to(weight)
        else:
            weight[:, where] += delta.to(weight)

    return add


@contextmanager
def merged(model: Any, folder: Path | None) -> Iterator[None]:
    """The model with an adapter merged into its weights for the length of the block."""
    saved = {}
    if folder is not None:
        for module, add in merged_deltas(folder).items():
            weight = model.get_submodule(module).weight.data
            saved[module] = weight.clone()
            add(weight)
    try:
        yield
    finally:
        for module, weight in saved.items():
            model.get_submodule(module).weight.data.copy_(weight)


def score(model: Any, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """Log-probabilities of the prompt's tokens from the second on, and a greedy continuation with its own.

    ``margins`` holds, for each new token, how far its log-probability lies above the second best: where that is
    below the tolerance, either token is right.
    """
    import torch

    ids = torch.tensor([prompt], device=model.device)
    tokens, logprobs, margins = [], [], []
    with torch.inference_mode():
        scores = torch.log_softmax(model(ids).logits[0].float(), -1)
        own = scores[:-1].gather(1, ids[0, 1:, None]).squeeze(1)
        for _ in range(new_tokens):
            best = scores[-1].topk(2)
            tokens.append(int(best.indices[0]))
            logprobs.append(float(best.values[0]))
            margins.append(float(best.values[0] - best.values[1]))
            ids = torch.cat([ids, best.indices[:1][None]], 1)
            scores = torch.log_softmax(model(ids).logits[0, -1:].float(), -1)
    return {"prompt_logprobs": own.tolist(), "tokens": tokens, "logprobs": logprobs, "margins": margins}


def main(argv: list[str]) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    spec = json.loads(Path(argv[0]).read_text())
    torch.set_num_threads(os.cpu_count() or 1)
    device = "cuda" if spec["device"] == "cuda" and torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    model = loaded.to(device).eval()
    by_adapter: dict[str | None, list[int]] = {}
    for i, request in enumerate(spec["requests"]):
        by_adapter.setdefault(request["adapter"], []).append(i)
    results: list[Any] = [None] * len(spec["requests"])
    for adapter, members in by_adapter.items():
        with merged(model, Path(adapter) if adapter else None):
            for i in members:
                results[i] = score(model, spec["requests"][i]["prompt"], spec["new_tokens"])
    Path(argv[1]).write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
