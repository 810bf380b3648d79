"""The gate's judgement, on outputs that are right and on each way of being wrong."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from experiments.engine.gate import GateRequest, compare, gate_requests

TOLERANCE = 1e-4
REQUESTS = [GateRequest([3, 4, 5], 0), GateRequest([3, 4, 6], None), GateRequest([3, 4, 7], 1)]


def output(shift: float, tokens: tuple[int, ...] = (9, 8)) -> dict[str, Any]:
    return {
        "prompt_logprobs": [-1.0 - shift, -2.0 - shift],
        "tokens": list(tokens),
        "logprobs": [-0.5 - shift, -0.6 - shift],
        "margins": [1.0, 1.0],
    }


EXPECTED = [output(0.3), output(0.0), output(0.7)]
BASE = [output(0.0), output(0.0), output(0.0)]


def judge(outputs: list[dict[str, Any]], **kwargs: Any) -> dict[str, Any]:
    return compare(REQUESTS, outputs, kwargs.pop("expected", EXPECTED), BASE, TOLERANCE, True)


def test_right_outputs_pass() -> None:
    result = judge(copy.deepcopy(EXPECTED))
    assert result["passed"], result
    assert result["max_abs_error"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o.__setitem__(0, output(0.3 + 3e-4)), "off the merged weights"),
        (lambda o: o.__setitem__(0, output(0.0)), "equals the base model's output"),
        (lambda o: o.__setitem__(1, output(0.01)), "when batched with adapter requests"),
        (lambda o: o.__setitem__(2, output(0.7, (9, 1))), "off the merged weights by inf"),
        (lambda o: o[2].__setitem__("prompt_logprobs", [math.nan, -1.0]), "no finite log-probabilities"),
        (lambda o: o[2].__setitem__("prompt_logprobs", []), "no finite log-probabilities"),
        (lambda o: o[2].__setitem__("prompt_logprobs", [-1.0]), "inf"),
        (lambda o: o[2].__setitem__("tokens", [9]), "inf"),
    ],
)
def test_wrong_outputs_fail(change: Any, message: str) -> None:
    outputs = copy.deepcopy(EXPECTED)
    change(outputs)
    result = judge(outputs)
    assert not result["passed"]
    assert message in result["detail"]


def test_another_token_is_right_only_where_the_reference_has_no_preference() -> None:
    outputs, expected = copy.deepcopy(EXPECTED), copy.deepcopy(EXPECTED)
    outputs[0]["tokens"][1] = 77
    assert not judge(outputs, expected=expected)["passed"]
    expected[0]["margins"][1] = TOLERANCE
    assert judge(outputs, expected=expected)["passed"]


def test_without_reference_the_rest_is_still_checked() -> None:
    result = judge(copy.deepcopy(EXPECTED), expected=None)
    assert result["passed"]
    assert math.isnan(result["max_abs_error"])
    assert "dummy weights" in result["reference"]
    assert not compare(REQUESTS, BASE, None, BASE, TOLERANCE, True)["passed"], "adapters had no effect"


def test_the_batch_mixes_both_ends_of_the_set_with_plain_requests() -> None:
    requests = gate_requests(64, 512, 3, 6)
    adapters = [r.adapter for r in requests]
    assert adapters.count(None) == 2
    assert {0, 63} <= set(adapters)
    assert requests == gate_requests(64, 512, 3, 6)
    assert len({r.adapter for r in gate_requests(64, 512, 3, 12)} - {None}) == 12, "as many as were asked for"
    assert all(3 <= t < 512 for r in requests for t in r.prompt)
