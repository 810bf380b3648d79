"""Dataclasses out of nested mappings (YAML), strictly: unknown keys and wrong types are errors."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from tessa.errors import UserError


def from_mapping(cls: type, mapping: Mapping[str, Any], where: str) -> Any:
    """An instance of the dataclass `cls`; `where` names the mapping in errors. Nested dataclasses likewise."""
    if not isinstance(mapping, Mapping):
        raise UserError(f"{where} is {mapping!r}; give a mapping with keys {', '.join(_field_names(cls))}")
    hints = typing.get_type_hints(cls)
    unknown = [k for k in mapping if k not in hints]
    if unknown:
        raise UserError(f"{where} has no key {unknown[0]!r}; the keys are {', '.join(_field_names(cls))}")
    absent = [
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
        and f.name not in mapping
    ]
    if absent:
        raise UserError(f"{where} needs {', '.join(absent)}")
    return cls(**{key: _typed(hints[key], value, f"{where}.{key}") for key, value in mapping.items()})


def _typed(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotated type: whole numbers are fine for floats, nothing else is converted."""
    options = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
    if value is None and type(None) in options:
        return None
    kind = next(o for o in options if o is not type(None))
    origin = typing.get_origin(kind) or kind
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else from_mapping(kind, value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(value)
    if origin is dict and isinstance(value, Mapping):
        return {str(k): str(v) for k, v in value.items()}
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, origin) and not (origin is int and isinstance(value, bool)):
        return value
    names = {int: "a whole number", float: "a number", str: "text", tuple: "a list", dict: "a mapping"}
    raise UserError(f"{where} is {value!r}; give {names.get(origin, origin.__name__)}")


def _field_names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]
