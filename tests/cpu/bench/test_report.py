from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from tfla_tk.bench import plots, readme, report
from tfla_tk.bench.__main__ import main
from tfla_tk.bench.results import write
from tfla_tk.bench.runner import FAILED, Outcome
from tfla_tk.bench.shapes import Shape
from tfla_tk.bench.variants import Variant

SHAPE = Shape(8, 8192, 16, 128, 256)


@pytest.fixture
def rows(make_row):
    return [
        make_row("tk", 0.5, schedule="pingpong"),
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
    assert table[1] == ["tk:pingpong", "0.5", "6.80x", "377", "3246", "76%", "h 2.3e-03", "512"]
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


def test_csv_has_a_column_per_dimension_and_error(tmp_path: Path, rows, make_row) -> None:
    both = make_row(rel_err={"h": 1e-3, "df": 2e-3}, **{"pass": "fwdbwd"})
    report.write_csv(tmp_path / "new" / "rows.csv", [*rows, both])
    with (tmp_path / "new" / "rows.csv").open() as file:
        found = list(csv.DictReader(file))
    assert len(found) == 6
    assert (found[0]["T"], found[0]["V"], found[0]["schedule"]) == ("8192", "256", "pingpong")
    assert (found[0]["ms"], found[0]["rel_err_h"], found[0]["rel_err_df"]) == ("0.5", "0.0023", "")
    assert found[-1]["rel_err_df"] == "0.002" and found[2]["schedule"] == ""


def test_readme_table(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "DEFAULT_SCHEDULE", "pingpong")
    text = readme.render(rows)
    assert "### mLSTM, exponential input gate, forward\n" in text
    cells = next(line for line in text.splitlines() if line.startswith("| B8 T8192")).strip("| ").split(" | ")
    assert cells[:6] == ["B8 T8192 H16 128/256", "bf16", "0.5", "3.4", "xl_chunk_128", "6.80x"]
    assert cells[6:] == ["377", "3246", "76%", "h 2.3e-03", "512", "2048"]
    assert "NVIDIA H200; runs run-a" in text
    assert "| B8 T8192 H16 128/256 | forward | 0.6 | - | 0.5 |" in text


def test_readme_shows_the_shipped_schedule_not_the_fastest(rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "DEFAULT_SCHEDULE", "sequential")
    line = next(line for line in readme.render(rows).splitlines() if line.startswith("| B8 T8192"))
    assert line.split(" | ")[2:4] == ["0.6", "3.4"]


def test_readme_forms_no_ratio_across_runs(make_row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readme, "DEFAULT_SCHEDULE", "pingpong")
    text = readme.render([make_row("tk", 0.5, run="run-b"), make_row("triton:xl_chunk_128", 3.4)])
    line = next(line for line in text.splitlines() if line.startswith("| B8"))
    assert line.split(" | ")[2:6] == ["0.5", "-", "-", "-"]


def test_readme_shows_baselines_alone(make_row) -> None:
    text = readme.render([make_row("triton:xl_chunk_128", 10.6, **{"pass": "fwdbwd"})])
    line = next(line for line in text.splitlines() if line.startswith("| B8"))
    assert line.split(" | ")[2:6] == ["-", "10.6", "xl_chunk_128", "-"]
    assert "schedules" not in text


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
    "text", ["", readme.BEGIN, f"{readme.END}\n{readme.BEGIN}", f"{readme.BEGIN * 2}{readme.END}"]
)
def test_readme_without_its_markers_is_left_alone(tmp_path: Path, rows, text: str) -> None:
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(ValueError, match="results:begin"):
        readme.update(path, rows)
    assert path.read_text() == text


def test_readme_command(tmp_path: Path, rows, capsys) -> None:
    write(tmp_path / "h200.json", rows)
    (tmp_path / "README.md").write_text(f"{readme.BEGIN}\n{readme.END}\n")
    command = ["readme", str(tmp_path / "h200.json"), str(tmp_path / "README.md")]
    assert main(command) == 0 and "changed" in capsys.readouterr().out
    assert main(command) == 0 and "up to date" in capsys.readouterr().out


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plot_of_bars(tmp_path: Path, rows, make_row, suffix: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    both = make_row("triton:xl_chunk_128", 10.6, **{"pass": "fwdbwd"})
    plots.write_plot(tmp_path / f"rows.{suffix}", [*rows, both])
    assert (tmp_path / f"rows.{suffix}").read_bytes().startswith(magic)


def test_plot_of_a_sweep(tmp_path: Path, make_row) -> None:
    pytest.importorskip("matplotlib")
    sweep = [
        make_row(backend, ms, shape={"B": 65536 // length, "T": length, "H": 16, "K": 128, "V": 256})
        for backend, ms in (("tk", 0.5), ("triton:xl_chunk_128", 3.4))
        for length in (2048, 4096, 8192)
    ]
    assert plots.is_sweep(sweep)
    assert not plots.is_sweep(sweep[:2])
    assert not plots.is_sweep([*sweep, make_row(shape={"B": 1, "T": 8192, "H": 16, "K": 128, "V": 256})])
    plots.write_plot(tmp_path / "sweep.svg", sweep)
    text = (tmp_path / "sweep.svg").read_text()
    assert text.count("triton:xl_chunk_128") == 1 and "65,536 tokens" in text


def test_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        plots.write_plot(tmp_path / "rows.png", [])
