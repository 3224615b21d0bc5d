"""What README.md and docs/results.md show of the results on record, generated between markers."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import results
from .report import PASS_TITLES, errors_of, milliseconds, problem_title
from .results import Pair, Row
from .rivals import RIVALS
from .shapes import PASSES, PHASES, SWEEP, SWEEP_TOKENS, Shape

PACKAGES = {rival.operator for rival in RIVALS.values()}  # operators that more than one package computes
FIGURE = "docs/speedups.png"  # what the summary shows, from the file that it stands in
NOTHING = "No results are on record yet."
# what the figure has of one GPU and one commit: operator and shape, forward and both passes
HEADLINE = (
    ("mlstm_exp", Shape(8, 8192, 16, 128, 256)),
    ("mlstm_exp", Shape(8, 8192, 8, 256, 512)),
    ("simple_gla", Shape(8, 8192, 16, 128, 256)),
    ("gla", Shape(8, 8192, 16, 128, 256)),
    ("delta_rule", Shape(8, 8192, 16, 128, 128)),
    ("gated_delta_rule", Shape(8, 8192, 16, 128, 128)),
)

# the columns of a table: a header, and the cell of a pair
Columns = Sequence[tuple[str, Callable[[Pair], str]]]


def render(rows: Sequence[Row]) -> str:
    """All tables as Markdown: per operator and pass tk against the best baseline of its run, every package
    beside it, the same over the length, the host's time; whole models; the ablation."""
    parts: list[str] = []
    of = {op: [row for row in rows if row["op"] == op] for op in results.OPS}
    for op, own in of.items():
        if op in (results.STEP, *results.STEP_OF.values()):
            parts.append(_steps(op, own))
            continue
        for which in PASSES:
            chosen = [row for row in own if row["pass"] == which]
            title = f"{results.TITLES[op]}, {PASS_TITLES[which]}"
            found = results.pairs(row for row in chosen if not results.sweep_only(row))
            parts.append(_section(title, CONTEST, found))
            if op in PACKAGES:
                parts.append(_packages(f"{title}, every package", chosen))
            parts += _sweeps(f"{title}, over the length", [row for row in chosen if results.in_sweep(row)])
        parts.append(_hosts(f"{results.TITLES[op]}, host", own))
    parts.append(_models(of[results.MODEL]))
    parts += [_generated(op, of[op]) for op in results.GENERATED]
    parts += [_ablation(op, of[op]) for op in results.ABLATED]
    return "\n\n".join(filter(None, parts)) or NOTHING


def headline(rows: Sequence[Row]) -> list[Pair]:
    """What the README's figure shows: tk in bf16, on the default inputs, against its run's best baseline.
    Of all GPUs and commits those with the most of HEADLINE, of several the latest; in HEADLINE's order."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["dtype"] == "bf16" and results.is_plain(row) and _problem(row) in HEADLINE:
            groups.setdefault((str(row["gpu"]), str(row["commit"])), []).append(row)
    found = [[pair for pair in results.pairs(group) if pair.speed_up] for group in groups.values()]
    most = max(found, key=lambda chosen: (len(chosen), _last_date(chosen)), default=[])
    return sorted(most, key=_place)


def _problem(row: Row) -> tuple[str, Shape]:
    return row["op"], results.shape_of(row)


def _place(pair: Pair) -> tuple[int, int]:
    return HEADLINE.index(_problem(pair.shown)), PASSES.index(pair.shown["pass"])


def _last_date(found: Sequence[Pair]) -> str:
    return max((pair.shown["date"] for pair in found), default="")


def render_summary(rows: Sequence[Row]) -> str:
    """The README's figure, its range in words, and where it comes from."""
    chosen = headline(rows)
    if not chosen:
        return NOTHING
    ratios = [pair.speed_up or 0.0 for pair in chosen]
    between = f"{min(ratios):.1f} to {max(ratios):.1f} times as fast as the fastest correct baseline"
    row, day = chosen[0].shown, _last_date(chosen).partition("T")[0]
    what = f"bf16, {row['shape']['B']} sequences of {row['shape']['T']:,} tokens"
    origin = f"{row['gpu']}, commit {row['commit']}, {day}, PyTorch {row['torch']}, nvcc {row['nvcc']}"
    return f"![Speed-ups by operator and pass]({FIGURE})\n\n{between}; {what}; {origin}."


# by the name of their markers: all tables, in docs/results.md; a few lines, in README.md
REGIONS: dict[str, Callable[[Sequence[Row]], str]] = {"results": render, "summary": render_summary}


def update(path: Path, rows: Sequence[Row]) -> bool:
    """Replace what stands between the markers <!-- name:begin --> and <!-- name:end --> of a file, for each
    name in REGIONS; returns whether the file changed."""
    text = new = path.read_text(encoding="utf-8")
    for name, write in REGIONS.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        parts = re.split(f"({begin}|{end})", new)
        if parts[1::2] == [begin, end]:
            new = f"{parts[0]}{begin}\n{write(rows)}\n{end}{parts[4]}"
        elif len(parts) > 1:
            raise ValueError(f"{path}: expected one {begin} and after it one {end}")
    if not any(f"<!-- {name}:begin -->" in new for name in REGIONS):
        raise ValueError(f"{path}: expected <!-- {' or '.join(REGIONS)}:begin -->, and its end after it")
    if new != text:
        path.write_text(new, encoding="utf-8")
    return new != text


def _section(title: str, columns: Columns, items: Sequence[Pair], caption: str = "") -> str:
    """A heading, a table with a line per item, and what is said below it, at its end the GPUs and the runs;
    empty where there is no item."""
    if not items:
        return ""
    ruler = ["---", *["---:"] * (len(columns) - 1)]
    lines = [[cell(item) for _, cell in columns] for item in items]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in ([name for name, _ in columns], ruler, *lines))
    gpus = sorted({item.shown["gpu"] for item in items if item.shown["gpu"]})
    runs = sorted({item.shown["run"] for item in items})
    origin = f"{', '.join(gpus) or 'no GPU'}; runs {', '.join(runs)}"
    return f"### {title}\n\n{table}\n\n{caption}{origin}"


# Cells of a row; of a pair, "-" where the row is missing


Cell = Callable[[Row], str]
CellOfPair = Callable[[Pair], str]


def _figure(key: str, text: Callable[[Any], str]) -> Cell:
    """The cell of a figure, "-" for a row without it."""
    return lambda row: "-" if row.get(key) is None else text(row[key])


_ms, _graph_ms = _figure("ms", milliseconds), _figure("graph_ms", milliseconds)
_error = _figure("rel_err", errors_of)
_memory = _figure("peak_mem_mb", "{:.0f}".format)


def _variant(row: Row) -> str:
    return str(row["backend"].partition(":")[2])


def _shown(cell: Cell) -> CellOfPair:
    return lambda pair: cell(pair.shown)


def _ours(cell: Cell) -> CellOfPair:
    return lambda pair: "-" if pair.ours is None else cell(pair.ours)


def _theirs(cell: Cell) -> CellOfPair:
    return lambda pair: "-" if pair.theirs is None else cell(pair.theirs)


def _speed_up(pair: Pair) -> str:
    return f"{pair.speed_up:.2f}x" if pair.speed_up else "-"


# Tables

SHAPE = ("Shape", _shown(problem_title))
MODEL = ("Model", _shown(lambda row: str(results.shape_of(row))))
PROBLEM: Columns = (SHAPE, ("dtype", _shown(lambda row: row["dtype"])))
TIMES: Columns = (
    ("tk ms", _ours(_ms)),
    ("baseline ms", _theirs(_ms)),
    ("best baseline", _theirs(_variant)),
    ("speed-up", _speed_up),
)
CONTEST: Columns = (
    *PROBLEM,
    *TIMES,
    ("TFLOP/s", _ours(_figure("tflops", "{:.0f}".format))),
    ("GB/s", _ours(_figure("gbps", "{:.0f}".format))),
    ("roofline", _ours(_figure("roofline", "{:.0%}".format))),
    ("error", _ours(_error)),
    ("peak MB, tk", _ours(_memory)),
    ("peak MB, baseline", _theirs(_memory)),
)


def _packages(title: str, rows: Sequence[Row]) -> str:
    """The times of several packages beside tk, one line per problem of which a run has more than one. The
    variants of one package, as those of mLSTM, are no packages: the best of them stands with the contest."""
    by_contest: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in filter(results.is_baseline, rows):
        by_contest.setdefault(results.contest_of(row), {})[row["backend"]] = row

    def packages(pair: Pair) -> dict[str, Row]:
        return by_contest.get(results.contest_of(pair.shown), {})

    def against(name: str, cell: CellOfPair) -> CellOfPair:
        return lambda pair: cell(pair._replace(theirs=packages(pair).get(name)))

    shown = [pair for pair in results.pairs(rows) if pair.ours and pair.theirs and len(packages(pair)) > 1]
    columns = [*PROBLEM, TIMES[0]]
    for name in sorted({name for pair in shown for name in packages(pair)}):
        columns += [
            (f"{name.partition(':')[2]} ms", against(name, _theirs(_ms))),
            ("speed-up", against(name, _speed_up)),
            ("error", against(name, _theirs(_error))),
            ("peak MB", against(name, _theirs(_memory))),
        ]
    return _section(title, columns, shown)


def _hosts(title: str, rows: Sequence[Row]) -> str:
    """The host's time of short calls, of the latest run; empty where no row tells how many kernels it has."""
    latest: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = (results.problem_of(row), row["backend"])
        wanted = results.is_shipped(row) or results.is_baseline(row)
        if wanted and {"launch_us", "host_us"} <= row.keys() and row["date"] >= latest.get(key, row)["date"]:
            latest[key] = row
    columns: Columns = (
        SHAPE,
        ("pass", _shown(lambda row: PASS_TITLES[row["pass"]])),
        ("backend", _shown(lambda row: row["backend"])),
        ("call ms", _shown(_ms)),
        ("graph ms", _shown(_graph_ms)),
        ("host us", _shown(_figure("host_us", "{:.0f}".format))),
        ("launches", _shown(_figure("launches", str))),
        ("beyond them us", _shown(lambda row: f"{row['host_us'] - row['launch_us']:.0f}")),
    )
    caption = "Beyond them: the host's time for a call less that of as many launches of an empty kernel.\n\n"
    return _section(title, columns, [Pair(row, None, None) for row in latest.values()], caption)


def _steps(op: str, rows: Sequence[Row]) -> str:
    """One token, through CUDA graphs as decoding runs, and as plain calls, where the host may take longer."""
    header, other = "V-first ms", f"tk{results.V_FIRST}"
    if op == results.STEP:
        header, other = "in place ms", results.IN_PLACE
    others = {results.contest_of(row): row for row in rows if row["backend"] == other}

    def of_copy_rate(row: Row) -> str:
        graph = row.get("graph_ms")
        return f"{row['roofline'] * row['ms'] / graph:.0%}" if graph and row["roofline"] else "-"

    columns: Columns = (
        *PROBLEM,
        ("tk ms", _ours(_graph_ms)),
        (header, _shown(lambda row: _graph_ms(others.get(results.contest_of(row), {})))),
        ("Triton ms", _theirs(_graph_ms)),
        ("speed-up", lambda pair: _speed_up(_through_graphs(pair) or Pair(pair.shown, None, None))),
        ("of the copy rate", _ours(of_copy_rate)),
        ("plain call, tk ms", _ours(_ms)),
        ("plain call, Triton ms", _theirs(_ms)),
        ("error", _ours(_error)),
    )
    caption = "A call takes T steps on T states. Times are of CUDA graphs but for plain calls; "
    return _section(results.TITLES[op], columns, results.pairs(rows), caption)


def _through_graphs(pair: Pair) -> Pair | None:
    """The pair with the times of CUDA graphs; None where one of its rows has none."""
    if any("graph_ms" not in row for row in (pair.ours, pair.theirs) if row is not None):
        return None
    ours, theirs = (row and row | {"ms": row["graph_ms"]} for row in (pair.ours, pair.theirs))
    return Pair(pair.shown, ours, theirs)


def _sweeps(title: str, rows: Sequence[Row]) -> list[str]:
    """Per dtype the times over the length; none where only main shapes of the sweep were measured."""
    parts = []
    columns: Columns = (("T", _shown(lambda row: str(row["shape"]["T"]))), *TIMES)
    heads = f"H{SWEEP[0].H} {SWEEP[0].K}/{SWEEP[0].V}"
    for dtype in sorted({row["dtype"] for row in rows if results.sweep_only(row)}):
        found = results.pairs(row for row in rows if row["dtype"] == dtype)
        found.sort(key=lambda pair: pair.shown["shape"]["T"])
        flatness = f"flatness of tk (max / min): {_flatness(found)}"
        caption = f"B x T = {SWEEP_TOKENS:,}, {heads}, {dtype}; {flatness}; "
        parts.append(_section(title, columns, found, caption))
    return parts


def _flatness(found: Sequence[Pair]) -> str:
    """Largest over smallest time of tk; times of different runs are not divided."""
    ours = [pair.ours for pair in found if pair.ours]
    times = [row["ms"] for row in ours]
    one_run = len(ours) > 1 and len({row["run"] for row in ours}) == 1
    return f"{max(times) / min(times):.2f}" if one_run else "-"


def _tokens_per_s(row: Row) -> str:
    return f"{row['shape']['B'] * row['shape']['T'] / row['ms'] * 1e3:,.0f}"


def _generated(op: str, rows: Sequence[Row]) -> str:
    """Models that generate, one line per shape; empty where no row is of tk or FLA."""
    columns: Columns = (
        MODEL,
        ("tokens/s, tk", _ours(_tokens_per_s)),
        ("tokens/s, FLA", _theirs(_tokens_per_s)),
        ("speed-up", _speed_up),
    )
    return _section(results.TITLES[op], columns, results.pairs(rows), "Plain calls of generate(); ")


def _models(rows: Sequence[Row]) -> str:
    """Whole models, one line per phase and shape; empty where no row is of tk or Triton. Decoding is shown
    through CUDA graphs where both were captured."""
    found = sorted(results.pairs(rows), key=lambda pair: PHASES.index(pair.shown["pass"]))
    graphs = {id(pair.shown): _through_graphs(pair) for pair in found}
    found = [graphs[id(pair.shown)] or pair for pair in found]

    def phase(row: Row) -> str:
        return PASS_TITLES[row["pass"]] + ", CUDA graph" * bool(graphs[id(row)])

    def error(row: Row) -> str:
        return f"{row['rel_err'][results.FP32_NATIVE]:.1e}" if results.FP32_NATIVE in row["rel_err"] else "-"

    figures: dict[str, Cell] = {
        "tokens/s": _tokens_per_s,
        "mLSTM kernels": _figure("kernel_share", "{:.1%}".format),
        "peak GB": _figure("peak_mem_mb", lambda mb: f"{mb / 1024:.1f}"),
        "error": error,
    }
    columns: list[tuple[str, CellOfPair]] = [
        ("Phase", _shown(phase)),
        MODEL,
        ("tk ms", _ours(_ms)),
        ("Triton ms", _theirs(_ms)),
        ("Triton", _theirs(_variant)),
        ("speed-up", _speed_up),
    ]
    for name, cell in figures.items():
        columns += [(f"{name}, tk", _ours(cell)), (f"{name}, Triton", _theirs(cell))]
    caption = (
        "Peak: all that is allocated. mLSTM kernels: their share of the GPU's time. Error: against "
        "mlstm_kernels' fp32 native path, of logits relative Frobenius, of training the largest difference "
        "of the first losses in nats; "
    )
    return _section(results.TITLES[results.MODEL], columns, found, caption)


def _ablation(op: str, rows: Sequence[Row]) -> str:
    """ms without overlap, as theirs, and with it, each line from one run, the latest with both; empty where
    none has."""
    contests: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        if row["schedule"]:
            contests.setdefault(results.contest_of(row), {})[row["schedule"]] = row
    both = [[found[each] for each in results.SCHEDULES] for found in contests.values() if len(found) == 2]
    latest = {results.problem_of(theirs): Pair(theirs, ours, theirs) for theirs, ours in both}
    columns: Columns = (SHAPE, ("sequential ms", _theirs(_ms)), ("overlapped ms", _ours(_ms)))
    title = f"{results.TITLES[op]}, forward without and with overlap"
    return _section(title, columns, list(latest.values()))
