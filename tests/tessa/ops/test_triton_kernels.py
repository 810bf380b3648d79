"""The Triton kernels: compiled for GPUs without one, run where there is one (tests/test_triton_interpreter.py
interprets them)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted functions are not compiled"
)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("tokens", [32, 4096])
@pytest.mark.parametrize("part", ["in", "out"])
def test_segmented_kernels_compile_for_gpus(
    part: str, tokens: int, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ahead of time, without a GPU; the shared memory fits and bfloat16 uses the tensor cores."""
    from tessa.ops import triton_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    choose = kernels.segmented_in_config if part == "in" else kernels.segmented_out_config
    kernel = kernels._segmented_in_kernel if part == "in" else kernels._segmented_out_kernel
    for dtype in (torch.bfloat16, torch.float32):
        config = choose(tokens, 64, 4096, dtype)
        options = {name: config.pop(name) for name in ("num_warps", "num_stages")}
        constants = {"HAS_WIDTH": True, "UPCAST": False, "S_PAD": 8, "stride_dn": 1, **config}
        compiled = _compile(kernel, dtype, constants, options, capability)
        assert compiled.metadata.shared <= 99 * 1024
        if dtype == torch.bfloat16:
            assert "mma" in compiled.asm["ptx"]


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted functions are not compiled"
)
def test_epilogue_orders_its_stores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The copy of the base columns must come before the barrier, the additions after it."""
    from tessa.ops import triton_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"HAS_WIDTH": True, "BLOCK_N": 1024, "BLOCK_K": 64}
    ptx = _compile(kernels._route_outputs_kernel, torch.bfloat16, constants, {"num_warps": 4}, 90).asm["ptx"]
    events = [
        "barrier" if "bar.sync" in line else "store"
        for line in ptx.splitlines()
        if "bar.sync" in line or "st.global" in line
    ]
    assert "barrier" in events
    assert events[0] == events[-1] == "store"
    assert _compile(
        kernels._scatter_inputs_kernel,
        torch.float16,
        {"HAS_WIDTH": False, "BLOCK": 512},
        {"num_warps": 4},
        80,
    ).asm["cubin"]


def _compile(kernel, dtype: torch.dtype, constants: dict, options: dict, capability: int):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in ("y_ptr", "x_ptr", "delta_ptr", "wide_ptr"):
            signature[name] = "*" + TYPES[dtype]
        else:
            signature[name] = "*i32" if name.endswith("_ptr") else "i32"
        if name != "S":
            attributes[(position,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_the_gpu() -> None:
    from tessa.ops.selfcheck import check_graphs, check_kernels

    results = check_kernels("cuda") + check_graphs("cuda")
    failed = [(name, worst) for name, worst, ok in results if not ok]
    assert not failed
