"""The CPU ops against a float64 loop over tokens, on ragged batches with poisoned padding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessa.ops import compiled, cpu, openmp
from tessa.ops.gpu_schedule import wide_limit
from tessa.ops.products import GrowingProducts, StaticProducts
from tessa.ops.routing import route
from tessa.ops.schedule import Schedule
from tessa.ops.slots import SlotPart, aligned
from tessa.ops.step import step_buffers, step_meta

D_IN, D_OUT = 24, 40


def fill(part: SlotPart, dim: int, widths: list[int], rng: torch.Generator, shared: bool) -> None:
    for slot, width in enumerate(widths):
        if width:
            start = 3 if shared else int(torch.randint(0, dim - width + 1, (), generator=rng))
            index = torch.arange(start, start + width)
            if not shared and slot % 2:
                index = torch.randperm(dim, generator=rng)[:width]
            part.set(slot, index, torch.randn(width, part.length, generator=rng))


def expected(
    x: torch.Tensor, y: torch.Tensor, slots: list[int], in_part: SlotPart | None, out_part: SlotPart | None
) -> torch.Tensor:
    """One token at a time, in float64, from the definition."""
    y = y.double().clone()
    for t, s in enumerate(slots):
        if s < 0:
            continue
        if in_part is not None:
            for k in range(in_part.widths[s]):
                y[t] += x[t, in_part.index[s, k]].double() * in_part.delta[s, k].double()
        if out_part is not None:
            for k in range(out_part.widths[s]):
                y[t, out_part.index[s, k]] += out_part.delta[s, k].double() @ x[t].double()
    return y


batches = st.lists(st.integers(-1, 3), min_size=1, max_size=12)
widths = st.lists(st.integers(0, 9), min_size=4, max_size=4)


@pytest.fixture(autouse=True, params=["one thread", "three threads", "library"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test here runs on the compiled kernels, alone and with more threads than there is work for some of them,
    and on the library products."""
    monkeypatch.setattr(compiled, "WORTH_THREADS", 0)
    monkeypatch.setattr(compiled, "NARROWEST", 4)
    if request.param == "library":
        monkeypatch.setattr(compiled, "usable", lambda *_: False)
    before = torch.get_num_threads()
    torch.set_num_threads(3 if request.param == "three threads" else 1)
    yield
    torch.set_num_threads(before)


ragged = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ragged
@given(batches, widths, st.booleans(), st.integers(0, 2**16))
def test_segmented_matches_definition(slots: list[int], width: list[int], shared: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    in_part = SlotPart(4, D_OUT, torch.float32, torch.device("cpu"))
    out_part = SlotPart(4, D_IN, torch.float32, torch.device("cpu"))
    fill(in_part, D_IN, width, rng, shared)
    fill(out_part, D_OUT, width[::-1], rng, shared)
    x, y = torch.randn(len(slots), D_IN, generator=rng), torch.randn(len(slots), D_OUT, generator=rng)
    want = expected(x, y, slots, in_part, out_part)
    untouched = y.clone()
    routing = route(torch.tensor(slots), 4)
    if in_part.used:
        cpu.segmented_in(y, x, in_part, routing)
    if out_part.used:
        cpu.segmented_out(y, x, out_part, routing)
    torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    plain = [t for t, s in enumerate(slots) if s < 0]
    assert torch.equal(y[plain], untouched[plain])


@ragged
@given(batches, widths, st.booleans(), st.integers(0, 2**16))
def test_wide_matches_definition(slots: list[int], width: list[int], shared: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    routing = route(torch.tensor(slots), 4)
    x, w = torch.randn(len(slots), D_IN, generator=rng), torch.randn(D_OUT, D_IN, generator=rng)
    for axis, length, dim in (("in", D_OUT, D_IN), ("out", D_IN, D_OUT)):
        part = SlotPart(4, length, torch.float32, torch.device("cpu"))
        fill(part, dim, width, rng, shared)
        if axis == "in":
            y = cpu.widen_input(x, part, routing) @ cpu.wide_weight_in(w, part).t()
        else:
            y = cpu.narrow_output(x @ cpu.wide_weight_out(w, part).t(), D_OUT, part, routing)
        want = expected(x, x @ w.t(), slots, *((part, None) if axis == "in" else (None, part)))
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("axis", ["in", "out"])
@pytest.mark.parametrize("mode", ["wide", "segmented"])
def test_growing_and_static_products_agree(dtype: torch.dtype, axis: str, mode: str) -> None:
    """The CPU's products and the GPU's, on the same adapters, before and after a slot changes hands."""
    rng = torch.Generator().manual_seed(5)
    w = torch.randn(D_OUT, D_IN, generator=rng).to(dtype)
    schedule = Schedule(mode=mode)
    growing = GrowingProducts(3, D_OUT, D_IN, dtype, schedule, w, lambda weight: lambda x: x @ weight.t())
    length, dim = (D_OUT, D_IN) if axis == "in" else (D_IN, D_OUT)
    static = StaticProducts(3, 8, axis, w, wide_limit(schedule.mode, 3, 8, length))
    x = torch.randn(7, D_IN, generator=rng).to(dtype)
    bias = torch.randn(D_OUT, generator=rng).to(dtype)
    buffers = step_buffers(16, 3, "cpu")
    for round_, slots in enumerate([[0, 2, -1, 1, 0, 0, 2], [1, 1, 1, 1, 1, 1, 1], [-1] * 7]):
        rows = torch.randperm(dim, generator=rng)[:5], torch.randn(5, length, generator=rng)
        for products in (growing, static):
            products.set(round_, *((rows, None) if axis == "in" else (None, rows)))
        base = lambda a, b: torch.nn.functional.linear(a, w, b)  # noqa: E731
        ours = growing.apply(base, x, bias, route(torch.tensor(slots), 3))
        other = static.apply(base, x, bias, step_meta(torch.tensor(slots, dtype=torch.int32), 3, out=buffers))
        tolerance = 1e-5 if dtype == torch.float32 else 0.15
        torch.testing.assert_close(ours, other, rtol=tolerance, atol=tolerance)
    growing.clear(0)
    static.clear(0)
    assert growing.nbytes > 0
    assert static.nbytes > 0


def test_static_products_refuse_what_does_not_fit() -> None:
    static = StaticProducts(2, 4, "in", torch.zeros(D_OUT, D_IN), 8)
    static.check(4, 0)
    with pytest.raises(ValueError, match="max-lora-rank"):
        static.check(5, 0)
    with pytest.raises(ValueError, match="'placement': 'along'"):
        static.check(0, 1)


def test_slots_share_a_window_only_when_all_are_alike() -> None:
    part = SlotPart(3, D_OUT, torch.float32, torch.device("cpu"))
    part.set(0, torch.arange(4, 8), torch.ones(4, D_OUT))
    assert part.window == (4, 8)
    part.set(1, torch.arange(8, 12), torch.ones(4, D_OUT))
    assert part.window is None
    part.clear(1)
    assert part.window == (4, 8)
    part.set(0, torch.arange(4, 9), torch.ones(5, D_OUT))
    assert part.window is None, "five rows are padded to eight, so a window of five would read wrong columns"
    assert part.used == 8


def test_aligned_counts_whole_sixteen_bytes() -> None:
    assert [aligned(n, torch.float32) for n in (1, 4, 5)] == [4, 4, 8]
    assert [aligned(n, torch.bfloat16) for n in (1, 8, 9)] == [8, 8, 16]


@pytest.mark.parametrize("runtime", [True, False], ids=["OpenMP", "no OpenMP"])
def test_compiled_kernels_give_the_same_bits_on_any_number_of_threads(
    runtime: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "WORTH_THREADS", 0)
    monkeypatch.setattr(compiled, "NARROWEST", 16)
    if runtime:
        assert openmp.available(), "PyTorch brings an OpenMP runtime on Linux"
    else:
        monkeypatch.setattr(openmp, "available", lambda: False)
    rng = torch.Generator().manual_seed(3)
    part = SlotPart(4, 777, torch.float32, torch.device("cpu"))
    fill(part, 90, [1, 7, 12, 16], rng, shared=False)
    routing = route(torch.tensor([3, 0, -1, 1, 1, 2, 3, 1, 0]), 4)
    narrow, long = torch.randn(9, 90, generator=rng), torch.randn(9, 777, generator=rng)
    results = []
    for count in (1, 2, 3, 7):
        torch.set_num_threads(count)
        into_long, into_narrow = long.clone(), narrow.clone()
        compiled.segmented_in(into_long, narrow, part, routing)
        compiled.segmented_out(into_narrow, long, part, routing)
        results.append((into_long, into_narrow))
    for into_long, into_narrow in results[1:]:
        assert torch.equal(into_long, results[0][0])
        assert torch.equal(into_narrow, results[0][1])
