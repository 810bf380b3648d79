"""The hooks on vLLM's LoRA layers, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from baselines import plain_lora
from baselines.grouped import PerAdapterWrapper
from baselines.vllm_lora import PlainLoRA, current_platform
from tessa.errors import UserError


def config(eager: bool) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=SimpleNamespace(enforce_eager=eager),
    )


def test_plain_lora_is_never_captured(monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(UserError, match="--enforce-eager"):
        PlainLoRA({}, config(eager=False))
    assert not PlainLoRA({}, config(eager=True)).stock
    assert plain_lora.SPEC.engine_args["enforce_eager"] is True


def test_a_steps_rows_lie_where_the_layers_are():
    from vllm.lora.layers import LoRAMapping

    wrapper = PerAdapterWrapper(16, 4, torch.device("meta"), lora_config=SimpleNamespace(max_loras=2))
    wrapper.keep_vllm_metadata = False
    wrapper.update_metadata(LoRAMapping((7, 0, 5), (7, 0, 5)), [5, 7], 2, 100)
    step = wrapper.step
    assert (step.order.device.type, step.slots.device.type) == ("meta", "meta")
    # The loop over adapters reads these on the host.
    assert (step.ends.tolist(), step.groups) == ([1, 2], (0, 1))
    x = torch.empty(3, 4, device="meta")
    assert step.gather(x).shape == (2, 4)
