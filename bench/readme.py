"""What README.md and docs/results.md show of the results on record, generated between markers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from .report import PASS_TITLES, TITLES, errors_of, milliseconds, problem_title
from .results import (
    ABLATED,
    FP32_NATIVE,
    IN_PLACE,
    MODEL,
    OPS,
    SCHEDULES,
    STEP,
    Pair,
    Row,
    contest_of,
    in_sweep,
    is_baseline,
    is_plain,
    pairs,
    problem_of,
    shape_of,
    sweep_only,
)
from .rivals import RIVALS
from .shapes import PASSES, PHASES, SWEEP_TOKENS, Shape

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"  # all tables: docs/results.md
SUMMARY_BEGIN, SUMMARY_END = "<!-- summary:begin -->", "<!-- summary:end -->"  # a few lines: README.md

PACKAGES = {rival.operator for rival in RIVALS.values()}  # operators that more than one package computes
FIGURE = "docs/speedups.png"  # what the summary shows, from the file that it stands in
# what the figure has of one GPU and one commit: operator and shape, forward and both passes
HEADLINE = (
    ("mlstm_exp", Shape(8, 8192, 16, 128, 256)),
    ("mlstm_exp", Shape(8, 8192, 8, 256, 512)),
    ("simple_gla", Shape(8, 8192, 16, 128, 256)),
    ("gla", Shape(8, 8192, 16, 128, 256)),
    ("delta_rule", Shape(8, 8192, 16, 128, 128)),
    ("gated_delta_rule", Shape(8, 8192, 16, 128, 128)),
)


def render(rows: Sequence[Row]) -> str:
    """All tables as Markdown.

    Per operator and pass the tk row of the shipped kernels against the best baseline of its run, every
    package beside it where there are several, the same over the lengths of the sweep, the host's time, whole
    models, then the ablation.
    """
    parts: list[str] = []
    for op in OPS:
        for which in PASSES:
            chosen = [row for row in rows if row["op"] == op and row["pass"] == which]
            parts.append(_contest(op, which, [row for row in chosen if not sweep_only(row)]))
            parts.append(_baselines(op, which, chosen))
            parts += _sweeps(op, which, [row for row in chosen if in_sweep(row)])
        parts.append(_hosts(op, [row for row in rows if row["op"] == op]))
    parts.append(_models([row for row in rows if row["op"] == MODEL]))
    parts += [_ablation(op, [row for row in rows if row["op"] == op]) for op in ABLATED]
    return "\n\n".join(filter(None, parts)) or "No results are on record yet."


def headline(rows: Sequence[Row]) -> list[Pair]:
    """What the README's figure shows: tk in bf16, on the default inputs, against its run's best baseline.

    Of all GPUs and commits those with the most of HEADLINE, of several the latest; in HEADLINE's order.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["dtype"] == "bf16" and is_plain(row) and _place(row) is not None:
            groups.setdefault((str(row["gpu"]), str(row["commit"])), []).append(row)
    found = [[pair for pair in pairs(group) if pair.speed_up is not None] for group in groups.values()]
    most = max(found, key=lambda chosen: (len(chosen), max(_dates(chosen), default="")), default=[])
    return sorted(most, key=lambda pair: (_place(pair.shown), PASSES.index(pair.shown["pass"])))


def _place(row: Row) -> int | None:
    """Where a row stands in HEADLINE."""
    entry = (row["op"], None if row["op"] == MODEL else shape_of(row))
    return HEADLINE.index(entry) if entry in HEADLINE else None


def _dates(found: Sequence[Pair]) -> list[str]:
    return [pair.shown["date"] for pair in found]


def render_summary(rows: Sequence[Row]) -> str:
    """The README's figure, its range in words, and where it comes from."""
    chosen = headline(rows)
    if not chosen:
        return "No results are on record yet."
    ratios = [pair.speed_up or 0.0 for pair in chosen]
    between = f"{min(ratios):.1f} to {max(ratios):.1f} times as fast as the fastest correct baseline"
    row, day = chosen[0].shown, max(_dates(chosen)).partition("T")[0]
    what = f"bf16, {row['shape']['B']} sequences of {row['shape']['T']:,} tokens"
    origin = f"{row['gpu']}, commit {row['commit']}, {day}, PyTorch {row['torch']}, nvcc {row['nvcc']}"
    return f"![Speed-ups by operator and pass]({FIGURE})\n\n{between}; {what}; {origin}."


def has_summary(path: Path) -> bool:
    """Whether a file shows the summary, and so its figure."""
    return SUMMARY_BEGIN in path.read_text(encoding="utf-8")


def update(path: Path, rows: Sequence[Row]) -> bool:
    """Replace what stands between each pair of markers of a file; returns whether the file changed.

    Raises:
        ValueError: no marker is there, or one is repeated, without its other one or before it.
    """
    text = new = path.read_text(encoding="utf-8")
    regions = ((BEGIN, END, render), (SUMMARY_BEGIN, SUMMARY_END, render_summary))
    if not any(marker in text for *markers, _ in regions for marker in markers):
        raise ValueError(f"{path}: expected {BEGIN} or {SUMMARY_BEGIN}, and its end after it")
    for opening, closing, write in regions:
        begin, end = new.find(opening), new.find(closing)
        if begin == end == -1:
            continue
        if new.count(opening) != 1 or new.count(closing) != 1 or end < begin:
            raise ValueError(f"{path}: expected one {opening} and after it one {closing}")
        new = f"{new[: begin + len(opening)]}\n{write(rows)}\n{new[end:]}"
    if new == text:
        return False
    path.write_text(new, encoding="utf-8")
    return True


def _contest(op: str, which: str, rows: Sequence[Row]) -> str:
    """tk against the best baseline, one line per problem; empty where no row is of either."""
    if op == STEP:
        return _steps(rows)
    found = pairs(rows)
    if not found:
        return ""
    header = (
        "Shape",
        "dtype",
        "tk ms",
        "baseline ms",
        "best baseline",
        "speed-up",
        "TFLOP/s",
        "GB/s",
        "roofline",
        "error",
        "peak MB, tk",
        "peak MB, baseline",
    )
    table = _markdown(header, [_cells(pair) for pair in found])
    return f"### {TITLES[op]}, {PASS_TITLES[which]}\n\n{table}\n\n{_origin(found)}"


def _baselines(op: str, which: str, rows: Sequence[Row]) -> str:
    """The times of several packages beside tk, one line per problem of which a run has more than one.

    The variants of one package, as those of mLSTM, are no packages: the best of them stands with the contest.
    """
    if op not in PACKAGES:
        return ""
    found = [pair for pair in pairs(rows) if pair.ours is not None and pair.theirs is not None]
    by_contest: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        if is_baseline(row):
            by_contest.setdefault(contest_of(row), {})[row["backend"]] = row
    shown = [pair for pair in found if len(by_contest[contest_of(pair.shown)]) > 1]
    if not shown:
        return ""
    names = sorted({name for pair in shown for name in by_contest[contest_of(pair.shown)]})
    lines = []
    for pair in shown:
        theirs = by_contest[contest_of(pair.shown)]
        cells = [problem_title(pair.shown), pair.shown["dtype"], milliseconds(pair.shown["ms"])]
        for name in names:
            cells += _beside(pair.shown, theirs.get(name))
        lines.append(cells)
    each = [part for name in names for part in (f"{_package(name)} ms", "speed-up", "error", "peak MB")]
    table = _markdown(("Shape", "dtype", "tk ms", *each), lines)
    return f"### {TITLES[op]}, {PASS_TITLES[which]}, every package\n\n{table}\n\n{_origin(shown)}"


def _beside(ours: Row, theirs: Row | None) -> list[str]:
    """A package's time, tk's speed-up over it, its error and peak memory."""
    if theirs is None:
        return ["-"] * 4
    ratio = f"{theirs['ms'] / ours['ms']:.2f}x"
    return [milliseconds(theirs["ms"]), ratio, errors_of(theirs["rel_err"]), _memory(theirs)]


def _package(backend: str) -> str:
    return backend.partition(":")[2]


def _hosts(op: str, rows: Sequence[Row]) -> str:
    """The host's time of short calls, of the latest run; empty where no row tells how many kernels it has."""
    if op == STEP:
        return ""
    latest: dict[tuple[object, ...], Row] = {}
    for row in rows:
        named = row["backend"] == "tk" and row["schedule"] != "sequential"
        key = (problem_of(row), row["backend"])
        wanted = "launch_us" in row and "host_us" in row and (named or is_baseline(row))
        if wanted and (key not in latest or row["date"] >= latest[key]["date"]):
            latest[key] = row
    if not latest:
        return ""
    header = ("Shape", "pass", "backend", "call ms", "graph ms", "host us", "launches", "beyond them us")
    lines = [
        [
            problem_title(row),
            PASS_TITLES[row["pass"]],
            row["backend"],
            milliseconds(row["ms"]),
            milliseconds(row["graph_ms"]) if "graph_ms" in row else "-",
            f"{row['host_us']:.0f}",
            str(row["launches"]),
            f"{row['host_us'] - row['launch_us']:.0f}",
        ]
        for row in latest.values()
    ]
    caption = "Beyond them: the host's time for a call less that of as many launches of an empty kernel"
    origin = _origin_of(list(latest.values()))
    return f"### {TITLES[op]}, host\n\n{_markdown(header, lines)}\n\n{caption}.\n\n{origin}"


def _steps(rows: Sequence[Row]) -> str:
    """One token, through CUDA graphs as decoding runs, and as plain calls, where the host may take longer."""
    found = pairs(rows)
    if not found:
        return ""
    in_place = {contest_of(row): row for row in rows if row["backend"] == IN_PLACE}
    header = (
        "Shape",
        "dtype",
        "tk ms",
        "in place ms",
        "Triton ms",
        "speed-up",
        "of the copy rate",
        "plain call, tk ms",
        "plain call, Triton ms",
        "error",
    )
    lines = []
    for pair in found:
        ours, theirs = pair.ours, pair.theirs
        times = [_graph_ms(row) for row in (ours, in_place.get(contest_of(pair.shown)), theirs)]
        plain = [milliseconds(row["ms"]) if row else "-" for row in (ours, theirs)]
        share = ours["roofline"] * ours["ms"] / times[0] if ours and times[0] and ours["roofline"] else None
        lines.append(
            [
                problem_title(pair.shown),
                pair.shown["dtype"],
                *("-" if ms is None else milliseconds(ms) for ms in times),
                f"{times[2] / times[0]:.2f}x" if times[0] and times[2] else "-",
                "-" if share is None else f"{share:.0%}",
                *plain,
                errors_of(ours["rel_err"]) if ours else "-",
            ]
        )
    caption = "A call takes T steps on T states. Times are of CUDA graphs but for plain calls"
    return f"### {TITLES[STEP]}\n\n{_markdown(header, lines)}\n\n{caption}; {_origin(found)}"


def _graph_ms(row: Row | None) -> float | None:
    return None if row is None else row.get("graph_ms")


def _sweeps(op: str, which: str, rows: Sequence[Row]) -> list[str]:
    """Per dtype the times over the length; none where only main shapes of the sweep were measured."""
    parts = []
    for dtype in sorted({row["dtype"] for row in rows if sweep_only(row)}):
        found = pairs(row for row in rows if row["dtype"] == dtype)
        if found:
            parts.append(_sweep(op, which, sorted(found, key=lambda pair: pair.shown["shape"]["T"])))
    return parts


def _sweep(op: str, which: str, found: Sequence[Pair]) -> str:
    lines = [[str(pair.shown["shape"]["T"]), *_times(pair)] for pair in found]
    table = _markdown(("T", "tk ms", "baseline ms", "best baseline", "speed-up"), lines)
    shape = shape_of(found[0].shown)
    what = f"B x T = {SWEEP_TOKENS:,}, H{shape.H} {shape.K}/{shape.V}, {found[0].shown['dtype']}"
    caption = f"{what}; flatness of tk (max / min): {_flatness(found)}; {_origin(found)}"
    return f"### {TITLES[op]}, {PASS_TITLES[which]}, over the length\n\n{table}\n\n{caption}"


def _flatness(found: Sequence[Pair]) -> str:
    """Largest over smallest time of tk; times of different runs are not divided."""
    ours = [pair.ours for pair in found if pair.ours is not None]
    if len(ours) < 2 or len({row["run"] for row in ours}) > 1:
        return "-"
    times = [row["ms"] for row in ours]
    return f"{max(times) / min(times):.2f}"


def _times(pair: Pair) -> list[str]:
    """ms of tk, of the best baseline, its name, and the speed-up."""
    ours, theirs, ratio = pair.ours, pair.theirs, pair.speed_up
    return [
        milliseconds(ours["ms"]) if ours else "-",
        milliseconds(theirs["ms"]) if theirs else "-",
        theirs["backend"].partition(":")[2] if theirs else "-",
        f"{ratio:.2f}x" if ratio else "-",
    ]


def _origin(found: Sequence[Pair]) -> str:
    return _origin_of([pair.shown for pair in found])


def _origin_of(rows: Sequence[Row]) -> str:
    gpus = sorted({row["gpu"] for row in rows if row["gpu"]})
    runs = sorted({row["run"] for row in rows})
    return f"{', '.join(gpus) or 'no GPU'}; runs {', '.join(runs)}"


def _cells(pair: Pair) -> list[str]:
    ours = pair.ours
    cells = [problem_title(pair.shown), pair.shown["dtype"], *_times(pair)]
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
    cells.append(_memory(pair.theirs))
    return cells


def _models(rows: Sequence[Row]) -> str:
    """Whole models, one line per phase and shape; empty where no row is of tk or Triton.

    Decoding is shown through CUDA graphs where both were captured.
    """
    found = [pair for phase in PHASES for pair in pairs(row for row in rows if row["pass"] == phase)]
    if not found:
        return ""
    header = (
        "Phase",
        "Model",
        "tk ms",
        "Triton ms",
        "Triton",
        "speed-up",
        "tokens/s, tk",
        "tokens/s, Triton",
        "mLSTM kernels, tk",
        "mLSTM kernels, Triton",
        "peak GB, tk",
        "peak GB, Triton",
        "error, tk",
        "error, Triton",
    )
    lines = []
    for pair in found:
        shown = [row for row in (pair.ours, pair.theirs) if row is not None]
        phase = PASS_TITLES[pair.shown["pass"]]
        if all("graph_ms" in row for row in shown):
            phase += ", CUDA graph"
            shown_ms = [row and row | {"ms": row["graph_ms"]} for row in (pair.ours, pair.theirs)]
            pair = Pair(pair.shown, *shown_ms)
        both = (pair.ours, pair.theirs)
        figures = [[cell(row) if row else "-" for row in both] for cell in _MODEL_CELLS]
        lines.append([phase, str(shape_of(pair.shown)), *_times(pair), *(x for two in figures for x in two)])
    caption = (
        "Peak: all that is allocated. mLSTM kernels: their share of the GPU's time. Error: against "
        "mlstm_kernels' fp32 native path, of logits relative Frobenius, of training the largest difference "
        "of the first losses in nats"
    )
    return f"### {TITLES[MODEL]}\n\n{_markdown(header, lines)}\n\n{caption}; {_origin(found)}"


def _tokens_per_s(row: Row) -> str:
    return f"{row['shape']['B'] * row['shape']['T'] / row['ms'] * 1e3:,.0f}"


def _kernel_share(row: Row) -> str:
    return f"{row['kernel_share']:.1%}" if "kernel_share" in row else "-"


def _peak_gb(row: Row) -> str:
    return "-" if row["peak_mem_mb"] is None else f"{row['peak_mem_mb'] / 1024:.1f}"


def _against_fp32(row: Row) -> str:
    return f"{row['rel_err'][FP32_NATIVE]:.1e}" if FP32_NATIVE in row["rel_err"] else "-"


_MODEL_CELLS = (_tokens_per_s, _kernel_share, _peak_gb, _against_fp32)


def _memory(row: Row | None) -> str:
    return "-" if row is None or row["peak_mem_mb"] is None else f"{row['peak_mem_mb']:.0f}"


def _ablation(op: str, rows: Sequence[Row]) -> str:
    """ms with and without overlap, each line from one run, the latest with both; empty where none has."""
    contests: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        if row["schedule"]:
            contests.setdefault(contest_of(row), {})[row["schedule"]] = row
    latest = {
        problem_of(found["sequential"]): found for found in contests.values() if len(found) == len(SCHEDULES)
    }
    if not latest:
        return ""
    lines = [
        [problem_title(found["sequential"]), *(milliseconds(found[name]["ms"]) for name in SCHEDULES)]
        for found in latest.values()
    ]
    table = _markdown(("Shape", *(f"{name} ms" for name in SCHEDULES)), lines)
    origin = _origin_of([found["sequential"] for found in latest.values()])
    return f"### {TITLES[op]}, forward without and with overlap\n\n{table}\n\n{origin}"


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ruler, *lines))
