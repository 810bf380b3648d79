"""A slower interconnect on real ranks: every collective of a rank's tensor-parallel group waits before it starts.

Both ranks of a pair wait as long, so a collective takes the added time longer than before, whichever of them comes
last. The wait stands in one place, the group's device communicator, which all backends' collectives pass.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch

from tessa.errors import UserError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "gather")
"""What the model, the adapters' layers and the sampler ask of the group; the counters wrap the same ones."""
KEPT_STEPS = 4096
BUSY_S = 300e-6
_CALIBRATION_CYCLES = 20_000_000


@dataclass(frozen=True, slots=True)
class StepMark:
    """The start of a forward pass: perf_counter seconds, its tokens, and the collectives of all passes before.

    ``collective_s``: seconds inside those collectives, their waits left out; 0 on a GPU, where they run on a stream.
    """

    start_s: float
    tokens: int
    collectives: int
    collective_s: float


def spin(seconds: float) -> None:
    """Wait busily, and asleep before that where there is time for it.

    A thread that slept wakes up late by up to a fraction of a millisecond, so the end is always waited for busily. One
    that was busy all the time has used up its share of a core that others want too, and is held up afterwards, which
    no slow interconnect would do.
    """
    end = time.perf_counter() + seconds
    if seconds > BUSY_S:
        time.sleep(seconds - BUSY_S)
    while time.perf_counter() < end:
        pass


@cache
def _cycles_per_second() -> float:
    """Clock cycles that a waiting kernel counts in a second, from one timed wait on the current GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CALIBRATION_CYCLES // 10)
    begin.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    end.record()
    end.synchronize()
    return _CALIBRATION_CYCLES / (begin.elapsed_time(end) / 1e3)


def wait_for(tensor: torch.Tensor, seconds: float) -> None:
    """The wait where the collective will run: on the thread, or as a kernel on the tensor's stream."""
    if seconds <= 0:
        return
    if tensor.is_cuda:
        torch.cuda._sleep(round(seconds * _cycles_per_second()))
    else:
        spin(seconds)


class AddedLatency:
    """Wraps the collectives of a communicator and the forward of a model, for good.

    Args:
        model: the rank's model; its forward passes are marked.
        communicator: the group's device communicator, None for a single rank.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        communicator: Any,
        wait: Callable[[torch.Tensor, float], None] = wait_for,
    ) -> None:
        self.seconds = 0.0
        self.collectives = 0
        self.collective_s = 0.0
        self.steps = 0
        self.marks: deque[StepMark] = deque(maxlen=KEPT_STEPS)
        self._wait = wait
        self._inside = False
        for name in COLLECTIVES if communicator is not None else ():
            setattr(communicator, name, self._delayed(getattr(communicator, name)))
        model.forward = self._marked(model.forward)  # type: ignore[method-assign]

    def set(self, microseconds: float) -> None:
        """Wait so long from now on, and forget what was counted."""
        self.seconds = microseconds * 1e-6
        self.collectives = self.steps = 0
        self.collective_s = 0.0
        self.marks.clear()

    def counts(self) -> dict[str, Any]:
        """What happened since `set`: forward passes, collectives, and the marks of the last passes."""
        return {
            "steps": self.steps,
            "collectives": self.collectives,
            "marks": [astuple(m) for m in self.marks],
        }

    def _delayed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def collective(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._inside:  # a collective that is made of another one crosses the interconnect once
                return original(tensor, *args, **kwargs)
            self._inside = True
            try:
                self.collectives += 1
                self._wait(tensor, self.seconds)
                began = time.perf_counter()
                result = original(tensor, *args, **kwargs)
                if not tensor.is_cuda:
                    self.collective_s += time.perf_counter() - began
                return result
            finally:
                self._inside = False

        return collective

    def _marked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            tokens = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)), None)
            self.steps += 1
            count = 0 if tokens is None else tokens.shape[0]
            self.marks.append(StepMark(time.perf_counter(), count, self.collectives, self.collective_s))
            return original(*args, **kwargs)

        return forward


def attach(model: torch.nn.Module, enforce_eager: bool) -> AddedLatency:
    """The added latency of this rank. UserError where a captured graph would replay without the wait."""
    from vllm.distributed.parallel_state import get_tp_group

    if not enforce_eager:
        raise UserError("an added latency needs engine.enforce_eager=true: captured graphs would not wait")
    group = get_tp_group()
    return AddedLatency(model, group.device_communicator if group.world_size > 1 else None)
