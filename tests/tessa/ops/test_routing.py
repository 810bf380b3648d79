from __future__ import annotations

import torch

from tessa.ops.routing import route


def test_tokens_are_sorted_by_slot_and_plain_ones_left_out() -> None:
    routing = route(torch.tensor([2, -1, 0, 2, 0, -1]), 4)
    assert routing.order.tolist() == [2, 4, 0, 3]
    assert routing.slots.tolist() == [0, 0, 2, 2]
    assert routing.ends.tolist() == [2, 2, 4, 4]
    assert routing.groups == (0, 2)
    assert (routing.rows, routing.identity) == (4, False)


def test_sorted_prefix_needs_no_gather() -> None:
    routing = route(torch.tensor([0, 0, 3, -1]), 4)
    x = torch.arange(8.0).view(4, 2)
    assert routing.identity
    assert routing.gather(x).data_ptr() == x.data_ptr()


def test_plain_batch_and_empty_batch() -> None:
    for slots in ([-1, -1], []):
        routing = route(torch.tensor(slots, dtype=torch.int64), 2)
        assert routing.rows == 0
        assert routing.groups == ()
