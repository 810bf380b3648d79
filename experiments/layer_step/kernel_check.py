"""`python -m experiments.layer_step.kernel_check --device cuda`: every kernel against float64, within a time budget."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from experiments.layer_step.spec import LayerStepSpec
from tessa.errors import UserError

Result = tuple[str, float, bool]


def groups(device: str) -> list[tuple[str, Callable[[], list[Result]]]]:
    """The checks in parts, each named: a budget can end between two. What serves a decode step comes first.

    On the CPU one shape tries the script; the test set checks all small ones there.
    """
    from baselines import lora_check
    from tessa.ops import selfcheck

    cuda = device == "cuda"
    small, large = selfcheck.SMALL, selfcheck.LARGE
    slices = (*small[:3], *large[:2], small[3], *large[2:]) if cuda else small[1:2]
    parts: list[tuple[str, Callable[[], list[Result]]]] = [
        (f"slices {shape}", lambda shape=shape: selfcheck.check_kernels(device, shapes=(shape,)))  # type: ignore[misc]
        for shape in slices
    ]
    if cuda:  # these kernels have no other form on the CPU
        loras = [
            (f"LoRA {shape}", lambda shape=shape: lora_check.check_lora_kernels(device, (shape,)))  # type: ignore[misc]
            for shape in lora_check.SMALL[1:] + lora_check.LARGE
        ]
        graphs = ("CUDA graphs", lambda: selfcheck.check_graphs(device))
        parts = [*parts[:4], graphs, *loras, *parts[4:]]
    return parts


def check(device: str, budget_s: float) -> bool:
    """Runs the groups and says what failed and what the budget left out; whether all that ran is right."""
    begin, ran, failed, left = time.monotonic(), 0, [], []
    for name, run in groups(device):
        if time.monotonic() - begin > budget_s:
            left.append(name)
            continue
        start = time.monotonic()
        results = run()
        ran += len(results)
        failed += [(case, worst) for case, worst, ok in results if not ok]
        print(f"  {name}: {len(results)} cases, {time.monotonic() - start:.1f} s", flush=True)
    for case, worst in failed:
        print(f"WRONG {case}: error {worst:.2g}")
    for name in left:
        print(f"left out after {budget_s:.0f} s: {name}")
    print(f"kernel check on {device}: {ran - len(failed)} of {ran} cases right", flush=True)
    return not failed and ran > 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.layer_step.kernel_check", description=__doc__
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True, help="where the kernels run")
    parser.add_argument(
        "--budget-s", type=float, default=120.0, help="begin no further case after so many seconds"
    )
    args = parser.parse_args(argv)
    from experiments.layer_step.measure import Machine

    try:
        Machine.of(LayerStepSpec(device=args.device))  # refuses a GPU that is not there
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if check(args.device, args.budget_s) else 1


if __name__ == "__main__":
    sys.exit(main())
