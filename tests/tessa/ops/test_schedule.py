from __future__ import annotations

import pytest
import torch

from tessa.errors import UserError
from tessa.ops import compiled
from tessa.ops.routing import route
from tessa.ops.schedule import Schedule
from tessa.ops.slots import SlotPart


def part(slots: int, width: int = 16, length: int = 4096) -> SlotPart:
    made = SlotPart(slots, length, torch.float32, torch.device("cpu"))
    for slot in range(slots):
        made.set(slot, torch.arange(width), torch.zeros(width, length))
    return made


def test_forced_modes_ignore_the_rule() -> None:
    routing = route(torch.zeros(4096, dtype=torch.int64), 64)
    assert Schedule("wide").wide(routing, part(2), 10**9)
    assert not Schedule("segmented").wide(route(torch.zeros(1, dtype=torch.int64), 2), part(2), 1)


@pytest.mark.parametrize("kernels", [True, False])
def test_auto_never_computes_many_slots_for_many_tokens(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the compiled kernels and, where they do not apply, with library products."""
    monkeypatch.setattr(compiled, "usable", lambda *_: kernels)

    def choice(tokens: int, slots: int, **small: int) -> bool:
        routing = route(torch.arange(tokens) % slots, slots)
        return Schedule().wide(routing, part(slots, **small), tokens * 256)

    assert not choice(4096, 8)
    assert not choice(32, 64)
    chosen = [choice(tokens, 8, width=4, length=256) for tokens in (8, 16, 32, 64, 128, 256, 512)]
    assert chosen == sorted(chosen, reverse=True), "once segmented is cheaper it stays cheaper"
    assert any(chosen) != kernels, "library products cost more per group than a few wide rows"


def test_unknown_schedule_names_the_allowed() -> None:
    with pytest.raises(UserError, match="auto, wide, segmented"):
        Schedule("fast")  # type: ignore[arg-type]
