"""TESSA beside a quantised base: the weight cannot be widened, so the delta runs as its own product in the
activation dtype.

The checkpoint is `tiny` with 8-bit weights per output channel and 8-bit activations per token (compressed-tensors
W8A8, which vLLM serves on the CPU). The reference rounds weights and activations in the same way in Hugging Face
and adds the delta in float32. Weights keep to 7 bits: without VNNI the 8-bit kernels add pairs of products in 16
bits and would saturate.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from warm import WarmEngine

from experiments import models
from experiments.adapters import AdapterSet, make
from experiments.engine import gate as gating
from experiments.engine.build import cpu_env
from experiments.engine.setup import EngineSetup
from tessa.adapter_io import read_adapter

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LARGEST = 63
QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def quantise(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """Write the W8A8 checkpoint; returns the rounded weights in float32, by module path."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    rounded = {}
    for key in [k for k in tensors if "_proj.weight" in k]:
        weight = tensors.pop(key).float()
        scale = weight.abs().amax(1, keepdim=True) / LARGEST
        whole = torch.round(weight / scale).clamp(-LARGEST, LARGEST).to(torch.int8)
        tensors[key] = whole
        tensors[key.replace(".weight", ".weight_scale")] = scale
        rounded[key.removesuffix(".weight")] = whole.float() * scale
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTISATION}))
    return rounded


class Rounded(torch.nn.Module):
    """A linear layer on rounded weights and per-token rounded activations, with a delta on the exact ones."""

    def __init__(self, weight: torch.Tensor, delta: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.delta = weight, delta

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        y = torch.round(x / scale).clamp(-127, 127) * scale @ self.weight.t()
        return y if self.delta is None else y + x @ self.delta.t()


def reference(
    model_folder: Path, rounded: dict[str, torch.Tensor], adapter: Path | None, prompt: list[int]
) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    deltas: dict[str, torch.Tensor] = {}
    if adapter is not None:
        loaded = read_adapter(adapter)
        for module, s in loaded.slices.items():
            full = torch.zeros(s.d_out, s.d_in)
            where = list(s.indices)
            if s.axis == "out":
                full[where] = loaded.deltas[module]
            else:
                full[:, where] = loaded.deltas[module]
            deltas[module] = full
    for module, weight in rounded.items():
        parent, _, name = module.rpartition(".")
        setattr(model.get_submodule(parent), name, Rounded(weight, deltas.get(module)))
    with torch.inference_mode():
        scores = torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], -1)
    return scores.gather(1, torch.tensor(prompt[1:])[:, None]).squeeze(1).numpy()


def test_the_delta_runs_beside_an_8_bit_base(cache: Path, tmp_path: Path) -> None:
    spec = models.load_named("tiny")
    plain = models.ensure_model(spec, cache)
    quantised = tmp_path / "quantised"
    rounded = quantise(plain, quantised)
    make(
        AdapterSet("tessa", spec.linear_shapes(), (8, 4), placement="across", offset="random"), tmp_path / "a"
    )
    folders = [tmp_path / "a" / f"adapter-000{i}" for i in range(2)]
    requests = gating.gate_requests(2, spec.vocab_size, 3, 2)
    setup = EngineSetup(
        "tessa",
        str(quantised),
        tuple(map(str, folders)),
        {
            "model": str(quantised),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 2**26,
            "enable_lora": True,
            "max_loras": 2,
            "max_lora_rank": 8,
            "worker_extension_cls": "tessa.vllm.worker.WorkerExtension",
            "additional_config": {"adapter_backend": "tessa"},
        },
        env={**cpu_env(1), "HF_HUB_OFFLINE": "1"},
        gate={"requests": [dataclasses.asdict(r) for r in requests], "expected": None},
    )
    engine = WarmEngine(setup, tmp_path / "log")
    try:
        engine.start(600)
        outputs = engine._call("probe", requests=[dataclasses.asdict(r) for r in requests])
    finally:
        engine.stop()
    for request, output in zip(requests, outputs["outputs"], strict=True):
        adapter = None if request.adapter is None else folders[request.adapter]
        right = reference(plain, rounded, adapter, request.prompt)
        without = reference(plain, rounded, None, request.prompt)
        error = float(np.abs(right - np.array(output["prompt_logprobs"])).max())
        effect = float(np.abs(right - without).max())
        # A value that rounds the other way in one of the two moves a logit by a step of its range over 127.
        assert error < 0.08, (request.adapter, error)
        if adapter is not None:
            assert effect > 10 * error
