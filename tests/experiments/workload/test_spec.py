"""What a spec may say, and that each random stream minds its own business."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from experiments.workload import WorkloadSpec, build
from experiments.workload.popularity import zipf
from tessa.errors import UserError

BASE = {
    "seed": 3,
    "num_requests": 200,
    "arrivals": {"kind": "poisson", "rate": 5.0},
    "prompt_tokens": {"kind": "uniform", "low": 4, "high": 40},
    "output_tokens": {"kind": "uniform", "low": 2, "high": 9},
    "popularity": {"kind": "zipf", "s": 1.0},
    "num_adapters": 10,
}


def spec(**over):
    return copy.deepcopy(BASE) | over


def test_same_spec_same_workload_other_seed_other_workload():
    a, b = build(spec(), 1000), build(WorkloadSpec.from_mapping(spec()), 1000)
    assert a.hash == b.hash
    assert (a.prompt_tokens == b.prompt_tokens).all()
    others = [build(spec(seed=4), 1000), build(spec(), 1001), build(spec(num_adapters=11), 1000)]
    assert len({a.hash, *(o.hash for o in others)}) == 4


def columns(w):
    return {
        "arrivals": w.arrival_s.tolist(),
        "prompts": w.prompt_lengths.tolist(),
        "outputs": w.output_tokens.tolist(),
        "tokens": w.prompt_tokens.tolist(),
        "adapters": w.adapter.tolist(),
    }


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        ({"arrivals": {"kind": "gamma", "rate": 5.0, "cv": 3.0}}, {"arrivals"}),
        ({"prompt_tokens": {"kind": "uniform", "low": 4, "high": 50}}, {"prompts", "tokens"}),
        ({"output_tokens": {"kind": "uniform", "low": 2, "high": 20}}, {"outputs"}),
        ({"popularity": {"kind": "uniform"}}, {"adapters"}),
        ({"base_fraction": 0.5}, {"adapters"}),
        ({"min_token_id": 5}, {"tokens"}),
    ],
)
def test_changing_one_part_leaves_the_others_as_they_were(change, moved):
    before, after = columns(build(spec(), 1000)), columns(build(spec(**change), 1000))
    assert {name for name in before if before[name] != after[name]} == moved


def test_streams_are_numpys_with_seed_and_stream_number():
    w = build(spec(), 1000)
    assert w.arrival_s.tolist() == np.cumsum(np.random.default_rng([3, 0]).exponential(0.2, 200)).tolist()
    lengths = np.random.default_rng([3, 1]).spawn(2)[0].integers(4, 40, 200, endpoint=True)
    assert w.prompt_lengths.tolist() == lengths.tolist()
    outputs = np.random.default_rng([3, 1]).spawn(2)[1].integers(2, 9, 200, endpoint=True)
    assert w.output_tokens.tolist() == outputs.tolist()
    assert w.prompt_tokens[0] == np.random.default_rng([3, 2]).permutation(1000)[0]
    assert w.adapter.tolist() == zipf(200, 10, 1.0, np.random.default_rng([3, 3])).tolist()


@pytest.mark.parametrize(
    ("popularity", "given", "expected_number", "used"),
    [
        ({"kind": "identical"}, None, 1, {0}),
        ({"kind": "identical"}, 8, 8, {0}),
        ({"kind": "distinct"}, None, 200, set(range(200))),
        ({"kind": "distinct"}, 8, 8, set(range(8))),
        ({"kind": "punica_geometric"}, None, 12, set(range(12))),
        ({"kind": "punica_geometric"}, 3, 3, set(range(3))),
        ({"kind": "slora_power", "alpha": 1.0}, 5, 5, set(range(5))),
    ],
)
def test_number_of_adapters(popularity, given, expected_number, used):
    w = build(spec(popularity=popularity, num_adapters=given), 1000)
    assert w.num_adapters == expected_number
    assert set(w.adapter.tolist()) == used


def test_no_adapters_at_all():
    for over in ({"num_adapters": 0}, {"num_adapters": 0, "popularity": None}, {"base_fraction": 1.0}):
        w = build(spec(**over), 1000)
        assert (w.adapter == -1).all()
        assert w.requests[0].adapter is None
    assert (
        build(spec(base_fraction=1.0, popularity={"kind": "punica_geometric"}), 1000).meta["realised"][
            "base_share"
        ]
        == 1
    )


def test_base_fraction_is_exact_and_shares_are_logged():
    realised = build(spec(base_fraction=0.25), 1000).meta["realised"]
    assert realised["base_share"] == 0.25
    assert 0 < realised["top1_share"] < realised["top5_share"] < realised["top20_share"] == 0.75


def test_duration_counts_as_slora_does():
    w = build(spec(num_requests=None, duration_s=10.5), 1000)
    assert len(w) == int(5.0 * 10.5) == 52


def test_load_modes():
    assert build(spec(), 1000).load_mode == {"mode": "open_loop", "concurrency": None}
    w = build(spec(arrivals={"kind": "closed_loop", "concurrency": 7}), 1000)
    assert w.load_mode == {"mode": "closed_loop", "concurrency": 7}
    assert w.arrival_s.max() == 0
    assert build(spec(arrivals={"kind": "all_at_once"}), 1000).load_mode["mode"] == "all_at_once"


def test_a_million_requests_in_bounded_memory():
    w = build(spec(num_requests=1_000_000, prompt_tokens={"kind": "fixed", "value": 8}), 32000)
    held = sum(c.nbytes for c in (w.arrival_s, w.prompt_tokens, w.offsets, w.output_tokens, w.adapter))
    assert held == 1_000_000 * (8 + 4 * 8 + 8 + 4 + 4) + 8
    assert w.requests[-1].request_id == 999_999


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"nmu_requests": 3}, "no key 'nmu_requests'; the keys are seed"),
        ({"arrivals": {"kind": "poisson", "rat": 1.0}}, "workload.arrivals has no key 'rat'"),
        ({"arrivals": {"kind": "poison", "rate": 1.0}}, "choose one of all_at_once"),
        ({"arrivals": {"rate": 1.0}}, "workload.arrivals needs kind"),
        ({"arrivals": {"kind": "poisson"}}, "needs rate"),
        ({"arrivals": {"kind": "poisson", "rate": 1.0, "cv": 2.0}}, "does not use cv"),
        ({"arrivals": {"kind": "poisson", "rate": 0.0}}, "arrivals.rate is 0.0"),
        ({"arrivals": {"kind": "poisson", "rate": "4"}}, "workload.arrivals.rate is '4'; give a number"),
        ({"arrivals": {"kind": "poisson", "rate": float("nan")}}, "arrivals.rate is nan"),
        ({"arrivals": "poisson"}, "give a mapping"),
        ({"num_requests": 2.5}, "workload.num_requests is 2.5; give a whole number"),
        ({"num_requests": True}, "give a whole number"),
        ({"num_requests": 0}, "num_requests is 0"),
        ({"num_requests": None}, "set num_requests or duration_s"),
        ({"duration_s": 5.0}, "both set"),
        (
            {"num_requests": None, "duration_s": 5.0, "arrivals": {"kind": "all_at_once"}},
            "needs arrivals with a rate",
        ),
        ({"num_requests": None, "duration_s": 0.1}, "is no request"),
        ({"prompt_tokens": {"kind": "uniform", "low": 9, "high": 3}}, "lengths.low 9 is above"),
        ({"prompt_tokens": {"kind": "fixed", "value": 0}}, "lengths.value is 0"),
        ({"prompt_tokens": None}, "has no prompt_tokens"),
        ({"popularity": {"kind": "zipf", "s": -1.0}}, "popularity.s is -1.0"),
        ({"popularity": {"kind": "punica_geometric", "ratio": 1.0}}, "above 1"),
        ({"popularity": {"kind": "slora_power", "alpha": 0.0}}, "popularity.alpha is 0.0"),
        ({"num_adapters": None}, "'zipf' needs num_adapters"),
        ({"num_adapters": -1}, "num_adapters is -1"),
        ({"base_fraction": 1.5}, "share from 0 to 1"),
        ({"seed": -1}, "seed is -1"),
        ({"arrivals": {"kind": "trace"}}, "trace is not set"),
        ({"trace": {"format": "azure", "path": "x"}}, "no part of the workload has kind trace"),
        ({"slora": {"req_rate": 2, "duration": 5}}, "remove arrivals, prompt_tokens"),
    ],
)
def test_mistakes_are_named(over, message):
    with pytest.raises(UserError, match=message):
        build(spec(**over), 1000)
