"""What README.md and docs/results.md show of the results on record, generated between markers."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import results
from .fla import VARIANT as FLA
from .report import PASS_TITLES, errors_of, milliseconds, problem_title
from .results import Pair, Row
from .shapes import PASSES, PHASES, Shape

FIGURE = "docs/speedups.png"  # what the summary shows, from the file that it stands in
NOTHING = "No results are on record yet."
# what the figure has of one GPU: operator and shape, forward and both passes
HEADLINE = (
    ("mlstm_exp", Shape(8, 8192, 16, 128, 256)),
    ("mlstm_exp", Shape(8, 8192, 8, 256, 512)),
    ("simple_gla", Shape(8, 8192, 16, 128, 256)),
    ("gla", Shape(8, 8192, 16, 128, 256)),
    ("delta_rule", Shape(8, 8192, 16, 128, 128)),
    ("gated_delta_rule", Shape(8, 8192, 16, 128, 128)),
)

# a column of a table: its header, and the cell of an item
Columns = Sequence[tuple[str, Callable[[Any], str]]]
# packages by the variant of a baseline; mlstm_kernels has variants of its own
PACKAGES = {"fla": "FLA", "mamba_ssm": "mamba_ssm", "flash_qla": "FlashQLA"}


def render(rows: Sequence[Row]) -> str:
    """All tables as Markdown: per operator tk against every package, one step of decoding, whole models, the
    ablation."""
    parts: list[str] = []
    for op in results.OPS:
        own = [row for row in rows if row["op"] == op]
        if op in (results.STEP, *results.STEP_OF.values()):
            parts.append(_steps(op, own))
        elif op == results.MODEL:
            parts.append(_models(own))
        elif op in results.GENERATED:
            parts.append(_generated(op, own))
        else:
            parts.append(_contests(op, own))
    parts += [_ablation(op, [row for row in rows if row["op"] == op]) for op in results.ABLATED]
    return "\n\n".join(filter(None, parts)) or NOTHING


def headline(rows: Sequence[Row]) -> list[Pair]:
    """What the README's figure shows: tk in bf16, on the default inputs, against the fastest baseline that is
    on record. Of the GPU with the most of HEADLINE, of several the latest; in HEADLINE's order."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["dtype"] == "bf16" and results.is_plain(row) and _problem(row) in HEADLINE:
            groups.setdefault(str(row["gpu"]), []).append(row)
    found = [_with_fastest_baselines(group) for group in groups.values()]
    most = max(found, key=lambda chosen: (len(chosen), _last_date(chosen)), default=[])
    return sorted(most, key=_place)


def _with_fastest_baselines(rows: Sequence[Row]) -> list[Pair]:
    """The pairs that have a baseline, each with the fastest one on record, of any run."""
    fastest = results.baselines(rows, per=results.problem_of)
    pairs = [pair for pair in results.pairs(rows) if pair.speed_up]
    return [pair._replace(theirs=fastest[results.problem_of(pair.shown)]) for pair in pairs]


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
    times = f"{min(ratios):.1f} to {max(ratios):.1f} times"
    between = f"At these shapes {times} as fast as the fastest correct baseline on record"
    shape = chosen[0].shown["shape"]
    what = f"bf16, {shape['B']} sequences of {shape['T']:,} tokens"
    origin = _origin([row for pair in chosen for row in (pair.ours, pair.theirs) if row])
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


def _section(title: str, columns: Columns, items: Sequence[Any], caption: str) -> str:
    """A heading, a table with a line per item, and what is said below it; empty where there is no item."""
    if not items:
        return ""
    ruler = ["---", *["---:"] * (len(columns) - 1)]
    lines = [[cell(item) for _, cell in columns] for item in items]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in ([name for name, _ in columns], ruler, *lines))
    return f"### {title}\n\n{table}\n\n{caption}"


def _origin(found: Sequence[Pair | Row]) -> str:
    """The GPUs and the days of the rows."""
    rows = [each.shown if isinstance(each, Pair) else each for each in found]
    gpus = sorted({row["gpu"] for row in rows if row["gpu"]})
    days = sorted({row["date"].partition("T")[0] for row in rows})
    return f"{', '.join(gpus) or 'no GPU'}, {' to '.join(dict.fromkeys((*days[:1], *days[-1:])))}"


# Cells of a row


Cell = Callable[[Row], str]


def _figure(key: str, text: Callable[[Any], str]) -> Cell:
    """The cell of a figure, "-" for a row without it."""
    return lambda row: "-" if row.get(key) is None else text(row[key])


_ms = _figure("ms", milliseconds)
_memory_gb = _figure("peak_mem_mb", lambda mb: f"{mb / 1024:.1f}")


def _ours(cell: Cell) -> Callable[[Pair], str]:
    return lambda pair: "-" if pair.ours is None else cell(pair.ours)


def _theirs(cell: Cell) -> Callable[[Pair], str]:
    return lambda pair: "-" if pair.theirs is None else cell(pair.theirs)


def _ratio(ours: Row | None, theirs: Row | None, key: str = "ms") -> str:
    """How many times as fast we are."""
    return f"{theirs[key] / ours[key]:.2f}x" if ours and theirs else "-"


def _speed_up(pair: Pair) -> str:
    return _ratio(pair.ours, pair.theirs)


def _title(row: Row) -> str:
    """The problem, with its dtype where that is not bf16."""
    return problem_title(row) + f", {row['dtype']}" * (row["dtype"] != "bf16")


# Tables


def _package_of(baseline: Row) -> str:
    return PACKAGES.get(baseline["backend"].partition(":")[2], "mlstm_kernels")


def _contests(op: str, rows: Sequence[Row]) -> str:
    """The times of both passes against every package, a line per problem; points of the sweep over the length
    are left out."""
    rows = [row for row in rows if not results.sweep_only(row)]
    # the fastest of a package, by package and contest
    rivals = results.baselines(rows, per=lambda row: (_package_of(row), results.contest_of(row)))
    problems: dict[tuple[Any, ...], dict[str, Pair]] = {}  # pairs by pass
    for pair in results.pairs(rows):
        if pair.ours is not None:
            _, shape, which, *rest = results.problem_of(pair.shown)
            problems.setdefault((shape, *rest), {})[which] = pair

    def time(which: str) -> Callable[[dict[str, Pair]], str]:
        return lambda found: _ours(_ms)(found[which]) if which in found else "-"

    def against(package: str, which: str) -> Callable[[dict[str, Pair]], str]:
        def cell(found: dict[str, Pair]) -> str:
            ours = found[which].ours if which in found else None
            rival = rivals.get((package, results.contest_of(ours))) if ours else None
            return _ratio(ours, rival)

        return cell

    def memory(found: dict[str, Pair]) -> str:
        pair = found[max(found, key=PASSES.index)]
        if not (pair.ours and pair.theirs and pair.theirs["peak_mem_mb"]):
            return "-"
        return f"{pair.ours['peak_mem_mb'] / pair.theirs['peak_mem_mb']:.0%}"

    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("Shape", lambda found: _title(next(iter(found.values())).shown))
    ]
    packages = sorted({package for package, _ in rivals})
    for which in PASSES:
        columns.append((f"{PASS_TITLES[which]}, ms", time(which)))
        columns += [(package, against(package, which)) for package in packages]
    columns.append(("memory", memory))
    shown = [pair for found in problems.values() for pair in found.values()]
    caption = f"{_errors(shown)}; {_origin(shown)}"
    return _section(results.TITLES[op], columns, list(problems.values()), caption)


def _errors(shown: Sequence[Pair]) -> str:
    """The largest errors of tk in bf16: of the output and of the worst gradient."""
    worst: dict[str, float] = {}
    for pair in shown:
        if pair.ours is not None and pair.shown["dtype"] == "bf16":
            for name, error in pair.ours["rel_err"].items():
                worst[name] = max(error, worst.get(name, 0.0))
    return f"Errors up to {errors_of(worst)}"


def _steps(op: str, rows: Sequence[Row]) -> str:
    """One token through CUDA graphs, as decoding runs."""
    found = [pair for pair in results.pairs(rows) if pair.ours and "graph_ms" in pair.ours]
    by_backend = {(row["backend"], results.contest_of(row)): row for row in rows}

    def row_of(pair: Pair, backend: str) -> Row | None:
        return by_backend.get((backend, results.contest_of(pair.shown)))

    def time(backend: str) -> Callable[[Pair], str]:
        def cell(pair: Pair) -> str:
            row = row_of(pair, backend)
            return f"{1e3 * row['graph_ms'] / row['shape']['T']:.1f}" if row else "-"

        return cell

    def against(ours: str, theirs: str) -> Callable[[Pair], str]:
        return lambda pair: _ratio(row_of(pair, ours), row_of(pair, theirs), "graph_ms")

    def of_copy_rate(row: Row) -> str:
        return f"{row['roofline'] * row['ms'] / row['graph_ms']:.0%}" if row["roofline"] else "-"

    def title(pair: Pair) -> str:
        shape = results.shape_of(pair.shown)
        return _title(pair.shown).replace(f" T{shape.T}", "")

    columns = [("Shape", title), ("us", time("tk")), ("of the copy rate", _ours(of_copy_rate))]
    if op == results.STEP:
        columns += [("mlstm_kernels", against("tk", "triton")), ("in place, us", time(results.IN_PLACE))]
    else:
        ours, theirs = f"tk{results.V_FIRST}", f"{FLA}{results.V_FIRST}"
        columns += [("FLA", against("tk", FLA)), ("V-first, us", time(ours)), ("FLA", against(ours, theirs))]
    return _section(results.TITLES[op], columns, found, _origin(found))


def _through_graphs(pair: Pair) -> Pair:
    """The pair with the times of CUDA graphs where both rows have them."""
    if not all(row and "graph_ms" in row for row in (pair.ours, pair.theirs)):
        return pair
    ours, theirs = (row and row | {"ms": row["graph_ms"]} for row in (pair.ours, pair.theirs))
    return Pair(pair.shown | {"graphs": True}, ours, theirs)


def _tokens_per_s(row: Row) -> str:
    return f"{row['shape']['B'] * row['shape']['T'] / row['ms'] * 1e3:,.0f}"


# of whole models
TOKENS: Columns = (
    ("Model", lambda pair: str(results.shape_of(pair.shown))),
    ("tokens/s", _ours(_tokens_per_s)),
    ("speed-up", _speed_up),
)


def _generated(op: str, rows: Sequence[Row]) -> str:
    """Models that generate, one line per shape."""
    found = results.pairs(rows)
    return _section(results.TITLES[op], TOKENS, found, _origin(found))


def _models(rows: Sequence[Row]) -> str:
    """Whole models, one line per phase and shape. Decoding is shown through CUDA graphs where both were
    captured."""
    phases = [results.pairs(row for row in rows if row["pass"] == phase) for phase in PHASES]
    found = [_through_graphs(pair) for pairs in phases for pair in pairs]

    def phase(pair: Pair) -> str:
        return PASS_TITLES[pair.shown["pass"]] + ", CUDA graph" * ("graphs" in pair.shown)

    columns: Columns = (
        ("Phase", phase),
        *TOKENS,
        ("peak GB", _ours(_memory_gb)),
        ("baseline's", _theirs(_memory_gb)),
    )
    return _section(results.TITLES[results.MODEL], columns, found, _origin(found))


def _ablation(op: str, rows: Sequence[Row]) -> str:
    """ms with and without overlap, each line from one run, the latest with both; empty where none has."""
    contests: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        if row["schedule"]:
            contests.setdefault(results.contest_of(row), {})[row["schedule"]] = row
    both = [found for found in contests.values() if len(found) == len(results.SCHEDULES)]
    latest = list({results.problem_of(found["sequential"]): found for found in both}.values())
    columns: Columns = (
        ("Shape", lambda found: _title(found["sequential"])),
        *((f"{name} ms", lambda found, name=name: _ms(found[name])) for name in results.SCHEDULES),
    )
    origin = _origin([found["sequential"] for found in latest])
    return _section(f"{results.TITLES[op]}, forward without and with overlap", columns, latest, origin)
