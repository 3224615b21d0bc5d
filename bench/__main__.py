"""Benchmarks beyond `tfla-tk compare`, and the results on record: `python -m tfla_tk.bench <command>`.

`merge` takes rows that `tfla-tk compare --json` wrote elsewhere; `readme` writes README.md's figure and the
tables of docs/results.md, `api` docs/api.md; `ablation` times mLSTM's forward without overlap, `step` one
token, `model` whole xLSTMs and `generate` models that generate.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tfla_tk.cli import run_command

from . import ablation, api, generate, model_step, plots, readme, results, step


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, as that of `tfla-tk`."""
    parser = argparse.ArgumentParser(
        prog="python -m tfla_tk.bench",
        description="benchmarks beyond tfla-tk compare, and the results on record",
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, run: Callable[[argparse.Namespace], int], told: str) -> argparse.ArgumentParser:
        command: argparse.ArgumentParser = commands.add_parser(name, help=told)
        command.set_defaults(run=run)
        return command

    command = add("merge", _merge, "merge rows into the results of their GPU")
    command.add_argument("rows", type=Path, nargs="+", help="files that `tfla-tk compare --json` wrote")
    command.add_argument("--folder", type=Path, default=results.FOLDER, help="where the results are kept")
    command = add("readme", _readme, "write tables between the markers of files, and README.md's figure")
    command.add_argument("results", type=Path, help="for example bench/results/h200.json")
    command.add_argument("files", type=Path, nargs="+", help="with markers: README.md, docs/results.md")
    command = add("api", _api, "write the API page from the docstrings")
    command.add_argument("page", type=Path, help="docs/api.md")
    for name, module, told in (
        ("ablation", ablation, "time mLSTM's forward with and without overlap"),
        ("step", step, "time one token of mLSTM against the copy rate"),
        ("model", model_step, "train, prefill and decode with xLSTM models, Triton against tk"),
        ("generate", generate, "tokens per second of generate(), FLA against tk"),
    ):
        module.add_arguments(add(name, module.run, told))
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
    for path in arguments.files:
        print(f"{path}: {'changed' if readme.update(path, rows) else 'up to date'}")
        if "<!-- summary:begin -->" in path.read_text("utf-8") and (chosen := readme.headline(rows)):
            plots.write_speed_ups(path.parent / readme.FIGURE, chosen)
    return 0


def _api(arguments: argparse.Namespace) -> int:
    arguments.page.write_text(api.page(), encoding="utf-8")
    return 0


def _existing(path: Path) -> list[results.Row]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    return results.load(path)


if __name__ == "__main__":
    sys.exit(main())
