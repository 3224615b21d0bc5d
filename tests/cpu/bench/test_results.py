from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfla_tk.bench import results
from tfla_tk.bench.__main__ import main
from tfla_tk.bench.results import baselines, contest_of, load, merge, validate, write

LATER = {"run": "run-b", "date": "2026-11-21T10:00:00Z"}


def test_a_later_run_replaces_the_row_of_the_same_key(make_row) -> None:
    old = [make_row("tk", 0.6), make_row("triton:xl_chunk_128", 3.4)]
    merged = merge(old, [make_row("tk", 0.5, **LATER)])
    assert [(row["backend"], row["ms"], row["run"]) for row in merged] == [
        ("tk", 0.5, "run-b"),
        ("triton:xl_chunk_128", 3.4, "run-a"),
    ]


def test_an_earlier_run_does_not_replace(make_row) -> None:
    merged = merge([make_row("tk", 0.5, **LATER)], [make_row("tk", 0.6)])
    assert [row["ms"] for row in merged] == [0.5]


@pytest.mark.parametrize(
    "change",
    [
        {"op": "mlstm_sig"},
        {"shape": {"B": 8, "T": 8192, "H": 8, "K": 256, "V": 512}},
        {"pass": "fwdbwd"},
        {"backend": "reference"},
        {"schedule": "pingpong"},
        {"dtype": "fp16"},
    ],
)
def test_each_part_of_the_key_keeps_rows_apart(make_row, change) -> None:
    assert len(merge([make_row()], [make_row(**change, **LATER)])) == 2


def test_merge_has_one_order(make_row) -> None:
    rows = [
        make_row(),
        make_row(schedule="sequential"),
        make_row("triton:xl_chunk_64"),
        make_row(op="mlstm_sig"),
        make_row(**{"pass": "fwdbwd"}),
        make_row(shape={"B": 1, "T": 8192, "H": 8, "K": 256, "V": 512}),
    ]
    assert merge(rows, []) == merge([], reversed(rows))
    assert [row["op"] for row in merge(rows, [])][-1] == "mlstm_sig"


def test_written_rows_come_back_and_the_bytes_are_stable(tmp_path: Path, make_row) -> None:
    path = tmp_path / "deep" / "h200.json"
    rows = [make_row(), make_row("triton:xl_chunk_128", 3.4, graph_ms=3.3, note="checked otherwise")]
    write(path, rows)
    assert load(path) == rows
    first = path.read_bytes()
    write(path, [dict(reversed(list(row.items()))) for row in load(path)])
    assert path.read_bytes() == first
    # one row per line
    assert len(first.splitlines()) == 2 + len(rows)
    assert list(json.loads(first)[0]) == list(results.REQUIRED)
    write(path, [])
    assert load(path) == []


def test_no_file_holds_no_rows(tmp_path: Path) -> None:
    assert load(tmp_path / "none.json") == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"op": "softmax"}, "op"),
        ({"pass": "bwd"}, "pass"),
        ({"schedule": "auto"}, "schedule"),
        ({"shape": {"B": 1}}, "shape"),
        ({"shape": {"B": 0, "T": 1, "H": 1, "K": 1, "V": 1}}, "shape B"),
        ({"ms": "0.5"}, "ms"),
        ({"ms": float("nan")}, "ms"),
        ({"ms": True}, "ms"),
        ({"ms": -1.0}, "ms"),
        ({"rel_err": {"h": float("nan")}}, "rel_err h"),
        ({"speed": 3}, "unknown keys \\['speed'\\]"),
        ({"commit": 5}, "commit"),
    ],
)
def test_validation_names_the_key(make_row, change, named) -> None:
    with pytest.raises(ValueError, match=named):
        validate(make_row(**change))


def test_validation_names_missing_keys(make_row) -> None:
    row = make_row()
    del row["gbps"]
    with pytest.raises(ValueError, match="missing keys \\['gbps'\\]"):
        validate(row)
    with pytest.raises(ValueError, match="expected an object"):
        validate([row])


def test_load_names_file_and_row(tmp_path: Path, make_row) -> None:
    path = tmp_path / "h200.json"
    path.write_text(json.dumps([make_row(), {}]))
    with pytest.raises(ValueError, match=r"h200\.json, row 1: .*missing keys"):
        load(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="expected a list"):
        load(path)
    path.write_text("[")
    with pytest.raises(ValueError, match="expected JSON"):
        load(path)


def test_baseline_is_the_fastest_triton_row_of_the_same_run(make_row) -> None:
    ours = make_row("tk", 0.5)
    rows = [
        ours,
        make_row("triton:limit_chunk_64", 3.9),
        make_row("triton:xl_chunk_128", 3.4),
        make_row("triton:xl_chunk_64", 3.0, **LATER),
        make_row("reference", 0.1),
    ]
    assert baselines(rows)[contest_of(ours)]["backend"] == "triton:xl_chunk_128"


def test_record_path_is_named_for_the_gpu() -> None:
    assert results.record_path("NVIDIA H200") == results.FOLDER / "h200.json"
    assert results.record_path("NVIDIA GH200 480GB").name == "gh200_480gb.json"


def test_merge_command(tmp_path: Path, make_row, capsys) -> None:
    write(tmp_path / "h200.json", [make_row("tk", 0.6)])
    write(tmp_path / "new.json", [make_row("tk", 0.5, **LATER), make_row("reference", 90.0, **LATER)])
    assert main(["merge", str(tmp_path / "new.json"), "--folder", str(tmp_path)]) == 0
    assert [row["ms"] for row in load(tmp_path / "h200.json")] == [90.0, 0.5]
    assert "2 rows" in capsys.readouterr().out


@pytest.mark.parametrize("change", [{"commit": None}, {"gpu": None}])
def test_merge_command_refuses_rows_of_unknown_origin(tmp_path: Path, make_row, change, capsys) -> None:
    write(tmp_path / "new.json", [make_row(**change)])
    assert main(["merge", str(tmp_path / "new.json"), "--folder", str(tmp_path)]) == 1
    assert "expected a gpu and a commit" in capsys.readouterr().err
    assert not (tmp_path / "h200.json").exists()


def test_merge_command_names_a_missing_file(tmp_path: Path, capsys) -> None:
    assert main(["merge", str(tmp_path / "none.json")]) == 1
    assert "no such file" in capsys.readouterr().err


def test_results_in_the_repository_are_valid() -> None:
    for path in results.FOLDER.glob("*.json"):
        rows = load(path)
        assert merge(rows, []) == rows, f"{path.name} is not in the file's order"
