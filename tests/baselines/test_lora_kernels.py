"""The LoRA kernels: compiled for GPUs without one, run where there is one (tests/test_triton_interpreter.py
interprets them)."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

POINTERS = {"inner_ptr": "*fp32", "order_ptr": "*i32", "seg_start_ptr": "*i32", "part_start_ptr": "*i32"}


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted functions are not compiled"
)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("tokens", [32, 4096])
@pytest.mark.parametrize("which", ["shrink", "expand"])
def test_kernels_compile_for_gpus(
    which: str, tokens: int, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ahead of time, without a GPU; the shared memory fits and bfloat16 uses the tensor cores."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from baselines import lora_kernels as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if which == "shrink":
        kernel, config = kernels._shrink_kernel, kernels.shrink_config(tokens, 48, 4096, torch.bfloat16)
    else:
        kernel, config = kernels._expand_kernel, kernels.expand_config(tokens, 16, 4096, torch.bfloat16)
    options = {name: config.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"UPCAST": False, "S_PAD": 8, **config}
    signature, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        pointer = POINTERS.get(name, "*bf16")
        signature[name] = pointer if name.endswith("_ptr") else "i32"
        if name not in ("S", "N", "r"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= 99 * 1024
    assert "mma" in compiled.asm["ptx"]
    adds = re.search(r"^\s*(@%p\d+ )?(atom|red)\.", compiled.asm["ptx"], re.MULTILINE) is not None
    assert adds == (constants.get("SPLIT_K", 1) > 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_the_gpu() -> None:
    from baselines.lora_check import check_lora_kernels

    failed = [(name, worst) for name, worst, ok in check_lora_kernels("cuda") if not ok]
    assert not failed
