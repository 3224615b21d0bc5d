"""What a person reads: console, tables, the table of one contest, and rows as CSV."""

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from . import results
from .results import Row
from .runner import OK, Outcome

PASS_TITLES = {
    "fwd": "forward",
    "fwdbwd": "forward + backward",
    "train": "training step",
    "prefill": "prefill",
    "decode": "decode",
}


def name_of(row: Row) -> str:
    """Backend and schedule in one word: "tk:sequential", "triton:xl_chunk_128"."""
    return f"{row['backend']}:{row['schedule']}" if row["schedule"] else str(row["backend"])


def conditions_title(row: Mapping[str, Any]) -> str:
    """What differs from the default inputs: "layout bsnd, forget bias 12"; empty where nothing does."""
    given = {key: row.get(key, default) for key, default in results.DEFAULTS.items()}
    shown = {"layout": f"layout {given['layout']}", "forget_bias": f"forget bias {given['forget_bias']:g}"}
    return ", ".join(shown[key] for key, default in results.DEFAULTS.items() if given[key] != default)


def problem_title(row: Row) -> str:
    """The shape of a row, and what differs from the default inputs."""
    return ", ".join(filter(None, (str(results.shape_of(row)), conditions_title(row))))


def milliseconds(value: float) -> str:
    """A time in ms with three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def errors_of(errors: dict[str, float]) -> str:
    """The output's error and the worst of the gradients': "h 2.3e-03, df 4.0e-03"."""
    shown = [f"{name} {errors[name]:.1e}" for name in results.OUTPUTS if name in errors]
    grads = {name: error for name, error in errors.items() if name not in results.OUTPUTS}
    if grads:
        # NaN first: it compares as neither larger nor smaller
        worst = max(grads, key=lambda name: (grads[name] != grads[name], grads[name]))
        shown.append(f"{worst} {grads[worst]:.1e}")
    return ", ".join(shown)


def make_progress() -> Progress:
    """A progress bar on stderr, so that the tables can be piped; hidden where that is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def make_table(*words: str, numbers: Iterable[str]) -> Table:
    """A table with columns of words, then of numbers."""
    table = Table(highlight=False)
    for column in words:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def filled_table(word: str, lines: Sequence[tuple[str, Mapping[str, str]]]) -> Table:
    """A table of named lines of cells by column, which the longest line has all of. Columns that no line
    fills are left out; a line with fewer cells than the longest is dim."""
    widest = max((cells for _, cells in lines), key=len)
    columns = [column for column in widest if any(cells.get(column) for _, cells in lines)]
    table = make_table(word, numbers=columns)
    for name, cells in lines:
        style = "dim" if len(cells) < len(widest) else ""
        table.add_row(Text(name), *(cells.get(column, "") for column in columns), style=style)
    return table


def contest_table(outcomes: Sequence[Outcome]) -> Table:
    """The table of one contest; what was not timed stands there with the reason."""
    best = results.baselines(outcome.row for outcome in outcomes if outcome.row is not None)
    lines = [
        (outcome.variant.call, {"ms": outcome.status, "error": errors_of(outcome.errors)})
        if outcome.row is None
        else (name_of(outcome.row), _cells(outcome.row, best.get(results.contest_of(outcome.row))))
        for outcome in outcomes
    ]
    return filled_table("backend", lines)


def _cells(row: Row, best: Row | None) -> dict[str, str]:
    on_gpu = row["gpu"] is not None
    return {
        "ms": milliseconds(row["ms"]),
        "speed-up": f"{best['ms'] / row['ms']:.2f}x" if best is not None and on_gpu else "",
        "TFLOP/s": f"{row['tflops']:.3g}" if on_gpu else "",
        "GFLOP/s": "" if on_gpu else f"{1e3 * row['tflops']:.3g}",
        "GB/s": f"{row['gbps']:.3g}" if row["gbps"] < 1000 else f"{row['gbps']:.0f}",
        "roofline": f"{row['roofline']:.0%}" if row["roofline"] is not None else "",
        "error": errors_of(row["rel_err"]),
        "peak MB": f"{row['peak_mem_mb']:.0f}" if row["peak_mem_mb"] is not None else "",
        "host us": f"{row['host_us']:.3g}" if "host_us" in row else "",
        "graph ms": milliseconds(row["graph_ms"]) if "graph_ms" in row else "",
    }


def reasons(outcomes: Sequence[Outcome]) -> list[str]:
    """One line per variant without a figure: its name, what happened and why."""
    return [f"{o.variant.call}: {o.status}: {o.reason}" for o in outcomes if o.status != OK]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Rows as CSV, each number of the shape and each error in its own column. What a row lacks is an empty
    cell."""
    lines = [
        {**row, **row["shape"], **{f"rel_err_{name}": error for name, error in row["rel_err"].items()}}
        for row in rows
    ]
    header = dict.fromkeys(key for line in lines for key in line if key not in ("shape", "rel_err"))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(header), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
