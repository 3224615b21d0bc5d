"""What a person reads: the table of one contest, and rows as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from .results import (
    DEFAULTS,
    OPTIONAL,
    OUTPUTS,
    REQUIRED,
    Row,
    baselines,
    conditions_of,
    contest_of,
    shape_of,
)
from .runner import OK, Outcome
from .shapes import Shape

TITLES = {
    "mlstm_exp": "mLSTM, exponential input gate",
    "mlstm_sig": "mLSTM, sigmoid input gate",
    "simple_gla": "simple GLA",
    "retention": "retention",
    "lightning": "Lightning attention",
    "gla": "GLA",
    "delta_rule": "delta rule",
    "gated_delta_rule": "gated delta rule",
    "kda": "KDA",
    "mlstm_step": "mLSTM, one step",
    "model_step": "xLSTM, whole model",
}
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


def conditions_title(layout: str, forget_bias: float) -> str:
    """What differs from the default inputs: "layout bsnd, forget bias 12"; empty where nothing does."""
    shown = [f"layout {layout}"] * (layout != DEFAULTS["layout"])
    shown += [f"forget bias {forget_bias:g}"] * (forget_bias != DEFAULTS["forget_bias"])
    return ", ".join(shown)


def problem_title(row: Row) -> str:
    """The shape of a row, and what differs from the default inputs."""
    return ", ".join(filter(None, (str(shape_of(row)), conditions_title(*conditions_of(row)))))


def milliseconds(value: float) -> str:
    """A time in ms with three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def errors_of(errors: dict[str, float]) -> str:
    """The output's error and the worst of the gradients': "h 2.3e-03, df 4.0e-03"."""
    shown = [f"{name} {errors[name]:.1e}" for name in OUTPUTS if name in errors]
    grads = {name: error for name, error in errors.items() if name not in OUTPUTS}
    if grads:
        # NaN first: it compares as neither larger nor smaller
        worst = max(grads, key=lambda name: (grads[name] != grads[name], grads[name]))
        shown.append(f"{worst} {grads[worst]:.1e}")
    return ", ".join(shown)


def contest_table(outcomes: Sequence[Outcome]) -> Table:
    """The table of one contest; what was not timed stands there with the reason.

    Columns that no row fills (roofline and memory without a GPU) are left out.
    """
    first = outcomes[0]
    rows = [outcome.row for outcome in outcomes if outcome.row is not None]
    best = baselines(rows)
    on_gpu = any(row["gpu"] for row in rows)
    columns = ["ms", *["speed-up"] * bool(best and on_gpu), "TFLOP/s" if on_gpu else "GFLOP/s", "GB/s"]
    columns += ["roofline"] * any(row["roofline"] is not None for row in rows) + ["error"]
    columns += ["peak MB"] * any(row["peak_mem_mb"] is not None for row in rows)
    columns += ["host us"] * any("host_us" in row for row in rows)
    columns += ["graph ms"] * any("graph_ms" in row for row in rows)
    # a table may be narrower than its title, which rich would wrap
    title = Text(
        title_of(first.op, first.shape, first.which), style="table.title", no_wrap=True, overflow="ignore"
    )
    table = Table(title=title, title_justify="left", highlight=False)
    table.add_column("backend", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for outcome in outcomes:
        if outcome.row is not None:
            cells = _cells(outcome.row, best.get(contest_of(outcome.row)))
            table.add_row(Text(name_of(outcome.row)), *(cells[column] for column in columns))
        else:
            cells = dict.fromkeys(columns, "")
            cells["ms"] = outcome.status
            cells["error"] = errors_of(outcome.errors)
            table.add_row(Text(outcome.variant.call), *(cells[column] for column in columns), style="dim")
    return table


def _cells(row: Row, best: Row | None) -> dict[str, str]:
    return {
        "ms": milliseconds(row["ms"]),
        "speed-up": f"{best['ms'] / row['ms']:.2f}x" if best is not None else "",
        "TFLOP/s": f"{row['tflops']:.3g}",
        "GFLOP/s": f"{1e3 * row['tflops']:.3g}",
        "GB/s": f"{row['gbps']:.3g}" if row["gbps"] < 1000 else f"{row['gbps']:.0f}",
        "roofline": f"{row['roofline']:.0%}" if row["roofline"] is not None else "",
        "error": errors_of(row["rel_err"]),
        "peak MB": f"{row['peak_mem_mb']:.0f}" if row["peak_mem_mb"] is not None else "",
        "host us": f"{row['host_us']:.3g}" if "host_us" in row else "",
        "graph ms": milliseconds(row["graph_ms"]) if "graph_ms" in row else "",
    }


def title_of(op: str, shape: Shape, which: str) -> str:
    """The heading of one contest."""
    return f"{TITLES[op]}, {PASS_TITLES[which]}, {shape}"


def reasons(outcomes: Sequence[Outcome]) -> list[str]:
    """One line per variant without a figure: its name, what happened and why."""
    return [f"{o.variant.call}: {o.status}: {o.reason}" for o in outcomes if o.status != OK]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Rows as CSV, the shape in columns B, T, H, K, V, N, HV and each error in its own column.

    What a row lacks is an empty cell.
    """
    errors = list(dict.fromkeys(name for row in rows for name in row["rel_err"]))
    plain = [key for key in REQUIRED if key not in ("op", "shape", "rel_err")]
    header = [
        "op",
        "B",
        "T",
        "H",
        "K",
        "V",
        "N",
        "HV",
        *plain,
        *(f"rel_err_{name}" for name in errors),
        *OPTIONAL,
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, header, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            named = {f"rel_err_{name}": error for name, error in row["rel_err"].items()}
            filled = {key: value for key, value in row.items() if value is not None}
            writer.writerow({**filled, **row["shape"], **named})
