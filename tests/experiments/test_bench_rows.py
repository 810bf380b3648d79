"""What the benchmarks share, and the command lines of those on a layer's products."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from experiments import (
    bench_collectives,
    bench_crosscheck,
    bench_lora_ops,
    bench_rows,
    bench_schedules,
    bench_training,
    provenance,
)
from experiments.measure import selfcheck

GIT = {"sha": "c" * 40, "dirty": False}


def test_rows_name_the_processor_or_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="a GPU"))
    for device, named in (("cpu", ("cpu", provenance.machine())), ("cuda", ("a GPU", "a GPU"))):
        bench_rows.store(pd.DataFrame({"x": [1]}), "trial", tmp_path, GIT, device)
        (row,) = pd.read_csv(tmp_path / "rows.csv").to_dict("records")
        assert (row["device"], row["machine"]) == named


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Benchmarks of `tmp_path` that measure nothing and leave the threads of this process as they are."""
    point = {
        "layer": "qkv", "d_out": 8, "d_in": 8, "tokens": 1, "base_us": 1.0, "wide_us": 2.0, "segmented_us": 3.0,
        "chose_wide": True, "slots": 1, "distinct": 1, "rows": 1, "used": 8, "length": 8,
    }  # fmt: skip
    monkeypatch.setattr(bench_schedules, "measure", lambda *_: pd.DataFrame([point]))
    monkeypatch.setattr(bench_lora_ops, "compare", lambda *_: {"layer": "qkv", "vllm_over_ours": 5.0})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("bench", [bench_lora_ops, bench_schedules], ids=lambda bench: bench.__name__)
def test_a_quick_run_leaves_the_full_table(bench: ModuleType) -> None:
    assert bench.main(["--quick"]) == 0
    assert not bench.RESULTS.exists()
    assert bench.main([]) == 0
    full = (bench.RESULTS / "rows.csv").read_text()
    assert bench.main(["--quick"]) == 0
    assert (bench.RESULTS / "rows.csv").read_text() == full
    assert bench.main(["--quick", "--out", "mine"]) == 0
    assert len(pd.read_csv("mine/rows.csv")) in (1, 2)


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize(
    ("bench", "arguments", "said"),
    [
        (bench_lora_ops, "--repeats 0", "--repeats is 0; give 1 or more"),
        (bench_schedules, "--repeats 0", "--repeats is 0; give 1 or more"),
        (bench_schedules, "--tp 0", "--tp is 0; give 1 or more"),
    ],
)
def test_wrong_arguments_are_one_line(
    bench: ModuleType, arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(arguments.split()) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


@pytest.mark.parametrize(
    "bench", [bench_lora_ops, bench_schedules, bench_training, bench_collectives, bench_crosscheck, selfcheck],
    ids=lambda bench: bench.__name__,
)  # fmt: skip
def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object, **__: object) -> None:
        pytest.fail("measured first")

    for name in ("measure", "compare", "run", "prepare"):
        if hasattr(bench, name):
            monkeypatch.setattr(bench, name, never)
    (tmp_path / "file").write_text("")
    assert bench.main(["--out", str(tmp_path / "file" / "x")]) == 2
    assert "a part of that path is a file. Choose another folder with --out" in capsys.readouterr().err


def test_an_unknown_model_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert bench_schedules.main(["--model", "smal", "--quick"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: unknown model 'smal'; known: ")


def test_each_lora_op_is_timed_on_the_storage_of_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    contiguous = {}

    class Op:
        def __init__(self, kind: type) -> None:
            self.name = kind.__name__

        def register_joint(self, joint: torch.Tensor) -> None:
            pass

        def update_metadata(self, *_: Any) -> None:
            pass

        def add_lora_linear(self, y: Any, x: Any, a: Any, b: Any, *_: Any) -> None:
            contiguous[self.name] = [t.is_contiguous() for t in (*a, *b)]

    monkeypatch.setattr(bench_lora_ops, "wrapper", lambda kind, *_: Op(kind))
    bench_lora_ops.compare("gate_up", 4, 2, 3, False, 1)
    assert contiguous["PunicaWrapperCPU"] == [True] * 4
    assert contiguous["GroupedWrapper"] == [False] * 4
