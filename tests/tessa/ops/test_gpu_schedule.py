"""The GPU's rule at its two limits, worked out by hand from the data sheet's figures that it names."""

from __future__ import annotations

from tessa.ops.gpu_schedule import wide_limit


def test_auto_is_wide_while_the_extra_arithmetic_costs_no_more_than_a_launch() -> None:
    # 8 slots of 16 rows of 4096: 2 * 8 * 16 * 4096 operations a token; 5 us at 400 Tflop/s are 2e9 of them.
    assert wide_limit("auto", 8, 16, 4096) == int(2e9 / (2 * 8 * 16 * 4096)) == 1907


def test_idle_slots_that_take_longer_to_read_than_a_launch_make_every_step_segmented() -> None:
    # 5 us at 3.35 TB/s are 16.75 MB: 127 slots of 16 x 4096 bfloat16 numbers of 2 bytes, and not 128.
    assert wide_limit("auto", 127, 16, 4096) > 0
    assert wide_limit("auto", 128, 16, 4096) == 0


def test_a_fixed_schedule_is_kept() -> None:
    assert wide_limit("segmented", 8, 16, 4096) == 0
    assert wide_limit("wide", 1000, 16, 4096) > 10**9
