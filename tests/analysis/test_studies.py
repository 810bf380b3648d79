"""Tables of studies: their commit stands in their rows or beside them, and only clean rows are a reference."""

from __future__ import annotations

import json

import analysis_store
import pandas as pd
import pytest

from analysis import studies
from tessa.errors import UserError

CLEAN, DIRTY = analysis_store.CLEAN, analysis_store.DIRTY


def test_rows_that_say_their_commit_are_taken_at_their_word(tmp_path):
    (tmp_path / "environment.json").write_text(json.dumps({"git_start": DIRTY}))
    table = pd.DataFrame(
        {"git_sha": [CLEAN["sha"], DIRTY["sha"], None, "e" * 40], "git_dirty": [False, True, None, None]}
    )
    assert len(studies.counted(table, tmp_path)) == 4
    assert list(studies.counted(table, tmp_path, reference=True)["git_sha"]) == [CLEAN["sha"]]


@pytest.mark.parametrize(
    ("said", "clean"),
    [
        ({"git_start": CLEAN, "git_submit": CLEAN}, True),
        ({"git_start": CLEAN, "git_submit": {"sha": None, "dirty": None}}, True),
        ({"git_start": CLEAN, "git_submit": DIRTY}, False),
        ({"git_start": {"sha": None, "dirty": None}}, False),
        (None, False),
    ],
)
def test_other_tables_have_the_commit_of_their_environment(tmp_path, said, clean):
    if said is not None:
        (tmp_path / "environment.json").write_text(json.dumps(said))
    table = pd.DataFrame({"x": [1, 2]})
    if clean:
        assert set(studies.counted(table, tmp_path, reference=True)["git_sha"]) == {CLEAN["sha"]}
    else:
        assert len(studies.counted(table, tmp_path)) == 2
        with pytest.raises(UserError, match="none of the 2 rows"):
            studies.counted(table, tmp_path, reference=True)
