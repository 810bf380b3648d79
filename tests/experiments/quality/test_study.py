"""The study against a scripted training process: what is chosen on which data, what is kept, what is run again."""

from __future__ import annotations

import io

import pytest
from quality_scripted import Scripted

from analysis import load, quality
from experiments.console import Console
from experiments.quality import study as studies
from experiments.quality.pool import WorkerDied
from experiments.quality.spec import QualitySpec
from tessa.errors import UserError

SPEC = QualitySpec(
    methods=("base", "lora", "tessa:across:random"),
    budgets=(2, 4),
    learning_rates={"lora": [1e-3, 1e-2], "tessa": [1e-3, 1e-2]},
    seeds=(0, 1, 2),
    workers=2,
)
PER_RUN = 8 + 1 + 4 * 3  # searches, base, seeds of four structures


def score(cell) -> float:
    """On validation data the higher rate is better for LoRA and the lower for TESSA; on test data the other way
    round, so that a rate chosen on test data would be seen."""
    trial = cell.trial
    if trial.learning_rate is None:
        return 0.05
    better = (trial.learning_rate == 1e-2) == (trial.structure.method == "lora")
    if trial.role == "test":
        better = not better
    return 0.5 + 0.1 * better + 0.01 * trial.seed * (trial.role == "test")


def run(tmp_path, rule=score, spec=SPEC, **options) -> tuple[Scripted, studies.Outcome, str]:
    worker, out = Scripted(rule), io.StringIO()
    study = studies.Study("quality", spec, tmp_path, "cpu", **options)
    outcome = studies.Run(study, Console(out), tmp_path / "cache", make=worker.make)()
    return worker, outcome, out.getvalue()


def test_rates_are_chosen_on_validation_data(tmp_path):
    worker, outcome, _ = run(tmp_path)
    assert (outcome.complete, outcome.failed) == (PER_RUN, [])
    tests = {
        (c.trial.structure.method, c.trial.learning_rate) for c in worker.asked if c.trial.role == "test"
    }
    assert tests == {("base", None), ("lora", 1e-2), ("tessa", 1e-3)}
    rows = quality.rows(load(tmp_path))
    assert set(rows["split"]) == {"test"}
    assert len(rows) == 2 * (1 + 4 * 3)
    table = quality.table(load(tmp_path))
    lora = table[(table["structure"] == "LoRA") & (table["r"] == "4")].iloc[0]
    assert lora["mean of tasks"].startswith("51.0 ±")
    assert lora["rate"] == "0.01 (highest)"


def test_seeds_come_round_by_round_so_that_whole_comparisons_are_there_early(tmp_path):
    worker, _, _ = run(tmp_path, spec=QualitySpec(**{**SPEC.__dict__, "workers": 1}))
    seeds = [c.trial.seed for c in worker.asked if c.trial.role == "test"]
    assert seeds == sorted(seeds)


def test_a_second_run_trains_nothing_and_force_trains_all(tmp_path):
    run(tmp_path)
    worker, outcome, _ = run(tmp_path)
    assert (worker.asked, outcome.complete) == ([], 0)
    worker, outcome, _ = run(tmp_path, force=True)
    assert outcome.complete == PER_RUN


def test_limits_leave_the_rest_to_a_rerun(tmp_path):
    few = QualitySpec(**{**SPEC.__dict__, "max_cells": 5})
    total = 0
    for _ in range(10):
        _, outcome, _ = run(tmp_path, spec=few)
        assert outcome.complete <= 5
        total += outcome.complete
    assert total == PER_RUN


@pytest.mark.parametrize(
    ("broken", "status", "said"),
    [
        (WorkerDied("the training process ended by signal SIGKILL"), "failed", "signal SIGKILL"),
        (float("nan"), "invalid", "the loss became nan"),
    ],
)
def test_a_broken_training_is_a_row_and_is_retried(tmp_path, broken, status, said):
    def rule(cell):
        return broken if cell.trial.role == "test" and cell.trial.seed == 1 else score(cell)

    _, outcome, out = run(tmp_path, rule)
    assert len(outcome.failed) == 4
    assert outcome.complete == PER_RUN - 4
    assert said in out
    frame = load(tmp_path)
    bad = frame[frame["status"] == status]
    assert len(bad.drop_duplicates("cell")) == 4
    assert bad["value"].isna().all()
    worker, outcome, _ = run(tmp_path, only="failed")
    assert {c.trial.seed for c in worker.asked} == {1}
    assert len(quality.rows(load(tmp_path))) == 2 * (1 + 4 * 3)


def test_a_candidate_that_diverged_has_lost_and_is_not_tried_again(tmp_path):
    def rule(cell):
        broken = cell.trial.role == "search" and cell.trial.structure.name == "lora-r2"
        return float("nan") if broken and cell.trial.learning_rate == 1e-2 else score(cell)

    worker, outcome, _ = run(tmp_path, rule)
    assert len(outcome.failed) == 1
    tests = [c.trial for c in worker.asked if c.trial.role == "test" and c.trial.structure.name == "lora-r2"]
    assert {trial.learning_rate for trial in tests} == {1e-3}
    worker, _, _ = run(tmp_path, rule)
    assert worker.asked == []


def test_a_structure_of_which_every_candidate_diverged_stays_untested(tmp_path):
    worker, _, out = run(
        tmp_path, lambda cell: float("nan") if cell.trial.structure.name == "lora-r2" else score(cell)
    )
    assert "lora-r2" not in {c.trial.structure.name for c in worker.asked if c.trial.role == "test"}
    assert "lora-r2: its learning rate is not chosen yet" in out


def test_a_search_that_failed_leaves_its_structure_untested(tmp_path):
    def rule(cell):
        broken = cell.trial.role == "search" and cell.trial.structure.name == "lora-r2"
        return WorkerDied("out of memory") if broken else score(cell)

    worker, outcome, out = run(tmp_path, rule)
    assert len(outcome.failed) == 2
    assert "lora-r2" not in {c.trial.structure.name for c in worker.asked if c.trial.role == "test"}
    assert "lora-r2: its learning rate is not chosen yet" in out


def test_a_rate_at_the_end_of_its_grid_is_said(tmp_path):
    _, _, out = run(tmp_path)
    assert "lora-r2: the chosen learning rate is the highest of its grid" in out


def test_a_user_s_mistake_in_the_training_process_ends_the_run(tmp_path):
    with pytest.raises(UserError, match=r"study\.model is wrong"):
        run(tmp_path, lambda cell: UserError("study.model is wrong"))


def test_status_counts_what_is_not_known_yet(tmp_path):
    study = studies.Study("quality", SPEC, tmp_path, "cpu", create=False)
    lines = studies.status_lines(study)
    assert lines[0].startswith(f"quality: {PER_RUN} cells")
    assert "9 missing, 12 once their learning rates are chosen" in lines[-2]
    run(tmp_path)
    assert (
        f"total: {PER_RUN} complete"
        in studies.status_lines(studies.Study("quality", SPEC, tmp_path, "cpu"))[-2]
    )
