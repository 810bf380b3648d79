"""Bands around the model's figures: its held-out errors, and the range of the assumed adapter kernels."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.projection.hardware import (
    ADAPTER_KERNELS,
    ADAPTER_KERNELS_FAST,
    ADAPTER_KERNELS_SLOW,
    AdapterKernelConstants,
)
from experiments.projection.step import Setting, StepTime, step_time

# 10 % and 90 % quantiles of predicted over measured on held-out data (validate.py recomputes them): sums over
# one layer's kernels, and single all-reduces.
LAYER_RATIO = (0.925, 1.076)
COLLECTIVE_RATIO = (0.774, 1.446)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with the ends of its band."""

    value: float
    low: float
    high: float


def _seconds(time: StepTime, kernels: float, collectives: float) -> float:
    """Step seconds with each part divided by its ratio (a ratio above 1 means that the model is too slow)."""
    device = (time.base_s + time.adapter_s) / kernels
    return device + (time.base_comm_s + time.adapter_comm_s) / collectives + time.gap_s + time.host_s


def _extra(time: StepTime, kernels: float, collectives: float) -> float:
    return time.adapter_s / kernels + time.adapter_comm_s / collectives


def step_estimate(backend: str, setting: Setting) -> Estimate:
    """Seconds of a step; the ends take all errors in one direction and the fast or slow adapter kernels."""
    value = step_time(backend, setting).total_s
    fast = _seconds(step_time(backend, setting, ADAPTER_KERNELS_FAST), LAYER_RATIO[1], COLLECTIVE_RATIO[1])
    slow = _seconds(step_time(backend, setting, ADAPTER_KERNELS_SLOW), LAYER_RATIO[0], COLLECTIVE_RATIO[0])
    return Estimate(value, min(fast, value), max(slow, value))


def cost_estimate(backend: str, setting: Setting) -> Estimate:
    """1 - throughput/throughput(base). The base's error is common: only the extra part spans the band."""
    base = step_time("base", setting).total_s

    def cost(constants: AdapterKernelConstants, kernels: float, collectives: float) -> float:
        time = step_time(backend, setting, constants)
        gap = time.total_s - time.base_s - time.base_comm_s - time.adapter_s - time.adapter_comm_s
        total = time.base_s + time.base_comm_s + _extra(time, kernels, collectives) + gap
        return 1 - base / total

    value = cost(ADAPTER_KERNELS, 1.0, 1.0)
    ends = (
        cost(ADAPTER_KERNELS_FAST, LAYER_RATIO[1], COLLECTIVE_RATIO[1]),
        cost(ADAPTER_KERNELS_SLOW, LAYER_RATIO[0], COLLECTIVE_RATIO[0]),
    )
    return Estimate(value, min(value, *ends), max(value, *ends))


def speedup_estimate(backend: str, over: str, setting: Setting) -> Estimate:
    """Throughput of `backend` over that of `over`; adapter kernels are equally fast or slow in both."""

    def ratio(constants: AdapterKernelConstants, collectives: float) -> float:
        a, b = step_time(over, setting, constants), step_time(backend, setting, constants)
        extra = 1 / collectives - 1
        return (a.total_s + extra * a.adapter_comm_s) / (b.total_s + extra * b.adapter_comm_s)

    value = ratio(ADAPTER_KERNELS, 1.0)
    ends = [
        ratio(constants, collectives)
        for constants in (ADAPTER_KERNELS_FAST, ADAPTER_KERNELS_SLOW)
        for collectives in COLLECTIVE_RATIO
    ]
    return Estimate(value, min(value, *ends), max(value, *ends))
