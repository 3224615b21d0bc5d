"""The README's tables, generated from the results on record between two markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tfla_tk.build.instances import DEFAULT_SCHEDULE, SCHEDULES

from .report import PASS_TITLES, TITLES, errors_of, milliseconds
from .results import OPS, Row, baselines, contest_of, shape_of
from .shapes import PASSES

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def render(rows: Sequence[Row]) -> str:
    """All tables as Markdown.

    Per operator and pass the tk row of the shipped schedule against the best Triton row of its run, then the
    schedules side by side where more than one was measured.
    """
    parts = []
    for op in OPS:
        for which in PASSES:
            chosen = [row for row in rows if row["op"] == op and row["pass"] == which]
            if chosen:
                parts.append(_contest(op, which, chosen))
    parts += [_schedules(op, rows) for op in OPS if _has_schedules(op, rows)]
    return "\n\n".join(parts) if parts else "No results are on record yet."


def update(path: Path, rows: Sequence[Row]) -> bool:
    """Replace what stands between the markers; returns whether the file changed.

    Raises:
        ValueError: the markers are missing, repeated or in the wrong order.
    """
    text = path.read_text(encoding="utf-8")
    begin, end = text.find(BEGIN), text.find(END)
    if text.count(BEGIN) != 1 or text.count(END) != 1 or end < begin:
        raise ValueError(f"{path}: expected one {BEGIN} and after it one {END}")
    new = f"{text[: begin + len(BEGIN)]}\n{render(rows)}\n{text[end:]}"
    if new == text:
        return False
    path.write_text(new, encoding="utf-8")
    return True


def _contest(op: str, which: str, rows: Sequence[Row]) -> str:
    best = baselines(rows)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((str(shape_of(row)), row["dtype"]), []).append(row)
    lines = []
    for (shape, dtype), group in groups.items():
        ours = _fastest(
            row for row in group if row["backend"] == "tk" and row["schedule"] in (None, DEFAULT_SCHEDULE)
        )
        if ours is None:
            theirs = _fastest(row for row in group if row["backend"].startswith("triton"))
        else:
            theirs = best.get(contest_of(ours))
        if ours is not None or theirs is not None:
            lines.append(_cells(shape, dtype, ours, theirs))
    header = (
        "Shape",
        "dtype",
        "tk ms",
        "Triton ms",
        "best Triton",
        "speed-up",
        "TFLOP/s",
        "GB/s",
        "roofline",
        "error",
        "peak MB, tk",
        "peak MB, Triton",
    )
    gpus = sorted({row["gpu"] for row in rows if row["gpu"]})
    runs = sorted({row["run"] for row in rows})
    caption = f"{', '.join(gpus) or 'no GPU'}; runs {', '.join(runs)}"
    return f"### {TITLES[op]}, {PASS_TITLES[which]}\n\n{_markdown(header, lines)}\n\n{caption}"


def _cells(shape: str, dtype: str, ours: Row | None, theirs: Row | None) -> list[str]:
    cells = [shape, dtype]
    cells.append(milliseconds(ours["ms"]) if ours else "-")
    cells.append(milliseconds(theirs["ms"]) if theirs else "-")
    cells.append(theirs["backend"].partition(":")[2] if theirs else "-")
    cells.append(f"{theirs['ms'] / ours['ms']:.2f}x" if ours and theirs else "-")
    if ours is None:
        cells += ["-"] * 5
    else:
        share = "-" if ours["roofline"] is None else f"{ours['roofline']:.0%}"
        cells += [
            f"{ours['tflops']:.0f}",
            f"{ours['gbps']:.0f}",
            share,
            errors_of(ours["rel_err"]),
            _memory(ours),
        ]
    cells.append(_memory(theirs))
    return cells


def _memory(row: Row | None) -> str:
    return "-" if row is None or row["peak_mem_mb"] is None else f"{row['peak_mem_mb']:.0f}"


def _schedules(op: str, rows: Sequence[Row]) -> str:
    """ms per schedule, each line from one run."""
    contests: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        if row["op"] == op and row["backend"] == "tk" and row["schedule"]:
            contests.setdefault(contest_of(row), {})[row["schedule"]] = row
    lines = []
    for found in contests.values():
        row = next(iter(found.values()))
        times = [milliseconds(found[name]["ms"]) if name in found else "-" for name in SCHEDULES]
        lines.append([str(shape_of(row)), PASS_TITLES[row["pass"]], *times])
    table = _markdown(("Shape", "pass", *(f"{name} ms" for name in SCHEDULES)), lines)
    return f"### {TITLES[op]}, schedules\n\n{table}"


def _has_schedules(op: str, rows: Iterable[Row]) -> bool:
    return (
        len(
            {
                row["schedule"]
                for row in rows
                if row["op"] == op and row["backend"] == "tk" and row["schedule"]
            }
        )
        > 1
    )


def _fastest(rows: Iterable[Row]) -> Row | None:
    return min(rows, key=lambda row: row["ms"], default=None)


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ruler, *lines))
