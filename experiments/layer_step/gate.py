"""Before a backend is timed, its step must equal the float64 reference."""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.layer_step.executors import Executor
from experiments.layer_step.reference import reference_step
from experiments.layer_step.spec import Point
from experiments.layer_step.stack import Stack, step

# Of one element of a product, relative to the product's root mean square; and of a token's final state, relative to
# its norm. An adapter that is left out or taken from another slot changes elements by half the root mean square.
PRODUCT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}
STEP_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}

Inputs = tuple[Tensor, Tensor]


class Incorrect(Exception):
    """A step's output is not what it must be."""


def check_products(
    executor: Executor, stack: Stack, point: Point, caches: list[Tensor], inputs: Inputs, token_slot: Tensor
) -> float:
    """Every fused product of every layer on the inputs that it gets in the step; the largest relative error.

    Raises `Incorrect` also where the adapters do not change the output of tokens that use one, or change that of
    tokens that use none.
    """
    worst = 0.0

    def linear(layer: int, name: str, x: Tensor) -> Tensor:
        nonlocal worst
        y = executor.linear(layer, name, x)
        base = x.double() @ stack.layers[layer].weights[name].double().T
        want = base.clone()
        executor.add_reference(layer, name, want, x.double(), token_slot)
        scale = want.pow(2).mean().sqrt()
        error = float(((y.double() - want).abs().max() / scale).nan_to_num(nan=float("inf")))
        worst = max(worst, error)
        if error > PRODUCT_TOLERANCE[stack.dtype]:
            raise Incorrect(f"layer {layer} {name}: largest error {error:.2g} of the root mean square")
        if executor.params:
            changed = (want - base).abs().amax(dim=1) > 4 * PRODUCT_TOLERANCE[stack.dtype] * scale
            if not torch.equal(changed, token_slot >= 0):
                raise Incorrect(
                    f"layer {layer} {name}: the adapters do not change exactly the tokens that use one"
                )
        return y

    executor.prepare(token_slot)
    executor.join(True)
    try:
        step(stack, point, caches, inputs, linear)
    finally:
        executor.join(False)
    return worst


def check_step(
    executor: Executor,
    stack: Stack,
    point: Point,
    caches: list[Tensor],
    inputs: Inputs,
    token_slot: Tensor,
    output: Inputs,
) -> float:
    """The step that is timed, as it is timed; the largest error of a token's final state."""

    def add(layer: int, name: str, y: Tensor, x: Tensor) -> None:
        executor.add_reference(layer, name, y, x, token_slot)

    residual, update = reference_step(stack, point, caches, inputs, add)
    want = residual + update
    got = output[0].double() + output[1].double()
    error = float(((got - want).norm(dim=1) / want.norm(dim=1)).max().nan_to_num(nan=float("inf")))
    if error > STEP_TOLERANCE[stack.dtype]:
        raise Incorrect(f"the step's output is off by {error:.2g} of a token's norm")
    return error
