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
        {"shape": {"B": 8, "T": 8192, "H": 16, "K": 128, "V": 256, "HV": 32}},
        {"pass": "fwdbwd"},
        {"backend": "reference"},
        {"schedule": "sequential"},
        {"dtype": "fp16"},
        {"layout": "bsnd"},
        {"forget_bias": 12.0},
    ],
)
def test_each_part_of_the_key_keeps_rows_apart(make_row, change) -> None:
    assert len(merge([make_row()], [make_row(**change, **LATER)])) == 2


@pytest.mark.parametrize("same", [{"layout": "bnsd"}, {"forget_bias": 3}, {"host_us": 9.0}, {"note": "n"}])
def test_an_absent_key_means_the_default(make_row, same) -> None:
    merged = merge([make_row()], [make_row(**same, **LATER)])
    assert [row["run"] for row in merged] == ["run-b"]


@pytest.mark.parametrize("change", [{"layout": "bsnd"}, {"forget_bias": 12.0}])
def test_no_contest_across_inputs(make_row, change) -> None:
    ours, theirs = make_row("tk", 0.5), make_row("triton:xl_chunk_128", 3.4, **change)
    assert contest_of(ours) not in baselines([ours, theirs])
    ours = make_row("tk", 0.5, **change)
    assert baselines([ours, theirs])[contest_of(ours)] is theirs


def test_merge_has_one_order(make_row) -> None:
    rows = [
        make_row(),
        make_row(schedule="sequential"),
        make_row("triton:xl_chunk_64"),
        make_row(op="mlstm_sig"),
        make_row(**{"pass": "fwdbwd"}),
        make_row(shape={"B": 1, "T": 8192, "H": 8, "K": 256, "V": 512}),
        make_row(layout="bsnd"),
        make_row(forget_bias=12.0),
        make_row(forget_bias=-3.0),
    ]
    assert merge(rows, []) == merge([], reversed(rows))
    assert [row["op"] for row in merge(rows, [])][-1] == "mlstm_sig"
    # the default inputs first
    forwards = [row for row in merge(rows, []) if row["op"] == "mlstm_exp" and row["pass"] == "fwd"]
    found = [(row.get("layout"), row.get("forget_bias")) for row in forwards]
    assert found == [(None, None)] * 4 + [(None, -3.0), (None, 12.0), ("bsnd", None)]


def test_written_rows_come_back_and_the_bytes_are_stable(tmp_path: Path, make_row) -> None:
    path = tmp_path / "deep" / "h200.json"
    more = {
        "layout": "bsnd",
        "forget_bias": 12.0,
        "host_us": 41.5,
        "graph_ms": 3.3,
        "note": "checked otherwise",
    }
    rows = [make_row(), make_row("triton:xl_chunk_128", 3.4, **more)]
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
        ({"schedule": "pingpong"}, "schedule"),
        ({"layout": "sbnd"}, "layout"),
        ({"forget_bias": float("inf")}, "forget_bias"),
        ({"forget_bias": "12"}, "forget_bias"),
        ({"host_us": -1.0}, "host_us"),
        ({"shape": {"B": 1}}, "shape"),
        ({"shape": {"B": 0, "T": 1, "H": 1, "K": 1, "V": 1}}, "shape B"),
        ({"shape": {"B": 2, "T": 8, "H": 1, "K": 16, "V": 16, "N": 2}}, "shape N"),
        ({"shape": {"B": 2, "T": 8, "H": 2, "K": 16, "V": 16, "HV": 2}}, "row shape: expected no HV"),
        ({"shape": {"B": 2, "T": 8, "H": 2, "K": 16, "V": 16, "HV": None}}, "row shape: expected no HV"),
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


def test_rows_of_packed_sequences_and_value_heads(make_row) -> None:
    shape = {"B": 1, "T": 65536, "H": 16, "K": 128, "V": 256}
    rows = [make_row(shape=shape), make_row(shape=shape | {"N": 128}), make_row(shape=shape | {"HV": 32})]
    for row in rows:
        validate(row)
    assert len(merge(rows, [])) == 3 and merge(rows, []) == merge(reversed(rows), [])
    assert len({contest_of(row) for row in rows}) == 3
    # only the first is a point of the sweep
    assert [results.in_sweep(row) for row in rows] == [True, False, False]


def test_a_forget_bias_may_be_negative(make_row) -> None:
    validate(make_row(forget_bias=-3))


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


def test_points_of_the_sweep(make_row) -> None:
    def at(length: int, **changes):
        return make_row(shape={"B": 65536 // length, "T": length, "H": 16, "K": 128, "V": 256}, **changes)

    assert results.in_sweep(at(8192)) and not results.sweep_only(at(8192))
    assert results.in_sweep(at(512)) and results.sweep_only(at(512))
    for other in (at(512, layout="bsnd"), at(512, forget_bias=12.0)):
        assert not results.in_sweep(other) and not results.sweep_only(other)
    assert not results.in_sweep(make_row(shape={"B": 1, "T": 512, "H": 16, "K": 128, "V": 256}))


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
