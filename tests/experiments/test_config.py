"""The schema: ranges, and messages that name what was meant."""

from __future__ import annotations

import pytest

from experiments import config
from experiments.backends import resolve, variant_name
from experiments.config import BackendConfig
from tessa.errors import UserError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 0}, "tp=0 is too small"),
        ({"measure": {"name": "m", "rounds": 0}}, r"measure\.rounds=0"),
        ({"measure": {"name": "m", "interleave": "residnt"}}, "did you mean 'resident'"),
        ({"workload": {"name": "w", "base_fraction": 1.5}}, "between 0 and 1"),
        ({"adapters": {"name": "a", "target_modules": []}}, "is empty"),
        ({"name": "../x"}, "folder name"),
        ({"only": "missing"}, "Known values: failed"),
        ({"logger": {"name": "wandbb"}}, "did you mean 'wandb'"),
        ({"tpp": 1}, "unknown setting 'tpp'; did you mean 'tp'"),
        ({"measure": {"name": "m", "gate": {"request": 1}}}, "did you mean 'requests'"),
        ({"tp": "many"}, "tp=many is not a whole number"),
        ({"backends": "base"}, r"backends takes a list, such as backends=\[\.\.\.\]"),
    ],
)
def test_mistakes_are_named(values, message):
    named = [
        g
        for g, node in config.SCHEMAS.items()
        if "name" in node.__annotations__ and g not in ("backend", "logger")
    ]
    full = {**{group: {"name": "x"} for group in named}, **values}
    with pytest.raises(UserError, match=message):
        config.build(full)


def test_order_of_backends_is_the_registry_s():
    names = ["zzz", "tessa", "slora", "base", "aaa"]
    assert sorted(names, key=config.backend_rank) == ["base", "slora", "tessa", "aaa", "zzz"]


def test_kernels_follow_the_device():
    assert resolve(BackendConfig("punica"), "cpu").kernels == "grouped"
    assert resolve(BackendConfig("punica"), "cuda").kernels == "stock"
    assert resolve(BackendConfig("punica", "stock"), "cpu").kernels == "stock"


def test_options_are_filled_in_and_read_as_switches():
    filled = resolve(BackendConfig("slora", options={"communication": False}), "cpu").options
    assert filled == {"communication": "off", "compute": "on"}
    assert variant_name("slora", "grouped", filled) == "slora:communication=off"
    assert variant_name("slora", "grouped", resolve(BackendConfig("slora"), "cpu").options) == "slora"
