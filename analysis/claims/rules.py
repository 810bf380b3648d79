"""The paper's six claims, and the rule by which each is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from analysis.claims.evidence import Evidence

REPRODUCED, PARTLY, NOT, NOT_TESTED = "reproduced", "partly", "not", "not tested"
COMMON = (
    "The evidence that is held against the rule is measured where there is any, else emulated, else modelled; of one "
    "provenance, that on GPUs goes first. Emulated and modelled evidence can at most give `partly`, and so can a "
    "number measured on a CPU where the claim is a number on GPUs (C1, C6); of these, only a number on GPUs gives "
    "`not`. Of measured costs and speed-ups, measure=smoke does not count, nor does a single round, which has no "
    "interval, nor do more ranks than cores; their "
    "intervals are widened so that those of all settings hold at once (Bonferroni)."
)
COST_POINTS = 5.0
NEAR = 0.9
"""Share of the paper's speed-up that the value itself has to reach: a wide interval reaches more than it shows."""
MARGIN_POINTS = -2.0
"""The lowest difference to LoRA that still counts as comparable, in points of the score."""


@dataclass(frozen=True)
class Claim:
    """judge: (chosen evidence, all of its provenance) -> verdict. greatest: whether the claim is of an extreme, so that
    the greatest value is the one shown; of the others it is the lowest."""

    id: str
    title: str
    paper: str
    unit: str
    rule: str
    judge: Callable[[Evidence, list[Evidence]], str]
    greatest: bool = False
    paper_value: float = np.nan


def _cost(e: Evidence, _: list[Evidence]) -> str:
    if not e.above > 0:
        return NOT if e.gpu and e.below < 15.5 else NOT_TESTED
    near = (
        abs(e.value - 42.9) <= COST_POINTS and abs(e.reference - 15.5) <= COST_POINTS and e.growth_separated
    )
    return REPRODUCED if near and e.provenance == "measured" and e.gpu else PARTLY


def _share(_: Evidence, same: list[Evidence]) -> str:
    below = [e.value < 1.0 for e in same]
    if not any(below):
        return NOT
    published = all(e.reference == 1 and e.provenance == "measured" for e in same)
    return REPRODUCED if all(below) and published else PARTLY


def _products(e: Evidence, same: list[Evidence]) -> str:
    chosen = [x for x in same if x.backend == "tessa"]
    if chosen and all(x.value == 0 for x in chosen):
        return REPRODUCED if e.provenance == "measured" else PARTLY
    return PARTLY if any(x.value == 0 for x in same) else NOT


def _collectives(e: Evidence, same: list[Evidence]) -> str:
    if any(x.value > 0 for x in same):
        return NOT
    return REPRODUCED if e.provenance == "measured" else PARTLY


def _quality(e: Evidence, same: list[Evidence]) -> str:
    near = [x.above >= MARGIN_POINTS for x in same]
    if not any(near):
        return NOT if any(x.below < MARGIN_POINTS for x in same) else NOT_TESTED
    return REPRODUCED if all(near) and e.gpu else PARTLY


def _speedup(e: Evidence, _: list[Evidence]) -> str:
    if not e.above > 1:
        return NOT if e.gpu and e.below < 3.46 else NOT_TESTED
    reaches = e.value >= NEAR * 3.46 and e.below >= 3.46
    return REPRODUCED if reaches and e.provenance == "measured" and e.gpu else PARTLY


CLAIMS = (
    Claim(
        "C1",
        "LoRA adapters cut serving throughput, more so as tensor parallelism scales",
        "15.5 %, up to 42.9 %",
        "% of base throughput",
        "Adapter cost of punica and slora under full load at a setting's highest TP degree, the one that lies "
        "furthest above 0 with its whole interval; in tp_scaling where it ran. reproduced: within 5 points of 42.9 % "
        "there and of 15.5 % at the lowest degree, growth separated (the intervals at the two degrees do not "
        "overlap), measured on GPUs. partly: above 0 with its whole interval; whether growth is separated stands "
        "beside it. not: on GPUs, the interval holds 0 or less and ends below 15.5 %. not tested: otherwise, so "
        "nothing is decided.",
        _cost,
        greatest=True,
        paper_value=42.9,
    ),
    Claim(
        "C2",
        "LoRA adds little to compute and to parameter memory",
        "< 1 %",
        "% of the base model",
        "The greater of one adapter's share of the multiply-adds per token and of the weights held by a rank (counted "
        "bytes over slots); in tp_scaling where it ran. "
        "reproduced: below 1 % in every setting judged, on published models. partly: in some, or on shapes of our own. "
        "not: in none.",
        _share,
        greatest=True,
        paper_value=1.0,
    ),
    Claim(
        "C3",
        "base and adapter computation run as one wider matrix multiplication",
        "no product of its own",
        "adapter products per step",
        "Matrix products that TESSA's adapters add to a counted decode step, as it chooses by itself and with "
        "schedule=wide. reproduced: none anywhere as it chooses by itself. partly: none somewhere. not: otherwise.",
        _products,
        greatest=True,
        paper_value=0.0,
    ),
    Claim(
        "C4",
        "no adapter-specific communication between GPUs under tensor parallelism",
        "0 collectives",
        "adapter collectives per step",
        "Collectives that TESSA's adapters add to a counted step at TP 2 or more, base's own taken off. reproduced: "
        "none anywhere. not: any.",
        _collectives,
        greatest=True,
        paper_value=0.0,
    ),
    Claim(
        "C5",
        "adaptation quality comparable to LoRA at an approximately matched parameter budget",
        "comparable",
        "points of the score",
        "TESSA's score - LoRA's, of the mean over the tasks that are not saturated and paired over seeds, at every "
        "budget matched within 5 %; a task is saturated where all trainings of both are at 0 or all at 100 %, and a "
        "budget without any other does not count. The intervals of all budgets hold at once (Bonferroni), the lowest "
        "is shown. reproduced: each lies above -2 points, on a published base model. partly: some do, or all on a "
        "base model of our own. not: none does, and one lies below -2 points. not tested: they hold -2 points, so "
        "nothing is decided, or there are fewer than 2 seeds.",
        _quality,
        paper_value=0.0,
    ),
    Claim(
        "C6",
        "higher throughput than S-LoRA at an approximately matched budget",
        "up to 3.46x",
        "times S-LoRA's throughput",
        "TESSA's output throughput over slora's within rounds under full load, of all settings the one that lies "
        "furthest above 1 with its whole interval; without adapters known to be more than 5 % off LoRA's parameters "
        "or served at a larger rank than their own. reproduced: at least 0.9 of 3.46, which its interval reaches, "
        "measured on GPUs. partly: above 1 with its whole interval. not: on GPUs, the interval holds 1 or less and "
        "ends below 3.46. not tested: otherwise, so nothing is decided.",
        _speedup,
        greatest=True,
        paper_value=3.46,
    ),
)
