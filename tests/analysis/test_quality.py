"""Quality tables: intervals and p values against scipy's, adjusted by hand; rates at the end of what was tried."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from analysis_store import trainings
from scipy.stats import ttest_1samp, ttest_rel

from analysis import quality
from analysis.figures import quality as figures

import matplotlib.pyplot as pyplot  # isort: skip

LORA = {"a": [0.50, 0.52, 0.48, 0.51, 0.49], "b": [0.60, 0.66, 0.58, 0.61, 0.65]}
OTHERS = {
    "bd_lora": {"a": [0.53, 0.56, 0.50, 0.55, 0.53], "b": [0.62, 0.67, 0.61, 0.66, 0.68]},
    "tessa across random": {"a": [0.49, 0.52, 0.53, 0.57, 0.50], "b": [0.66, 0.65, 0.60, 0.62, 0.68]},
    "tessa along random": {"a": [0.47, 0.49, 0.50, 0.47, 0.46], "b": [0.59, 0.60, 0.58, 0.63, 0.57]},
    "tessa across weight": {"a": [0.55, 0.53, 0.57, 0.60, 0.52], "b": [0.70, 0.63, 0.66, 0.64, 0.71]},
    "tessa along weight": {"a": [0.51, 0.50, 0.49, 0.52, 0.48], "b": [0.61, 0.62, 0.61, 0.60, 0.63]},
}


def mean(scores: dict[str, list[float]]) -> np.ndarray:
    return np.mean(list(scores.values()), axis=0)


def by_hand(pairs: list[tuple[np.ndarray, np.ndarray]]) -> tuple[list[str], list[str]]:
    """Differences and adjusted p values of all pairs, as the tables print them."""
    tests = [ttest_rel(*pair) for pair in pairs]
    texts = []
    for (one, other), test in zip(pairs, tests, strict=True):
        low, high = test.confidence_interval(0.95)
        texts.append(f"{100 * (one.mean() - other.mean()):+.1f} ±{100 * (high - low) / 2:.1f}")
    raw = [test.pvalue for test in tests]
    adjusted = [min(1, max(p * sum(q >= p for q in raw) for p in raw if p <= mine)) for mine in raw]
    assert any(a != pytest.approx(p) for a, p in zip(adjusted, raw, strict=True))
    return texts, [f"{p:.3f}" for p in adjusted]


def test_p_is_that_of_the_paired_t_test_and_0_where_every_seed_differs_alike():
    assert quality.p_value(np.array([1.0, 2.0, 4.0])) == pytest.approx(ttest_1samp([1, 2, 4], 0).pvalue)
    assert quality.p_value(np.full(5, 0.01)) == 0
    assert np.isnan(quality.p_value(np.zeros(5)))
    assert np.isnan(quality.p_value(np.ones(1)))


def test_holm_is_the_published_procedure():
    assert quality.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert quality.holm([0.4, np.nan, 0.9]) == pytest.approx([0.8, np.nan, 0.9], nan_ok=True)
    assert quality.holm([]).size == 0


def test_differences_to_lora_are_paired_and_their_p_is_adjusted_for_the_table():
    frame = pd.concat([trainings("lora", LORA), *(trainings(kind, s) for kind, s in OTHERS.items())])
    table = quality.table(frame).set_index("structure")
    own = table.loc[[quality.name(kind) for kind in OTHERS]]
    differences, p = by_hand([(mean(scores), mean(LORA)) for scores in OTHERS.values()])
    assert own["- LoRA"].tolist() == differences
    assert own["p (Holm)"].tolist() == p
    assert table.loc["LoRA", "p (Holm)"] == "-"


def test_a_mean_over_tasks_is_of_trainings_with_several():
    other = "tessa across random"
    one_task = pd.concat(
        [trainings("lora", {"a": LORA["a"]}, rank=8), trainings(other, {"a": OTHERS[other]["a"]}, rank=8)]
    )
    frame = pd.concat([trainings("lora", LORA), one_task])
    means = quality.with_mean(frame)
    means = means[means["task"] == quality.MEAN]
    assert means["rank_equivalent"].tolist() == [4] * 5
    assert means["value"].to_numpy() == pytest.approx(mean(LORA))
    assert means["stderr"].to_numpy() == pytest.approx([0.01 / np.sqrt(2)] * 5)
    assert quality.MEAN not in set(quality.with_mean(one_task)["task"])
    # What has one task is compared on that task.
    shown = quality.table(frame).set_index(["structure", "r"])
    assert shown.loc[(quality.name(other), "8"), quality.MEAN] == "-"
    assert shown.loc[(quality.name(other), "8"), "- LoRA"].startswith("+2.2 ")


def test_slices_are_compared_with_each_other_at_equal_budget():
    frame = pd.concat(
        [
            *(trainings(kind, s, params=1040 if "along" in kind else 1000) for kind, s in OTHERS.items()),
            trainings("tessa across random", LORA, rank=1),
            trainings("tessa along random", LORA, rank=1, params=1300),  # not the same budget
        ]
    )
    found = quality.comparisons(frame)
    assert found["slices compared"].tolist() == [
        "across - along, random",
        "across - along, weight",
        "weight - random, across",
        "weight - random, along",
    ]
    assert set(found["r"]) == {"4"}
    across, along, across_weight, along_weight = (mean(OTHERS[kind]) for kind in list(OTHERS)[1:])
    pairs = [(across, along), (across_weight, along_weight), (across_weight, across), (along_weight, along)]
    differences, p = by_hand(pairs)
    assert found["difference"].tolist() == differences
    assert found["p (Holm)"].tolist() == p
    assert "across - along, weight" in quality.render(frame)


def test_differences_without_variance_have_no_p():
    frame = pd.concat(
        [trainings(kind, LORA) for kind in ("lora", "tessa across random", "tessa along random")]
    )
    assert set(quality.table(frame)["p (Holm)"]) == {"-"}
    assert set(quality.comparisons(frame)["p (Holm)"]) == {"-"}


def test_of_trainings_with_several_rates_those_of_the_last_search_count():
    """Searches may be widened or given up for one rate: scores of two rates are never averaged, and what was run last
    is what is shown."""
    frame = pd.concat(
        [
            trainings("lora", {"a": [0.9]}, rate=0.01, role="search"),
            trainings("lora", LORA, rate=0.01, ended="2026-01-01T00:00:00+00:00"),
            trainings("lora", LORA, rate=0.02, ended="2026-01-03T00:00:00+00:00"),
            trainings("lora", LORA, rate=0.04, ended="2026-01-02T00:00:00+00:00"),
            trainings("lora", LORA, rank=1, rate=0.01),
            trainings("base", {"a": [0.1]}).assign(rank_equivalent=np.nan, learning_rate=np.nan),
        ]
    )
    counted = quality.rows(frame)
    adapted = counted[counted["method"] == "lora"]
    assert set(zip(adapted["rank_equivalent"], adapted["learning_rate"], strict=True)) == {
        (4, 0.02),
        (1, 0.01),
    }
    assert len(adapted) == 2 * 2 * 5
    assert len(counted) == len(adapted) + 1


def test_figures_of_few_structures():
    """As after an interrupted run: without adapters, and with module sets that no structure was compared on."""
    base = trainings("base", {"a": [0.1]}).assign(targets=None, rank_equivalent=np.nan, learning_rate=np.nan)
    assert list(figures.draw(quality.with_mean(quality.rows(base)))) == [""]
    assert "seeds" not in figures.note(quality.rows(base))
    apart = pd.concat(
        [base, trainings("lora", LORA), trainings("bd_lora", LORA, rank=8).assign(targets="mlp")]
    )
    assert list(figures.draw(quality.with_mean(quality.rows(apart)))) == [""]
    pyplot.close("all")


@pytest.mark.parametrize(
    ("tried", "shown"),
    [
        ((0.01, 0.02), "0.01 (lowest)"),
        ((0.005, 0.01), "0.01 (highest)"),
        ((0.005, 0.01, 0.02), "0.01"),
        ((), "0.01"),
    ],
)
def test_a_rate_at_the_end_of_those_tried_is_marked(tried: tuple[float, ...], shown: str):
    found = {rate: 0.5 if rate == 0.01 else 0.4 for rate in tried}
    searched = [trainings("lora", {"a": [score]}, rate=rate, role="search") for rate, score in found.items()]
    other = trainings("lora", {"a": [0.5]}, rank=8, rate=0.08, role="search")  # of another budget
    (rate,) = quality.table(pd.concat([trainings("lora", LORA), *searched, other]))["rate"]
    assert rate == shown
