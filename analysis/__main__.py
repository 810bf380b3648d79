"""`python -m analysis table|figures [results_dir] [--experiment NAME]`, `python -m analysis validation [--json]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from analysis.load import load
from tessa.errors import UserError


def report(results: Path, experiment: str, cells: Collection[str] | None = None) -> list[Path]:
    """Prints the table of an experiment and the paths of its figures; `cells` narrows it to their settings."""
    frame = load(results, experiment)
    if cells is not None and len(frame):
        touched = set(frame.loc[frame["cell"].isin(cells), "setting"])
        frame = frame[frame["setting"].isin(touched)]
    from analysis import figures, tables

    print(tables.render(frame))
    paths = figures.draw(frame, results / "figures") if len(frame) else []
    for path in paths:
        print(f"figure: {path}")
    return paths


def validation_text(results: Path, reference: Path | None, as_json: bool) -> str:
    """The projection's errors as JSON or as one line each; an entry without its data is null or `not available`."""
    from analysis.projection import validation

    errors = validation(results, reference)
    if as_json:
        return json.dumps(errors, indent=2)
    width = max(len(name) for name in errors)
    lines = (
        f"{name:<{width}}  {'not available' if value is None else f'{value:g}'}"
        for name, value in errors.items()
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("table", "print the table"), ("figures", "draw every figure as PNG and PDF")):
        command = commands.add_parser(name, help=text)
        command.add_argument("results_dir", nargs="?", type=Path, default=Path("results"))
        command.add_argument("--experiment", default=None, help="one experiment; default: all")
    command = commands.add_parser(
        "validation", help="errors of the projection on published and measured data"
    )
    command.add_argument("results_dir", nargs="?", type=Path, default=Path("results"))
    command.add_argument("--reference", type=Path, default=None, help="folder of the published tables")
    command.add_argument("--json", action="store_true", help="as one JSON object")
    args = parser.parse_args(argv)
    try:
        if args.command == "validation":
            print(validation_text(args.results_dir, args.reference, args.json))
            return 0
        frame = load(args.results_dir, args.experiment)
        if args.command == "table":
            from analysis import tables

            print(tables.render(frame))
        else:
            from analysis import figures

            if frame.empty:
                print(f"no stored cells below {args.results_dir}; run an experiment first")
            for path in figures.draw(frame, args.results_dir / "figures"):
                print(path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
