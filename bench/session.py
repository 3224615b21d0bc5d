"""What a command that measures has: its device, what its rows share, and where they go."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import environment, results
from .usage import UsageError, check_outputs

PIPED_WIDTH = 140


class Session:
    """One run of a command.

    Attributes:
        device, on_gpu: what is measured on.
        facts: what all rows share, see `environment.provenance`.
        console: wide enough for tables where it is piped.
        rows: so far; `add` writes them each time, for --json and --update-results.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        check_outputs(args)
        self.rows: list[results.Row] = []
        self._json, self._path = args.json, record_path(args)
        self._earlier = [] if self._path is None else results.load(self._path)
        self.device = environment.current_device()
        self.on_gpu = self.device.type == "cuda"
        self.facts = environment.provenance(self.device, args.commit)
        environment.fetch_thunderkittens()
        self.console = make_console()

    def add(self, rows: Sequence[results.Row]) -> None:
        """Keep more rows."""
        self.rows += rows
        if self._json:
            results.write(self._json, self.rows)
        if self._path is not None:
            results.write(self._path, results.merge(self._earlier, self.rows))

    def tell(self) -> None:
        """Print what is on record now."""
        if self._path is not None:
            self.console.print(f"{len(self.rows)} rows merged into {self._path.name}")

    def print_table(self, title: str, table: Table) -> None:
        """A table below its title, which may be wider than it."""
        self.console.print(Text(title, style="table.title"), soft_wrap=True)
        self.console.print(table)

    def print_lines(self, lines: Iterable[str]) -> None:
        """Lines as they are, whatever their length and whatever brackets are in them."""
        for line in lines:
            self.console.print(line, markup=False, soft_wrap=True)


def make_console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def record_path(args: argparse.Namespace) -> Path | None:
    """Where --update-results writes; UsageError for figures that are not fit for the record."""
    if not args.update_results:
        return None
    if not torch.cuda.is_available():
        raise UsageError("--update-results: expected a CUDA GPU, found none")
    if args.quick:
        raise UsageError(f"--update-results: --quick runs fewer than {results.RECORD_REPEATS} times")
    if not (args.commit or environment.git_commit(environment.ROOT)):
        raise UsageError("--update-results: this is no git checkout, name what is measured with --commit")
    return results.record_path(torch.cuda.get_device_name())
