"""The claims table: the paper's number, ours, its interval, provenance, setting, and a verdict by a written rule."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.claims import evidence, quality
from analysis.claims.evidence import PROVENANCES, Evidence
from analysis.claims.rules import CLAIMS, COMMON, MARGIN_POINTS, NOT_TESTED, Claim
from analysis.figures import only_reference
from analysis.quality import rows as quality_rows

__all__ = ["CLAIMS", "as_json", "as_markdown", "as_text", "gather", "table"]


def gather(frame: pd.DataFrame, results: Path, reference: bool = False) -> dict[str, list[Evidence]]:
    """All evidence by claim. Ablations with wrong outputs, and cells without a result, give none, nor with
    `reference` do numbers of trees that were not clean."""
    frame = only_reference(frame) if reference else frame
    serving = frame[frame["method"].isna()] if "method" in frame else frame
    if "wrong_by_design" in serving:
        serving = serving[~serving["wrong_by_design"].fillna(False).astype(bool)]
    found = {
        "C1": evidence.lora_cost(_scaling_first(_timed(serving))),
        "C2": evidence.lora_shares(_scaling_first(_no_smoke(serving))),
        "C3": evidence.own_products(serving),
        "C4": evidence.own_collectives(serving),
        "C5": quality.differences(quality_rows(_no_smoke(frame))),
        "C6": evidence.tessa_over_slora(_timed(serving)),
    }
    for more in (evidence.from_layer_step(results, reference), evidence.from_projection(results, reference)):
        for claim, entries in more.items():
            found[claim] += entries
    return found


def table(frame: pd.DataFrame, results: Path, reference: bool = False) -> list[dict[str, Any]]:
    """One object per claim: id, claim, paper, ours, unit, interval, provenance, setting, verdict, rule, evidence.

    ours and interval are None where nothing was tested. `evidence` lists every number that bears on the claim.
    """
    entries = gather(frame, results, reference)
    return [_judged(claim, entries[claim.id]) for claim in CLAIMS]


def _judged(claim: Claim, found: list[Evidence]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "id": claim.id,
        "claim": claim.title,
        "paper": claim.paper,
        "ours": None,
        "unit": claim.unit,
    }
    usable = [e for e in found if e.judged and math.isfinite(e.value)]
    same = _strongest(usable)
    if not same:
        rest = {"interval": None, "provenance": None, "setting": None, "verdict": NOT_TESTED, "note": ""}
        return {**row, **rest, "rule": claim.rule, "evidence": [_plain(e) for e in found]}
    extreme = max if claim.greatest else min
    chosen = extreme(same, key=lambda e: (e.above, e.value))
    interval = [_number(chosen.low), _number(chosen.high)] if math.isfinite(chosen.low) else None
    return {
        **row,
        "ours": _number(chosen.value),
        "interval": interval,
        "provenance": chosen.provenance,
        "setting": chosen.setting,
        "verdict": claim.judge(chosen, same),
        "note": _note(claim, chosen, same),
        "rule": claim.rule,
        "evidence": [_plain(e) for e in found],
    }


def _strongest(found: list[Evidence]) -> list[Evidence]:
    for provenance in PROVENANCES:
        mine = [e for e in found if e.provenance == provenance]
        if mine:
            return [e for e in mine if e.gpu] or mine
    return []


def _note(claim: Claim, e: Evidence, same: list[Evidence]) -> str:
    words = []
    if claim.id != "C5":
        words.append(f"{e.backend} at TP {e.tp}")
        if claim.id == "C1":
            words.append(_growth(e))
        elif math.isfinite(e.reference) and claim.id in ("C3", "C4"):
            words.append(f"{'punica' if claim.id == 'C3' else 'slora'} {e.reference:g}")
    else:
        near = sum(x.above >= MARGIN_POINTS for x in same)
        words.append(f"interval above {MARGIN_POINTS:g} points at {near} of {len(same)} matched budgets")
    if len(same) > 1:
        words.append(f"{'greatest' if claim.greatest else 'lowest'} of {len(same)}")
    words += [e.note] if e.note else []
    text = ", ".join(words)
    if claim.id == "C1":
        for backend in dict.fromkeys(x.backend for x in same if x.backend != e.backend):
            mine = [x for x in same if x.backend == backend]
            other = max(mine, key=lambda x: (x.setting == e.setting, x.above, x.value))
            text += f"; {backend} {other.value:.1f} % at TP {other.tp}, {_growth(other)}"
    return text


def _growth(e: Evidence) -> str:
    """The cost at the lowest TP degree, and whether the one at the highest is separated from it."""
    if e.tp == e.reference_tp or not math.isfinite(e.reference):
        return "one TP degree"
    if not (math.isfinite(e.low) and math.isfinite(e.reference_high)):
        said = "growth without intervals"
    else:
        said = f"growth {'' if e.growth_separated else 'not '}separated"
    return f"{e.reference:.1f} % at TP {e.reference_tp}, {said}"


def _timed(frame: pd.DataFrame) -> pd.DataFrame:
    """Cells whose throughput is the engine's and says something: timed arrivals and added latencies set it themselves,
    smoke runs are too short, and ranks without a core of their own wait for the processor."""
    frame = _no_smoke(frame)
    out = frame["experiment"] == "interconnect"
    if "arrivals" in frame:
        out |= ~frame["arrivals"].isin(["all_at_once", "closed_loop"])
    if "cores" in frame:
        out |= (frame["device"] == "cpu") & (frame["tp"] > frame["cores"].fillna(np.inf)).fillna(False)
    return frame[~out]


def _no_smoke(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["measure"].ne("smoke")] if "measure" in frame else frame


def _scaling_first(frame: pd.DataFrame) -> pd.DataFrame:
    """tp_scaling alone where it ran: other experiments leave the paper's setting on purpose, such as in budget."""
    scaling = frame[(frame["experiment"] == "tp_scaling") & (frame["status"] == "complete")]
    return scaling if len(scaling) else frame


def _plain(e: Evidence) -> dict[str, Any]:
    return {
        "backend": e.backend,
        "tp": e.tp,
        "value": _number(e.value),
        "interval": [_number(e.low), _number(e.high)] if math.isfinite(e.low) else None,
        "provenance": e.provenance,
        "setting": e.setting,
        "reference": _number(e.reference),
        "reference_interval": [_number(e.reference_low), _number(e.reference_high)]
        if math.isfinite(e.reference_low)
        else None,
        "note": e.note,
        "judged": e.judged,
    }


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def as_json(rows: list[dict[str, Any]]) -> str:
    return json.dumps(rows, indent=2, ensure_ascii=False)


def shown(row: dict[str, Any]) -> str:
    """Our number with its interval, `-` where nothing was tested."""
    if row["ours"] is None:
        return "-"
    text = f"{row['ours']:.3g}"
    return text + (f" [{row['interval'][0]:.3g}, {row['interval'][1]:.3g}]" if row["interval"] else "")


def as_markdown(rows: list[dict[str, Any]]) -> str:
    """A table, then the rules. Numbers in brackets are 95 % intervals."""
    lines = [
        "| id | claim | paper | ours | unit | provenance | setting | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        setting = "; ".join(filter(None, (row["note"], row["setting"]))) or "-"
        cells = (
            row["id"],
            row["claim"],
            row["paper"],
            shown(row),
            row["unit"],
            row["provenance"] or "-",
            setting,
        )
        lines.append("| " + " | ".join([*cells, f"**{row['verdict']}**"]) + " |")
    lines += ["", *(f"- {row['id']}: {row['rule']}" for row in rows), f"- {COMMON}"]
    return "\n".join(lines)


def as_text(rows: list[dict[str, Any]], width: int = 110) -> str:
    """A block per claim and the rule below it."""
    blocks = []
    for row in rows:
        lines = [f"{row['id']}  {row['verdict'].upper()}  {row['claim']}"]
        lines.append(
            f"    paper: {row['paper']}    ours: {shown(row)} {row['unit'] if row['ours'] is not None else ''}"
        )
        if row["ours"] is not None:
            where = f"{row['provenance']}; {row['note']}; {row['setting']}"
            lines += textwrap.wrap(where, width, initial_indent="    ", subsequent_indent="    ")
        rule = textwrap.wrap("rule: " + row["rule"], width, initial_indent="    ", subsequent_indent="    ")
        blocks.append("\n".join(line.rstrip() for line in [*lines, *rule]))
    return "\n\n".join([*blocks, textwrap.fill(COMMON, width)])
