"""Checks of settings that stand in dataclasses: types, lists without gaps or repeats, counts."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from tessa.errors import UserError

_PLAIN = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a text"),
    bool: ((bool,), "true or false"),
}


def check_kinds(kind: type[Any], values: Mapping[str, Any], where: str) -> None:
    """UserError for the first of `values` that is not what `kind` annotates its field with.

    Whole numbers serve as numbers, and lists as tuples. Fields that `kind` has not are the caller's matter.
    """
    hints = get_type_hints(kind)
    for key, value in values.items():
        if key in hints:
            _check(f"{where}.{key}", value, hints[key])


def check_lists(spec: Any, *names: str) -> None:
    """UserError for the first of these fields that is empty or names something twice."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(spec)}
    for name in names:
        values = list(getattr(spec, name))
        if not values:
            raise UserError(f"{name} is empty; give at least one, such as {defaults[name][0]}")
        if repeated := [value for value in values if values.count(value) > 1]:
            raise UserError(f"{name}={values} names {repeated[0]} twice; give each once")


def check_counts(spec: Any, *names: str) -> None:
    """UserError for the first of these fields, or of the values in it, that is below 1; None may stand anywhere."""
    for name in names:
        given = getattr(spec, name)
        for value in given if isinstance(given, list | tuple) else (given,):
            if value is not None and value < 1:
                raise UserError(f"{name}={value} is too small: give 1 or more")


def _check(what: str, value: Any, expected: Any) -> None:
    origin, inner = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        if value is not None:
            (expected,) = (one for one in inner if one is not types.NoneType)
            _check(what, value, expected)
    elif origin is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{what}={value} is no mapping; give one, such as {what}={{name: value}}")
        for key, one in value.items():
            _check(f"{what}.{key}", one, inner[1])
    elif origin in (tuple, list, Sequence):
        if not isinstance(value, list | tuple):
            raise UserError(f"{what}={value} is no list; give one, such as {what}=[{value}]")
        for one in value:
            _check(what, one, inner[0])
    elif expected is not Any:
        allowed, words = _PLAIN[expected]
        if not isinstance(value, allowed) or (isinstance(value, bool) and expected is not bool):
            raise UserError(f"{what}={value} is not {words}; give one")
