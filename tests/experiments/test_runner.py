"""The runner with scripted engines: every backend, every failure, every way to stop."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis import load
from experiments import cli
from experiments.runner import rotated

pytestmark = pytest.mark.fake

BACKENDS = ["base", "plain_lora", "punica", "slora", "tessa"]


def frame_of(tmp_path: Path) -> pd.DataFrame:
    return load(tmp_path / "results")


def test_every_backend_completes_on_the_same_workload_file(fleet, tiny_run, tmp_path):
    assert cli.execute(tiny_run("tp=2"), factory=fleet) == 0
    frame = frame_of(tmp_path)
    assert list(frame["backend"].unique()) == BACKENDS
    assert (frame["status"] == "complete").all()
    assert (frame["tp"] == 2).all()
    assert frame["workload_hash"].nunique() == 1
    assert len({path for paths in fleet.paths.values() for path in paths}) == 1
    assert frame.groupby("backend")["repeat"].apply(list).map(lambda rounds: rounds == [0, 1]).all()
    assert not fleet.alive


def test_numbers_are_those_of_the_scripted_engine(fleet, tiny_run, tmp_path):
    cli.execute(tiny_run(), factory=fleet)
    frame = frame_of(tmp_path).set_index("backend")
    for backend, speed in fleet.speeds.items():
        assert frame.loc[backend, "output_tokens_per_s"].to_numpy() == pytest.approx(speed)
        assert frame.loc[backend, "adapter_cost"].to_numpy() == pytest.approx(1 - speed / 100.0)
        assert frame.loc[backend, "tpot_s_mean"].to_numpy() == pytest.approx(1 / speed)
    assert (frame["collectives_per_step"] == 2.0).all()


def test_added_latencies_share_one_engine_start_and_one_base(fleet, composed, tmp_path):
    """The latency is set before every run, ratios to base stay within one latency, and the rows say `emulated`."""
    chosen = (
        "backends=[base,slora]",
        "grid.engine.added_latency_us=[0,500,2000]",
        "measure.caps.grid_values=3",
    )
    config = composed(
        "experiment=interconnect", "model=tiny", "measure=smoke", "allow_sha_change=true", *chosen
    )
    assert cli.execute(config, factory=fleet) == 0
    assert fleet.count("base", "start") == fleet.count("slora", "start") == 1
    frame = frame_of(tmp_path)
    assert (frame["provenance"] == "emulated").all()
    assert sorted(frame["added_latency_us"].unique()) == [0, 500, 2000]
    for (backend, added), rows in frame.groupby(["backend", "added_latency_us"]):
        speed = 1 / (1 / fleet.speeds[backend] + 2 * added * 1e-6)
        assert rows["output_tokens_per_s"].to_numpy() == pytest.approx(speed)
        base = 1 / (1 / fleet.speeds["base"] + 2 * added * 1e-6)
        assert rows["adapter_cost"].to_numpy() == pytest.approx(1 - speed / base)
    assert fleet.count("slora", "add 500us") == 3  # the warm-up and two rounds
    assert cli.execute(config, factory=fleet) == 0
    assert fleet.count("slora", "start") == 1


def test_rounds_rotate_and_only_the_measured_engine_runs(fleet, tiny_run):
    cli.execute(tiny_run("measure.rounds=3", "backends=[base,slora,tessa]"), factory=fleet)
    order = [backend for backend, step in fleet.calls if step == "run"]
    assert order == ["base", "slora", "tessa", "slora", "tessa", "base", "tessa", "base", "slora"]
    running: set[str] = set()
    for backend, step in fleet.calls:
        if step in ("start", "resume"):
            running.add(backend)
        elif step in ("park", "stop"):
            running.discard(backend)
        assert len(running) <= 1


def test_ratio_is_formed_within_the_round(fleet, tiny_run, tmp_path):
    def drift(engine: Any) -> None:
        fleet.speeds["base"], fleet.speeds["tessa"] = (100.0, 90.0) if engine.runs == 1 else (200.0, 120.0)

    fleet.script["base", "run"] = fleet.script["tessa", "run"] = drift
    cli.execute(tiny_run("backends=[base,tessa]"), factory=fleet)
    costs = frame_of(tmp_path).query("backend == 'tessa'").set_index("repeat")["adapter_cost"]
    assert costs[0] == pytest.approx(0.1)
    assert costs[1] == pytest.approx(0.4)


def test_complete_cells_are_not_run_again_unless_forced(fleet, tiny_run):
    cli.execute(tiny_run(), factory=fleet)
    fleet.calls.clear()
    assert cli.execute(tiny_run(), factory=fleet) == 0
    assert not fleet.calls
    cli.execute(tiny_run("force=true"), factory=fleet)
    assert fleet.count("tessa", "run") == 2


@pytest.mark.parametrize(
    ("backend", "step", "kind", "phase"),
    [
        ("tessa", "start", "failed", "start"),
        ("tessa", "start", "timeout", "start"),
        ("slora", "gate", "failed", "gate"),
        ("punica", "warmup", "failed", "warm-up"),
        ("tessa", "run", "failed", "round 1/2"),
        ("tessa", "run", "timeout", "round 1/2"),
        ("base", "run", "failed", "round 1/2"),
    ],
)
def test_one_failure_is_a_row_and_the_others_go_on(
    fleet, tiny_run, tmp_path, scripted_error, backend, step, kind, phase
):
    def fail(engine: Any) -> None:
        engine.log.write_text("loading\nthe device burnt down\n")
        raise scripted_error(kind, "the device burnt down")

    fleet.script[backend, step] = fail
    assert cli.execute(tiny_run(), factory=fleet) == 1
    frame = frame_of(tmp_path)
    row = frame[frame["backend"] == backend].iloc[0]
    assert (row["status"], row["reason"]) == (kind, f"{phase}: the device burnt down")
    assert "the device burnt down" in (tmp_path / "results" / row["log"]).read_text()
    assert pd.isna(row["output_tokens_per_s"])
    others = frame[frame["backend"] != backend]
    assert set(others["backend"]) == set(BACKENDS) - {backend}
    assert (others["status"] == "complete").all()
    if backend == "base":
        assert others["adapter_cost"].isna().all()
    assert not fleet.alive


def test_a_failed_cell_is_retried_and_then_kept(fleet, tiny_run, tmp_path, scripted_error):
    def fail(engine: Any) -> None:
        raise scripted_error("failed", "once")

    fleet.script["tessa", "run"] = fail
    cli.execute(tiny_run(), factory=fleet)
    fleet.script.clear()
    fleet.calls.clear()
    assert cli.execute(tiny_run(), factory=fleet) == 0
    assert {backend for backend, _ in fleet.calls} == {"tessa"}
    tessa = frame_of(tmp_path).query("backend == 'tessa'")
    assert (tessa["status"] == "complete").all()
    assert (tessa["adapter_cost_basis"] == "other_session").all()


def stored(tmp_path: Path, backend: str) -> tuple[Path, dict[str, Any]]:
    (file,) = (tmp_path / "results" / "tp_scaling").glob(f"{backend}-*/summary.json")
    return file, json.loads(file.read_text())


@pytest.mark.parametrize("machine", ["the same", "another"])
def test_costs_that_lacked_a_base_are_formed_once_it_is_there(
    fleet, tiny_run, tmp_path, scripted_error, machine
):
    fleet.script["base", "run"] = lambda engine: (_ for _ in ()).throw(scripted_error("failed", "once"))
    assert cli.execute(tiny_run(), factory=fleet) == 1
    file, before = stored(tmp_path, "tessa")
    assert before["status"] == "complete"
    assert "adapter_cost" not in before["intervals"]
    records = file.with_name("requests.parquet").read_bytes()
    if machine == "another":
        before["environment"]["hardware"]["cpu"] = "another CPU"
        file.write_text(json.dumps(before))
    fleet.script.clear()
    fleet.calls.clear()
    assert cli.execute(tiny_run(), factory=fleet) == 0
    assert {backend for backend, _ in fleet.calls} == {"base"}
    slora = frame_of(tmp_path).query("backend == 'slora'")
    assert slora["adapter_cost"].to_numpy() == pytest.approx(0.5)
    assert (slora["adapter_cost_basis"] == "other_session").all()
    _, after = stored(tmp_path, "tessa")
    assert file.with_name("requests.parquet").read_bytes() == records
    if machine == "another":
        assert after == before
    else:
        assert after["intervals"]["adapter_cost"]["centre"] == pytest.approx(0.1)
        del after["intervals"]["adapter_cost"]
        assert after["intervals"] == before["intervals"]
    assert not list((tmp_path / "results").glob("tp_scaling/.claims/*.claim"))


def test_a_base_of_another_machine_is_no_base(fleet, tiny_run, tmp_path):
    cli.execute(tiny_run("backends=[base]"), factory=fleet)
    file, summary = stored(tmp_path, "base")
    summary["environment"]["hardware"]["cores"] += 1
    file.write_text(json.dumps(summary))
    assert cli.execute(tiny_run("backends=[base,tessa]"), factory=fleet) == 0
    tessa = frame_of(tmp_path).query("backend == 'tessa'")
    assert (tessa["status"] == "complete").all()
    assert tessa["adapter_cost"].isna().all()


def test_base_is_measured_again_beside_a_late_cell_when_asked(fleet, tiny_run, tmp_path, scripted_error):
    fleet.script["tessa", "start"] = lambda engine: (_ for _ in ()).throw(scripted_error("failed", "once"))
    cli.execute(tiny_run(), factory=fleet)
    before = next((tmp_path / "results").glob("tp_scaling/base-*/summary.json")).read_text()
    fleet.script.clear()
    fleet.calls.clear()
    cli.execute(tiny_run("measure.base_reference=rerun"), factory=fleet)
    assert {backend for backend, _ in fleet.calls} == {"base", "tessa"}
    tessa = frame_of(tmp_path).query("backend == 'tessa'")
    assert (tessa["adapter_cost_basis"] == "same_round").all()
    assert next((tmp_path / "results").glob("tp_scaling/base-*/summary.json")).read_text() == before


def test_only_failed_leaves_missing_cells(fleet, tiny_run, tmp_path, scripted_error):
    fleet.script["tessa", "run"] = lambda engine: (_ for _ in ()).throw(scripted_error("failed", "once"))
    cli.execute(tiny_run("backends=[base,tessa]"), factory=fleet)
    fleet.script.clear()
    fleet.calls.clear()
    cli.execute(tiny_run("only=failed"), factory=fleet)
    assert {backend for backend, _ in fleet.calls} == {"tessa"}
    assert set(frame_of(tmp_path)["backend"]) == {"base", "tessa"}


def test_a_failed_gate_is_incorrect_and_never_timed(fleet, tiny_run, tmp_path):
    fleet.gates["tessa"] = {"passed": False, "max_abs_error": 3.0, "detail": "adapter 2 differs by 3.0"}
    assert cli.execute(tiny_run(), factory=fleet) == 1
    row = frame_of(tmp_path).query("backend == 'tessa'").iloc[0]
    assert row["status"] == "incorrect"
    assert "adapter 2 differs by 3.0" in row["reason"]
    assert fleet.count("tessa", "run") == 0


def test_outputs_that_could_not_be_checked_do_not_count_as_passed(fleet, tiny_run, tmp_path):
    fleet.gates["tessa"] = {
        "passed": None,
        "max_abs_error": None,
        "detail": "not gated: no log-probabilities",
    }
    assert cli.execute(tiny_run(), factory=fleet) == 0
    gates = frame_of(tmp_path).drop_duplicates("cell").set_index("backend")["gate"]
    assert gates["base"] == "passed"
    assert pd.isna(gates["tessa"])


@pytest.mark.parametrize(("late", "status"), [("open_loop", "invalid"), (None, "complete")])
def test_a_round_is_judged_by_the_mode_in_which_it_was_sent(fleet, tiny_run, tmp_path, late, status):
    class Late(type(fleet(type("G", (), {"backend": "tessa"}), tmp_path / "x.log"))):
        def run(self, path: Path, options: dict[str, Any]) -> dict[str, Any]:
            result = super().run(path, options)
            for record in result["records"]:
                record.scheduled_s -= 5.0
            return {**result, "mode": late}

    cli.execute(tiny_run("backends=[tessa]"), factory=lambda g, log: Late(fleet, g.backend, log))
    row = frame_of(tmp_path).iloc[0]
    assert row["status"] == status
    assert late is None or "schedule lag" in row["reason"]


def test_a_dead_engine_is_started_again_for_the_next_workload(fleet, tiny_run, tmp_path, scripted_error):
    def fail_once(engine: Any) -> None:
        if fleet.count("tessa", "start") == 1:
            raise scripted_error("failed", "died")

    fleet.script["tessa", "run"] = fail_once
    two = tiny_run("backends=[base,tessa]", "+grid.workload.seed=[1,2]")
    two["grid"] = {"backends": ["base", "tessa"], "workload.seed": [1, 2]}
    assert cli.execute(two, factory=fleet) == 1
    assert fleet.count("base", "start") == 1
    assert fleet.count("tessa", "start") == 2
    tessa = frame_of(tmp_path).query("backend == 'tessa'").drop_duplicates("cell")
    assert sorted(tessa["status"]) == ["complete", "failed"]


def test_an_engine_that_always_dies_is_given_up(fleet, tiny_run, tmp_path, scripted_error):
    fleet.script["tessa", "run"] = lambda engine: (_ for _ in ()).throw(scripted_error("failed", "died"))
    many = tiny_run()
    many["grid"] = {"backends": ["base", "tessa"], "workload.seed": [1, 2, 3, 4]}
    many["measure"]["caps"]["grid_values"] = None
    cli.execute(many, factory=fleet)
    assert fleet.count("tessa", "start") == 2
    reasons = frame_of(tmp_path).query("backend == 'tessa'").drop_duplicates("cell")["reason"]
    assert len(reasons) == 4
    assert reasons.str.contains("2 times in a row").sum() == 2


def test_deaths_with_measured_rounds_between_them_are_not_in_a_row(fleet, tiny_run, tmp_path, scripted_error):
    """Where each round starts its engines anew, cells are stored at the end only."""

    def die(engine: Any) -> None:
        if fleet.count("tessa", "run") in (1, 3):  # the first and the third of four cells
            raise scripted_error("failed", "died")

    fleet.script["tessa", "run"] = die
    many = tiny_run("measure.interleave=restart")
    many["grid"] = {"backends": ["base", "tessa"], "workload.seed": [1, 2, 3, 4]}
    many["measure"]["caps"]["grid_values"] = None
    assert cli.execute(many, factory=fleet) == 1
    tessa = frame_of(tmp_path).query("backend == 'tessa'").drop_duplicates("cell")
    assert sorted(tessa["status"]) == ["complete", "complete", "failed", "failed"]
    assert set(tessa["reason"].dropna()) == {"round 1/2: died"}


def test_a_failed_restart_is_called_a_start(fleet, tiny_run, tmp_path, scripted_error):
    def fail_again(engine: Any) -> None:
        if fleet.count("tessa", "start") == 2:
            raise scripted_error("failed", "no room")

    fleet.script["tessa", "start"] = fail_again
    cli.execute(tiny_run("measure.interleave=restart"), factory=fleet)
    assert frame_of(tmp_path).query("backend == 'tessa'")["reason"].tolist() == ["start: no room"]


@pytest.mark.parametrize("mode", ["restart", "off"])
def test_other_schedules_measure_the_same(fleet, tiny_run, tmp_path, mode):
    assert cli.execute(tiny_run(f"measure.interleave={mode}"), factory=fleet) == 0
    frame = frame_of(tmp_path)
    assert (frame["status"] == "complete").all()
    assert frame.query("backend == 'slora'")["adapter_cost"].to_numpy() == pytest.approx(0.5)
    assert fleet.count("slora", "start") == (2 if mode == "restart" else 1)
    assert fleet.count("slora", "gate") == 1
    basis = "same_round" if mode == "restart" else "not_interleaved"
    assert set(frame["adapter_cost_basis"]) == {basis}


@pytest.mark.parametrize(
    ("number", "step"),
    [
        (signal.SIGTERM, "start"),
        (signal.SIGINT, "gate"),
        (signal.SIGTERM, "warmup"),
        (signal.SIGINT, "run"),
        (signal.SIGHUP, "run"),
        (signal.SIGTERM, "park"),
    ],
)
def test_a_signal_stops_everything_and_leaves_nothing_half_written(fleet, tiny_run, tmp_path, number, step):
    fleet.script["slora", step] = lambda engine: os.kill(os.getpid(), number)
    former = signal.getsignal(number)
    assert cli.execute(tiny_run(), factory=fleet) == 130
    assert signal.getsignal(number) is former
    assert not fleet.alive
    experiment = tmp_path / "results" / "tp_scaling"
    assert [p.name for p in experiment.iterdir() if p.name not in (".claims",)] == []
    assert not list(experiment.glob(".claims/*.claim"))
    fleet.script.clear()
    assert cli.execute(tiny_run(), factory=fleet) == 0


def test_cells_finished_before_a_signal_are_kept(fleet, tiny_run, tmp_path):
    fleet.script["tessa", "start"] = lambda engine: os.kill(os.getpid(), signal.SIGTERM)
    assert cli.execute(tiny_run("measure.interleave=off"), factory=fleet) == 130
    assert set(frame_of(tmp_path)["backend"]) == set(BACKENDS) - {"tessa"}
    fleet.script.clear()
    fleet.calls.clear()
    assert cli.execute(tiny_run("measure.interleave=off"), factory=fleet) == 0
    assert {backend for backend, _ in fleet.calls} == {"tessa"}


def test_a_second_signal_while_stopping_leaves_no_engine(fleet, tiny_run):
    fleet.script["slora", "run"] = lambda engine: os.kill(os.getpid(), signal.SIGINT)
    fleet.script["base", "stop"] = lambda engine: os.kill(os.getpid(), signal.SIGINT)
    assert cli.execute(tiny_run(), factory=fleet) == 130
    assert not fleet.alive


def test_cells_of_a_live_run_are_left_to_it(fleet, tiny_run, tmp_path, capsys):
    cli.execute(tiny_run("backends=[base]"), factory=fleet)
    other = cli.Store(tmp_path / "results", "tp_scaling")
    plan = cli.plan_run(cli.schema.build(tiny_run()), device="cpu")
    claims = [other.claim(cell.name) for cell in plan.cells if cell.backend == "slora"]
    fleet.calls.clear()
    assert cli.execute(tiny_run(), factory=fleet) == 0
    assert fleet.count("slora", "start") == 0
    assert fleet.count("tessa", "run") == 2
    assert "being run" in capsys.readouterr().err
    claims[0].release()
    assert cli.execute(tiny_run(), factory=fleet) == 0
    assert fleet.count("slora", "run") == 2


def test_a_failing_logger_costs_no_cell(fleet, tiny_run, tmp_path, monkeypatch, capsys):
    import wandb

    def broken(**_: Any) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(wandb, "init", broken)
    assert cli.execute(tiny_run("logger=wandb"), factory=fleet) == 0
    assert (frame_of(tmp_path)["status"] == "complete").all()
    assert capsys.readouterr().err.count("wandb failed") == 1


def test_status_and_dry_run_touch_nothing(fleet, tiny_run, tmp_path, capsys):
    assert cli.execute(tiny_run("dry_run=true"), factory=fleet) == 0
    assert cli.execute(tiny_run(), mode="status", factory=fleet) == 0
    text = capsys.readouterr().out
    assert "5 to run, 5 engine starts" in text
    assert "total: 5 missing" in text
    assert not fleet.calls
    assert not (tmp_path / "results").exists()
    cli.execute(tiny_run("backends=[base]"), factory=fleet)
    cli.execute(tiny_run(), mode="status", factory=fleet)
    assert "total: 1 complete, 4 missing" in capsys.readouterr().out


def test_a_dry_run_counts_starts_as_the_runner_makes_them(fleet, tiny_run, monkeypatch, capsys):
    def starts(*overrides: str) -> str:
        assert cli.execute(tiny_run("dry_run=true", *overrides), factory=fleet) == 0
        return capsys.readouterr().out.splitlines()[0].split(", ", 1)[1]

    cli.execute(tiny_run("backends=[base]"), factory=fleet)
    assert starts("measure.base_reference=rerun") == "4 to run, 5 engine starts"
    monkeypatch.setattr("experiments.estimate.side_by_side", lambda groups: "no room")
    assert starts() == "4 to run, 8 engine starts"
    assert starts("measure.interleave=off") == "5 to run, 5 engine starts"
    assert starts("backends=[tessa]") == "1 to run, 1 engine starts"
    # The base that is measured again beside it is a second engine.
    late = ("backends=[base,tessa]", "measure.base_reference=rerun")
    assert starts(*late) == "1 to run, 4 engine starts"
    fleet.calls.clear()
    cli.execute(tiny_run(*late), factory=fleet)
    assert [step for _, step in fleet.calls].count("start") == 4


def test_stored_cell_names_no_folder_of_this_machine(fleet, tiny_run, tmp_path):
    cli.execute(tiny_run(), factory=fleet)
    for file in (tmp_path / "results").rglob("*.json"):
        text = file.read_text()
        assert str(tmp_path) not in text
        assert str(Path.home()) + "/" not in text
        json.loads(text)


def test_rotation_gives_every_place_to_every_backend():
    orders = [rotated(["a", "b", "c"], i) for i in range(3)]
    assert sorted(order[0] for order in orders) == ["a", "b", "c"]
    assert rotated([], 2) == []


def test_engines_that_do_not_fit_side_by_side_start_anew_each_round(fleet, tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "experiments.estimate.side_by_side", lambda groups: f"{len(groups)} engines are too many"
    )
    assert cli.execute(tiny_run(), factory=fleet) == 0
    assert fleet.count("slora", "start") == 2
    assert (frame_of(tmp_path)["status"] == "complete").all()
    _, summary = stored(tmp_path, "slora")
    assert [entry["interleave"] for entry in summary["rounds"]] == ["restart", "restart"]
