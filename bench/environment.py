"""What a command that measures has: the machine, versions, commit and run id, and where its rows go."""

import argparse
import contextlib
import re
import secrets
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tfla_tk import build, doctor
from tfla_tk.backends.tk.device import HOPPER
from tfla_tk.build import prebuilt
from tfla_tk.core.checks import counted

from . import results
from .usage import UsageError, check_outputs

ROOT = Path(__file__).resolve().parent.parent
PIPED_WIDTH = 140


def current_device() -> torch.device:
    """What commands measure on: the current GPU, or the CPU where there is none."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def heading(facts: Mapping[str, Any]) -> str:
    """The first line that a command prints, of `provenance`."""
    place = facts["gpu"] or f"CPU, {counted(torch.get_num_threads(), 'thread')}"
    return f"{place}; torch {facts['torch']}; triton {facts['triton']}"


def provenance(device: torch.device, commit: str | None = None) -> dict[str, Any]:
    """What all rows of one run share: run, gpu, torch, triton, nvcc, commit (given where this is no git
    checkout), date."""
    now = datetime.now(timezone.utc)
    return {
        "run": f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}",
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "torch": torch.__version__,
        "triton": doctor.version("triton"),
        "nvcc": _nvcc_version(),  # that has compiled the kernels
        "commit": commit or git_commit(ROOT),
        "date": f"{now:%Y-%m-%dT%H:%M:%SZ}",
    }


def _nvcc_version() -> str | None:
    try:
        brought = prebuilt.index()
        if brought is not None:
            return ".".join(map(str, brought.cuda))
        identity = build.find_toolchain().identity
    except build.BuildError:
        return None
    return re.sub(r".*nvcc ([\d.]+).*", r"\1", identity, flags=re.DOTALL)


def git_commit(root: Path) -> str | None:
    """The checked-out commit, "-dirty" where files differ from it; None where `root` is no git checkout."""
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def fetch_thunderkittens() -> None:
    """Bring ThunderKittens to a machine that can run the kernels: no call of the package fetches it. Where
    it cannot be had, the tk backend refuses its calls with the reason and the remedy."""
    with contextlib.suppress(build.BuildError):
        is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER
        if is_hopper and prebuilt.index() is None:
            build.find_thunderkittens()


class Session:
    """One run of a command.

    Attributes:
        device, on_gpu: what is measured on.
        facts: what all rows share, see `provenance`.
        console: wide enough for tables where it is piped.
        rows: so far; `add` writes them each time, for --json and --update-results.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        check_outputs(args)
        self.rows: list[results.Row] = []
        self._json, self._path = args.json, record_path(args)
        self._earlier = [] if self._path is None else results.load(self._path)
        self.device = current_device()
        self.on_gpu = self.device.type == "cuda"
        self.facts = provenance(self.device, args.commit)
        fetch_thunderkittens()
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
    if not (args.commit or git_commit(ROOT)):
        raise UsageError("--update-results: this is no git checkout, name what is measured with --commit")
    return results.record_path(torch.cuda.get_device_name())
