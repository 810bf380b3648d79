"""Tables, figures, claims and reports from the stored cells: `python -m analysis COMMAND --help`."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from analysis.load import load
from experiments.disk import disk_errors
from experiments.provenance import REPO
from tessa.errors import UserError


def report(results: Path, experiment: str, cells: Collection[str] | None = None) -> list[Path]:
    """Prints the table of an experiment and the paths of its figures.

    `cells` narrows the table to their settings, and the figures to those that these cells are in. A study that keeps
    tables of its own has figures alone, and the projection its errors.
    """
    if experiment in ("layer_step", "projection"):
        return _report_study(results, experiment)
    frame = shown = load(results, experiment)
    if cells is not None and len(frame):
        mine = frame[frame["cell"].isin(cells)]
        shown = frame[frame["setting"].isin(set(mine["setting"]))]
        frame = frame[frame["family"].isin(set(mine["family"]))]
    from analysis import figures, tables

    print(tables.render(shown))
    paths = figures.draw(frame, results / "figures", results) if len(frame) else []
    for path in paths:
        print(f"figure: {path}")
    return paths


def _report_study(results: Path, experiment: str) -> list[Path]:
    from analysis import layer_step, projection

    draw = {"layer_step": layer_step.draw, "projection": projection.draw}[experiment]
    try:
        paths = draw(results, results / "figures")
    except UserError as error:  # a run whose time was too short for a row has nothing to draw
        print(f"no figure: {error}")
        return []
    for path in paths:
        print(f"figure: {path}")
    if experiment == "projection":
        print(validation_text(results, None, as_json=False))
    return paths


def validation_text(results: Path, reference: Path | None, as_json: bool) -> str:
    """The projection's errors as JSON or as one line each; an entry without its data is null or `not available`."""
    from analysis.projection import validation

    errors = validation(results, reference)
    if as_json:
        return json.dumps(errors, indent=2)
    width = max(len(name) for name in errors)
    lines = (f"{name:<{width}}  {_shown(value)}" for name, value in errors.items())
    return "\n".join(lines)


def _shown(value: float | int | str | None) -> str:
    if value is None:
        return "not available"
    return value if isinstance(value, str) else f"{value:g}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m analysis", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, reference: bool = False) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument(
            "results_dir", nargs="?", type=Path, default=Path("results"), help="default: results"
        )
        if reference:
            made.add_argument(
                "--reference", action="store_true", help="leave out numbers of trees with uncommitted changes"
            )
        return made

    table = command("table", "print the table of the stored cells")
    table.add_argument("--experiment", help="one experiment; default: all")
    table.add_argument("--adapters-of", metavar="CELL", help="each adapter of one cell instead")
    drawn = command("figures", "draw every figure as PNG and PDF, with a caption in JSON", reference=True)
    drawn.add_argument("--experiment", help="one experiment; default: all")
    drawn.add_argument("--out", type=Path, help="folder of the figures; default: <results_dir>/figures")
    claimed = command("claims", "the paper's claims with our numbers and a verdict by rule", reference=True)
    form = claimed.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a list of objects")
    form.add_argument("--markdown", action="store_true", help="a table and the rules")
    written = command("report", "write HTML pages that open from a file", reference=True)
    written.add_argument("--out", type=Path, help="folder of the pages; default: <results_dir>/report")
    checked = command("validation", "errors of the projection on published and measured data")
    checked.add_argument("--reference", type=Path, help="folder of the published tables")
    checked.add_argument("--json", action="store_true", help="as one JSON object")
    text = "ratios of two result sets, B over A, with intervals; regressions are marked"
    compared = commands.add_parser("compare", help=text, description=text)
    compared.add_argument("a", type=Path, metavar="A", help="results folder of before")
    compared.add_argument("b", type=Path, metavar="B", help="results folder of after")
    compared.add_argument("--experiment", help="one experiment; default: all")
    compared.add_argument("--json", action="store_true", help="as one JSON object")
    compared.add_argument(
        "--threshold", type=change, default=None, help="least change that counts, default 0.03"
    )
    compared.add_argument("--fail", action="store_true", help="exit with 1 if anything got worse or was lost")
    text = "copy a results folder into a small one for git, without logs and names of the machine"
    exported = commands.add_parser("export", help=text, description=text)
    exported.add_argument("results_dir", type=Path, help="folder that runs wrote, on a clean tree")
    exported.add_argument("out", type=Path, help="folder of the copy, such as results/reference")
    text = "write the tables and figures of README.md and results/README.md from the reference results"
    shown = commands.add_parser("readme", help=text, description=text)
    shown.add_argument("--check", action="store_true", help="write nothing; exit with 1 where they differ")
    shown.add_argument("--readme", type=Path, default=Path("README.md"), help="default: README.md")
    shown.add_argument(
        "--details", type=Path, default=Path("results/README.md"), help="default: results/README.md"
    )
    shown.add_argument(
        "--results", type=Path, default=Path("results/reference"), help="default: results/reference"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        for name in ("results_dir", "a", "b", "results"):
            if (folder := getattr(args, name, None)) is not None and not folder.is_dir():
                raise UserError(f"{folder} is no folder; give one that runs wrote, such as results")
        _check_experiment(args)
        return _COMMANDS[args.command](args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _check_experiment(args: argparse.Namespace) -> None:
    """UserError where `--experiment` names one that neither is known nor has results in the folders."""
    if (name := getattr(args, "experiment", None)) is None:
        return
    from analysis import figures

    folders = [
        folder for key in ("results_dir", "a", "b") if (folder := getattr(args, key, None)) is not None
    ]
    known = {file.stem for file in (REPO / "conf" / "experiment").glob("*.yaml")} | set(figures.EXPERIMENTS)
    if name in known or any((folder / name).is_dir() for folder in folders):
        return
    from experiments.config import unknown

    raise UserError(unknown("--experiment", name, sorted(known)))


def change(text: str) -> float:
    """The type of `--threshold`."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give 0 or more, such as 0.03 for 3 %")
    return value


def _table(args: argparse.Namespace) -> int:
    from analysis import adapters, tables

    if args.adapters_of is not None:
        print(adapters.render(adapters.per_adapter(args.results_dir, args.adapters_of)))
        return 0
    frame = load(args.results_dir, args.experiment)
    print(tables.render(frame))
    if frame.empty and args.experiment is None:
        print(f"nothing below {args.results_dir}: run an experiment first, or give the folder of another run")
    own = args.results_dir / str(args.experiment)
    if frame.empty and own.is_dir():
        print(
            f"{own} keeps its numbers in files of its own: {', '.join(sorted(f.name for f in own.iterdir()))}"
        )
    return 0


def _figures(args: argparse.Namespace) -> int:
    from analysis import figures

    frame = load(args.results_dir, args.experiment)
    folder = args.out or args.results_dir / "figures"
    wanted = figures.EXPERIMENTS if args.experiment is None else (args.experiment,)
    with disk_errors(folder, "--out"):
        done = figures.draw_all(frame, args.results_dir, folder, args.reference, wanted)
    if args.experiment is None and frame.empty and not done.paths:
        print(f"no stored cells below {args.results_dir}; run an experiment first")
    for path in done.paths:
        print(path)
    for text in done.missing:
        print(f"missing: {text}", file=sys.stderr)
    return 0


def _claims(args: argparse.Namespace) -> int:
    from analysis import claims

    rows = claims.table(load(args.results_dir), args.results_dir, args.reference)
    write = claims.as_json if args.json else claims.as_markdown if args.markdown else claims.as_text
    print(write(rows))
    return 0


def _report(args: argparse.Namespace) -> int:
    from analysis import report as pages

    out = args.out or args.results_dir / "report"
    for path in pages.write(load(args.results_dir), args.results_dir, out, args.reference):
        print(path)
    return 0


def _validation(args: argparse.Namespace) -> int:
    print(validation_text(args.results_dir, args.reference, args.json))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from analysis import compare

    threshold = compare.THRESHOLD if args.threshold is None else args.threshold
    found = compare.compare(args.a, args.b, args.experiment, threshold)
    print((compare.as_json if args.json else compare.as_text)(found, threshold))
    return int(args.fail and bool(found.regressions or found.lost))


def _export(args: argparse.Namespace) -> int:
    from analysis import reference

    with disk_errors(args.out, "the second argument"):
        written = reference.export(args.results_dir, args.out)
    total = reference.size(args.out)
    print(f"{len(written)} files written; {args.out} holds {total / 1e6:.2f} MB")
    if total > reference.MOST_BYTES:
        print(
            f"that is more than {reference.MOST_BYTES / 1e6:g} MB; export fewer experiments", file=sys.stderr
        )
        return 1
    return 0


def _readme(args: argparse.Namespace) -> int:
    from analysis import readme

    for page in (args.readme, args.details):
        if not page.is_file():
            raise UserError(f"{page} is no file; give the page to write into with --readme or --details")
    if not args.check:
        for path in readme.write(args.readme, args.details, args.results):
            print(path)
        return 0
    found = readme.differences(args.readme, args.details, args.results)
    for text in found:
        print(text)
    if found:
        print("write them anew with: python -m analysis readme", file=sys.stderr)
    return int(bool(found))


_COMMANDS = {
    "table": _table,
    "figures": _figures,
    "claims": _claims,
    "report": _report,
    "validation": _validation,
    "compare": _compare,
    "export": _export,
    "readme": _readme,
}


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` closes the pipe, which is no error
    sys.exit(main())
