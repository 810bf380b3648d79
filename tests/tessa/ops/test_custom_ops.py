"""The registered ops on the CPU: results, schemas, fake implementations, torch.compile without graph breaks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tessa.ops import custom_ops, selfcheck
from tessa.ops.selfcheck import SMALL, Case, Shape, check_kernels, check_segmented, make_case, wide_weight

SHAPE = Shape(21, 4, 6, 24, 20, 3)


def test_every_op_matches_the_float64_references() -> None:
    results = check_kernels("cpu")
    assert len(results) == 3 * len(SMALL) * 2 * 2 * 2
    assert [(name, worst) for name, worst, ok in results if not ok] == []


def test_the_check_notices_a_wrong_op() -> None:
    """An op that touches a token without adapter, and one that drops the last row of a slot."""

    def touches_all(y, *args) -> None:
        custom_ops.segmented_in(y, *args)
        y *= 1.0 + 2.0**-8

    def drops_a_row(y, x, index, delta, order, seg_start, widths) -> None:
        custom_ops.segmented_in(y, x, index, delta, order, seg_start, (widths - 1).clamp_min(0))

    for wrong in (touches_all, drops_a_row):
        case = make_case("in", SHAPE, torch.float32, "cpu", 0, widths=True)
        assert not check_segmented("in", wrong, case)[1]


@pytest.mark.parametrize("stale", [False, True])
def test_graphs_are_replayed_with_the_metadata_of_the_batch(
    stale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph stands for its last call; a stale one keeps what it read when it was captured."""
    captured: list = []

    def op(name: str, *arguments: object) -> torch.Tensor | None:
        result = getattr(custom_ops, name)(*arguments)
        captured[:] = [name, arguments, result]
        return result

    def replay() -> None:
        name, arguments, result = captured
        again = None if stale else getattr(custom_ops, name)(*arguments)
        if again is not None:
            result.copy_(again)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in (
        ("Stream", lambda: stream),
        ("current_stream", lambda: stream),
        ("stream", lambda one: nullcontext()),
        ("CUDAGraph", lambda: SimpleNamespace(replay=replay)),
        ("graph", lambda graph: nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    names = ("segmented_in", "segmented_out", "wide_in", "wide_out")
    ops = SimpleNamespace(**{name: partial(op, name) for name in names})
    monkeypatch.setattr(selfcheck, "custom_ops", ops)
    monkeypatch.setattr(selfcheck, "LARGE", (SHAPE,))
    results = selfcheck.check_graphs("cpu")
    assert sorted(name for name, _, _ in results) == sorted(f"graph {name}" for name in names)
    assert {ok for _, _, ok in results} == {not stale}


def _arguments(name: str, dtype: torch.dtype, widths: bool) -> tuple:
    part = name.removeprefix("segmented_").removeprefix("wide_")
    case = make_case(part, SHAPE, dtype, "cpu", 3, widths)
    if name.startswith("segmented"):
        case.x[case.without_adapter] = (
            0  # opcheck compares inputs before and after, and NaN differs from itself
        )
        y = torch.randn(SHAPE.tokens, SHAPE.d_out).to(dtype)
        delta = case.delta.nan_to_num()
        return y, case.x, case.index, delta, case.meta.order, case.meta.seg_start, case.widths
    case.x[case.without_adapter] = 1
    wide, _ = wide_weight(part, case, bias=True)
    wide.buffer.nan_to_num_()
    extra = (wide.d_out,) if part == "out" else ()
    width = wide.widths if widths else None
    return case.x, wide.buffer, wide.index, case.meta.token_slot, *extra, wide.bias, width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [False, True])
@pytest.mark.parametrize("name", ["segmented_in", "segmented_out", "wide_in", "wide_out"])
def test_opcheck(name: str, widths: bool, dtype: torch.dtype) -> None:
    torch.library.opcheck(getattr(custom_ops, name), _arguments(name, dtype, widths))


def _layer(case: Case, weight: torch.Tensor, wide_buffer: torch.Tensor, part: str):
    """What a layer does with the ops: both schedules, summed, with ops around them."""

    def forward(x, token_slot, order, seg_start):
        y = torch.nn.functional.linear(x, weight)
        if part == "in":
            custom_ops.segmented_in(y, x, case.index, case.delta, order, seg_start)
            other = custom_ops.wide_in(x, wide_buffer, case.index, token_slot)
        else:
            custom_ops.segmented_out(y, x, case.index, case.delta, order, seg_start)
            other = custom_ops.wide_out(x, wide_buffer, case.index, token_slot, weight.shape[0])
        return torch.relu(y + 1), other * 2

    return forward


@pytest.mark.parametrize("part", ["in", "out"])
def test_compiles_as_one_graph_for_any_number_of_tokens(part: str) -> None:
    case = make_case(part, SHAPE, torch.float32, "cpu", 8, widths=False)
    case.delta.nan_to_num_()
    case.x[case.without_adapter] = 1
    wide, weight = wide_weight(part, case, bias=False)
    wide.buffer.nan_to_num_()
    eager = _layer(case, weight, wide.buffer, part)
    graphs = []

    def count(graph, _inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="aot_eager")
    counted = torch.compile(eager, fullgraph=True, dynamic=True, backend=count)
    inputs = case.x.clone(), case.meta.token_slot, case.meta.order, case.meta.seg_start
    for run in (compiled, counted):
        for got, want in zip(run(*inputs), eager(*inputs), strict=True):
            torch.testing.assert_close(got, want)
    y, other = eager(*inputs)
    torch.testing.assert_close(y, torch.relu(other / 2 + 1), rtol=1e-5, atol=1e-5)
    shorter = case.x[:9].clone(), *inputs[1:2], torch.zeros_like(inputs[2]), torch.zeros_like(inputs[3])
    for got, want in zip(counted(*shorter), eager(*shorter), strict=True):
        torch.testing.assert_close(got, want)
    assert len(graphs) == 1
    assert sum("tessa." in target for target in graphs[0]) == 2


def test_fake_implementations_give_shapes_without_data() -> None:
    with FakeTensorMode():
        x = torch.empty(7, 24, dtype=torch.bfloat16)
        index = torch.empty(3, 5, dtype=torch.int32)
        slots = torch.empty(16, dtype=torch.int32)
        into = custom_ops.wide_in(x, torch.empty(20, 24 + 15 + 1, dtype=torch.bfloat16), index, slots)
        out = custom_ops.wide_out(x, torch.empty(20 + 15, 24, dtype=torch.bfloat16), index, slots, 20)
    for y in (into, out):
        assert y.shape == (7, 20)
        assert y.dtype == torch.bfloat16
        assert y.is_contiguous()
