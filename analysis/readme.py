"""The results in README.md and results/README.md: tables, claims and figures between two marks of each, from the
reference sets alone. README.md has the first set's serving and claims, results/README.md has all.

`python -m analysis readme` writes them, `--check` tells what is no longer what the reference sets give.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.image import imread

from analysis import benchmarks, claims, figures, files, quality, style, tables
from analysis.figures import marks
from analysis.load import load, summaries
from experiments.provenance import REPO
from tessa.errors import UserError

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
REFERENCE = Path("results") / "reference"
FEW_ROWS = 6  # of a quality table, up to which it has a column for each task
FIGURES = (
    ("tp_scaling", "tp_scaling"), ("breakdown", "breakdown"), ("adapter_count", "adapter_count"),
    ("rate_sweep", "rate_sweep"), ("interconnect", "interconnect"), ("quality", "quality"),
    ("projection", "projection_speedup"),
)  # fmt: skip
"""(experiment, start of the figure's name): the figures that results/README.md shows where they can be drawn."""
SUMMARY_FIGURES = ("tp_scaling.png", "breakdown.png")
"""Those that README.md shows too."""
FIGURES_ELSEWHERE = (
    ("tp_scaling", "tp_scaling"),
    ("interconnect", "interconnect"),
    ("collectives", "collectives"),
)
"""Those of another machine's set."""
PIXELS_MAY_DIFFER = 0.01
"""Mean difference of two drawings, of 1: other builds of the font library round glyphs otherwise."""
EMPTY = "No reference results are stored yet; `make reference` makes them on this machine's CPU in three to four hours."


@dataclass
class Set:
    """A reference set. place: its folder. drawn: name -> PNG of each figure, which lie in `place / "figures"`."""

    place: Path
    frame: pd.DataFrame
    drawn: dict[str, bytes]


def sets(results: Path) -> list[Set]:
    """The reference set, then those of other machines: folders beside it that are called `<its name>_<machine>`."""
    found = []
    for place in (results, *sorted(p for p in results.parent.glob(f"{results.name}_*") if p.is_dir())):
        frame = load(place)
        found.append(
            Set(place, frame, _draw(frame, place, FIGURES if place == results else FIGURES_ELSEWHERE))
        )
    return found


def _pages(shown: list[Set], readme: Path, details: Path) -> dict[Path, str]:
    """What belongs between the marks of each page."""
    first, *others = shown
    home = _relative(first.place / "figures", readme)
    return {
        readme: summary(first.frame, first.place, first.drawn, home, _relative(details, readme)),
        details: "\n\n".join(
            show(one.frame, one.place, one.drawn, _relative(one.place / "figures", details))
            for show, one in ((block, first), *((elsewhere, other) for other in others))
        ),
    }


def write(readme: Path, details: Path, results: Path) -> list[Path]:
    """Puts the results between each page's marks and the figures into each set's `figures`; returns what it wrote."""
    shown = sets(results)
    split = {page: (_split(page), text) for page, text in _pages(shown, readme, details).items()}
    written = []
    for page, ((before, _, after), text) in split.items():
        page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
        written.append(page)
    for one in shown:
        folder = one.place / "figures"
        for old in folder.glob("*.png"):
            if old.name not in one.drawn:
                old.unlink()
        for name, content in one.drawn.items():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
            written.append(folder / name)
    return written


def differences(readme: Path, details: Path, results: Path) -> list[str]:
    """What in the pages or in the figures is not what the reference sets give, in words; empty if all is."""
    found = []
    shown = sets(results)
    for page, text in _pages(shown, readme, details).items():
        wanted, there = text.splitlines(), _split(page)[1].strip("\n").splitlines()
        if wanted != there:
            pairs = zip([*wanted, ""], [*there, ""], strict=False)
            first = next(((a, b) for a, b in pairs if a != b), (wanted[-1:], there[-1:]))
            found.append(f"{page}: the reference set gives {first[0]!r}, the file has {first[1]!r}")
    for one in shown:
        folder = one.place / "figures"
        for name, content in one.drawn.items():
            found += _compared(folder / name, content)
        stale = {file.name for file in folder.glob("*.png")} - set(one.drawn)
        found += [f"{folder / name} is not drawn from the reference set any more" for name in sorted(stale)]
    return found


def summary(frame: pd.DataFrame, results: Path, drawn: Mapping[str, bytes], folder: str, details: str) -> str:
    """README.md's Markdown, arguments as `block`'s: serving over TP, what is counted, claims, the main figures."""
    if frame.empty and not drawn:
        return EMPTY
    clean = figures.only_reference(frame)
    parts = _serving(clean, results)
    parts.append(_claims(claims.table(frame, results, reference=True)))
    parts.append(_images({name: drawn[name] for name in SUMMARY_FIGURES if name in drawn}, folder))
    parts.append(f"All tables and figures, other machines' too, and what they say: [{details}]({details}).")
    return "\n\n".join(filter(None, parts))


def block(frame: pd.DataFrame, results: Path, drawn: Mapping[str, bytes], folder: str) -> str:
    """The Markdown of all of a set. `drawn`: name -> PNG of each figure; `folder`: theirs, seen from the page."""
    if frame.empty and not drawn:
        return EMPTY
    clean = figures.only_reference(frame)
    parts = _serving(clean, results)
    parts += benchmarks.tables(results)
    parts += [_quality(clean), _quality(clean, "quality_smollm2", "columns as above")]
    parts.append(_claims(claims.table(frame, results, reference=True)))
    parts.append(_images(drawn, folder))
    return "\n\n".join(filter(None, parts))


def _serving(clean: pd.DataFrame, results: Path) -> list[str]:
    """Where the numbers come from, tp_scaling, and what is counted there."""
    scaling = clean[clean["experiment"] == "tp_scaling"]
    return [_source(clean, results), *map(_scaling, _parts(scaling)), _counters(scaling)]


def elsewhere(frame: pd.DataFrame, results: Path, drawn: Mapping[str, bytes], folder: str) -> str:
    """The Markdown of another machine's set, arguments as `block`'s: what its serving differs in, and figures."""
    clean = figures.only_reference(frame)
    scaling = clean[clean["experiment"] == "tp_scaling"]
    name = results.name.partition("_")[2]
    parts = [f"**Another machine, {name}.** {_source(clean, results)}"]
    parts += [_scaling(part) for part in _parts(scaling)]
    parts.append(_images(drawn, folder))
    return "\n\n".join(filter(None, parts))


def _images(drawn: Mapping[str, bytes], folder: str) -> str:
    images = (
        f'<img src="{folder}/{name}" alt="{Path(name).stem}" width="{_share(content)}">'
        for name, content in drawn.items()
    )
    return "\n".join(images)


def _draw(frame: pd.DataFrame, results: Path, which: tuple[tuple[str, str], ...]) -> dict[str, bytes]:
    """File name -> PNG of every figure of `which` that the reference set allows."""
    found: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        wanted = tuple(experiment for experiment, _ in which)
        paths = figures.draw_all(frame, results, Path(folder), True, wanted).paths
        for experiment, start in which:
            for path in sorted(paths):
                said = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
                if said["experiment"] == experiment and path.stem.startswith(start):
                    found[f"{start}.png"] = path.read_bytes()
                    break
    return found


def _share(png: bytes) -> str:
    """Of the page's width: a figure of two columns would be unreadable at half of it."""
    return "100%" if files.wide(png) else "48%"


def _split(readme: Path) -> tuple[str, str, str]:
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(
            f"{readme} has no {BEGIN} followed by {END}; put the two lines where the results belong"
        )
    return before, inside, after


def _relative(place: Path, page: Path) -> str:
    place, home = place.resolve(), page.resolve().parent
    return place.relative_to(home).as_posix() if place.is_relative_to(home) else place.as_posix()


def _compared(file: Path, drawn: bytes) -> list[str]:
    if not file.is_file():
        return [f"{file} is missing"]
    if file.read_bytes() == drawn:
        return []
    with tempfile.NamedTemporaryFile(suffix=".png") as now:
        Path(now.name).write_bytes(drawn)
        old, new = imread(file), imread(now.name)
    same = old.shape == new.shape and float(np.abs(old - new).mean()) < PIXELS_MAY_DIFFER
    return [] if same else [f"{file} is not what the reference set gives"]


def _source(frame: pd.DataFrame, results: Path) -> str:
    """Machine, packages and commits of the measured cells in a sentence, and the commands that show all of them."""
    good = frame[frame["status"] == "complete"]
    if good.empty:
        return ""
    hardware: dict[str, Any] = next(summaries(results))["environment"].get("hardware") or {}
    memory = f", {hardware['memory_gib']:g} GiB" if hardware.get("memory_gib") else ""
    machines = " and ".join(sorted(map(str, good["machine"].dropna().unique())))
    packages = "; ".join(sorted(map(str, good["engine"].dropna().unique())))
    commits = ", ".join(marks.commits(good))
    served = good[good["method"].isna()] if "method" in good else good
    right = served[served["gate"] != "wrong by design"]
    checked = "not every output was checked against merged weights"
    if (right["gate"] == "passed").all():
        but = ", ablations left out that are wrong by design" if len(right) < len(served) else ""
        checked = f"served outputs checked against merged weights{but}"
    place = results.resolve()
    place = place.relative_to(REPO) if place.is_relative_to(REPO) else place
    cells = len(good.drop_duplicates(["experiment", "cell"]))
    return (
        f"{cells} cells on {machines}{memory}; {packages}; commit {commits}, clean tree; {checked}; "
        "± are 95 % intervals. "
        f"All cells: `python -m analysis table {place}`; the studies' tables too: `python -m analysis report {place}`."
    )


def _parts(scaling: pd.DataFrame) -> list[pd.DataFrame]:
    """tp_scaling by model and load; degrees stand side by side, so `setting` may differ in tp."""
    keys = [k for k in ("model", "dtype", "device", "family") if k in scaling]
    return [part for _, part in scaling.groupby(keys, dropna=False, sort=False)] if len(scaling) else []


def _scaling(part: pd.DataFrame) -> str:
    degrees = [int(tp) for tp in sorted(part["tp"].dropna().unique())]
    heads = ["backend"]
    for tp in degrees:
        heads += [f"TP {tp}: tokens/s", "cost", "TPOT p50", "collectives/step"]
    rows = ["| " + " | ".join([*heads, "adapters/rank", "commit"]) + " |"]
    rows.append("|---" * (len(heads) + 2) + "|")
    for variant in style.in_order(part):
        mine = part[part["variant"] == variant]
        cells = [style.name(variant)]
        for tp in degrees:
            at = mine[mine["tp"] == tp]
            cells += [_value(at, *column) for column in _COLUMNS]
        cells.append(
            _value(mine[mine["tp"] == degrees[-1]], "adapter_bytes_per_rank", 2**-20, 2, " MiB", False)
        )
        rows.append("| " + " | ".join([*cells, ", ".join(marks.commits(mine)) or "–"]) + " |")
    what = f"{tables.describe(part)}; {_rounds(part)} rounds:"
    return what + "\n\n" + "\n".join(rows)


_COUNTED = (
    "adapter_kernels_per_step", "adapter_gemms_per_step", "adapter_load_s_median", "engine_start_s",
    "counted_tokens_per_step",
)  # fmt: skip


def _counters(scaling: pd.DataFrame) -> str:
    """What the adapters of each backend add to a decode step at the greatest TP degree, and what they cost besides."""
    good = scaling[scaling["status"] == "complete"]
    if good.empty:
        return ""
    tp = int(good["tp"].max())
    at = good[good["tp"] == tp].reindex(columns=good.columns.union(list(_COUNTED)))
    base = at.loc[at["backend"] == "base", "collectives_per_step"]
    heads = ["backend", "added collectives", "kernels", "products", "memory", "adapter load", "engine start"]
    rows = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for variant in style.in_order(at):
        mine = at[at["variant"] == variant]
        first = mine.iloc[0]
        added = first["collectives_per_step"] - base.iloc[0] if len(base) else np.nan
        numbers = (added, first["adapter_kernels_per_step"], first["adapter_gemms_per_step"])
        cells = [f"{v:g}" if np.isfinite(v) else "–" for v in map(float, numbers)]
        cells.append(_value(mine, "adapter_bytes_per_rank", 2**-20, 2, " MiB", False))
        cells.append(_value(mine, "adapter_load_s_median", 1e3, 1, " ms", False))
        cells.append(_value(mine, "engine_start_s", 1.0, 0, " s", False))
        rows.append("| " + " | ".join([style.name(variant), *cells]) + " |")
    tokens = at["counted_tokens_per_step"].dropna()
    counted = f"a decode step of {tokens.iloc[0]:g} tokens" if len(tokens) else "a decode step"
    return (
        f"Counted on {counted} at TP {tp}, {tables.describe(at)}; memory is a rank's for all slots, adapters alone, "
        "adapter load the "
        "median time from a folder into a slot, engine start includes vLLM's import:\n\n" + "\n".join(rows)
    )


def _quality(frame: pd.DataFrame, experiment: str = "quality", words: str = quality.DEFINITIONS) -> str:
    """A quality experiment: a row per structure and budget, its mean over tasks beside LoRA's; then TESSA's slices
    beside each other."""
    mine = frame[frame["experiment"] == experiment]
    table = quality.table(mine) if len(mine) else pd.DataFrame()
    if quality.MEAN not in table:
        return ""
    rows = quality.rows(mine)
    tasks = list(rows["task"].unique()) if len(table) <= FEW_ROWS else []
    heads = [
        "structure",
        "r",
        "params",
        "rate",
        *tasks,
        quality.MEAN,
        "- LoRA",
        quality.ADJUSTED,
        "in LoRA's",
    ]
    parts = [f"{experiment}, {figures.quality.note(rows)}; {words}:"]
    parts.append(_grid(table.reindex(columns=heads, fill_value="-")))
    slices = quality.comparisons(mine)
    if len(slices):
        parts += [f"{quality.COMPARED}:", _grid(slices.drop(columns=["experiment", "setting"]))]
    return "\n\n".join(parts)


def _grid(table: pd.DataFrame) -> str:
    lines = ["| " + " | ".join(map(str, table.columns)) + " |", "|---" * len(table.columns) + "|"]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in table.itertuples(index=False)]
    return "\n".join(lines)


_COLUMNS = (
    ("output_tokens_per_s", 1.0, 1, "", True), ("adapter_cost", 100.0, 1, " %", True),
    ("tpot_s_p50", 1e3, 1, " ms", False), ("collectives_per_step", 1.0, 0, "", False),
)  # fmt: skip


def _value(part: pd.DataFrame, column: str, scale: float, digits: int, unit: str, interval: bool) -> str:
    """`94.5 ± 3.2 %`; a dash where there is no number, and for the throughput the status instead."""
    found = tables.interval(part, column)
    if not np.isfinite(found.centre):
        lost = [s for s in dict.fromkeys(part["status"]) if s != "complete"]
        return str(lost[0]) if lost and column == _COLUMNS[0][0] else "–"
    if column == "adapter_cost" and (part["backend"] == "base").all():
        return "–"
    text = f"{found.centre * scale:.{digits}f}"
    if interval and np.isfinite(found.low):
        text += f" ± {(found.high - found.low) / 2 * scale:.{digits}f}"
    return (text + unit).replace("-", "−")


def _rounds(part: pd.DataFrame) -> str:
    counts = part[part["status"] == "complete"].groupby("cell")["repeat"].nunique()
    if counts.empty:
        return "0"
    return f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"


def _claims(rows: list[dict[str, Any]]) -> str:
    lines = ["The brackets of a claim hold together with 95 %, those of several claims do not:", ""]
    lines += ["| claim | paper | here | provenance | where | verdict |", "|---" * 6 + "|"]
    for row in rows:
        # The best of many settings says little without the one that it was seen in.
        where = [row["note"], row["setting"]] if row["id"] == "C6" else [row["note"]]
        here = f"{claims.shown(row)} {row['unit']}" if row["ours"] is not None else "–"
        cells = (
            f"{row['id']}: {row['claim']}", row["paper"], here, row["provenance"] or "–",
            "; ".join(filter(None, where)) or "–",
            f"**{row['verdict']}**",
        )  # fmt: skip
        lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)
