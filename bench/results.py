"""Results on record: the row format, its validation, and merging into one file."""

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .inputs import FORGET_BIAS, LAYOUTS
from .shapes import MAIN, PASSES, PHASES, SWEEP, ModelShape, Shape
from .timing import Timing

Row = dict[str, Any]

FOLDER = Path(__file__).resolve().parent / "results"
STEP = "mlstm_step"  # decoding: by tk also in place, "tk:in_place"
IN_PLACE = "tk:in_place"
# decoding of the linear operators: states [K, V], and with this behind the backend [V, K]
STEP_OF = {op: f"{op}_step" for op in ("gated_delta_rule", "gla", "simple_gla", "delta_rule", "kda")}
V_FIRST = ":v_first"
MODEL = "model_step"  # a whole xLSTM
GENERATED = ("qwen3_next_model", "gla_model")  # whole models that generate
MODELS = (MODEL, *GENERATED)  # phases in place of passes, no count of FLOP and bytes
_LINEAR = {"simple_gla": "simple GLA", "retention": "retention", "lightning": "Lightning attention"}
_LINEAR |= {"gla": "GLA", "delta_rule": "delta rule", "gated_delta_rule": "gated delta rule", "kda": "KDA"}
# in the order of the tables, with what they are called there
TITLES = {
    "mlstm_exp": "mLSTM, exponential input gate",
    "mlstm_sig": "mLSTM, sigmoid input gate",
    **_LINEAR,
    STEP: "mLSTM, one step",
    **{step: f"{_LINEAR[op]}, one step" for op, step in STEP_OF.items()},
    MODEL: "xLSTM, whole model",
    "qwen3_next_model": "Qwen3-Next, generate()",
    "gla_model": "GLA, generate()",
}
OPS = tuple(TITLES)
FP32_NATIVE = "fp32 native"  # in the errors of a model: what it was compared with
RECORD_REPEATS = 30  # timed runs of what goes on record
SCHEDULES = ("sequential", "overlapped")  # of the ablation; null in other rows, whose kernels are overlapped
ABLATED = ("mlstm_exp", "mlstm_sig")
BASELINES = ("triton", "tilelang")  # families of backends that a speed-up is measured against
OUTPUTS = ("h", "o")  # the output among the errors of a row; the others are gradients
# optional keys that are part of a row's identity, and what an absent one means
DEFAULTS: dict[str, Any] = {"layout": LAYOUTS[0], "forget_bias": FORGET_BIAS}

# the keys of every row, in this order
REQUIRED = (
    *("op", "shape", "pass", "backend", "schedule", "dtype", "ms", "ms_p20", "ms_p80"),
    *("tflops", "gbps", "roofline", "peak_mem_mb", "rel_err"),
    *("run", "gpu", "torch", "triton", "nvcc", "commit", "date"),
)
# host_us: of the host for one call; launches: kernels of one call; launch_us: of the host for as many
# launches of an empty kernel; graph_ms: median of CUDA-graph replays; kernel_share: of the GPU's time in
# mLSTM kernels; repeats: timed runs, where fewer than 30; note: what to know
_FIGURES = ("host_us", "launches", "launch_us", "graph_ms", "kernel_share", "repeats")
OPTIONAL = ("layout", "forget_bias", *_FIGURES, "note")
_NULLABLE = ("schedule", "tflops", "gbps", "roofline", "peak_mem_mb", "gpu", "triton", "nvcc", "commit")
# what is no number: texts, and objects
_TEXTS = {"op", "pass", "backend", "schedule", "dtype", "layout", "note", *REQUIRED[REQUIRED.index("run") :]}
_OBJECTS = ("shape", "rel_err")


def record_path(gpu: str) -> Path:
    """The file that holds a GPU's results: "NVIDIA H200" has results/h200.json."""
    return FOLDER / f"{gpu.lower().removeprefix('nvidia ').replace(' ', '_')}.json"


def validate(row: Any) -> None:
    """Check one row against the format."""
    if not isinstance(row, dict):
        raise ValueError(f"row: expected an object, got {row!r}")
    missing = [key for key in REQUIRED if key not in row]
    unknown = [key for key in row if key not in REQUIRED and key not in OPTIONAL]
    if missing or unknown:
        raise ValueError(f"row: missing keys {missing}, unknown keys {unknown}")
    for key, value in row.items():
        if not (value is None and key in _NULLABLE):
            _check_value(key, value)
    is_model = row["op"] in MODELS
    choices = {"op": OPS, "pass": PHASES if is_model else PASSES, "schedule": (*SCHEDULES, None)}
    for key, allowed in (choices | {"layout": LAYOUTS}).items():
        if row.get(key, DEFAULTS.get(key)) not in allowed:
            raise ValueError(f"row {key}: expected one of {', '.join(map(str, allowed))}, got {row[key]!r}")
    try:
        shape = shape_of(row)
    except TypeError as error:
        more = " and layers and width" if is_model else ""
        expected = f"B, T, H, K and V{more}, and N and HV where they apply"
        raise ValueError(f"row shape: expected {expected}, got {row['shape']!r}") from error
    if shape.as_dict() != row["shape"]:
        raise ValueError(f"row shape: expected no HV that equals H and no null, got {row['shape']!r}")
    for key in ("tflops", "gbps"):
        if (row[key] is None) != is_model:
            raise ValueError(f"row {key}: expected null for models and a number else, got {row[key]!r}")


def _check_value(key: str, value: Any) -> None:
    """A text, an object, with numbers alone where it is of errors, or a finite number, not negative."""
    kind: Any = str if key in _TEXTS else dict if key in _OBJECTS else (int, float)
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = {str: "a text", dict: "an object"}.get(kind, "a number")
        raise ValueError(f"row {key}: expected {expected}, got {value!r}")
    if kind == (int, float) and not (math.isfinite(value) and (value >= 0 or key == "forget_bias")):
        raise ValueError(f"row {key}: expected a finite number that is not negative, got {value!r}")
    for name, error in value.items() if key == "rel_err" else ():
        _check_value(f"rel_err {name}", error)


def shape_of(row: Row) -> Shape:
    """The shape of a row."""
    return (ModelShape if row["op"] in MODELS else Shape)(**row["shape"])


def conditions_of(row: Row) -> tuple[str, float]:
    """What else the inputs of a row were: memory layout and forget bias."""
    return row.get("layout", DEFAULTS["layout"]), row.get("forget_bias", DEFAULTS["forget_bias"])


def is_plain(row: Row) -> bool:
    """Whether layout and forget bias are the default ones."""
    return conditions_of(row) == tuple(DEFAULTS.values())


def problem_of(row: Row) -> tuple[Any, ...]:
    """What was computed: op, shape, pass, dtype, layout, forget bias."""
    return row["op"], shape_of(row), row["pass"], row["dtype"], *conditions_of(row)


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """One row per problem, backend and schedule, that of the later date (of `new` at equal dates), in the
    file's order."""
    by_date = sorted((*old, *new), key=lambda row: row["date"])
    found = {(*problem_of(row), row["backend"], row["schedule"]): row for row in by_date}
    return sorted(found.values(), key=_order)


def _order(row: Row) -> tuple[Any, ...]:
    shape = row["shape"]
    more = (shape.get("HV", 0), shape.get("N", 0))
    size = (-shape["B"], -shape["T"], -shape["H"], shape["K"], shape["V"], *more)
    layout, forget_bias = conditions_of(row)
    return (
        OPS.index(row["op"]),
        (*PASSES, *PHASES).index(row["pass"]),
        row["dtype"],
        LAYOUTS.index(layout),
        (forget_bias != FORGET_BIAS, forget_bias),
        size,
        row["backend"],
        (*SCHEDULES, None).index(row["schedule"]),
    )


def load(path: Path) -> list[Row]:
    """The rows of a file, validated; none where there is no file."""
    if not path.exists():
        return []
    place = f"{path}: expected JSON"
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise ValueError(f"expected a list of rows, got {type(rows).__name__}")
        for number, row in enumerate(rows):
            place = f"{path}, row {number}"
            validate(row)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return rows


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write validated rows, one per line, the keys in the format's order: equal rows give equal bytes. The
    file is replaced at once, so that there is a whole one whenever a run is cut off."""
    lines = []
    for row in rows:
        validate(row)
        ordered = {key: row[key] for key in (*REQUIRED, *OPTIONAL) if key in row}
        lines.append(json.dumps(ordered, ensure_ascii=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def new_row(
    op: str, shape: Shape, which: str, backend: str, dtype: str, times: Timing, **figures: Any
) -> Row:
    """A row of what was measured, with the digits that measurements have. which: the pass. figures: all
    other keys, rel_err among them; what is REQUIRED and not given is null, an empty note is left out."""
    row: Row = {**dict.fromkeys(REQUIRED), "op": op, "shape": shape.as_dict(), "pass": which}
    row |= {"backend": backend, "dtype": dtype, "ms": times.ms, "ms_p20": times.p20, "ms_p80": times.p80}
    if times.repeats < RECORD_REPEATS:
        row["repeats"] = times.repeats
    row |= {key: value for key, value in figures.items() if (key, value) != ("note", "")}
    row["rel_err"] = {name: rounded("rel_err", error) for name, error in row["rel_err"].items()}
    return row | {key: rounded(key, row[key]) for key in DIGITS if isinstance(row.get(key), float)}


# of figures, those that a measurement can have
DIGITS = dict.fromkeys(("ms", "ms_p20", "ms_p80", "tflops", "gbps", "peak_mem_mb", "graph_ms"), 5)
DIGITS |= dict.fromkeys(("roofline", "host_us", "launch_us", "kernel_share", "rel_err"), 3)


def rounded(key: str, value: float) -> float:
    """A figure of a row with its DIGITS."""
    return float(f"{value:.{DIGITS[key]}g}")


def is_baseline(row: Row) -> bool:
    """Whether a row is of other people's kernels."""
    return row["backend"].partition(":")[0] in BASELINES


def contest_of(row: Row) -> tuple[Any, ...]:
    """What rows must share to be compared: the run and the problem."""
    return row["run"], *problem_of(row)


def baselines(
    rows: Iterable[Row], per: Callable[[Row], tuple[Any, ...]] = contest_of
) -> dict[tuple[Any, ...], Row]:
    """The fastest row of a baseline per contest, or what `per` says: what a speed-up is measured against.
    Every row on record passed its correctness check, so the fastest is the best correct one."""
    best: dict[tuple[Any, ...], Row] = {}
    for row in sorted(filter(is_baseline, rows), key=lambda row: row["ms"]):
        best.setdefault(per(row), row)
    return best


class Pair(NamedTuple):
    """What one problem came to: the row of tk, the best one of a baseline, and whichever of them there is."""

    shown: Row
    ours: Row | None
    theirs: Row | None

    @property
    def speed_up(self) -> float | None:
        """The baseline's time over ours; None where one is missing."""
        return self.theirs["ms"] / self.ours["ms"] if self.ours and self.theirs else None


def pairs(rows: Iterable[Row]) -> list[Pair]:
    """Per problem the tk row of the shipped kernels and the best baseline of its run, in the rows' order.
    The tk row is that of the latest run with a baseline (the ablation has none), else of the latest; where
    there is none, the best baseline of the latest run stands alone. A problem with neither is left out."""
    rows = list(rows)
    best = baselines(rows)
    problems: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        problems.setdefault(problem_of(row), []).append(row)
    found = []
    for group in problems.values():
        shipped = [row for row in group if is_shipped(row)]
        ours = _latest(row for row in shipped if contest_of(row) in best) or _latest(shipped)
        theirs = best.get(contest_of(ours)) if ours else _latest(filter(is_baseline, group))
        if shown := ours or theirs:
            found.append(Pair(shown, ours, theirs))
    return found


def is_shipped(row: Row) -> bool:
    """Whether a row is of tk's kernels as calls take them."""
    return row["backend"] == "tk" and row["schedule"] != "sequential"


def _latest(rows: Iterable[Row]) -> Row | None:
    """The fastest row of the latest run."""
    return max(rows, key=lambda row: (row["date"], -row["ms"]), default=None)


def sweep_only(row: Row) -> bool:
    """Whether a row is a point of the sweep over the length at a shape that is no main shape."""
    shape = shape_of(row)
    return shape in SWEEP and shape not in MAIN and is_plain(row)
