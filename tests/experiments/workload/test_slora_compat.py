"""S-LoRA's generator, value for value: against numpy's global legacy state, and against numbers written down."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from experiments import config as schema
from experiments.backends import known_backends
from experiments.grid import expand
from experiments.provenance import REPO
from experiments.workload.slora_compat import MODEL_SETTINGS, SUITES, SLoraSpec, draw, main, overrides
from tessa.errors import UserError


@pytest.mark.parametrize(
    ("adapters", "alpha", "rate", "cv", "seconds", "seed"),
    [(200, 1, 2, 1, 300, 42), (32, 0.3, 2, 8, 120, 42), (400, 1, 6, 4, 300, 7), (5, 0.1, 2.5, 0.5, 77, 0)],
)
def test_equal_to_the_legacy_global_generator(adapters, alpha, rate, cv, seconds, seed):
    when, prompts, outputs, ids = draw(SLoraSpec(rate, seconds, alpha, cv), adapters, seed)
    state = np.random.get_state()
    try:
        np.random.seed(seed)  # the very calls of its benchmark, in its order
        n = int(rate * seconds)
        expected_ids = (np.random.power(alpha, n) * adapters).astype(int)
        expected_in = np.random.randint(8, 512, n)
        expected_out = np.random.randint(8, 512, n)
        gaps = np.random.gamma(1 / (cv * cv), cv * cv / rate, n)
    finally:
        np.random.set_state(state)
    assert ids.tolist() == expected_ids.tolist()
    assert prompts.tolist() == expected_in.tolist()
    assert outputs.tolist() == expected_out.tolist()
    tic, times = 0, []
    for gap in gaps:
        tic += gap
        times.append(tic)
    assert when.tolist() == times


def test_numbers_of_the_default_setting():
    when, prompts, outputs, ids = draw(SLoraSpec(2, 300), 200, 42)
    assert ids[:6].tolist() == [74, 190, 146, 119, 31, 31]
    assert ids.sum() == 60076
    assert prompts[:4].tolist() == [12, 473, 99, 177]
    assert outputs[:4].tolist() == [410, 43, 292, 195]
    assert (prompts.sum(), outputs.sum()) == (153447, 155474)
    assert when[0] == pytest.approx(0.15984558)
    assert when[-1] == pytest.approx(301.00485344611263, abs=1e-9)


def test_no_adapter_means_the_base_model_on_the_same_load():
    with_one, base = draw(SLoraSpec(2, 60), 1, 42), draw(SLoraSpec(2, 60), 0, 42)
    assert (base[3] == -1).all()
    assert (with_one[3] == 0).all()
    assert all((a == b).all() for a, b in zip(with_one[:3], base[:3], strict=True))


@pytest.mark.parametrize("suite", SUITES)
def test_suites_are_runs_with_their_numbers(suite):
    """The printed command composes, and its cells hold the suite's loads."""
    schema.register()
    with initialize_config_dir(config_dir=str(REPO / "conf"), version_base="1.3"):
        composed = compose("config", overrides=[*overrides(suite, "S2"), "model=small"])
    config = schema.build(composed)
    assert config.adapters.ranks == list(MODEL_SETTINGS["S2"][1])
    loads = []

    def build(values):
        loads.append(values)
        return SimpleNamespace(hash=str(len(loads)), meta={"spec": values})

    expand(config, known_backends(), "cpu", build)
    s = SUITES[suite]
    axes = (n for n in s["num_adapters"] if n), s["alpha"], s["req_rate"], s["cv"]
    expected = {(n, a, r, c) for n, a, r, c in itertools.product(*axes)}
    found = {(w["num_adapters"], *(w["slora"][k] for k in ("alpha", "req_rate", "cv"))) for w in loads}
    assert found == expected
    assert {(w["seed"], w["slora"]["duration"]) for w in loads} == {(42, s["duration"])}
    assert {(*w["slora"]["input_range"], *w["slora"]["output_range"]) for w in loads} == {(8, 512, 8, 512)}


def test_the_command_names_suites_and_settings(capsys):
    assert main(["a10g-cv", "S2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "python run.py experiment=tp_scaling name=slora-a10g-cv-S2 workload=slora measure=paper "
    )
    assert "'adapters.ranks=[64,32,16,8]'" in out
    assert "'+grid.workload.slora.cv=[1,2,4,6,8]'" in out
    with pytest.raises(UserError, match="a10g-num-adapter"):
        overrides("b200", "S1")
    with pytest.raises(UserError, match="S1, S2"):
        overrides("a10g-cv", "S7")


@pytest.mark.parametrize(
    "wrong",
    [{"req_rate": 0}, {"cv": -1}, {"input_range": (0, 5)}, {"output_range": (9, 9)}, {"duration": 0.1}],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UserError):
        SLoraSpec(**{"req_rate": 2, "duration": 10} | wrong)
