"""Constants of the GPUs and interconnects, each with its source; nothing is read from a file at run time.

Sources
- data sheets: HBM bandwidth and dense bf16 peak of A100-40/80, H100, H200; number of SMs.
- fit: `experiments.projection.calibrate` on the Llama-2-7b rows of Vidur's published layer profiles
  (github.com/microsoft/vidur, data/profiling/compute, MIT). No other model took part in the fit.
- all-reduce: the same project's data/profiling/network; fixed cost from messages up to 64 KiB, bandwidth from
  16 MiB and more; what lies between is held out.
- H200 has no profile: it takes H100's fitted efficiencies with its own bandwidth (a copy reaches about 4.3 of
  4.8 TB/s and a bf16 product about 790 TFLOP/s, close to what these efficiencies give).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tessa.errors import UserError

SWITCH_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class MatmulConstants:
    """Dense product: `fixed_s` start and end of the kernel, reached shares of bandwidth and of peak.

    `half_intensity` is the tile intensity (mn/(m+n) of an m x n tile) at which half of the reachable rate is
    lost; `norm` joins memory and arithmetic time, `(a^p + b^p)^(1/p)`: 1 adds them, infinity overlaps them
    fully.
    """

    fixed_s: float
    memory_share: float
    flop_share: float
    half_intensity: float
    norm: float


@dataclass(frozen=True, slots=True)
class ElementwiseConstants:
    """Kernel with one thread block per token: its time grows with the row's width; blocks run in waves."""

    fixed_s: float
    row_s_per_element: float
    memory_share: float


@dataclass(frozen=True, slots=True)
class Link:
    """Collective over n ranks: fixed cost below and from `SWITCH_BYTES`, where the protocol changes.

    `bus_bandwidth` is in bytes/s after the usual 2(n-1)/n factor of an all-reduce.
    """

    alpha_s: float
    large_alpha_s: float
    bus_bandwidth: float


@dataclass(frozen=True, slots=True)
class GPU:
    name: str
    memory_bandwidth: float
    peak_flops: float
    sms: int
    matmul: MatmulConstants
    elementwise: Mapping[str, ElementwiseConstants]
    nccl: Mapping[int, Link]
    custom: Mapping[int, Link]


@dataclass(frozen=True, slots=True)
class AdapterKernelConstants:
    """Grouped kernels over adapters (shrink, expand, one-stage slice). Assumed; all backends share them.

    `fixed_s`: about 10 us (14 us before tuning) is reported for a captured expand kernel of a fused projection in
    decode (vLLM pull request 32425); 3 to 12 us is the range of the band. `memory_share`: many short rows of different
    adapters reach less of the bandwidth than one dense weight. `small_s`: a kernel that does next to nothing, such as
    TESSA's routing or a grouped kernel that finds no adapter; in a graph one costs 2 to 5 us with its gap.
    """

    fixed_s: float = 7.0e-6
    memory_share: float = 0.5
    flop_share: float = 0.3
    small_s: float = 2.5e-6


@dataclass(frozen=True, slots=True)
class HostConstants:
    """Host side. `launch_s`: a kernel launch from Python without a graph (4 to 6 us for the bare launch).

    `graph_kernel_s`: gap that one more small kernel costs inside a CUDA graph beyond its own run time.
    """

    launch_s: float = 6.0e-6
    graph_kernel_s: float = 1.0e-6


ADAPTER_KERNELS = AdapterKernelConstants()
ADAPTER_KERNELS_FAST = AdapterKernelConstants(3.0e-6, 0.8, 0.5, 1.0e-6)
ADAPTER_KERNELS_SLOW = AdapterKernelConstants(12.0e-6, 0.3, 0.2, 4.0e-6)
HOST = HostConstants()

# Fitted by calibrate.py; see the module docstring.
_A100_MATMUL = MatmulConstants(4.543e-6, 0.8857, 0.8637, 6.780, 2.335)
_H100_MATMUL = MatmulConstants(3.708e-6, 0.9300, 0.9883, 14.22, 1.5125)
_A100_ELEMENTWISE = {
    "norm": ElementwiseConstants(1.632e-6, 6.058e-10, 0.5095),
    "rope": ElementwiseConstants(2.371e-6, 3.646e-10, 0.5500),
    "act": ElementwiseConstants(1.335e-6, 5.797e-10, 0.5317),
    "add": ElementwiseConstants(1.131e-6, 1.917e-10, 1.0),
}
_H100_ELEMENTWISE = {
    "norm": ElementwiseConstants(1.145e-6, 6.838e-10, 1.0),
    "rope": ElementwiseConstants(1.589e-6, 2.992e-10, 0.6490),
    "act": ElementwiseConstants(0.959e-6, 4.349e-10, 0.6628),
    "add": ElementwiseConstants(1.024e-6, 0.0, 1.0),
}
# 16 ranks on A100: two DGX of the data set over its network.
_A100_NCCL = {
    2: Link(10.0e-6, 43.8e-6, 172.2e9),
    4: Link(16.0e-6, 60.1e-6, 189.8e9),
    8: Link(25.0e-6, 100.0e-6, 194.8e9),
    16: Link(63.0e-6, 100.0e-6, 16.6e9),
}
# 16 ranks on H100 and H200: assumed, two nodes with one 400 Gb/s adapter a GPU (50 GB/s, 90 % reached).
_H100_NCCL = {
    2: Link(6.0e-6, 17.4e-6, 291.5e9),
    4: Link(15.0e-6, 26.0e-6, 357.7e9),
    8: Link(15.0e-6, 44.1e-6, 389.5e9),
    16: Link(35.0e-6, 70.0e-6, 45.0e9),
}
# vLLM's own all-reduce kernel on H100: 9, 9 and 10 us at 4 KiB and 27, 40 and 45 us at 1 MiB for 2, 4 and 8
# ranks.
_H100_CUSTOM = {
    2: Link(9.0e-6, 9.0e-6, 58.3e9),
    4: Link(9.0e-6, 9.0e-6, 50.7e9),
    8: Link(10.0e-6, 10.0e-6, 52.4e9),
}
# Assumed on A100: the same fixed cost, bandwidth by NVLink's ratio (600 to 900 GB/s).
_A100_CUSTOM = {
    n: replace(link, bus_bandwidth=link.bus_bandwidth * 600 / 900) for n, link in _H100_CUSTOM.items()
}

GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU(
            "a100-40",
            1.555e12,
            312e12,
            108,
            _A100_MATMUL,
            _A100_ELEMENTWISE,
            _A100_NCCL,
            _A100_CUSTOM,
        ),
        GPU(
            "a100-80",
            2.039e12,
            312e12,
            108,
            _A100_MATMUL,
            _A100_ELEMENTWISE,
            _A100_NCCL,
            _A100_CUSTOM,
        ),
        GPU("h100", 3.35e12, 989e12, 132, _H100_MATMUL, _H100_ELEMENTWISE, _H100_NCCL, _H100_CUSTOM),
        GPU("h200", 4.8e12, 989e12, 132, _H100_MATMUL, _H100_ELEMENTWISE, _H100_NCCL, _H100_CUSTOM),
    )
}


def gpu_named(name: str) -> GPU:
    """The GPU named `name` (`a100` means the 80 GB one); UserError lists the known ones."""
    try:
        return GPUS["a100-80" if name == "a100" else name]
    except KeyError:
        raise UserError(f"unknown GPU {name!r}; known: {', '.join(GPUS)}") from None
