"""Times of one step: CUDA graphs and events on a GPU, the wall clock on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]
BUSY_CYCLES = 400_000  # about 0.2 ms, several times what the launch of a graph takes the CPU


def capture(step: Call, warm_up: int = 2) -> torch.cuda.CUDAGraph:
    """The step as a CUDA graph; kernels are compiled and libraries initialised before."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def time_cuda(run: Call, load: Sequence[Call], repeats: int, queued: bool) -> list[float]:
    """Device seconds of each of `repeats` runs. `load` puts the next input set in place, outside of the time.

    queued: the device is kept busy while a run is put behind it, as the way of a graph's launch to the device would
    otherwise count. Not queued (a step that is launched kernel by kernel): from idle to idle, gaps included.
    """
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for number, (start, end) in enumerate(events):
        load[number % len(load)]()
        if queued:
            torch.cuda._sleep(BUSY_CYCLES)
        else:
            torch.cuda.synchronize()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def time_cpu(run: Call, load: Sequence[Call], repeats: int) -> list[float]:
    """Wall seconds of each of `repeats` runs."""
    times = []
    for number in range(repeats):
        load[number % len(load)]()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times
