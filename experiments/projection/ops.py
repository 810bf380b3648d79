"""Device time of single kernels from bytes and FLOPs: products, row-wise kernels, attention, adapters.

All functions take counts (tokens, widths), give seconds, and broadcast over numpy arrays.
"""

from __future__ import annotations

import numpy as np

from experiments.projection.hardware import GPU, AdapterKernelConstants, ElementwiseConstants, MatmulConstants

BYTES = 2  # bf16 or fp16
FP32_BYTES = 4
# Output tiles that GEMM libraries choose from, rows x columns; and the ways to split the inner dimension.
TILES = ((256, 128), (128, 256), (128, 128), (64, 256), (64, 128), (128, 64), (64, 64))
SPLITS = (1, 2, 4, 8)
BLOCKS_PER_SM = 2  # blocks of 1024 threads that an SM holds at once (2048 threads)


def matmul_bytes(
    tokens: np.ndarray | float, d_out: np.ndarray | float, d_in: np.ndarray | float
) -> np.ndarray:
    """Bytes moved by `[tokens, d_in] x [d_in, d_out]`: input, weight and output once each."""
    tokens, d_out, d_in = (np.asarray(x, dtype=float) for x in (tokens, d_out, d_in))
    return BYTES * (tokens * d_in + d_in * d_out + tokens * d_out)


def matmul_s(
    gpu: GPU,
    tokens: np.ndarray | float,
    d_out: np.ndarray | float,
    d_in: np.ndarray | float,
    constants: MatmulConstants | None = None,
) -> np.ndarray:
    """Seconds of a dense product on one GPU.

    Arithmetic is the best over tile shapes and inner splits of (waves of tiles over the SMs) x (time of a
    tile); a tile's rate falls with its intensity; a split pays for its fp32 partial sums. Memory time is
    bytes over reached bandwidth.
    """
    c = constants or gpu.matmul
    tokens, d_out, d_in = np.broadcast_arrays(*(np.asarray(x, dtype=float) for x in (tokens, d_out, d_in)))
    bandwidth = gpu.memory_bandwidth * c.memory_share
    memory = matmul_bytes(tokens, d_out, d_in) / bandwidth
    arithmetic = np.full(tokens.shape, np.inf)
    for rows, cols in TILES:
        intensity = rows * cols / (rows + cols)
        rate = gpu.peak_flops / gpu.sms * c.flop_share * intensity / (intensity + c.half_intensity)
        tiles = np.ceil(tokens / rows) * np.ceil(d_out / cols)
        for split in SPLITS:
            waves = np.ceil(tiles * split / gpu.sms)
            partials = 2 * FP32_BYTES * split * tokens * d_out / bandwidth if split > 1 else 0.0
            arithmetic = np.minimum(arithmetic, waves * 2 * rows * cols * d_in / split / rate + partials)
    return c.fixed_s + (memory**c.norm + arithmetic**c.norm) ** (1 / c.norm)


# Values read and written per element of a row: (reads + writes).
PASSES = {"norm": 2, "rope": 2, "act": 3, "add": 3}


def elementwise_s(
    gpu: GPU,
    kind: str,
    tokens: np.ndarray | float,
    width: np.ndarray | float,
    constants: ElementwiseConstants | None = None,
) -> np.ndarray:
    """Seconds of a row-wise kernel (`norm`, `rope`, `act`, `add`) over `tokens` rows of `width` outputs."""
    c = constants or gpu.elementwise[kind]
    tokens, width = (np.asarray(x, dtype=float) for x in (tokens, width))
    waves = np.ceil(tokens / (BLOCKS_PER_SM * gpu.sms))
    serial = waves * width * c.row_s_per_element
    memory = PASSES[kind] * BYTES * tokens * width / (gpu.memory_bandwidth * c.memory_share)
    return c.fixed_s + np.hypot(serial, memory)


def attention_s(
    gpu: GPU,
    decode_tokens: float,
    context: float,
    prefill_tokens: float,
    prefill_length: float,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> float:
    """Seconds of attention on one rank: decode reads the KV cache, prefill is causal arithmetic.

    There is no published profile of attention here, so both use the dense product's reached shares (a flash
    kernel's usual two thirds of them for arithmetic).
    """
    c, total = gpu.matmul, 0.0
    if decode_tokens > 0:
        read = decode_tokens * context * 2 * kv_heads * head_dim * BYTES
        total += c.fixed_s + read / (gpu.memory_bandwidth * c.memory_share)
    if prefill_tokens > 0:
        flops = 4 * prefill_tokens * prefill_length / 2 * heads * head_dim
        total += c.fixed_s + flops / (gpu.peak_flops * c.flop_share * 2 / 3)
    return total


def adapter_kernel_s(
    gpu: GPU, constants: AdapterKernelConstants, moved_bytes: float, flops: float, kernels: int = 1
) -> float:
    """Seconds of grouped adapter kernels that move `moved_bytes` and do `flops` in all."""
    memory = moved_bytes / (gpu.memory_bandwidth * constants.memory_share)
    arithmetic = flops / (gpu.peak_flops * constants.flop_share)
    return kernels * constants.fixed_s + max(memory, arithmetic)
