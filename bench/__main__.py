"""Benchmarks beyond `tfla-tk compare`, and the results on record: `python -m tfla_tk.bench <command>`.

`merge` takes rows that `tfla-tk compare --json` wrote elsewhere; `readme` writes the tables of README.md and
docs/results.md; `ablation` times mLSTM's forward without overlap, `step` one token, `model` whole
models; `train` compares loss curves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tfla_tk.cli import run_command

from . import ablation, compare, model_step, plots, readme, results, step, train
from .inputs import DTYPES
from .operators import FUNCTIONS, OPERATORS
from .shapes import MAIN, PASSES, parse_shapes


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, as that of `tfla-tk`."""
    parser = argparse.ArgumentParser(
        prog="python -m tfla_tk.bench",
        description="benchmarks beyond tfla-tk compare, and the results on record",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser("merge", help="merge rows into the results of their GPU")
    command.add_argument("rows", type=Path, nargs="+", help="files that `tfla-tk compare --json` wrote")
    command.add_argument("--folder", type=Path, default=results.FOLDER, help="where the results are kept")
    command.set_defaults(run=_merge)
    command = commands.add_parser("readme", help="write tables between the markers of files")
    command.add_argument("results", type=Path, help="for example bench/results/h200.json")
    command.add_argument("files", type=Path, nargs="+", help="with markers: README.md, docs/results.md")
    command.add_argument("--more", type=Path, help="another results file, for the summary alone")
    command.set_defaults(run=_readme)
    command = commands.add_parser("plot", help="draw rows of a results file, those on the default inputs")
    command.add_argument("results", type=Path, help="for example bench/results/h200.json")
    command.add_argument("plot", type=Path, help="png, svg or pdf")
    command.add_argument(
        "--op",
        type=compare.names(OPERATORS, FUNCTIONS),
        default=list(OPERATORS),
        metavar="OP,..",
        help=f"of {', '.join(OPERATORS)} (default: all)",
    )
    command.add_argument(
        "--pass",
        dest="passes",
        type=compare.names(PASSES),
        default=list(PASSES),
        metavar="PASS,..",
        help="of fwd, fwdbwd (default: all)",
    )
    command.add_argument("--dtype", choices=list(DTYPES), help="of q, k, v (default: all)")
    command.add_argument(
        "--shapes",
        type=compare.argument(parse_shapes),
        default=MAIN,
        metavar="SHAPES",
        help="as compare takes them (default: main); sweep draws lines over the length",
    )
    command.set_defaults(run=_plot)
    command = commands.add_parser("ablation", help="time mLSTM's forward with and without overlap")
    compare.add_run_arguments(command)
    command.set_defaults(run=ablation.run)
    command = commands.add_parser("step", help="time one token of mLSTM against the copy rate")
    command.add_argument(
        "--shapes",
        type=compare.argument(parse_shapes),
        metavar="SHAPES",
        help="as compare takes them, T steps on states of their own (default: batch 1 to 256)",
    )
    compare.add_run_arguments(command)
    command.set_defaults(run=step.run)
    command = commands.add_parser("train", help="train a language model on every backend, compare the curves")
    train.add_arguments(command)
    command.set_defaults(run=train.run)
    command = commands.add_parser(
        "model", help="train, prefill and decode with xLSTM models, Triton against tk"
    )
    model_step.add_arguments(command)
    command.set_defaults(run=model_step.run)
    return run_command(parser, argv)


def _merge(arguments: argparse.Namespace) -> int:
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
    return 0


def _readme(arguments: argparse.Namespace) -> int:
    rows = _existing(arguments.results)
    more = _existing(arguments.more) if arguments.more else []
    for path in arguments.files:
        print(f"{path}: {'changed' if readme.update(path, rows, more) else 'up to date'}")
    return 0


def _plot(arguments: argparse.Namespace) -> int:
    chosen = [
        row
        for row in _existing(arguments.results)
        if row["op"] in arguments.op
        and row["pass"] in arguments.passes
        and arguments.dtype in (None, row["dtype"])
        and results.shape_of(row) in arguments.shapes
        and results.is_plain(row)
    ]
    plots.write_plot(arguments.plot, chosen)
    return 0


def _existing(path: Path) -> list[results.Row]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    return results.load(path)


if __name__ == "__main__":
    sys.exit(main())
