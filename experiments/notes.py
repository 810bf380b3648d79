"""What a reader of a run's numbers has to know before it starts: what `measure` limits, which budgets are off."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.config import CapConfig, RunConfig
from experiments.grid import Plan, apply, combinations, flatten, thin
from experiments.identity import workload_spec
from tessa.budget import TOLERANCE
from tessa.errors import UserError


def notes(plan: Plan) -> list[str]:
    """What of the adapters, a line each: budgets that are not LoRA's, and ranks that are padded."""
    off, padded = [], []
    several = len({cell.labels["target_modules"] for cell in plan.cells}) > 1
    for cell in plan.cells:
        what = f"{cell.variant} at rank-equivalent {cell.labels['rank_equivalent']}"
        if several:
            what += f" on {cell.labels['target_modules'].replace('_proj', '')}"
        ratio, own, served = (cell.labels[key] for key in ("budget_ratio", "adapter_rank", "served_rank"))
        if ratio is not None and abs(ratio - 1) > TOLERANCE:
            off.append(f"{what} ({ratio:.2f} times)")
        if served is not None and served > own:
            padded.append(f"{what} ({served} for {own})")
    lines = (
        (f"not within {100 * TOLERANCE:g} % of LoRA's parameters: ", off),
        ("served at a larger rank than the adapters have, and so at more memory and compute: ", padded),
    )
    return [head + ", ".join(dict.fromkeys(found)) for head, found in lines if found]


def limits(config: RunConfig) -> list[str]:
    """What `measure.caps` makes smaller than it was asked for, in one line; none where it changes nothing."""
    free = dataclasses.replace(config, measure=dataclasses.replace(config.measure, caps=CapConfig()))
    changed: dict[str, None] = {}
    for values in combinations(config):
        asked, got = (flatten(workload_spec(apply(one, values))) for one in (free, config))
        for key, value in got.items():
            if asked.get(key) != value:
                changed[f"{key} {_text(asked.get(key, 'all'))} to {_text(value)}"] = None
    left = []
    for key, values in flatten(config.grid).items():
        if key != "backends" and isinstance(values, list):
            kept = thin(values, config.measure.caps.grid_values)
            out = ", ".join(_text(value) for value in values if value not in kept)
            left += [f"{key} {out}"] if out else []
    parts = [f"limits {', '.join(changed)}"] if changed else []
    parts += [f"leaves {'; '.join(left)} out of the grid"] if left else []
    if not parts:
        return []
    return [
        f"measure={config.measure.name} {' and '.join(parts)}: measure.caps.<limit>=null lifts one limit "
        f"({', '.join(field.name for field in dataclasses.fields(CapConfig))}), measure=paper has none"
    ]


def check_swept(config: RunConfig, overrides: Sequence[str]) -> None:
    """UserError for a typed setting that the experiment's grid sets anew for every cell."""
    swept = [key for key in flatten(config.grid) if key != "backends"]
    for word in overrides:
        key, _, value = (part.strip() for part in word.lstrip("+~").partition("="))
        for name in swept:
            inside = name.startswith(f"{key}.") and value.startswith("{")
            named = inside and re.search(rf"\b{name[len(key) + 1 :].partition('.')[0]}\b", value)
            if named or f"{key}.".startswith(f"{name}."):
                instead = f"grid.{name}=[{value}]" if key == name else f"grid.{name}=[...]"
                raise UserError(
                    f"experiment={config.name} sweeps {name}, so {word} would change nothing; give {instead}"
                )


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return "/".join(_text(part) for part in value.values())
    return f"{value:g}" if isinstance(value, float) else str(value)
