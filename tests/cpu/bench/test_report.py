from __future__ import annotations

import csv
import io
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from tfla_tk.bench import plots, readme, report, results
from tfla_tk.bench.__main__ import main
from tfla_tk.bench.results import write
from tfla_tk.bench.runner import FAILED, Outcome
from tfla_tk.bench.shapes import Shape
from tfla_tk.bench.variants import Variant

SHAPE = Shape(8, 8192, 16, 128, 256)


@pytest.fixture
def rows(make_row):
    return [
        make_row("tk", 0.5, schedule="overlapped"),
        make_row("tk", 0.6, schedule="sequential"),
        make_row("triton:limit_chunk_64", 3.9, peak_mem_mb=4096.0),
        make_row("triton:xl_chunk_128", 3.4, peak_mem_mb=2048.0),
        make_row("reference", 95.0),
    ]


def printed(outcomes: list[Outcome]) -> list[list[str]]:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report.contest_table(outcomes))
    lines = console.export_text().splitlines()
    return [
        [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")]
        for line in lines
        if "│" in line or "┃" in line
    ]


def test_table_of_a_contest(rows) -> None:
    outcomes = [Outcome("mlstm_exp", SHAPE, "fwd", Variant(r["backend"], r["backend"]), row=r) for r in rows]
    failed = Outcome("mlstm_exp", SHAPE, "fwd", Variant("triton:xl_chunk_256", "triton:xl_chunk_256"))
    failed.stop(FAILED, "error against fp64: h 4.0e-01 > 1.5e-02")
    failed.errors = {"h": 0.4}
    table = printed([*outcomes, failed])
    assert table[0] == ["backend", "ms", "speed-up", "TFLOP/s", "GB/s", "roofline", "error", "peak MB"]
    assert table[1] == ["tk:overlapped", "0.5", "6.80x", "377", "3246", "76%", "h 2.3e-03", "512"]
    assert [line[2] for line in table[2:]] == ["5.67x", "0.87x", "1.00x", "0.04x", ""]
    assert table[-1][:2] == ["triton:xl_chunk_256", "FAILED"] and "h 4.0e-01" in table[-1]
    assert report.reasons([*outcomes, failed]) == [
        "triton:xl_chunk_256: FAILED: error against fp64: h 4.0e-01 > 1.5e-02"
    ]


def test_table_without_a_gpu_leaves_columns_out(make_row) -> None:
    row = make_row("reference:chunkwise", 1.5, roofline=None, peak_mem_mb=None, gpu=None, tflops=0.02)
    outcome = Outcome(
        "mlstm_exp", SHAPE, "fwd", Variant("reference:chunkwise", "reference:chunkwise"), row=row
    )
    table = printed([outcome])
    assert table[0] == ["backend", "ms", "GFLOP/s", "GB/s", "error"]
    assert table[1][2] == "20"


def test_errors_show_the_worst_gradient() -> None:
    assert report.errors_of({"h": 2.3e-3, "dq": 4e-3, "df": 9e-3, "di": 1e-3}) == "h 2.3e-03, df 9.0e-03"
    assert report.errors_of({"h": 2.3e-3, "dq": float("nan"), "df": 9e-3}) == "h 2.3e-03, dq nan"
    assert report.errors_of({}) == ""


def test_host_time_is_a_column_where_it_was_measured(make_row) -> None:
    found = [make_row("tk", 0.02, host_us=41.2), make_row("triton:xl_chunk_128", 3.4)]
    table = printed(
        [Outcome("mlstm_exp", SHAPE, "fwd", Variant(r["backend"], r["backend"]), row=r) for r in found]
    )
    assert table[0][-2:] == ["peak MB", "host us"]
    assert [line[-1] for line in table[1:]] == ["41.2", ""]


def test_titles_tell_what_differs_from_the_default_inputs(make_row) -> None:
    assert report.problem_title(make_row()) == "B8 T8192 H16 128/256"
    assert report.problem_title(make_row(layout="bnsd", forget_bias=3.0)) == "B8 T8192 H16 128/256"
    row = make_row(layout="bsnd", forget_bias=12.0)
    assert report.problem_title(row) == "B8 T8192 H16 128/256, layout bsnd, forget bias 12"


def test_csv_has_a_column_per_dimension_and_error(tmp_path: Path, rows, make_row) -> None:
    more = {"layout": "bsnd", "forget_bias": 12.0, "host_us": 41.2, "repeats": 8}
    both = make_row(rel_err={"h": 1e-3, "df": 2e-3}, **more, **{"pass": "fwdbwd"})
    report.write_csv(tmp_path / "new" / "rows.csv", [*rows, both])
    with (tmp_path / "new" / "rows.csv").open() as file:
        found = list(csv.DictReader(file))
    assert len(found) == 6
    assert (found[0]["T"], found[0]["V"], found[0]["schedule"]) == ("8192", "256", "overlapped")
    assert (found[0]["ms"], found[0]["rel_err_h"], found[0]["rel_err_df"]) == ("0.5", "0.0023", "")
    assert found[-1]["rel_err_df"] == "0.002" and found[2]["schedule"] == ""
    assert [found[-1][key] for key in more] == ["bsnd", "12.0", "41.2", "8"]
    assert [found[0][key] for key in more] == [""] * 4


def test_readme_table(rows) -> None:
    text = readme.render(rows)
    assert "### mLSTM, exponential input gate, forward\n" in text
    cells = next(line for line in text.splitlines() if line.startswith("| B8 T8192")).strip("| ").split(" | ")
    assert cells[:6] == ["B8 T8192 H16 128/256", "bf16", "0.5", "3.4", "xl_chunk_128", "6.80x"]
    assert cells[6:] == ["377", "3246", "76%", "h 2.3e-03", "512", "2048"]
    assert "NVIDIA H200; runs run-a" in text
    assert "| B8 T8192 H16 128/256 | 0.6 | 0.5 |" in text


def test_readme_shows_the_shipped_kernel_not_the_fastest(rows) -> None:
    rows[0]["ms"] = 0.7
    line = next(line for line in readme.render(rows).splitlines() if line.startswith("| B8 T8192"))
    assert line.split(" | ")[2:4] == ["0.7", "3.4"]


def test_readme_forms_no_ratio_across_runs(make_row) -> None:
    text = readme.render([make_row("tk", 0.5, run="run-b"), make_row("triton:xl_chunk_128", 3.4)])
    line = next(line for line in text.splitlines() if line.startswith("| B8"))
    assert line.split(" | ")[2:6] == ["0.5", "-", "-", "-"]


def test_readme_shows_steps_through_graphs(make_row) -> None:
    """Ratio and share are of the graphs' times; of other rows the plain calls alone are known."""
    row = partial(make_row, op="mlstm_step", schedule=None, roofline=0.5)
    rows = [
        row("tk", 0.4, graph_ms=0.25),
        row("tk:in_place", 0.5, graph_ms=0.3),
        row("triton", 1.2, graph_ms=0.5),
        row("tk", 2.0, dtype="fp32"),
    ]
    text = readme.render(results.merge([], rows))
    sixteen, full = (line for line in text.splitlines() if line.startswith("| B"))
    assert sixteen.split(" | ")[1:9] == ["bf16", "0.25", "0.3", "0.5", "2.00x", "80%", "0.4", "1.2"]
    assert full.split(" | ")[1:9] == ["fp32", "-", "-", "-", "-", "-", "2", "-"]


def test_readme_shows_baselines_alone(make_row) -> None:
    text = readme.render([make_row("triton:xl_chunk_128", 10.6, **{"pass": "fwdbwd"})])
    line = next(line for line in text.splitlines() if line.startswith("| B8"))
    assert line.split(" | ")[2:6] == ["-", "10.6", "xl_chunk_128", "-"]
    assert "overlap" not in text


def lines_of(text: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the README's generated part."""
    section = next(part for part in text.split("### ") if part.startswith(f"{heading}\n"))
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return lines[2:]


def at_length(make_row, length: int, *args, **changes):
    shape = {"B": 65536 // length, "T": length, "H": 16, "K": 128, "V": 256}
    return make_row(*args, shape=shape, **changes)


EXP_FORWARD = "mLSTM, exponential input gate, forward"


def test_readme_keeps_other_inputs_apart(make_row) -> None:
    rows = [
        make_row("tk", 0.5),
        make_row("triton:xl_chunk_128", 3.0),
        make_row("tk", 0.6, layout="bsnd"),
        make_row("triton:xl_chunk_64", 3.6, layout="bsnd"),
        make_row("tk", 0.8, forget_bias=12.0),
    ]
    found = lines_of(readme.render(rows), EXP_FORWARD)
    assert [cells[0] for cells in found] == [
        "B8 T8192 H16 128/256",
        "B8 T8192 H16 128/256, layout bsnd",
        "B8 T8192 H16 128/256, forget bias 12",
    ]
    assert [cells[2:6] for cells in found] == [
        ["0.5", "3", "xl_chunk_128", "6.00x"],
        ["0.6", "3.6", "xl_chunk_64", "6.00x"],
        ["0.8", "-", "-", "-"],
    ]


def test_readme_shows_the_latest_run_not_the_fastest(make_row) -> None:
    later = {"run": "run-b", "date": "2026-11-21T10:00:00Z"}
    rows = [
        make_row("tk", 0.4, schedule="overlapped"),
        make_row("tk", 0.45, schedule="sequential"),
        make_row("tk", 0.5, **later),
        make_row("triton:xl_chunk_128", 3.0, **later),
    ]
    text = readme.render(rows)
    assert lines_of(text, EXP_FORWARD)[0][2:6] == ["0.5", "3", "xl_chunk_128", "6.00x"]
    times, _, schedules = text.partition(", forward without and with overlap\n")
    assert "runs run-b" in times and "run-a" not in times
    assert "runs run-a" in schedules and "run-b" not in schedules
    # both of one run, not of several
    heading = "mLSTM, exponential input gate, forward without and with overlap"
    assert [cells[1:] for cells in lines_of(text, heading)] == [["0.45", "0.4"]]
    fresh = [
        make_row("tk", 0.6 + 0.1 * n, schedule=s, **later) for n, s in enumerate(("sequential", "overlapped"))
    ]
    found = lines_of(readme.render([*rows, *fresh]), heading)
    assert [cells[1:] for cells in found] == [["0.6", "0.7"]]
    # one alone says nothing
    assert [cells[1:] for cells in lines_of(readme.render([*rows, *fresh[:1]]), heading)] == [["0.45", "0.4"]]


def test_readme_has_the_sweep_over_the_length(make_row) -> None:
    rows = [
        at_length(make_row, length, backend, ms)
        for length, ours, theirs in ((512, 0.4, 3.2), (8192, 0.44, 3.3), (65536, 0.5, 4.0))
        for backend, ms in (("tk", ours), ("triton:xl_chunk_64", 9.0), ("triton:xl_chunk_128", theirs))
    ]
    text = readme.render(rows[::-1])
    assert lines_of(text, f"{EXP_FORWARD}, over the length") == [
        ["512", "0.4", "3.2", "xl_chunk_128", "8.00x"],
        ["8192", "0.44", "3.3", "xl_chunk_128", "7.50x"],
        ["65536", "0.5", "4", "xl_chunk_128", "8.00x"],
    ]
    assert "B x T = 65,536, H16 128/256, bf16; flatness of tk (max / min): 1.25; NVIDIA H200" in text
    # lengths of the sweep alone stand there alone
    assert [cells[0] for cells in lines_of(text, EXP_FORWARD)] == [
        "B1 T65536 H16 128/256",
        "B8 T8192 H16 128/256",
    ]


def test_readme_has_no_sweep_of_main_shapes_or_other_inputs(make_row) -> None:
    rows = [at_length(make_row, length) for length in (2048, 8192, 65536)]
    rows.append(at_length(make_row, 512, layout="bsnd"))
    text = readme.render(rows)
    assert "over the length" not in text
    assert lines_of(text, EXP_FORWARD)[-1][0] == "B128 T512 H16 128/256, layout bsnd"


def test_readme_gives_no_flatness_across_runs(make_row) -> None:
    rows = [at_length(make_row, 512), at_length(make_row, 8192, run="run-b")]
    assert "flatness of tk (max / min): -;" in readme.render(rows)


def test_readme_region_is_replaced_and_nothing_else(tmp_path: Path, rows) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"# Title\n\n{readme.BEGIN}\nold\n{readme.END}\n\nThe rest.\n")
    assert readme.update(path, rows)
    text = path.read_text()
    assert text.startswith(f"# Title\n\n{readme.BEGIN}\n### mLSTM") and text.endswith(
        f"{readme.END}\n\nThe rest.\n"
    )
    assert "old" not in text
    assert not readme.update(path, rows)
    assert readme.update(path, [])
    assert path.read_text() == (
        f"# Title\n\n{readme.BEGIN}\nNo results are on record yet.\n{readme.END}\n\nThe rest.\n"
    )


@pytest.mark.parametrize(
    "begin, end", [(readme.BEGIN, readme.END), (readme.SUMMARY_BEGIN, readme.SUMMARY_END)]
)
@pytest.mark.parametrize("text", ["", "{begin}", "{end}", "{end}\n{begin}", "{begin}{begin}{end}"])
def test_readme_without_its_markers_is_left_alone(
    tmp_path: Path, rows, begin: str, end: str, text: str
) -> None:
    path = tmp_path / "README.md"
    text = text.format(begin=begin, end=end)
    path.write_text(text)
    with pytest.raises(ValueError, match=begin if text else "results:begin"):
        readme.update(path, rows)
    assert path.read_text() == text


def test_readme_command(tmp_path: Path, rows, make_row, capsys) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path / "h200.json", [*rows, make_row("tk", 0.45)])
    (tmp_path / "README.md").write_text(f"{readme.SUMMARY_BEGIN}\n{readme.SUMMARY_END}\n")
    (tmp_path / "results.md").write_text(f"{readme.BEGIN}\n{readme.END}\n")
    command = ["readme", *(str(tmp_path / name) for name in ("h200.json", "README.md", "results.md"))]
    assert main(command) == 0 and capsys.readouterr().out.count("changed") == 2
    assert main(command) == 0 and capsys.readouterr().out.count("up to date") == 2
    assert "### mLSTM" in (tmp_path / "results.md").read_text()
    summary = (tmp_path / "README.md").read_text()
    assert f"]({readme.FIGURE})" in summary and "NVIDIA H200, commit abc" in summary
    assert (tmp_path / readme.FIGURE).read_bytes().startswith(b"\x89PNG")


def contests(make_row, entries, **changes):
    """tk and two baselines, the faster one 4 times as slow."""
    return [
        make_row(backend, ms, op=op, shape=shape.as_dict(), **{"pass": which}, **changes)
        for op, shape in entries
        for which in ("fwdbwd", "fwd")
        for backend, ms in (("tk", 0.5), ("triton:a", 4.0), ("triton:b", 2.0))
    ]


def test_the_headline_has_its_own_order(make_row) -> None:
    found = readme.headline(contests(make_row, readme.HEADLINE)[::-1])
    assert [(pair.shown["op"], results.shape_of(pair.shown), pair.shown["pass"]) for pair in found] == [
        (*entry, which) for entry in readme.HEADLINE for which in ("fwd", "fwdbwd")
    ]
    assert len({op for op, _ in readme.HEADLINE}) == 5  # every family
    assert all(pair.speed_up == 4 and pair.theirs["backend"] == "triton:b" for pair in found)


def test_the_headline_is_of_one_gpu_and_one_commit(make_row) -> None:
    """That with the most of it, of several the latest."""
    few = contests(make_row, readme.HEADLINE[:2], commit="few", run="few", date="2026-11-29T10:00:00Z")
    old = contests(make_row, readme.HEADLINE[1:4], commit="old", run="old")
    late = contests(make_row, readme.HEADLINE[1:4], commit="late", run="late", date="2026-11-21T10:00:00Z")
    other = contests(make_row, readme.HEADLINE[1:3], commit="late", run="other", gpu="NVIDIA H100 80GB HBM3")
    found = readme.headline([*late, *few, *old, *other])
    assert len(found) == 6
    assert {(pair.shown["commit"], pair.shown["gpu"]) for pair in found} == {("late", "NVIDIA H200")}


def test_the_headline_shows_contests_on_the_default_inputs_alone(make_row) -> None:
    alone = [make_row("tk", 0.5), make_row("triton:a", 2.0, run="run-b")]
    other = [make_row(backend, 1.0, layout="bsnd") for backend in ("tk", "triton:a")]
    half = [make_row(backend, 1.0, dtype="fp16") for backend in ("tk", "triton:a")]
    shape = {"B": 1, "T": 8192, "H": 8, "K": 256, "V": 512, "layers": 1, "width": 4096}
    model = [
        make_row(name, op="model_step", shape=shape, tflops=None, gbps=None, **{"pass": "train"})
        for name in ("tk", "triton")
    ]
    rows = [*alone, *other, *half, *model]
    assert readme.headline(rows) == [] and readme.render_summary(rows) == "No results are on record yet."


def test_the_figure_has_a_bar_per_speed_up(tmp_path: Path, make_row) -> None:
    pytest.importorskip("matplotlib")
    plots.write_speed_ups(tmp_path / "speedups.svg", readme.headline(contests(make_row, readme.HEADLINE[:2])))
    text = (tmp_path / "speedups.svg").read_text()
    assert text.count("<!--  4.0x (0.5 ms, b 2 ms) -->") == 4
    for title in ("16 heads of 128/256", "8 heads of 256/512", "forward", "forward + backward"):
        assert text.count(f"<!-- {title} -->") == 1
    with pytest.raises(ValueError, match="at least one speed-up"):
        plots.write_speed_ups(tmp_path / "none.svg", [])


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plot_of_bars(tmp_path: Path, rows, make_row, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    both = make_row("triton:xl_chunk_128", 10.6, **{"pass": "fwdbwd"})
    plots.write_plot(tmp_path / f"rows.{suffix}", [*rows, both])
    assert (tmp_path / f"rows.{suffix}").read_bytes().startswith(magic)


def test_plot_of_a_sweep(tmp_path: Path, make_row) -> None:
    pytest.importorskip("matplotlib")
    sweep = [
        at_length(make_row, length, backend, ms)
        for backend, ms in (("tk", 0.5), ("triton:xl_chunk_64", 3.9), ("triton:xl_chunk_128", 3.4))
        for length in (2048, 4096, 8192)
    ]
    assert plots.is_sweep(sweep)
    assert not plots.is_sweep(sweep[:2])
    assert not plots.is_sweep([*sweep, make_row(shape={"B": 1, "T": 8192, "H": 16, "K": 128, "V": 256})])
    lines = plots.sweep_lines(sweep)
    assert {name: {row["ms"] for row in rows} for name, rows in lines.items()} == {
        "tk": {0.5},
        "best baseline": {3.4},
    }
    # without one of them every backend is a line
    assert list(plots.sweep_lines(sweep[3:])) == ["triton:xl_chunk_64", "triton:xl_chunk_128"]
    plots.write_plot(tmp_path / "sweep.svg", sweep)
    text = (tmp_path / "sweep.svg").read_text()
    assert text.count("<!-- best baseline -->") == 1 and "65,536 tokens" in text and "<!-- 4,096 -->" in text


def test_a_plot_has_a_panel_per_dtype_and_conditions(tmp_path: Path, make_row) -> None:
    pytest.importorskip("matplotlib")
    rows = [make_row(), make_row(layout="bsnd"), make_row(dtype="fp16"), make_row("reference", 90.0)]
    plots.write_plot(tmp_path / "rows.svg", rows)
    text = (tmp_path / "rows.svg").read_text()
    title = "mLSTM, exponential input gate, forward"
    for panel in ("bf16", "fp16", "bf16, layout bsnd"):
        assert text.count(f"<!-- {title}, {panel} -->") == 1


def test_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        plots.write_plot(tmp_path / "rows.png", [])
