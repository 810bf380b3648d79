"""Memory of a step of training."""

from __future__ import annotations

from typing import Any


def step_peak_bytes(step: Any, cuda: bool) -> int:
    """Most memory that tensors made during ``step()`` hold at once, in bytes."""
    import torch

    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    changes: list[tuple[int, int]] = []
    profiler: Any = profile.profiler
    pending = list(profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    if not changes:
        raise RuntimeError("the profiler recorded no allocations; this build of torch cannot measure memory")
    held = peak = 0
    for _, size in sorted(changes):
        held += size
        peak = max(peak, held)
    return peak
