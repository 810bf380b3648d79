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


ENDS = ((1.0, 1.0), *zip(LAYER_RATIO, COLLECTIVE_RATIO, strict=True))
"""(kernels, collectives) of the base model: as modelled, and at both ends of the errors."""


def _base(time: StepTime, kernels: float, collectives: float) -> float:
    """What a step takes without the adapters' part, gaps and host included."""
    rest = time.total_s - time.base_s - time.base_comm_s - time.adapter_s - time.adapter_comm_s
    return time.base_s / kernels + time.base_comm_s / collectives + rest


def cost_estimate(backend: str, setting: Setting) -> Estimate:
    """1 - throughput/throughput(base).

    The ends are the least and the greatest cost over the errors of the base's parts, which both steps share, and of the
    adapters' parts, each at either end, with the fast and the slow adapter kernels.
    """
    base = step_time("base", setting)

    def cost(time: StepTime, own: tuple[float, float], shared: tuple[float, float]) -> float:
        return 1 - _base(base, *shared) / (_base(time, *shared) + _extra(time, *own))

    value = cost(step_time(backend, setting), ENDS[0], ENDS[0])
    slow, fast = (step_time(backend, setting, c) for c in (ADAPTER_KERNELS_SLOW, ADAPTER_KERNELS_FAST))
    ends = [cost(time, own, shared) for time, own in ((slow, ENDS[1]), (fast, ENDS[2])) for shared in ENDS]
    return Estimate(value, min(value, *ends), max(value, *ends))


def speedup_estimate(backend: str, over: str, setting: Setting) -> Estimate:
    """Throughput of `backend` over that of `over`; shared parts and adapter kernels are equally fast in both."""

    def times(constants: AdapterKernelConstants) -> tuple[StepTime, StepTime]:
        return step_time(over, setting, constants), step_time(backend, setting, constants)

    def ratio(
        both: tuple[StepTime, StepTime], own: tuple[float, float], shared: tuple[float, float]
    ) -> float:
        slow, fast = (_base(time, *shared) + _extra(time, *own) for time in both)
        return slow / fast

    value = ratio(times(ADAPTER_KERNELS), ENDS[0], ENDS[0])
    ends = [
        ratio(both, own, shared)
        for both in (times(ADAPTER_KERNELS_FAST), times(ADAPTER_KERNELS_SLOW))
        for own in ENDS[1:]
        for shared in ENDS
    ]
    return Estimate(value, min(value, *ends), max(value, *ends))
