"""LoRA kernels in Triton's interpreter; tests/test_triton_interpreter.py runs this file."""

from __future__ import annotations

import pytest
import torch

from baselines.lora_check import SMALL, LoraShape, check_lora
from baselines.lora_kernels import _shrink_kernel, expand, shrink, shrink_config
from tessa.ops.step import step_meta

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_runs_in_the_interpreter() -> None:
    assert type(_shrink_kernel).__name__ == "InterpretedFunction"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_ragged_batches(shape: LoraShape, dtype: torch.dtype) -> None:
    worst, ok = check_lora(shape, dtype, "cpu", seed=7)
    assert ok, worst


@pytest.mark.parametrize("tokens", [258, 2100])
def test_other_block_sizes(tokens: int) -> None:
    """Block sizes and the split of the sum change with the number of tokens."""
    worst, ok = check_lora(LoraShape(tokens, 3, 3, 4, 600, (20, 9)), torch.float16, "cpu", seed=3)
    assert ok, worst


def test_the_sum_is_split_for_few_tokens_only() -> None:
    assert shrink_config(32, 48, 4096, torch.bfloat16)["SPLIT_K"] > 1
    assert shrink_config(4096, 48, 4096, torch.bfloat16)["SPLIT_K"] == 1


def test_what_does_not_fit_is_refused() -> None:
    meta = step_meta(torch.zeros(4, dtype=torch.int32), 2)
    x, a = torch.ones(4, 32), torch.ones(2, 8, 32)
    with pytest.raises(ValueError, match="shapes do not fit"):
        shrink(torch.zeros(4, 7), x, a, meta.order, meta.seg_start)
    with pytest.raises(ValueError, match="must be float32"):
        shrink(torch.zeros(4, 8, dtype=torch.float16), x, a, meta.order, meta.seg_start)
    starts = torch.tensor([0, 16, 32], dtype=torch.int32)
    with pytest.raises(ValueError, match="shapes do not fit"):
        expand(
            torch.zeros(4, 32),
            torch.zeros(4, 8),
            torch.ones(3, 32, 4),
            meta.order,
            meta.seg_start,
            starts,
            16,
        )
