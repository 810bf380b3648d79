"""Pages of the report as text. Nothing in them is loaded from elsewhere; tables scroll on narrow screens."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd

from analysis import claims, files, quality, tables
from analysis.claims.rules import COMMON
from analysis.figures import marks
from analysis.report.own_tables import Study

CSS = """
:root { --ink: #1b1f24; --soft: #5a6472; --line: #d9dee5; --back: #ffffff; --head: #f4f6f8; --bad: #a32a00; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: var(--ink); background: var(--back);
       font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
nav { font-size: .9rem; } nav a { margin-right: .8rem; display: inline-block; }
p.note, figcaption, .soft { color: var(--soft); font-size: .85rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0 1rem; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th, td { padding: .35rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line);
         font-variant-numeric: tabular-nums; vertical-align: top; }
td.text, th.text { text-align: left; } td.wrap { white-space: normal; min-width: 12rem; overflow-wrap: normal; }
thead th { background: var(--head); } tr:last-child td { border-bottom: 0; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }
figure { margin: 0; flex: 0 1 30rem; max-width: 100%; } figure.wide { flex-basis: 60rem; }
figure img { width: 100%; height: auto; display: block; }
.bad { color: var(--bad); font-weight: 600; }
.verdict { font-weight: 600; white-space: nowrap; }
details { margin: .3rem 0; } pre { overflow-x: auto; background: var(--head); padding: .6rem; font-size: .8rem;
  border-radius: 6px; overflow-wrap: normal; }
code { background: var(--head); padding: .1rem .3rem; border-radius: 4px; }
@media (max-width: 40rem) { body { padding: .7rem; font-size: 15px; } th, td { padding: .3rem .45rem; } }
@media print { .scroll { overflow: visible; } details { display: none; } }
"""


@dataclass(frozen=True)
class Image:
    """A figure: its file name's stem, its PNG, and its caption as `figures.save` wrote it."""

    stem: str
    png: bytes
    caption: dict[str, Any]


def page(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def experiment_page(
    experiment: str,
    part: pd.DataFrame,
    images: Sequence[Image],
    logs: dict[str, str],
    study: Study | None = None,
) -> str:
    """part: the experiment's cells. study: its own tables, where it has these instead."""
    body = [f'<nav><a href="index.html">All experiments</a></nav><h1>{escape(experiment)}</h1>']
    if images:
        body.append('<div class="figures">' + "".join(map(_figure, images)) + "</div>")
    if len(part):
        body += ["<h2>Numbers</h2>", *_tables(part)]
        if not ("method" in part and part["method"].notna().any()):
            said = escape("\n".join([tables.definitions(), *tables.cautions(part)]))
            body.append(f"<details><summary>Definitions</summary><pre>{said}</pre></details>")
        if "cell" in part:
            body += [_without_result(part, logs), "<h2>Where the numbers come from</h2>", provenance(part)]
    if study is not None:
        body += _study(study)
    return page(experiment, "\n".join(filter(None, body)))


def index_page(
    frame: pd.DataFrame,
    experiments: Sequence[str],
    rows: list[dict[str, Any]],
    missing: Sequence[str],
    reference: bool,
    studies: Mapping[str, Study],
    benchmarks: Sequence[str] = (),
) -> str:
    """benchmarks: their tables in Markdown."""
    body = ["<h1>TESSA: results</h1>"]
    if reference:
        body.append('<p class="note">Reference: numbers of trees with uncommitted changes are left out.</p>')
    body.append("<h2>Claims</h2>" + _claims(rows))
    body.append("<h2>Experiments</h2>")
    body.append(
        _overview(frame, experiments, studies) if experiments else "<p>No results are stored yet.</p>"
    )
    if missing:
        items = "".join(f"<li>{escape(text)}</li>" for text in missing)
        body.append(f'<h2>Missing</h2><ul class="soft">{items}</ul>')
    if len(frame):
        body += ["<h2>Where the numbers come from</h2>", provenance(frame)]
    if benchmarks:
        body += ["<h2>Benchmarks</h2>", *map(_markdown, benchmarks)]
    return page("TESSA: results", "\n".join(body))


def _markdown(text: str) -> str:
    """A note and, where there is one, the table below it, as `analysis.benchmarks` writes them."""
    note, _, table = text.partition("\n\n")
    shown = f'<p class="note">{escape(note)}</p>'
    if not table:
        return shown
    heads, _, *rows = ([cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines())
    return shown + grid(heads, rows, text=heads[:2])


def _figure(image: Image) -> str:
    data = base64.b64encode(image.png).decode("ascii")
    said = image.caption
    words = [str(said.get("caption") or "/".join(said.get("provenance", [])))]
    words += [f"Knee of {name}: {text}." for name, text in said.get("knees", {}).items()]
    words += [str(said[key]) for key in ("knee_rule", "breakdown_rule") if key in said]
    lines = "<br>".join(escape(word) for word in words)
    typed = "<br>".join(f"<code>{escape(str(command))}</code>" for command in said["commands"])
    others = f" ({escape(str(said['other_settings']))})" if "other_settings" in said else ""
    kind = ' class="wide"' if files.wide(image.png) else ""
    return (
        f'<figure{kind}><img alt="{escape(image.stem)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{lines}<br>{typed}{others}</figcaption></figure>"
    )


def _tables(part: pd.DataFrame) -> list[str]:
    if "method" in part and part["method"].notna().any():
        return [_quality(part)]
    table = tables.end_table(part)
    found = []
    for setting, rows in table.groupby("setting", sort=False):
        rows = rows.drop(columns="setting")
        heads = [str(c).replace("\n", " ") for c in rows.columns]
        found.append(f'<p class="note">{escape(str(setting))}</p>')
        found.append(grid(heads, rows.to_numpy().tolist(), text=("backend", "status")))
    return found


def _quality(part: pd.DataFrame) -> str:
    """Means over seeds of each structure and budget, TESSA's slices side by side, and what the columns mean."""
    shown = []
    for table, said in (
        (quality.table(part), quality.DEFINITIONS),
        (quality.comparisons(part), quality.COMPARED),
    ):
        if len(table):
            table = table.drop(columns="experiment")
            heads = [str(column) for column in table.columns]
            cells = grid(heads, table.to_numpy().tolist(), ("structure", "in LoRA's", "slices compared"))
            shown.append(f'{cells}<p class="note">{escape(said)}</p>')
    return "".join(shown)


def _study(study: Study) -> list[str]:
    body = ["<h2>Numbers</h2>"]
    for table in study.tables:
        body.append(f'<p class="note">{escape(table.note)}</p>{grid(table.heads, table.rows, table.text)}')
    if (lost := study.lost) is not None:
        text = grid(lost.heads, lost.rows, lost.text, wrap=("reason",), bad=("status",))
        body.append(f"<h2>Rows without a result</h2>{text}")
    return [*body, "<h2>Where the numbers come from</h2>", provenance(study.rows, "rows")]


def _without_result(part: pd.DataFrame, logs: dict[str, str]) -> str:
    bad = part[part["status"] != "complete"].drop_duplicates("cell")
    if bad.empty:
        return ""
    rows = [[r.cell, r.variant, r.tp, r.status, r.reason or "", r.log or "-"] for r in bad.itertuples()]
    heads = ["cell", "backend", "TP", "status", "reason", "log"]
    text = grid(
        heads, rows, text=("cell", "backend", "status", "reason", "log"), wrap=("reason",), bad=("status",)
    )
    more = "".join(
        f"<details><summary>End of the log of {escape(cell)}</summary><pre>{escape(log)}</pre></details>"
        for cell, log in logs.items()
    )
    return f"<h2>Cells without a result</h2>{text}{more}"


def provenance(part: pd.DataFrame, counted: str = "cells") -> str:
    """One row per commit, machine and set of packages. counted: what the column `cell` counts."""
    keys = [k for k in ("git_sha", "git_dirty", "provenance", "machine", "engine", "gate") if k in part]
    groups = part.assign(**{k: part[k].astype(object).where(part[k].notna(), None) for k in keys})
    rows = []
    for _, group in groups.groupby(keys, dropna=False, sort=False):
        first = group.iloc[0]
        sha, dirty = first["git_sha"], first["git_dirty"]
        state = "unknown" if dirty is None else "uncommitted changes" if dirty else "clean"
        rows.append(
            [
                str(sha)[:12] if sha else "unknown", state, first["provenance"], first.get("machine") or "-",
                first.get("engine") or "-", first.get("gate") or "not run", group["cell"].nunique(),
            ]
        )  # fmt: skip
    heads = ["commit", "tree", "provenance", "machine", "packages", "outputs checked", counted]
    return grid(heads, rows, text=tuple(heads[:-1]))


def _claims(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        where = "; ".join(filter(None, (row["note"], row["setting"]))) or "-"
        ours = f"{claims.shown(row)} {row['unit']}" if row["ours"] is not None else "-"
        cells.append(
            [row["id"], row["claim"], row["verdict"], row["paper"], ours, row["provenance"] or "-", where]
        )
    heads = ["id", "claim", "verdict", "paper", "ours [95 % interval]", "provenance", "where"]
    rules = "".join(f"<li>{escape(row['id'])}: {escape(row['rule'])}</li>" for row in rows)
    return (
        grid(heads, cells, text=tuple(heads), wrap=("claim", "where", "ours [95 % interval]"))
        + f"<details><summary>Rules of the verdicts</summary><ul class='soft'>{rules}"
        f"<li>{escape(COMMON)}</li></ul></details>"
    )


def _overview(frame: pd.DataFrame, experiments: Sequence[str], studies: Mapping[str, Study]) -> str:
    rows = []
    for experiment in experiments:
        own = studies.get(experiment)
        part = frame[frame["experiment"] == experiment] if own is None else own.rows
        cells = part.drop_duplicates("cell")
        done = int((cells["status"] == "complete").sum())
        commits = ", ".join(marks.commits(part)) or "-"
        link = f'<a href="{escape(experiment)}.html">{escape(experiment)}</a>'
        unit = "" if own is None else " rows"
        rows.append([Markup(link), f"{done}{unit}", f"{len(cells) - done}{unit}", commits])
    return grid(["experiment", "complete", "without result", "commits"], rows, text=("experiment", "commits"))


class Markup(str):
    """Text that is HTML already."""


def grid(
    heads: Sequence[str],
    rows: Sequence[Sequence[Any]],
    text: Sequence[str] = (),
    wrap: Sequence[str] = (),
    bad: Sequence[str] = (),
) -> str:
    """A table in a box of its own that scrolls sideways. text: columns set left; wrap: may break; bad: in red."""

    def cell(head: str, value: Any) -> str:
        kinds = [name for name, of in (("text", text), ("wrap", wrap), ("bad", bad)) if head in of]
        shown = value if isinstance(value, Markup) else escape(str(value))
        return f'<td class="{" ".join(kinds)}">{shown}</td>' if kinds else f"<td>{shown}</td>"

    top = "".join(
        f'<th class="text">{escape(h)}</th>' if h in text else f"<th>{escape(h)}</th>" for h in heads
    )
    body = "".join("<tr>" + "".join(map(cell, heads, row)) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
