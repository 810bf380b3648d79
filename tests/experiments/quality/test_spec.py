"""Which trials follow from the settings, and what makes two of them the same cell."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import pytest

from experiments.quality import skills
from experiments.quality import spec as trials
from experiments.quality.base import BaseSettings
from experiments.quality.spec import QualitySpec, Structure, Trial
from experiments.studies import spec_from
from tessa.errors import UserError

RATES = {"full": [1e-3], "lora": [1e-3, 1e-2], "bd_lora": [1e-2], "tessa": [1e-3, 3e-3, 1e-2]}


def spec(**changes) -> QualitySpec:
    return trials.check(dataclasses.replace(QualitySpec(learning_rates=RATES), **changes))


def test_structures_are_curves_then_studies_each_once():
    made = spec(
        budgets=(2, 4),
        study_budget=4,
        study_methods=("tessa:across:first", "tessa:across:random"),
        study_targets=("attention",),
        target_methods=("lora",),
    )
    names = [s.name for s in trials.structures(made)]
    assert names == [
        "base", "full", "lora-r2", "lora-r4", "bd_lora-r2", "bd_lora-r4", "tessa-across-random-r2",
        "tessa-across-random-r4", "tessa-along-random-r2", "tessa-along-random-r4", "tessa-across-first-r4",
        "lora-r4-attention",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": "abc"}, "study.steps=abc is not a whole number"),
        ({"seeds": ["a"]}, "study.seeds=a is not a whole number"),
        ({"seeds": 3}, "study.seeds=3 is no list; give one, such as study.seeds=[3]"),
        ({"limit_s": True}, "study.limit_s=True is not a number"),
        ({"learning_rates": [0.1]}, "study.learning_rates=[0.1] is no mapping"),
        ({"budgets": [2.5]}, "study.budgets=2.5 is not a whole number"),
        ({"warmup": "x"}, "study.warmup=x is not a number"),
        ({"learning_rates": {"lora": ["abc"]}}, "study.learning_rates.lora=abc is not a number"),
        ({"model": "smol"}, "study.model=smol is not known; allowed: skills, smollm2"),
    ],
)
def test_a_value_of_another_kind_is_refused(changes, said):
    with pytest.raises(UserError, match=re.escape(said)):
        trials.check(spec_from(QualitySpec, changes))


def test_numbers_and_nothing_fit_where_they_may():
    made = spec_from(QualitySpec, {"limit_s": 3, "bd_rank": None, "warmup": 0, "seeds": [1, 2]})
    assert (made.limit_s, made.bd_rank, made.seeds) == (3, None, (1, 2))


def test_rates_are_searched_where_there_is_a_choice():
    made = spec(budgets=(2,), methods=("base", "full", "lora", "tessa"))
    found = [(t.structure.method, t.learning_rate) for t in trials.searches(made)]
    assert found == [("lora", 1e-3), ("lora", 1e-2), ("tessa", 1e-3), ("tessa", 3e-3), ("tessa", 1e-2)]
    assert {t.seed for t in trials.searches(made)} == {made.search_seed}
    assert {t.role for t in trials.searches(made)} == {"search"}
    assert len(trials.tests(made, Structure("lora", None, None, 2, "all"), 1e-3)) == 3
    assert len(trials.tests(made, Structure("base"), None)) == 1


def cell_hash(made: QualitySpec, device: str = "cpu", **changes) -> str:
    trial = Trial(Structure("lora", None, None, 2, "all"), 1e-3, 0, "test")
    return trials.cell("quality", made, dataclasses.replace(trial, **changes), device).hash


def test_a_cell_depends_on_what_changes_its_number_alone():
    here = cell_hash(spec())
    assert here == cell_hash(spec(seeds=(0, 1, 2, 3, 4), workers=1, limit_s=10.0, budgets=(2, 64)))
    assert here != cell_hash(spec(steps=7))
    assert here != cell_hash(spec(base={"steps": 7}))
    assert here != cell_hash(spec(), device="cuda")
    assert here == cell_hash(spec(measure="paper"))
    assert here != cell_hash(spec(schedule="linear"))
    assert "schedule" not in spec().identity()  # stored cells are from before this setting
    assert len({cell_hash(spec(), seed=1), cell_hash(spec(), learning_rate=1e-2), here}) == 3


def test_a_cell_depends_on_what_the_skills_are(monkeypatch):
    here, base_here = cell_hash(spec()), BaseSettings().hash
    changed = [
        replace(skill, make=skills.BY_NAME["copy"].make) if skill.held_out else skill
        for skill in skills.SKILLS
    ]
    monkeypatch.setattr(skills, "SKILLS", tuple(changed))
    monkeypatch.setattr(skills, "BY_NAME", {skill.name: skill for skill in changed})
    assert cell_hash(spec()) != here
    assert BaseSettings().hash != base_here


def test_data_files_count_and_their_place_does_not(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.jsonl").write_text("{}\n" * (2 if name == "c" else 1))
    a, b, c = (cell_hash(spec(data=str(tmp_path / name))) for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": ("dora",)}, "method 'dora' is unknown; allowed: base, full, lora"),
        ({"methods": ("tessa:beside",)}, "placement one of across, along"),
        ({"methods": ("lora:across",)}, "only tessa takes a placement"),
        ({"protocol": "glue"}, "allowed: skills, metamath, commonsense"),
        ({"schedule": "constant"}, "allowed: cosine, linear"),
        ({"seeds": (0, 1000)}, "is among study.seeds"),
        ({"seeds": ()}, "3 or more for intervals"),
        ({"methods": ()}, "methods is empty"),
        ({"budgets": ()}, "budgets is empty"),
        ({"study_methods": ("lora",)}, "study_budget is missing"),
        ({"workers": 0}, "give 1 or more"),
        ({"test_examples": 1000}, "a skill has 256"),
        ({"test_examples": 1}, "a standard error needs 2 or more"),
        ({"learning_rates": {"adalora": [1.0]}}, "allowed: full, lora"),
    ],
)
def test_mistakes_say_what_is_allowed(changes, said):
    with pytest.raises(UserError, match=said):
        spec(**changes)


def test_a_method_without_a_rate_is_an_error():
    with pytest.raises(UserError, match="has none for full"):
        trials.rates(spec(learning_rates={"lora": [1.0]}), Structure("full"))


def test_smoke_replaces_its_namesakes():
    values = {"steps": 100, "batch": 8, "smoke": {"steps": 2}}
    assert trials.with_smoke(values, "demo") == {**values, "measure": "demo"}
    assert trials.with_smoke(values, "smoke")["steps"] == 2
    assert trials.with_smoke(values, "smoke")["batch"] == 8
