"""Rows on record: their format, how they are merged, and which of them are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfla_tk.bench import results
from tfla_tk.bench.__main__ import main
from tfla_tk.bench.results import load, merge, validate, write

LATER = {"run": "run-b", "date": "2026-11-21T10:00:00Z"}
MODEL = {
    "op": "model_step",
    "pass": "decode",
    "shape": {"B": 1, "T": 1, "H": 8, "K": 256, "V": 512, "layers": 32, "width": 4096},
    "tflops": None,
    "gbps": None,
}


def test_each_part_of_the_key_keeps_rows_apart(make_row) -> None:
    shape = make_row()["shape"]
    plain = {"op": "mlstm_sig", "pass": "fwdbwd", "backend": "reference", "schedule": "sequential"}
    plain |= {"dtype": "fp16", "layout": "bsnd", "forget_bias": -12.0}
    shapes = [shape | change for change in ({"H": 8}, {"HV": 32}, {"B": 1, "N": 8})]
    for change in (*({key: value} for key, value in plain.items()), *({"shape": x} for x in shapes)):
        other = make_row(**change, **LATER)
        validate(other)
        assert len(merge([make_row()], [other])) == 2
    # an absent key means the default
    same = make_row(layout="bnsd", forget_bias=3, host_us=9.0, note="n", **LATER)
    assert merge([make_row()], [same]) == merge([same], [make_row()]) == [same]


def test_written_rows_come_back_and_the_bytes_are_stable(tmp_path: Path, make_row) -> None:
    path = tmp_path / "deep" / "h200.json"
    assert load(path) == []
    more = {"layout": "bsnd", "forget_bias": 12.0, "host_us": 41.5, "graph_ms": 3.3, "note": "so"}
    rows = [make_row(), make_row("triton:xl_chunk_128", 3.4, **more)]
    write(path, rows)
    assert load(path) == rows
    first = path.read_bytes()
    write(path, [dict(reversed(list(row.items()))) for row in load(path)])
    # one row per line
    assert path.read_bytes() == first and len(first.splitlines()) == 2 + len(rows)
    assert list(json.loads(first)[0]) == list(results.REQUIRED)
    write(path, [])
    assert load(path) == []


def test_validation_names_the_key(make_row) -> None:
    validate(make_row())
    validate(make_row(**MODEL))
    shape, inf, nan = {"B": 2, "T": 8, "H": 2, "K": 16, "V": 16}, float("inf"), float("nan")
    of_key = [("op", "softmax"), ("pass", "bwd"), ("schedule", "auto"), ("layout", "sbnd"), ("host_us", -1.0)]
    of_key += [("forget_bias", inf), ("forget_bias", "12"), ("ms", "0.5"), ("ms", nan), ("ms", True)]
    of_key += [("ms", None), ("tflops", None), ("commit", 5), ("shape", {"B": 1}), ("shape", MODEL["shape"])]
    for change, named in (
        *(({key: value}, f"row {key}") for key, value in of_key),
        ({"shape": {**shape, "B": 0}}, "shape B"),
        ({"shape": {**shape, "N": 2}}, "shape N"),
        ({"shape": {**shape, "HV": 2}}, "row shape: expected no HV"),
        ({"shape": {**shape, "HV": None}}, "row shape: expected no HV"),
        ({"rel_err": {"h": nan}}, "rel_err h"),
        ({"speed": 3}, "unknown keys \\['speed'\\]"),
        ({**MODEL, "tflops": 1.0}, "tflops"),
        ({**MODEL, "shape": shape}, "layers and width"),
        ({**MODEL, "kernel_share": "half"}, "kernel_share"),
        ({**MODEL, "pass": "fwd"}, "pass"),
    ):
        with pytest.raises(ValueError, match=named):
            validate(make_row(**change))


def test_load_names_file_and_row(tmp_path: Path, make_row) -> None:
    path = tmp_path / "h200.json"
    lacking = make_row()
    del lacking["gbps"]
    for text, message in (
        (json.dumps([make_row(), lacking]), r"h200\.json, row 1: .*missing keys \['gbps'\]"),
        (json.dumps([[]]), "expected an object"),
        ("{}", "expected a list"),
        ("[", "expected JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load(path)


def test_a_pair_is_of_the_latest_run(make_row) -> None:
    rows = [
        # faster, but out of date
        make_row("tk", 0.4, schedule="overlapped"),
        make_row("triton:xl_chunk_64", 2.0),
        make_row("tk", 0.3, schedule="sequential", **LATER),
        make_row("tk", 0.5, **LATER),
        make_row("triton:xl_chunk_128", 3.0, **LATER),
        make_row("reference", 0.1, **LATER),
    ]
    (pair,) = results.pairs(rows)
    assert (pair.ours["ms"], pair.theirs["ms"], pair.speed_up) == (0.5, 3.0, pytest.approx(6.0))
    assert pair.shown is pair.ours
    without_triton = make_row("tk", 0.6, schedule="overlapped", date="2027-01-01T00:00:00Z", run="schedules")
    assert results.pairs([*rows, without_triton]) == [pair]
    only_ours = [row for row in (*rows, without_triton) if row["backend"] == "tk"]
    assert [(pair.ours["ms"], pair.theirs) for pair in results.pairs(only_ours)] == [(0.6, None)]
    (alone,) = results.pairs([row for row in rows if row["backend"] != "tk"])
    assert (alone.ours, alone.shown["ms"], alone.speed_up) == (None, 3.0, None)
    assert results.pairs([make_row("reference")]) == []


def test_merge_command(tmp_path: Path, make_row, capsys) -> None:
    write(tmp_path / "h200.json", [make_row("tk", 0.6)])
    write(tmp_path / "new.json", [make_row("tk", 0.5, **LATER), make_row("reference", 90.0, **LATER)])
    assert main(["merge", str(tmp_path / "new.json"), "--folder", str(tmp_path)]) == 0
    assert [row["ms"] for row in load(tmp_path / "h200.json")] == [90.0, 0.5]
    assert "2 rows" in capsys.readouterr().out
    assert main(["merge", str(tmp_path / "none.json")]) == 1
    assert "no such file" in capsys.readouterr().err
    write(tmp_path / "new.json", [make_row(commit=None, ms=0.1, **LATER)])
    assert main(["merge", str(tmp_path / "new.json"), "--folder", str(tmp_path)]) == 1
    assert "expected a gpu and a commit" in capsys.readouterr().err
    assert [row["ms"] for row in load(tmp_path / "h200.json")] == [90.0, 0.5]


def test_results_in_the_repository_are_valid() -> None:
    for path in results.FOLDER.glob("*.json"):
        rows = load(path)
        assert merge([], rows[::-1]) == rows, f"{path.name} is not in the file's order"
