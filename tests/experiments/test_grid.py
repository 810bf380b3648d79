"""Expansion of a grid into cells: what makes a cell, how cells are grouped, and in which order they run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import cli, grid, notes
from experiments import config as schema
from tessa.errors import UserError


@pytest.fixture
def plan(composed):
    def make(*overrides: str, **grid_values: object) -> grid.Plan:
        values = composed("experiment=tp_scaling", "model=tiny", *overrides)
        if grid_values:
            values["grid"] = {key.replace("__", "."): value for key, value in grid_values.items()}
        return cli.plan_run(schema.build(values), device="cpu")

    return make


def test_order_is_points_then_workloads_then_backends(plan):
    made = plan(
        backends=["tessa", "base"], adapters__count=[2, 4], workload__arrivals={"concurrency": [3, 5]},
        **{"workload.arrivals.kind": ["closed_loop"]},
    )  # fmt: skip
    seen = [(c.labels["num_adapters"], c.labels["concurrency"], c.backend) for c in made.cells]
    assert seen == [(a, c, b) for a in (2, 4) for c in (3, 5) for b in ("base", "tessa")]


def test_one_engine_group_serves_all_workloads(plan):
    made = plan(backends=["base", "tessa"], workload__seed=[1, 2, 3])
    assert len(made.points) == 1
    assert [len(group.cells) for group in made.points[0].groups] == [3, 3]
    assert len(made.workloads) == 3


def test_settings_of_the_engine_make_new_points(plan):
    made = plan(backends=["base", "tessa"], adapters__rank_equivalent=[2, 4], engine__max_num_seqs=[8, 16])
    assert len(made.points) == 4
    assert len(made.workloads) == 1


def test_one_engine_start_serves_all_added_latencies(plan):
    made = plan(
        "tp=2", backends=["base", "slora"], workload__seed=[1, 2], engine__added_latency_us=[0, 50, 2000]
    )
    (point,) = made.points
    assert [len(group.cells) for group in point.groups] == [6, 6]
    assert len(made.workloads) == 2
    assert len({cell.hash for cell in made.cells}) == 12
    assert [cell.added_latency_us for cell in made.cells][:6] == [0, 0, 50, 50, 2000, 2000]
    assert [cell.backend for cell in made.cells][:4] == ["base", "slora"] * 2
    assert {cell.labels["added_latency_us"] for cell in made.cells} == {0, 50, 2000}
    plain = plan("tp=2", backends=["base"]).points[0].groups[0]
    assert plain.key == point.groups[0].key
    assert plain.cells[0].added_latency_us is None


@pytest.mark.parametrize("override", ["engine.added_latency_us=-1", "engine.added_latency_us=1e9"])
def test_an_added_latency_has_limits(plan, override):
    with pytest.raises(UserError, match="must lie between"):
        plan("tp=2", override)


def test_an_added_latency_needs_collectives(plan):
    with pytest.raises(UserError, match="tp=2 or more"):
        plan("tp=1", "engine.added_latency_us=10")


@pytest.mark.parametrize(
    "override",
    [
        "tp=2",
        "dtype=bfloat16",
        "model=tiny_gqa",
        "adapters.count=3",
        "adapters.rank_equivalent=2",
        "adapters.placement=along",
        "adapters.seed=1",
        "workload.seed=1",
        "workload.num_requests=5",
        "workload.base_fraction=0.5",
        "measure.rounds=9",
        "measure.gate.enabled=false",
        "engine.max_num_seqs=7",
        "measure.caps.requests=3",
    ],
)
def test_what_changes_the_result_changes_the_hash(plan, override):
    assert {c.hash for c in plan().cells}.isdisjoint({c.hash for c in plan(override).cells})


@pytest.mark.parametrize(
    "override",
    [
        "measure.start_timeout_s=1",
        "measure.base_reference=rerun",
        "logger=wandb",
        "force=true",
        "measure.caps.adapters=100",
        "paths.results=elsewhere",
        "backends=[tessa,slora,punica,plain_lora,base]",
    ],
)
def test_what_does_not_keeps_it(plan, override):
    assert [c.hash for c in plan().cells] == [c.hash for c in plan(override).cells]


def test_machines_of_an_engine_make_a_cell_and_their_addresses_do_not(plan):
    alone, one = plan("tp=2").cells[0], plan("tp=2", "engine.nnodes=1").cells[0]
    two = plan("tp=2", "engine.nnodes=2").cells[0]
    moved = plan("tp=2", "engine.nnodes=2", "engine.master_addr=10.0.0.1", "engine.master_port=4000").cells[0]
    assert alone.hash == one.hash != two.hash == moved.hash
    assert (alone.labels["nnodes"], two.labels["nnodes"]) == (1, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("tp=2", "engine.distributed_executor=ray"),
            "vLLM says 'current platform cpu does not support ray'",
        ),
        (("tp=2", "engine.distributed_executor=slurm"), "slurm is not known.*: mp, ray"),
        (("tp=2", "engine.distributed_executor=ray", "engine.nnodes=2"), "exclude each other"),
        (("tp=2", "engine.nnodes=4"), "engine.nnodes=4 must divide the 2 ranks of tp=2"),
        (("tp=2", "engine.nnodes=0"), "engine.nnodes=0 must divide"),
        (("tp=2", "+engine.extra.pipeline_parallel_size=2"), "stages are not supported"),
        (("tp=2", "+engine.extra.pipeline_parallel_size=two"), "stages are not supported"),
    ],
)
def test_ranks_that_cannot_be_spread_are_refused(plan, overrides, message):
    with pytest.raises(UserError, match=message):
        plan(*overrides)


LOOP = ("workload=closed_loop", "measure.caps.requests=null")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("workload=poisson", "measure.max_in_flight=4"),
            r"max_in_flight=4 .*\(open loop\) would no longer be",
        ),
        (("workload=closed_loop", "measure.max_in_flight=4"), r"\(closed loop\) has its own limit"),
        ((*LOOP, "workload.num_requests=8"), r"concurrency=16 needs as many requests, the workload has 8"),
        (("workload.arrivals=null", "workload.duration_s=5"), "the workload has no arrivals"),
        (("workload=slora", "workload.slora.req_rate=0"), r"slora\.req_rate is 0.*number above 0"),
    ],
)
def test_loads_that_cannot_be_sent_as_they_are_labelled_are_refused(plan, overrides, message):
    with pytest.raises(UserError, match=message):
        plan(*overrides, backends=["base"])


def test_a_limit_in_flight_is_for_requests_that_come_all_at_once(plan):
    (cell,) = plan("measure.max_in_flight=4", backends=["base"]).cells
    assert cell.identity["measure"]["max_in_flight"] == 4


def test_the_concurrency_is_no_more_than_the_requests(plan):
    (cell,) = plan("workload=closed_loop", "measure.caps.requests=6", backends=["base"]).cells
    assert (cell.labels["concurrency"], cell.labels["num_requests"]) == (6, 6)


def test_ray_is_for_gpus_and_must_be_installed(composed, monkeypatch):
    config = schema.build(composed("experiment=tp_scaling", "model=tiny", "engine.distributed_executor=ray"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs Ray in this environment"):
        cli.plan_run(config, device="cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert cli.plan_run(config, device="cuda").cells[0].identity["engine"]["distributed_executor"] == "ray"


def test_a_server_of_its_own_has_no_nodes_of_ours(composed):
    config = schema.build(
        composed(
            "experiment=tp_scaling", "model=tiny", "tp=2", "engine.nnodes=2", "backend=openai", "url=http://x"
        )
    )
    plan = cli.plan_run(config, device="cpu")
    with pytest.raises(UserError, match="'openai' is a server of its own"):
        cli.check_external(plan, lambda cell: True)


def test_cells_with_equal_identity_are_one(plan):
    made = plan("measure.caps.requests=4", backends=["base"], workload__num_requests=[10, 20])
    assert len(made.cells) == 1


def test_backend_choice_precedence(plan):
    assert [c.backend for c in plan("backend=tessa", "backends=[base]").cells] == ["tessa"]
    assert [c.backend for c in plan("backends=[tessa,base]").cells] == ["base", "tessa"]
    assert len(plan().cells) == 5


def test_a_backend_named_twice_is_refused(plan):
    with pytest.raises(UserError, match="names tessa twice"):
        plan("backends=[base,tessa,tessa]")


def test_variants_are_cells_of_their_own(plan):
    made = plan("backends=[punica,'punica:stock','slora:compute=off',slora]")
    assert [c.variant for c in made.cells] == ["punica", "punica:stock", "slora:compute=off", "slora"]
    assert [c.labels["wrong_by_design"] for c in made.cells] == [False, False, True, False]
    assert len({c.hash for c in made.cells}) == 4


def test_a_chosen_backend_keeps_its_overrides(plan):
    (cell,) = plan("backend=slora", "backend.options.communication=off").cells
    assert cell.identity["options"]["communication"] == "off"


def test_a_mapping_replaces_a_section(plan):
    made = plan(backends=["base"], workload__popularity=[{"kind": "zipf", "s": 1.5}, {"kind": "identical"}])
    assert [c.labels["popularity"] for c in made.cells] == ["zipf(s=1.5)", "identical"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": [1, 2]}, "-m tp=1,2"),
        ({"workload.arrivals.ratee": [1]}, "no setting. Known settings there: concurrency"),
        ({"workload.seed": 3}, "must be a list"),
        ({"workload.seed": []}, "at least one"),
        ({"adapters.count": ["many"]}, "adapters.count=many is not a whole number"),
    ],
)
def test_a_wrong_grid_is_refused(plan, values, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        plan(backends=["base"], **values)


def test_dtype_and_device(composed):
    values = schema.build(composed("experiment=tp_scaling", "model=llama3_1_8b", "backend=base"))
    assert cli.plan_run(values, device="cpu").cells[0].labels["dtype"] == "float32"
    cell = cli.plan_run(values, device="cuda").cells[0]
    assert (cell.labels["dtype"], cell.identity["device"]) == ("bfloat16", "cuda")


def test_labels_say_what_the_adapters_are(plan):
    (cell,) = plan(
        "workload=slora", "workload.slora.req_rate=3", "adapters.ranks=[64,32,8]", "adapters.count=4",
        "adapters.placement=along", "adapters.offset=first", backends=["base"],
    ).cells  # fmt: skip
    names = ("rank_equivalent", "request_rate", "arrivals", "placement", "offset", "shards")
    assert [cell.labels[name] for name in names] == ["64/32/8", 3, "slora(alpha=1,cv=1)", "along", "first", 8]
    assert {cell.labels[name] for name in ("budget_ratio", "adapter_rank", "served_rank")} == {None}
    (cell,) = plan("adapters.ranks=[16]", backends=["base"]).cells
    assert cell.labels["rank_equivalent"] == 16


def test_budgets_that_do_not_match_are_said_before_the_run(plan):
    made = plan(
        "tp=2", "model=small", "adapters.rank_equivalent=2", backends=["base", "punica", "bd_lora", "tessa"]
    )
    ratios = {cell.backend: cell.labels["budget_ratio"] for cell in made.cells}
    assert ratios == {
        "base": None,
        "punica": 1.0,
        "bd_lora": pytest.approx(0.68, abs=0.01),
        "tessa": pytest.approx(1.058, abs=0.001),
    }
    (line,) = [line for line in notes.notes(made) if "LoRA's parameters" in line]
    assert line == (
        "not within 5 % of LoRA's parameters: bd_lora at rank-equivalent 2 (0.68 times), "
        "tessa at rank-equivalent 2 (1.06 times)"
    )
    assert notes.notes(plan("tp=2", "model=small", "adapters.rank_equivalent=16")) == []


def test_names_are_short_plain_and_hash_bearing(plan):
    for cell in plan().cells:
        assert cell.name == f"{cell.backend}-tp1-{cell.hash[:12]}"
        assert len(cell.name) < 64


@given(st.lists(st.integers(), min_size=1, max_size=40, unique=True), st.integers(1, 50))
def test_thinning_keeps_order_and_ends(values, limit):
    kept = grid.thin(values, limit)
    assert len(kept) == min(limit, len(values))
    assert kept == [value for value in values if value in kept]
    assert kept[0] == values[0]
    if len(kept) > 1:
        assert kept[-1] == values[-1]


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5) | st.none(), max_size=5))
def test_canonical_hash_ignores_order(values):
    assert grid.canonical_hash(values) == grid.canonical_hash(dict(reversed(list(values.items()))))


def test_warm_up_touches_every_adapter_and_the_base_model(plan):
    made = plan("workload.base_fraction=0.25", backends=["tessa"])
    (load,) = made.workloads.values()
    warm = cli.warm_up(load, 1024, 8)
    assert sorted(warm.adapter.tolist()) == [-1, *range(8)]
    assert warm.output_tokens.max() <= cli.WARM_UP_OUTPUT
    assert load.hash != warm.hash
