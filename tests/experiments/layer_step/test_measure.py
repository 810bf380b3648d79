"""The layer step on the CPU: rows, the correctness gate, resuming, the time budget."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest
import torch

from experiments import provenance
from experiments.layer_step import __main__ as main
from experiments.layer_step import lora_products
from experiments.layer_step.executors import TessaExecutor, make_executor
from experiments.layer_step.gate import Incorrect, check_products
from experiments.layer_step.geometry import lora_geometry, slice_geometry
from experiments.layer_step.measure import Bench, scaled_point, token_slots
from experiments.layer_step.rows import RowFile, table
from experiments.layer_step.spec import BACKENDS, LayerStepSpec, Point, cell_id, scaled_shape
from experiments.layer_step.stack import build_caches, build_stack
from experiments.projection.collectives import collective_s
from experiments.projection.hardware import gpu_named
from tessa.errors import UserError
from tessa.ops import compiled

TINY = LayerStepSpec(
    models=("llama-3.1-8b",), tps=(2,), sweep_tp=2, batch=6, context=5, prompts=2, prompt_tokens=96, rank=16,
    distinct=3, batches=(), ranks=(), distincts=(), residents=(), device="cpu", scale=32, layers=2,
    rounds=2, repeats=2, interconnect="h100",
)  # fmt: skip
DECODE = Point("llama-3.1-8b", 2, "decode", 6, 5, 16, 3, 4)
PREFILL = Point("llama-3.1-8b", 2, "prefill", 2, 96, 16, 2, 3)


@pytest.fixture(scope="module")
def rows() -> dict[str, pd.DataFrame]:
    bench = Bench(TINY)
    return {p.phase: pd.DataFrame(bench.measure(p)).set_index("variant") for p in (DECODE, PREFILL)}


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_every_backend_has_a_complete_row(rows: dict[str, pd.DataFrame], phase: str) -> None:
    frame = rows[phase]
    assert list(frame.index) == list(BACKENDS)
    assert set(frame.status) == {"complete"}
    assert set(frame.provenance) == {"emulated"}
    assert set(frame.comm_provenance) == {"modelled"}
    assert (frame.layer_s > 0).all()
    assert (frame.layer_s_p10 <= frame.layer_s).all()
    assert (frame.layer_s <= frame.layer_s_p90).all()
    assert (frame.step_error < 1e-4).all()
    assert set(frame.tokens) == {6}  # six sequences; or 2 prompts of 96 / 32 tokens
    assert frame.adapter_cost["base"] == 0
    assert frame.padding_ratio.drop("base").ge(1).all()
    assert frame["mode"]["tessa:wide"] == "wide"
    assert frame["mode"]["tessa:segmented"] == "segmented"


def test_collectives_are_added_from_the_model_and_shown_apart(rows: dict[str, pd.DataFrame]) -> None:
    frame = rows["decode"]
    extra = frame.adapter_collectives_per_step
    assert dict(extra[extra > 0]) == {"slora": 4 * 32}
    total = frame.kernels_s + frame.base_comm_s + frame.adapter_comm_s
    assert frame.step_s.to_list() == pytest.approx(total.to_list())
    reduce = collective_s(gpu_named("h100"), 2, "all_reduce", 4 * 6 * 128)
    assert frame.base_comm_s.to_list() == pytest.approx([2 * 32 * reduce] * len(frame))
    assert (frame.adapter_comm_s > 0).to_dict() == {name: name == "slora" for name in BACKENDS}
    assert frame.kernels_s.to_list() == pytest.approx((frame.layer_s * 32).to_list())


def test_without_known_links_a_step_over_ranks_has_no_time_but_its_kernels_have() -> None:
    from dataclasses import replace

    spec = replace(TINY, interconnect=None, backends=("base", "slora"), rounds=1)
    frame = pd.DataFrame(Bench(spec).measure(DECODE)).set_index("variant")
    assert frame.step_s.isna().all()
    assert (frame.kernels_s > 0).all()
    assert math.isfinite(frame.adapter_cost_kernels["slora"])
    assert frame.adapter_collective_bytes_per_step["slora"] > 0


def test_adapter_bytes_follow_the_structure(rows: dict[str, pd.DataFrame]) -> None:
    size = rows["decode"].adapter_bytes_per_rank
    assert size["base"] == 0
    assert size["punica"] == size["plain_lora"] > size["slora"]
    read = rows["decode"].adapter_read_bytes_per_step
    assert read["punica"] == size["punica"] * 3 / 4  # three of four resident adapters are used
    assert read["tessa:wide"] == size["tessa"]
    assert read["tessa:segmented"] == size["tessa"] * 3 / 4


def wrong_slot(self: TessaExecutor, token_slot: torch.Tensor, prepare=TessaExecutor.prepare) -> None:
    prepare(self, torch.where(token_slot < 0, token_slot, (token_slot + 1) % self.slots))


def test_a_backend_with_wrong_outputs_has_a_row_without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TessaExecutor, "prepare", wrong_slot)
    monkeypatch.setattr(lora_products.TorchProducts, "expand", lambda *a: None)
    frame = pd.DataFrame(Bench(TINY).measure(DECODE)).set_index("variant")
    assert frame.status.to_dict() == {
        name: "complete" if name == "base" else "incorrect" for name in BACKENDS
    }
    assert frame.layer_s.drop("base").isna().all()
    assert "qkv_proj: largest error" in frame.reason["tessa"]


def test_a_backend_that_raises_has_a_row_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(lora_products.TorchProducts, "shrink", fail)
    frame = pd.DataFrame(Bench(TINY).measure(DECODE)).set_index("variant")
    assert frame.status["punica"] == "failed"
    assert frame.reason["punica"] == "RuntimeError: no such kernel"
    assert frame.status["tessa"] == "complete"


def test_the_gate_sees_an_adapter_that_reaches_a_token_without_one() -> None:
    stack = build_stack(scaled_shape("llama-3.1-8b", 32), 2, 1, torch.float32, torch.device("cpu"), 0)
    caches, gen = build_caches(stack, DECODE, 1), torch.Generator().manual_seed(2)
    inputs = (torch.randn(6, 128, generator=gen), torch.randn(6, 128, generator=gen))
    slots = token_slots(DECODE, 0.3, gen)
    assert (slots < 0).sum() == 2
    executor = make_executor("punica", stack, DECODE, 3)
    assert check_products(executor, stack, DECODE, caches, inputs, slots) < 1e-5
    everyone = torch.where(slots < 0, 0, slots)
    prepare = executor.prepare
    executor.prepare = lambda token_slot: prepare(everyone)  # type: ignore[method-assign]
    with pytest.raises(Incorrect, match="largest error"):
        check_products(executor, stack, DECODE, caches, inputs, slots)


@pytest.mark.parametrize("backend", ["plain_lora", "punica", "slora", "bd_lora", "tessa:segmented"])
def test_on_the_cpu_all_but_plain_lora_run_the_compiled_kernels_that_tessa_runs(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = build_stack(scaled_shape("llama-3.1-8b", 32), 2, 1, torch.float32, torch.device("cpu"), 0)
    executor, gen = make_executor(backend, stack, DECODE, 3), torch.Generator().manual_seed(2)
    executor.prepare(token_slots(DECODE, 0.0, gen))
    calls: list[object] = []
    run = compiled._run
    monkeypatch.setattr(compiled, "_run", lambda *call: (calls.append(call), run(*call)))
    for name in executor.geometry:
        width = stack.layers[0].weights[name].shape[1]
        executor.linear(0, name, torch.randn(6, width, generator=gen))
    assert len(calls) == (0 if backend == "plain_lora" else executor.launches)
    assert executor.kernels == {"plain_lora": "dense", "tessa:segmented": "segmented"}.get(
        backend, "compiled"
    )


def test_token_slots_use_as_many_adapters_as_asked_and_whole_prompts() -> None:
    gen = torch.Generator().manual_seed(0)
    slots = token_slots(Point("m", 1, "decode", 9, 8, 4, 4, 7), 0.0, gen)
    assert len(set(slots.tolist())) == 4
    assert slots.min() >= 0
    assert slots.max() < 7
    prompts = token_slots(scaled_point(PREFILL, 32), 0.0, gen).view(2, 3)
    assert (prompts == prompts[:, :1]).all()


def test_a_rerun_measures_what_is_missing(tmp_path, capsys) -> None:
    arguments = [
        "--device",
        "cpu",
        "--quick",
        "--out",
        str(tmp_path),
        "--phases",
        "decode",
        "--backends",
        "base",
    ]
    assert main.main(arguments) == 0
    first = RowFile(tmp_path).frame().set_index("cell").layer_s
    assert main.main([*arguments, "punica", "--command", "python run.py experiment=layer_step"]) == 0
    both = RowFile(tmp_path).frame()
    assert "python run.py experiment=layer_step" in set(both.command)
    assert len(both) == 2 * len(first)
    capsys.readouterr()
    assert main.main([*arguments, "punica"]) == 0
    assert "0 of 4 points to measure" in capsys.readouterr().out
    assert RowFile(tmp_path).frame().layer_s.to_list() == both.layer_s.to_list()
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["device"] == "cpu"
    assert set(both.git_sha) == {environment["git_start"]["sha"]}
    assert set(both.git_dirty) == {environment["git_start"]["dirty"]}
    assert set(both.machine) == {environment["machine"]} == {provenance.machine()}


def test_another_processor_measures_anew() -> None:
    settings = Bench(TINY).machine.settings(TINY)
    cells = {cell_id(DECODE, "base", {**settings, "machine": name}) for name in ("one cpu", "another")}
    assert len(cells) == 2


def test_two_runs_on_one_folder_keep_each_others_rows(tmp_path) -> None:
    one, two = RowFile(tmp_path), RowFile(tmp_path)
    # A name of digits alone.
    one.add([{"cell": "000000000012", "status": "complete", "layer_s": 0.1 + 0.2}])
    two.add([{"cell": "b", "status": "complete", "layer_s": 1.0}])
    one.add([{"cell": "c", "status": "failed", "layer_s": math.nan}])
    stored = RowFile(tmp_path).frame()
    assert list(stored.cell) == ["000000000012", "b", "c"]
    assert stored.layer_s[0] == 0.1 + 0.2
    two.add([{"cell": "b", "status": "complete", "layer_s": 2.0}])
    assert dict(zip(two.frame().cell, two.frame().layer_s, strict=True))["b"] == 2.0
    assert len(two.frame()) == 3


def test_a_spent_budget_leaves_points_out_and_says_which(tmp_path, capsys) -> None:
    code = main.main(
        ["--device", "cpu", "--quick", "--out", str(tmp_path), "--backends", "base", "--budget-s", "1e-6"]
    )
    out = capsys.readouterr().out
    assert code == 0
    assert "6 points" in out
    assert "left out: llama-3.1-8b tp 2 decode 8 tokens" in out
    assert "no rows" in out


def test_a_table_of_another_kind_is_refused(tmp_path) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="not a layer_step table"):
        RowFile(tmp_path)


def test_the_table_shows_time_over_base_and_counts_what_failed() -> None:
    common = {"model": "m", "tp": 2, "phase": "decode", "tokens": 8, "rank": 4, "distinct": 2, "resident": 2}
    frame = pd.DataFrame(
        [
            {**common, "variant": "base", "status": "complete", "layer_s": 1e-4},
            {**common, "variant": "punica", "status": "complete", "layer_s": 1.5e-4},
            {**common, "variant": "slora", "status": "incorrect", "layer_s": None},
        ]
    )
    text = table(frame)
    assert text.splitlines()[2].split()[-3:] == ["100.0", "1.500", "-"]
    assert text.endswith("2 rows complete, 1 not: slora")


def test_padding_is_no_part_of_the_budget() -> None:
    """At rank 5 the grouped products of the CPU compute eight columns of LoRA, and four of BD-LoRA's one or two."""
    stack = build_stack(scaled_shape("llama-3.1-8b", 32), 8, 1, torch.float32, torch.device("cpu"), 0)
    point = Point("llama-3.1-8b", 8, "decode", 6, 5, 5, 3, 4)
    punica, block, tessa = (make_executor(name, stack, point, 3) for name in ("punica", "bd_lora", "tessa"))
    assert punica.budget_ratio == pytest.approx(1)
    assert punica.stored_params / punica.params == pytest.approx(8 / 5)
    linears = stack.linears.values()
    assert block.params == sum(lora_geometry("bd_lora", linear, 5, 8).params for linear in linears)
    assert (
        block.params
        < block.stored_params
        == sum(lora_geometry("bd_lora", linear, 5, 8, 4).params for linear in linears)
    )
    assert tessa.params == sum(slice_geometry(linear, 5).params for linear in linears)
    assert tessa.stored_params == sum(slice_geometry(linear, 5).stored(4) for linear in linears)
    assert tessa.stored_params > tessa.params
