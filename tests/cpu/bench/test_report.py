"""What is shown of rows: the table of a contest, README.md and docs/results.md, plots."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from tfla_tk.bench import plots, readme, report, results
from tfla_tk.bench.__main__ import main
from tfla_tk.bench.runner import FAILED, Outcome
from tfla_tk.bench.shapes import Shape
from tfla_tk.bench.variants import Variant

ROOT = Path(__file__).parents[3]
EXP = "mLSTM, exponential input gate"
MARKERS = [(f"<!-- {name}:begin -->", f"<!-- {name}:end -->") for name in ("results", "summary")]


@pytest.fixture
def rows(make_row):
    return [
        make_row("tk", 0.5, schedule="overlapped"),
        make_row("tk", 0.6, schedule="sequential"),
        make_row("triton:limit_chunk_64", 3.9, peak_mem_mb=4096.0),
        make_row("triton:xl_chunk_128", 3.4, peak_mem_mb=2048.0),
        make_row("reference", 95.0),
    ]


def printed(rows, *others: Outcome) -> list[list[str]]:
    """The cells of the table of a contest."""
    outcomes = [Outcome(Variant(row["backend"]), row=row) for row in rows]
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report.contest_table([*others, *outcomes]))
    lines = [line.replace("┃", "│") for line in console.export_text().splitlines()]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if "│" in line]


def test_table_of_a_contest(rows) -> None:
    reason = "error against fp64: h 4.0e-01 > 1.5e-02"
    failed = Outcome(Variant("triton:xl_chunk_256"), status=FAILED, reason=reason, errors={"h": 0.4})
    table = printed(rows, failed)
    assert table[0] == ["backend", "ms", "speed-up", "TFLOP/s", "GB/s", "roofline", "error", "peak MB"]
    assert table[1] == ["triton:xl_chunk_256", "FAILED", "", "", "", "", "h 4.0e-01", ""]
    assert table[2] == ["tk:overlapped", "0.5", "6.80x", "377", "3246", "76%", "h 2.3e-03", "512"]
    assert [line[2] for line in table[3:]] == ["5.67x", "0.87x", "1.00x", "0.04x"]
    assert report.reasons([failed]) == [f"triton:xl_chunk_256: FAILED: {reason}"]


@pytest.mark.parametrize(
    ("record", "pages"),
    [("h200", ("README.md", "docs/results.md")), ("h100_80gb_hbm3", ("docs/results-h100.md",))],
)
def test_pages_are_those_of_the_results_on_record(record: str, pages, tmp_path: Path, capsys) -> None:
    """`make tables` writes them, and the figure."""
    pytest.importorskip("matplotlib")
    copies = [str(shutil.copy(ROOT / page, tmp_path)) for page in pages]
    assert main(["readme", str(results.FOLDER / f"{record}.json"), *copies]) == 0
    assert capsys.readouterr().out.count(": up to date\n") == len(pages)
    if "README.md" in pages:
        assert (tmp_path / readme.FIGURE).read_bytes().startswith(b"\x89PNG")


def lines_of(rows, heading: str) -> list[list[str]]:
    """The cells of the table below a heading; none where there is no such table."""
    sections = [part for part in readme.render(rows).split("### ") if part.startswith(f"{heading}\n")]
    lines = [line.strip("| ").split(" | ") for part in sections for line in part.splitlines() if "|" in line]
    return lines[2:]


OVERLAP = f"{EXP}, forward without and with overlap"


def test_tables_form_no_ratio_across_runs_and_inputs(make_row) -> None:
    apart = [make_row("tk", 0.5, run="run-b"), make_row("triton:xl_chunk_128", 3.4)]
    assert lines_of(apart, EXP) == [["B8 T8192 H16 128/256", "0.5", "-", "-", "-", "-"]]
    assert lines_of(apart[1:], EXP) == []
    rows = [
        make_row("tk", 0.5, rel_err={"h": 1e-3}),
        make_row(
            "tk", 2.0, rel_err={"h": 2e-3, "dq": 4e-3, "dk": 3e-3}, peak_mem_mb=30.0, **{"pass": "fwdbwd"}
        ),
        make_row("triton:xl_chunk_128", 8.0, peak_mem_mb=60.0, **{"pass": "fwdbwd"}),
        make_row("triton:xl_chunk_64", 4.0),
        make_row("triton:xl_chunk_128", 3.0),
        make_row("reference", 0.1),
        make_row("tk", 0.6, layout="bsnd"),
        make_row("triton:xl_chunk_64", 3.6, layout="bsnd"),
        make_row("tk", 0.8, forget_bias=12.0),
    ]
    assert lines_of(rows, EXP) == [
        ["B8 T8192 H16 128/256", "0.5", "6.00x", "2", "4.00x", "50%"],
        ["B8 T8192 H16 128/256, layout bsnd", "0.6", "6.00x", "-", "-", "100%"],
        ["B8 T8192 H16 128/256, forget bias 12", "0.8", "-", "-", "-", "-"],
    ]
    assert "Errors up to h 2.3e-03, dq 4.0e-03; NVIDIA H200, 2026-11-20\n" in f"{readme.render(rows)}\n"


def test_every_package_has_a_column(make_row) -> None:
    backends = {"tk": 0.5, "triton:fla": 2.0, "tilelang:flash_qla": 1.0}
    rows = [make_row(name, ms, op="gated_delta_rule", rel_err={"o": 1e-3}) for name, ms in backends.items()]
    assert lines_of(rows, "gated delta rule")[0][1:4] == ["0.5", "4.00x", "2.00x"]


def test_steps_are_shown_by_token_and_layout(make_row) -> None:
    graphs = {"tk": 0.012, "tk:v_first": 0.010, "triton:fla": 0.024, "triton:fla:v_first": 0.015}
    shape = Shape(8, 4, 16, 128, 256).as_dict()
    rows = [
        make_row(name, 1.0, op="gla_step", shape=shape, graph_ms=ms, roofline=0.006, rel_err={"o": 1e-3})
        for name, ms in graphs.items()
    ]
    assert lines_of(rows, "GLA, one step") == [["B8 H16 128/256", "3.0", "50%", "2.00x", "2.5", "1.50x"]]


def test_the_ablation_is_of_one_run(make_row) -> None:
    """The latest with both schedules; the other tables are of the latest run with a baseline."""
    later = {"run": "run-b", "date": "2026-11-21T10:00:00Z"}
    rows = [make_row("tk", ms, schedule=s) for s, ms in (("overlapped", 0.4), ("sequential", 0.45))]
    rows += [make_row("tk", 0.5, **later), make_row("triton:xl_chunk_128", 3.0, **later)]
    assert lines_of(rows, EXP)[0][1:3] == ["0.5", "6.00x"]
    times, _, schedules = readme.render(rows).partition(f"{OVERLAP}\n")
    assert "2026-11-21" in times and "2026-11-20" not in times
    assert "2026-11-20" in schedules and "2026-11-21" not in schedules
    fresh = [make_row("tk", ms, schedule=s, **later) for s, ms in (("sequential", 0.6), ("overlapped", 0.7))]
    assert lines_of([*rows, *fresh], OVERLAP)[0][1:] == ["0.6", "0.7"]
    assert lines_of([*rows, *fresh[:1]], OVERLAP)[0][1:] == ["0.45", "0.4"]


def test_what_stands_between_the_markers_is_replaced_and_nothing_else(tmp_path: Path, rows) -> None:
    path, (begin, end) = tmp_path / "README.md", MARKERS[0]
    path.write_text(f"# Title\n\n{begin}\nold\n{end}\n\nThe rest.\n")
    assert readme.update(path, rows) and not readme.update(path, rows)
    text = path.read_text()
    assert text.startswith(f"# Title\n\n{begin}\n### mLSTM") and "old" not in text
    assert text.endswith(f"{end}\n\nThe rest.\n")
    assert readme.update(path, [])
    assert path.read_text() == f"# Title\n\n{begin}\nNo results are on record yet.\n{end}\n\nThe rest.\n"


@pytest.mark.parametrize("markers", MARKERS)
def test_a_file_without_its_markers_is_left_alone(tmp_path: Path, rows, markers) -> None:
    path = tmp_path / "README.md"
    for text in ("", "{0}", "{1}", "{1}\n{0}", "{0}{0}{1}"):
        path.write_text(text := text.format(*markers))
        with pytest.raises(ValueError, match=markers[0] if text else "results or summary:begin"):
            readme.update(path, rows)
        assert path.read_text() == text


def contests(make_row, entries, **changes):
    """tk and two baselines, the faster one 4 times as slow."""
    return [
        make_row(backend, ms, op=op, shape=shape.as_dict(), **{"pass": which}, **changes)
        for op, shape in entries
        for which in ("fwdbwd", "fwd")
        for backend, ms in (("tk", 0.5), ("triton:a", 4.0), ("triton:b", 2.0))
    ]


def test_the_headline_is_of_one_gpu(make_row) -> None:
    """That with the most of it; of the latest run, against the fastest baseline of any. README.md, which is
    compared, has the order."""
    old = contests(make_row, readme.HEADLINE[:3], run="old")
    late = contests(make_row, readme.HEADLINE[1:4], run="late", date="2026-11-21T10:00:00Z")
    other = contests(make_row, readme.HEADLINE[1:3], run="other", gpu="NVIDIA H100 80GB HBM3")
    old[1]["ms"], old[7]["ms"] = 1.0, 1.5  # of forward and backward of the first problem and of the second
    found = readme.headline([*late, *old, *other])
    assert [pair.shown["run"] for pair in found] == ["old"] * 2 + ["late"] * 6
    assert [pair.speed_up for pair in found] == [4.0, 2.0, 4.0, 3.0, 4.0, 4.0, 4.0, 4.0]
    assert {pair.shown["gpu"] for pair in found} == {"NVIDIA H200"}


def test_figures(tmp_path: Path, make_row) -> None:
    """A bar per speed-up; a panel per pass, dtype and conditions."""
    pytest.importorskip("matplotlib")
    path, both = tmp_path / "figure.svg", make_row("triton:xl_chunk_128", 10.6, **{"pass": "fwdbwd"})
    plots.write_speed_ups(path, readme.headline(contests(make_row, readme.HEADLINE[:2])))
    assert path.read_text().count("<!--  4.0x (0.5 ms, b 2 ms) -->") == 4
    plots.write_plot(path, [make_row(), make_row(layout="bsnd"), make_row(dtype="fp16"), both])
    for panel in ("forward, bf16", "forward, fp16", "forward, bf16, layout bsnd", "forward + backward, bf16"):
        assert path.read_text().count(f"<!-- {EXP}, {panel} -->") == 1
