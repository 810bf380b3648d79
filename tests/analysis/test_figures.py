"""Figures: what is drawn is what is stored, gaps are seen, captions say where it comes from."""

from __future__ import annotations

import json
import shlex
import shutil

import analysis_store
import numpy as np
import pytest
from matplotlib import pyplot as plt

from analysis import figures, load, style, sweeps, tables
from analysis import quality as scores
from analysis.__main__ import main, report
from analysis.figures import breakdown, marks, quality, rate, replay, scaling
from analysis.figures.save import commands
from baselines import REGISTRY


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


@pytest.fixture
def frame(store_cell, tmp_path):
    store_cell("base", [100.0, 110.0, 90.0])
    store_cell("tessa", [90.0, 99.0, 81.0], base=[100.0, 110.0, 90.0])
    store_cell("slora", [50.0], status="failed")
    store_cell("tessa", [45.0, 46.0], tp=2, base=[50.0, 50.0], provenance="emulated")
    return load(tmp_path / "results")


@pytest.fixture(scope="module")
def full(full_results):
    return load(full_results)


def of(full, experiment):
    parts = [p for p in sweeps.families(full) if p["experiment"].iloc[0] == experiment]
    assert len(parts) == 1
    return parts[0]


def test_captions_name_the_commands_of_their_cells(store_cell, tmp_path):
    given = ["experiment=tp_scaling", "measure.rounds=7", "backends=[base,'slora:compute=off']"]
    store_cell("base", [100.0, 110.0], overrides=[*given, "tp=1"])
    store_cell("base", [50.0, 50.0], tp=2, overrides=[*given, "tp=2"])
    frame = load(tmp_path / "results")
    (png,) = figures.draw(frame, tmp_path / "f")
    said = json.loads(png.with_suffix(".json").read_text())
    assert [shlex.split(command) for command in said["commands"]] == [
        ["python", "run.py", *given, f"tp={tp}"] for tp in (1, 2)
    ]
    assert "other_settings" not in said
    store_cell("tessa", [90.0, 99.0])
    assert "other_settings" in commands(load(tmp_path / "results"))
    assert commands(load(tmp_path / "results"), reference=True) == {
        "commands": ["python scripts/reference.py --only tp_scaling"]
    }


def test_png_pdf_and_caption_stay_the_same(frame, tmp_path):
    (png,) = figures.draw(frame, tmp_path / "f")
    assert png.name.startswith("tp_scaling_tiny_")
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert png.with_suffix(".pdf").read_bytes()[:4] == b"%PDF"
    before = {s: png.with_suffix(s).read_bytes() for s in (".pdf", ".png", ".json")}
    figures.draw(frame, tmp_path / "f")
    assert before == {s: png.with_suffix(s).read_bytes() for s in before}
    said = json.loads(before[".json"])
    assert said["commands"] == ["python run.py -m experiment=tp_scaling model=tiny tp=1,2"]
    assert "config.json" in said["other_settings"], "cells from before commands were stored"
    assert said["commits"] == ["c" * 40]
    assert said["provenance"] == ["measured", "emulated"]
    assert [gap["status"] for gap in said["no_result"]] == ["failed"]
    assert said["uncommitted_changes"] is False


def test_bars_are_the_means_and_gaps_are_named(frame):
    top, bottom = scaling.over_tp(frame).axes
    assert sorted(round(b.get_height(), 3) for b in top.patches) == [45.5, 90.0, 100.0]
    assert [t.get_text() for t in top.texts] == ["failed"]
    assert [b.get_hatch() for b in top.patches].count(style.HATCHES["emulated"]) == 1
    drawn = {line.get_linestyle(): line.get_ydata() for line in bottom.lines if line.get_marker() == "*"}
    assert drawn["-"][0] == pytest.approx(10.0, abs=0.01)
    assert drawn["--"][1] == pytest.approx(9.0, abs=0.01)
    (cross,) = [line for line in bottom.lines if line.get_gid() == "gap"]
    assert (cross.get_color(), list(cross.get_xdata())) == (style.colour("slora"), [1])
    labels = [t.get_text() for t in top.figure.legends[0].get_texts()]
    assert labels == ["base", "S-LoRA", "TESSA", "measured", "emulated", "no result"]
    assert "commit cccccccccc" not in figures.caption(frame)
    assert "commit ccccccc" in figures.caption(frame)


def test_a_figure_says_that_its_times_say_nothing(tmp_path):
    analysis_store.write_cell(tmp_path, "base", [1.0, 2.0], labels={"measure": "smoke"})
    frame = load(tmp_path / "results")
    said = scaling.over_tp(frame)._supxlabel.get_text().replace("\n", " ")
    assert said.endswith("measure=smoke shows that everything runs; its times say nothing about speed")
    (png,) = figures.draw(frame, tmp_path / "f")
    assert json.loads(png.with_suffix(".json").read_text())["cautions"] == [
        "measure=smoke shows that everything runs; its times say nothing about speed"
    ]


def test_cells_without_any_result_are_no_figure(tmp_path):
    analysis_store.write_cell(tmp_path, "base", [], status="failed")
    done = figures.draw_all(load(tmp_path / "results"), tmp_path / "results", tmp_path / "f")
    assert done.paths == []
    assert any("failed: round 2/3: it broke" in text for text in done.missing)


def test_every_backend_has_its_own_colour_and_name():
    assert set(style.COLOURS) == set(style.NAMES) == set(style.MARKERS)
    assert all(style.colour(backend) and style.name(backend) for backend in REGISTRY)
    assert len(set(style.COLOURS.values())) == len(style.COLOURS)
    assert style.colour("punica:stock") not in style.COLOURS.values()
    assert style.name("slora:compute=off") == "S-LoRA (compute=off)"
    assert style.colour("something_new") in style.SPARE_COLOURS


def test_numbers_of_a_dirty_tree_are_gaps_of_a_reference_figure(store_cell, tmp_path):
    store_cell("base", [100.0, 110.0])
    store_cell("tessa", [90.0, 91.0], base=[100.0, 110.0], git=analysis_store.DIRTY)
    store_cell("slora", [80.0, 81.0], base=[100.0, 110.0], git={"sha": None, "dirty": None})
    frame = load(tmp_path / "results")
    top, _ = scaling.over_tp(figures.only_reference(frame)).axes
    assert [b.get_height() for b in top.patches] == [105.0]
    assert [t.get_text() for t in top.texts] == [figures.DIRTY, figures.DIRTY]
    assert marks.commits(frame) == ["ccccccc", "ddddddd+changes"]
    done = figures.draw_all(frame, tmp_path / "results", tmp_path / "f", True, ("tp_scaling",))
    assert sum("left out of reference figures" in text for text in done.missing) == 2
    assert json.loads(done.paths[0].with_suffix(".json").read_text())["reference"] is True
    (clean,) = [p for p in sweeps.families(frame)]
    assert len(scaling.over_tp(clean).axes[0].patches) == 3


def test_rows_of_a_dirty_tree_are_left_out_of_a_study_s_reference_figures(complete_results, tmp_path):
    results = tmp_path / "results"
    for name in ("layer_step", "projection"):
        shutil.copytree(complete_results / name, results / name)
    rows = analysis_store.layer_step_rows()
    rows.loc[rows["variant"] == "tessa:wide", ["git_sha", "git_dirty"]] = list(analysis_store.DIRTY.values())
    rows.to_csv(results / "layer_step" / "rows.csv", index=False)
    said = json.loads((results / "projection" / "environment.json").read_text())
    said["git_submit"]["dirty"] = True
    (results / "projection" / "environment.json").write_text(json.dumps(said))
    done = figures.draw_all(load(results), results, tmp_path / "f", True, ("layer_step", "projection"))
    captions = [json.loads(path.with_suffix(".json").read_text()) for path in done.paths]
    assert {said["experiment"] for said in captions} == {"layer_step"}
    assert captions[0]["commits"] == [analysis_store.CLEAN["sha"]]
    assert (captions[0]["uncommitted_changes"], captions[0]["reference"]) == (False, True)
    left, refused = done.missing
    assert left == "layer_step: 11 rows left out of reference figures: their tree was not clean"
    assert refused.startswith("projection: none of the ")
    assert len(figures.draw_all(load(results), results, tmp_path / "f", False, ("projection",)).paths) > 1


def test_a_sweep_has_a_panel_per_facet_and_breaks_at_a_gap(full):
    part = of(full, "adapter_count")
    (figure,) = scaling.over_sweep(part, sweeps.SWEEPS["adapter_count"])
    assert [a.get_title() for a in figure.axes] == ["identical", "distinct", "", ""]
    slora = [
        x for x in figure.axes[0].lines if x.get_color() == style.colour("slora") and len(x.get_xdata()) == 4
    ]
    assert list(slora[0].get_xdata()) == pytest.approx([1, 4, 16, 64], rel=0.3)
    assert [bool(np.isfinite(y)) for y in slora[0].get_ydata()] == [True, True, False, True]
    assert any(x.get_gid() == "gap" and list(x.get_xdata()) == [16] for x in figure.axes[0].lines)


def test_facets_and_values_are_in_a_fixed_order(full):
    budget = of(full, "budget_sweep")
    shown = [
        sweeps.shown("target_modules", v) for v in sweeps.in_order("target_modules", budget["target_modules"])
    ]
    assert shown == ["attention", "MLP", "all seven"]
    popularity = of(full, "popularity")["popularity"]
    shown = [sweeps.shown("popularity", v) for v in sweeps.in_order("popularity", popularity)]
    assert shown == ["identical", "S-LoRA power 0.1", "Punica geom. 1.5", "Zipf 1", "uniform", "distinct"]
    assert sweeps.in_order("num_adapters", of(full, "adapter_count")["num_adapters"]) == [1, 4, 16, 64]


def test_knees_lie_between_the_last_rate_kept_up_with_and_the_next(full):
    part = of(full, "rate_sweep")
    found = rate.knees(part)
    assert found["base"] == rate.Knee(4.0, 8.0)
    assert found["slora"] == rate.Knee(2.0, 4.0)
    assert found["tessa"] == rate.Knee(16.0, None)
    assert found["tessa"].text() == "not reached: above 16 requests/s"
    figure = rate.against_rate(part)
    ticks = {
        x.get_gid(): list(x.get_xdata()) for a in figure.axes for x in a.lines if "knee" in str(x.get_gid())
    }
    assert ticks["knee slora"] == [2.0]
    assert ticks["knee tessa"] == [16.0]
    assert rate.chosen_columns(part)[-2:] == ("slo_attainment", "goodput_requests_per_s")


def test_a_rate_sweep_says_at_what_rates_the_drawn_arrivals_came(full):
    part = of(full, "rate_sweep").copy()
    assert "as drawn" not in note_of(rate.against_rate(part))
    part["scheduled_rate"] = 0.9 * part["request_rate"]
    assert "arrivals as drawn: 0.45, 0.9, 1.8, 3.6, 7.2, 14.4 requests/s" in note_of(rate.against_rate(part))


def test_a_rate_that_was_too_high_from_the_start_and_one_without_a_limit(tmp_path):
    analysis_store.rates(tmp_path, {"base": 0.2, "tessa": 9.0}, slo=False)
    part = of(load(tmp_path / "results"), "rate_sweep")
    assert rate.knees(part)["base"] == rate.Knee(None, 0.5)
    assert rate.knees(part)["base"].text() == "below 0.5 requests/s"
    assert rate.chosen_columns(part)[-2:] == ("slora_attainment", "requests_per_s")


def test_arrivals_that_are_over_before_a_queue_shows_tell_nothing(full):
    part = full[(full["experiment"] == "rate_sweep") & (full["variant"] == "tessa")].copy()
    eight = part["request_rate"] == 8
    few = part.copy()
    few.loc[eight, "requests_total"] = 16.0
    for made in (
        few,
        part.assign(e2e_s_p99=part["e2e_s_p99"] + 2.0),
    ):  # 64 requests in 8 s, generations of 2.5 s
        found = rate.knees(made)["tessa"]
        assert found == rate.Knee(4.0, None, short=8.0)
        assert "too few requests at 8 requests/s" in found.text()


def test_the_wait_for_the_first_arrival_is_no_lateness(full):
    """Six requests of a server that keeps up, the first after 1.4 s: nothing is said, least of all that it was slow."""
    part = full[(full["experiment"] == "rate_sweep") & (full["variant"] == "tessa")].copy()
    part["requests_total"], part["scheduled_rate"], part["requests_per_s"] = 6.0, 0.776, 6 / 7.86
    assert rate.knees(part)["tessa"] == rate.Knee(None, None, short=0.5)


def test_a_rate_sweep_without_any_result_is_a_figure_of_gaps(full, tmp_path):
    part = full[full["experiment"] == "rate_sweep"].copy()
    part["status"] = "failed"
    part[
        [c for c in part.columns if c.startswith(("ttft", "tpot", "slo", "goodput")) or c.endswith("_per_s")]
    ] = np.nan
    assert all(path.stat().st_size > 0 for path in figures.draw(part, tmp_path))


@pytest.mark.parametrize(("status", "knee"), [("timeout", (4.0, 8.0, None)), ("failed", (4.0, None, 8.0))])
def test_a_rate_without_a_result_is_not_kept_up_with(full, status, knee):
    """A run that never ends in time is what saturation looks like; what another failure hides is unknown."""
    part = of(full, "rate_sweep").copy()
    part.loc[(part["variant"] == "tessa") & (part["request_rate"] >= 8), "status"] = status
    found = rate.knees(part)["tessa"]
    assert (found.last, found.beyond, found.lost) == knee
    assert found.text() == (
        "between 4 and 8 requests/s" if status == "timeout" else "not found: no result at 8 requests/s"
    )


def test_a_trace_over_its_time(full, full_results):
    part = of(full, "trace_replay")
    figure = replay.over_time(part, full_results, "azure conv")
    steps = figure.axes[0].patches[0].get_data()
    assert (steps.values * np.diff(steps.edges)).sum() == pytest.approx(300)
    waits = {x.get_color(): np.nanmean(x.get_ydata()) for x in figure.axes[1].lines}
    assert waits[style.colour("plain_lora")] > waits[style.colour("base")]
    assert replay.over_time(part, full_results.parent, "azure conv") is None


def test_breakdown_adds_up(full):
    part = of(full, "breakdown")
    found = {(s.variant, s.piece): s.time.centre for s in breakdown.shares(part)}
    slora = sum(value for (variant, _), value in found.items() if variant == "slora")
    own = part[part["variant"] == "slora"]["output_tokens_per_s"].astype(float)
    assert slora == pytest.approx((1e3 / own).mean())
    assert found["slora", "communication"] > 0
    assert ("slora:communication=off", "base") not in found
    assert ("tessa", breakdown.SUM) in found
    assert found["slora", "rest"] < 0, "the pieces overlap here, so that the bar is longer than the time"
    ticks = [x for x in breakdown.split(part).axes[0].lines if x.get_gid() == "measured total"]
    assert [list(x.get_xdata()) for x in ticks] == [[pytest.approx((1e3 / own).mean())]]
    other = part.copy()
    other.loc[other["variant"] == "tessa", "session"] = "another"
    unpaired = {(s.variant, s.piece): s.time.centre for s in breakdown.shares(other)}
    assert not np.isfinite(unpaired["tessa", breakdown.SUM])
    alone = part[part["variant"].isin(["base", "slora"])]
    assert [s.piece for s in breakdown.shares(alone)] == ["base", "base", breakdown.SUM]


def test_a_breakdown_without_any_result_has_no_pieces(tmp_path):
    analysis_store.write_cell(tmp_path, "base", [], 2, "failed", experiment="breakdown")
    assert breakdown.split(of(load(tmp_path / "results"), "breakdown")) is None


def test_quality_has_a_panel_per_task_and_one_for_their_mean(full_results):
    table = scores.with_mean(scores.rows(load(full_results)))
    figure = quality.draw(table)[""]
    assert [a.get_title() for a in figure.axes] == ["base7_addition", "style_shift", "mean of tasks"]
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert {"LoRA", "BD-LoRA", "TESSA across, random", "TESSA along, random", "full fine-tuning"} == set(
        labels
    )
    assert scores.rows(load(full_results / "none")).empty


def test_a_family_is_what_differs_in_nothing_but_the_sweep(store_cell, tmp_path):
    spec = {"arrivals": {"kind": "poisson", "rate": 1.0}, "seed": 0}
    config = {"tp": 1, "adapters": {"count": 8}, "workload": {"hash": "a", "spec": spec}}
    other = {
        "tp": 2,
        "adapters": {"count": 8},
        "workload": {"hash": "b", "spec": {**spec, "arrivals": {"rate": 2}}},
    }
    assert sweeps.family_of("rate_sweep", {}, config) != sweeps.family_of("rate_sweep", {}, other)
    other["workload"]["spec"]["arrivals"]["kind"] = "poisson"
    assert sweeps.family_of("rate_sweep", {}, config) == sweeps.family_of("rate_sweep", {}, other)
    assert sweeps.family_of("popularity", {}, config) != sweeps.family_of("popularity", {}, other)
    other["adapters"]["count"] = 9
    assert sweeps.family_of("rate_sweep", {}, config) != sweeps.family_of("rate_sweep", {}, other)
    assert config["tp"] == 1


def test_command_line(frame, store_cell, tmp_path, capsys):
    assert main(["table", str(tmp_path / "results")]) == 0
    assert "tessa" in capsys.readouterr().out
    assert main(["figures", str(tmp_path / "results"), "--out", str(tmp_path / "o")]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(str(tmp_path / "o" / "tp_scaling_tiny_"))
    assert (
        "missing: rate_sweep: no results; make them with: python run.py experiment=rate_sweep" in captured.err
    )
    assert "failed: round 2/3: it broke" in captured.err
    (tmp_path / "none").mkdir()
    assert main(["figures", str(tmp_path / "none")]) == 0
    assert "no stored cells" in capsys.readouterr().out
    store_cell("merged", [1.0], schema_version=9)
    assert main(["table", str(tmp_path / "results")]) == 2
    assert "schema version 9" in capsys.readouterr().err


def test_report_shows_the_settings_of_its_cells(frame, store_cell, tmp_path, capsys):
    other = store_cell("base", [7.0], setting="ffff0000", labels={"rank_equivalent": 8})
    paths = report(tmp_path / "results", "tp_scaling", [other.name])
    assert len(paths) == 1
    out = capsys.readouterr().out
    assert f"figure: {paths[0]}" in out
    assert "tessa" not in out.split("figure:")[0].split("requests =")[0]


def test_windows_of_one_trace_are_different_figures(tmp_path):
    for speedup in (1, 2):
        trace = {"format": "azure", "sha256": "a" * 64, "window_s": 60, "speedup": speedup}
        config = {"workload": {"spec": {"trace": trace}}}
        analysis_store.write_cell(tmp_path, "tessa", [1.0, 2.0], experiment="trace_replay", setting=f"s{speedup}",
                                  config=config)  # fmt: skip
    parts = sweeps.families(load(tmp_path / "results"))
    assert len(parts) == 2


def test_two_settings_of_a_quality_experiment_are_two_figures(tmp_path):
    analysis_store.quality(tmp_path / "results", 0.1)
    for folder in list((tmp_path / "results" / "quality").iterdir()):
        other = folder.with_name(f"{folder.name}-other")
        shutil.copytree(folder, other)
        text = (other / "summary.json").read_text()
        summary = json.loads(text)
        summary["labels"]["setting"] = "0therset"
        (other / "summary.json").write_text(json.dumps(summary))
    frame = load(tmp_path / "results")
    names = {path.stem for path in figures.draw(frame, tmp_path / "figures")}
    assert {"quality_0therset"} < {name.rpartition("_slices")[0] or name for name in names}
    assert len({name.split("_")[1] for name in names}) == 2
    assert tables.render(frame).count("model skills") == 2


def test_a_latency_added_to_every_collective_is_emulated(tmp_path):
    """interconnect: real ranks, an unreal wait; the figure says so, and its points stand at their latencies."""
    for us in (0, 50, 200):
        analysis_store.point(tmp_path, "interconnect", f"i{us}", {"slora": 0.2 + us / 400, "tessa": 0.04}, tp=2,
                             provenance="emulated", labels={"added_latency_us": us})  # fmt: skip
    part = of(load(tmp_path / "results"), "interconnect")
    (figure,) = scaling.over_sweep(part, sweeps.SWEEPS["interconnect"])
    slora = [
        x for x in figure.axes[0].lines if x.get_color() == style.colour("slora") and len(x.get_xdata()) == 3
    ]
    assert list(slora[0].get_xdata()) == pytest.approx([0, 50, 200], abs=8)
    assert slora[0].get_ydata()[-1] > slora[0].get_ydata()[0] + 40
    assert slora[0].get_linestyle() == style.LINES["emulated"]
    assert "0, 50, 200 µs added to each collective" in figures.caption(part)


def note_of(figure):
    return figure.get_supxlabel().replace("\n", " ")


def test_error_bars_at_one_value_stand_beside_each_other(full):
    (figure,) = scaling.over_sweep(of(full, "adapter_count"), sweeps.SWEEPS["adapter_count"])
    drawn = [x.get_xdata() for x in figure.axes[0].lines if len(x.get_xdata()) == 4]
    assert len({tuple(x) for x in drawn}) == 4
    lowest, highest = np.min(drawn, axis=0), np.max(drawn, axis=0)
    assert (highest[:-1] < lowest[1:]).all()
    assert list(marks.beside([1, 2, 4], 1, 3)) == pytest.approx([1, 2, 4])
    assert marks.beside([0, 10], 0, 2)[0] == -marks.beside([0, 10], 1, 2)[0] < 0


@pytest.mark.parametrize("wild", [False, True])
def test_a_cut_interval_is_said(store_cell, tmp_path, wild):
    speeds = [9.0, 400.0] if wild else [100.0, 101.0]
    for tp in (1, 2):
        store_cell("base", [100.0, 101.0], tp=tp)
        store_cell("tessa", speeds, tp=tp, base=[100.0, 101.0])
    figure = scaling.over_tp(load(tmp_path / "results"))
    assert ("intervals cut at the frame" in note_of(figure)) == wild


def test_the_black_tick_is_explained_and_a_piece_without_an_area_has_no_entry(full):
    part = of(full, "breakdown")
    figure = breakdown.split(part)
    assert "black tick: measured total" in note_of(figure)
    assert "intervals cut" not in note_of(figure)
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert labels == ["base", "products", "communication", breakdown.SUM]
    plain = breakdown.split(part[~part["variant"].isin(["slora", "slora:compute=off"])])
    assert "black tick" not in note_of(plain)


def test_a_missing_knee_says_why(full):
    part = of(full, "rate_sweep")
    (said,) = rate.knee_notes(rate.knees(part[part["variant"].isin(["base", "tessa"])]))
    assert said == "ticks on top: knee, the last rate kept up with (▷ not reached)"
    short = part[part["variant"].isin(["base", "tessa"])].copy()
    short["requests_total"] = 1.0
    assert "no knee: too few requests at 0.5 requests/s" in note_of(rate.against_rate(short))
    assert "ticks on top" not in note_of(rate.against_rate(short))
    found = {"base": rate.Knee(2.0, 4.0), "tessa": rate.Knee(None, 0.5)}
    assert rate.knee_notes(found) == [
        "ticks on top: knee, the last rate kept up with", "no knee of TESSA: below 0.5 requests/s",
    ]  # fmt: skip


@pytest.mark.parametrize("params", [1.0, 1.2])
def test_hollow_marks_lie_above_the_others_and_are_explained(tmp_path, params):
    analysis_store.quality(tmp_path / "results", params=params)
    table = scores.with_mean(scores.rows(load(tmp_path / "results")))
    figure = quality.draw(table)[""]
    hollow = [x for a in figure.axes for x in a.lines if x.get_gid() == "not matched" and len(x.get_xdata())]
    others = [x for a in figure.axes for x in a.lines if x.get_gid() != "not matched"]
    assert bool(hollow) == ("hollow: parameters more than 5 %" in note_of(figure)) == (params > 1)
    assert all(mark.get_zorder() > other.get_zorder() for mark in hollow for other in others)
    assert "cut at 0 and 100 %" in note_of(figure)
    assert "cut" not in quality.note(table)


def test_equal_cells_of_two_experiments_are_both_missing(store_cell, tmp_path):
    for experiment in ("tp_scaling", "breakdown"):
        store_cell("tessa", [], tp=2, status="failed", experiment=experiment)
    results = tmp_path / "results"
    missing = figures.draw_all(load(results), results, tmp_path / "f").missing
    assert sum("failed: round 2/3: it broke" in text for text in missing) == 2
