"""Results on record: the row format, its validation, and merging into one file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tfla_tk.build import instances

from .shapes import PASSES, Shape

Row = dict[str, Any]

FOLDER = Path(__file__).resolve().parent / "results"
OPS = (
    "mlstm_exp",
    "mlstm_sig",
    "simple_gla",
    "retention",
    "gla",
    "delta_rule",
    "gated_delta_rule",
    "mlstm_step",
)
SCHEDULES = (*instances.SCHEDULES, None)

_NUMBER, _TEXT = (int, float), (str,)
_NONE = (type(None),)
# every row has these keys, in this order
REQUIRED: dict[str, tuple[type, ...]] = {
    "op": _TEXT,
    "shape": (dict,),
    "pass": _TEXT,
    "backend": _TEXT,
    "schedule": _TEXT + _NONE,
    "dtype": _TEXT,
    "ms": _NUMBER,
    "ms_p20": _NUMBER,
    "ms_p80": _NUMBER,
    "tflops": _NUMBER,
    "gbps": _NUMBER,
    "roofline": _NUMBER + _NONE,
    "peak_mem_mb": _NUMBER + _NONE,
    "rel_err": (dict,),
    "run": _TEXT,
    "gpu": _TEXT + _NONE,
    "torch": _TEXT,
    "triton": _TEXT + _NONE,
    "nvcc": _TEXT + _NONE,
    "commit": _TEXT + _NONE,
    "date": _TEXT,
}
# graph_ms: median of CUDA-graph replays; repeats: timed runs, where fewer than 30; note: what to know
OPTIONAL: dict[str, tuple[type, ...]] = {"graph_ms": _NUMBER, "repeats": (int,), "note": _TEXT}


def record_path(gpu: str) -> Path:
    """The file that holds a GPU's results: "NVIDIA H200" has results/h200.json."""
    return FOLDER / f"{gpu.lower().removeprefix('nvidia ').replace(' ', '_')}.json"


def validate(row: Any) -> None:
    """Check one row against the format.

    Raises:
        ValueError: names the key, what was expected and what came.
    """
    if not isinstance(row, dict):
        raise ValueError(f"row: expected an object, got {row!r}")
    missing = [key for key in REQUIRED if key not in row]
    unknown = [key for key in row if key not in REQUIRED and key not in OPTIONAL]
    if missing or unknown:
        raise ValueError(f"row: missing keys {missing}, unknown keys {unknown}")
    for key, types in {**REQUIRED, **OPTIONAL}.items():
        if key in row and (not isinstance(row[key], types) or isinstance(row[key], bool)):
            names = " or ".join(kind.__name__ for kind in types)
            raise ValueError(f"row {key}: expected {names}, got {row[key]!r}")
    for key, allowed in (("op", OPS), ("pass", PASSES), ("schedule", SCHEDULES)):
        if row[key] not in allowed:
            raise ValueError(f"row {key}: expected one of {', '.join(map(str, allowed))}, got {row[key]!r}")
    try:
        shape_of(row)
    except TypeError as error:
        raise ValueError(f"row shape: expected B, T, H, K and V, got {row['shape']!r}") from error
    numbers = {key: row[key] for key in (*REQUIRED, *OPTIONAL) if isinstance(row.get(key), (int, float))}
    for key, value in {
        **numbers,
        **{f"rel_err {name}": error for name, error in row["rel_err"].items()},
    }.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise ValueError(f"row {key}: expected a finite number that is not negative, got {value!r}")


def shape_of(row: Row) -> Shape:
    """The shape of a row."""
    return Shape(**row["shape"])


def key_of(row: Row) -> tuple[Any, ...]:
    """What makes two rows figures of the same thing: op, shape, pass, backend, schedule, dtype."""
    return row["op"], shape_of(row), row["pass"], row["backend"], row["schedule"], row["dtype"]


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """One row per key, that of the later date (of `new` at equal dates), in the file's order."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in (*old, *new):
        key = key_of(row)
        if key not in found or row["date"] >= found[key]["date"]:
            found[key] = row
    return sorted(found.values(), key=_order)


def _order(row: Row) -> tuple[Any, ...]:
    shape = row["shape"]
    size = (-shape["B"], -shape["T"], -shape["H"], shape["K"], shape["V"])
    schedule = SCHEDULES.index(row["schedule"])
    return OPS.index(row["op"]), PASSES.index(row["pass"]), row["dtype"], size, row["backend"], schedule


def load(path: Path) -> list[Row]:
    """The rows of a file, validated; none where there is no file.

    Raises:
        ValueError: it is no JSON list of valid rows.
    """
    if not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: expected JSON, {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of rows, got {type(rows).__name__}")
    for number, row in enumerate(rows):
        try:
            validate(row)
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from error
    return rows


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write validated rows, one per line, the keys in the format's order: equal rows give equal bytes."""
    lines = []
    for row in rows:
        validate(row)
        lines.append(
            json.dumps({key: row[key] for key in (*REQUIRED, *OPTIONAL) if key in row}, ensure_ascii=False)
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"
    path.write_text(text, encoding="utf-8")


def rounded(value: float, digits: int = 5) -> float:
    """A figure with the digits that a measurement can have."""
    return float(f"{value:.{digits}g}")


def baselines(rows: Iterable[Row]) -> dict[tuple[Any, ...], Row]:
    """The fastest Triton row per (run, op, shape, pass, dtype): what a speed-up is measured against.

    Every row on record passed its correctness check, so the fastest is the best correct one.
    """
    best: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["backend"].startswith("triton"):
            key = contest_of(row)
            if key not in best or row["ms"] < best[key]["ms"]:
                best[key] = row
    return best


def contest_of(row: Row) -> tuple[Any, ...]:
    """What rows must share to be compared: run, op, shape, pass, dtype."""
    return row["run"], row["op"], shape_of(row), row["pass"], row["dtype"]
