"""What a GPU would run, on Triton's interpreter; tests/test_triton_interpreter.py runs this file."""

from __future__ import annotations

import pytest
import torch

from experiments.layer_step import executors, fused, fused_kernels, lora_products
from experiments.layer_step.executors import make_executor
from experiments.layer_step.gate import check_products
from experiments.layer_step.measure import token_slots
from experiments.layer_step.spec import BACKENDS, Point, scaled_shape
from experiments.layer_step.stack import build_caches, build_stack

POINT = Point("llama-3.1-8b", 2, "decode", 5, 4, 8, 2, 3)


def test_runs_in_the_interpreter() -> None:
    assert type(fused_kernels._silu_mul_kernel).__name__ == "InterpretedFunction"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_row_wise_kernels(dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(0)
    residual, update = torch.randn(2, 3, 70, generator=gen).to(dtype)
    weight = torch.randn(70, generator=gen).to(dtype)
    got, want = (
        fused_kernels.add_rms_norm(residual, update, weight, fused.EPS),
        fused.add_rms_norm(residual, update, weight),
    )
    tolerance = 4 * torch.finfo(dtype).eps
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=tolerance, atol=tolerance)
    wide = torch.randn(3, 2 * 1100, generator=gen).to(dtype)
    torch.testing.assert_close(
        fused_kernels.silu_mul(wide), fused.silu_mul(wide), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_are_right(backend: str) -> None:
    stack = build_stack(scaled_shape("llama-3.1-8b", 32), 2, 1, torch.float32, torch.device("cpu"), 0)
    gen = torch.Generator().manual_seed(1)
    inputs = (torch.randn(5, 128, generator=gen), torch.randn(5, 128, generator=gen))
    executor = make_executor(backend, stack, POINT, 2, gpu=True)
    kernels = {"base": "-", "plain_lora": "dense"}.get(backend, "triton")
    assert executor.kernels == (
        backend.partition(":")[2] or "auto" if backend.startswith("tessa") else kernels
    )
    slots = token_slots(POINT, 0.3, gen)
    assert check_products(executor, stack, POINT, build_caches(stack, POINT, 3), inputs, slots) < 1e-5


@pytest.mark.skipif(not executors.has_vllm(), reason="vLLM is not installed")
def test_vllms_own_kernels_are_called_as_they_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM for the CPU comes with the kernels' source and turns Triton off; the interpreter needs no driver."""
    import triton
    from vllm import triton_utils

    for name, value in (("triton", triton), ("tl", triton.language), ("HAS_TRITON", True)):
        monkeypatch.setattr(triton_utils, name, value)
    stack = build_stack(scaled_shape("llama-3.1-8b", 32), 2, 1, torch.float16, torch.device("cpu"), 0)
    gen = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, 5, 128, generator=gen).half()
    monkeypatch.setattr(
        executors,
        "lora_products",
        lambda _, device, tokens, slots, *rest: lora_products.VllmProducts(device, tokens, slots),
    )
    executor = make_executor("slora", stack, POINT, 2, gpu=True)
    assert executor.kernels == "vllm"
    slots = token_slots(POINT, 0.3, gen)
    assert (
        check_products(executor, stack, POINT, build_caches(stack, POINT, 3), (first, second), slots) < 1e-2
    )
