"""Keep the results on record: `python -m tfla_tk.bench merge | readme | plot`.

`merge` takes rows that `tfla-tk compare --json` wrote elsewhere; `readme` writes the tables of the README.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import plots, readme, results


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, or 1 with a message."""
    parser = argparse.ArgumentParser(prog="python -m tfla_tk.bench", description="keep the results on record")
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("merge", help="merge rows into the results of their GPU")
    command.add_argument("rows", type=Path, nargs="+", help="files that `tfla-tk compare --json` wrote")
    command.add_argument("--folder", type=Path, default=results.FOLDER, help="where the results are kept")
    command.set_defaults(run=_merge)
    command = commands.add_parser("readme", help="write the tables between the README's markers")
    command.add_argument("results", type=Path, help="for example bench/results/h200.json")
    command.add_argument("readme", type=Path, help="the file with the markers")
    command.set_defaults(run=_readme)
    command = commands.add_parser("plot", help="draw a results file")
    command.add_argument("results", type=Path, help="for example bench/results/h200.json")
    command.add_argument("plot", type=Path, help="png, svg or pdf")
    command.set_defaults(run=_plot)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _merge(arguments: argparse.Namespace) -> None:
    fresh = [row for path in arguments.rows for row in _existing(path)]
    for row in fresh:
        if row["gpu"] is None or row["commit"] is None:
            got = f"{row['gpu']} and {row['commit']}"
            raise ValueError(f"row of run {row['run']}: expected a gpu and a commit, got {got}")
    for gpu in sorted({row["gpu"] for row in fresh}):
        path = arguments.folder / results.record_path(gpu).name
        merged = results.merge(results.load(path), (row for row in fresh if row["gpu"] == gpu))
        results.write(path, merged)
        print(f"{path}: {len(merged)} rows")


def _readme(arguments: argparse.Namespace) -> None:
    changed = readme.update(arguments.readme, _existing(arguments.results))
    print(f"{arguments.readme}: {'changed' if changed else 'up to date'}")


def _plot(arguments: argparse.Namespace) -> None:
    plots.write_plot(arguments.plot, _existing(arguments.results))


def _existing(path: Path) -> list[results.Row]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    return results.load(path)


if __name__ == "__main__":
    sys.exit(main())
