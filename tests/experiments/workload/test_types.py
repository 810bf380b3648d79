"""The workload file: complete or absent, verified when read, named by what it holds."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.workload import Request, Workload, build
from tessa.errors import UserError

SPEC = {
    "num_requests": 50,
    "arrivals": {"kind": "poisson", "rate": 5.0},
    "prompt_tokens": {"kind": "uniform", "low": 4, "high": 40},
    "output_tokens": {"kind": "fixed", "value": 6},
    "popularity": {"kind": "uniform"},
    "num_adapters": 4,
    "base_fraction": 0.2,
}


@pytest.fixture(scope="module")
def workload():
    return build(SPEC, 500)


def test_file_round_trip(workload, tmp_path):
    path = workload.save(tmp_path)
    assert path.name == f"{workload.hash[:16]}.parquet"
    again = Workload.load(path)
    assert again.hash == workload.hash
    assert again.meta == workload.meta
    assert list(again.requests) == list(workload.requests)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_hash_does_not_depend_on_how_the_file_is_written(workload, tmp_path):
    path = workload.save(tmp_path)
    pq.write_table(pq.read_table(path), tmp_path / "other.parquet", compression="none", row_group_size=7)
    assert (tmp_path / "other.parquet").read_bytes() != path.read_bytes()
    assert Workload.load(tmp_path / "other.parquet").hash == workload.hash


def test_saving_again_keeps_the_file_and_repairs_a_damaged_one(workload, tmp_path):
    path = workload.save(tmp_path)
    before = path.stat().st_mtime_ns
    assert workload.save(tmp_path) == path
    assert path.stat().st_mtime_ns == before
    path.write_bytes(path.read_bytes()[:100])
    workload.save(tmp_path)
    assert Workload.load(path).hash == workload.hash


def test_requests_are_built_on_access(workload):
    r = workload.requests[7]
    assert isinstance(r, Request)
    assert r.request_id == 7
    assert r.prompt_token_ids == tuple(workload.prompt(7).tolist())
    assert all(type(t) is int for t in r.prompt_token_ids)
    assert len(r.prompt_token_ids) == workload.prompt_lengths[7]
    assert workload.requests[-1].request_id == 49
    assert [r.request_id for r in workload.requests[10:13]] == [10, 11, 12]
    assert {r.adapter for r in workload.requests} == {None, 0, 1, 2, 3}
    with pytest.raises(IndexError):
        workload.requests[50]
    assert len(workload.frame()) == len(workload) == 50


def test_columns_cannot_be_changed_after_the_hash(workload):
    with pytest.raises(ValueError, match="read-only"):
        workload.arrival_s[0] = 1.0


@pytest.mark.parametrize("column", ["arrival_s", "output_tokens", "adapter", "prompt_token_ids"])
def test_a_changed_value_is_found(workload, tmp_path, column):
    path = workload.save(tmp_path)
    table = pq.read_table(path)
    values = table[column].to_pylist()
    if column == "prompt_token_ids":
        values[3][0] += 1
    else:
        values[-1] += 1
    values = pa.array(values, table.schema.field(column).type)
    pq.write_table(table.set_column(table.schema.get_field_index(column), column, values), path)
    with pytest.raises(UserError, match=r"delete it and build it again|adapter ids must lie"):
        Workload.load(path)


def test_files_that_are_no_workload_are_named(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        Workload.load(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(UserError, match="cannot be read"):
        Workload.load(tmp_path / "text.parquet")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    with pytest.raises(UserError, match="not a workload"):
        Workload.load(tmp_path / "other.parquet")


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"arrival_s": [1.0, 0.5]}, "in order"),
        ({"arrival_s": [0.0, np.inf]}, "finite"),
        ({"output_tokens": [1, 0]}, "at least one output token"),
        ({"adapter": [0, 2]}, "adapter ids must lie in 0..1"),
        ({"offsets": [0, 0, 3]}, "at least one token each"),
        ({"offsets": [0, 1, 2]}, "at least one token each"),
        ({"adapter": [0]}, "different lengths"),
        ({"arrival_s": []}, "at least one request"),
    ],
)
def test_impossible_columns_are_refused(over, message):
    good = {
        "arrival_s": [0.0, 1.0],
        "prompt_tokens": [1, 2, 3],
        "offsets": [0, 1, 3],
        "output_tokens": [1, 1],
        "adapter": [0, -1],
    }
    meta = {"spec": {"num_adapters": 2}, "load": {"mode": "open_loop", "concurrency": None}}
    Workload(**{k: np.array(v) for k, v in good.items()}, meta=meta)
    with pytest.raises(UserError, match=message):
        Workload(**{k: np.array(v) for k, v in (good | over).items()}, meta=meta)


def test_failed_save_leaves_nothing(workload, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        workload.save(tmp_path)
    assert list(tmp_path.iterdir()) == []
