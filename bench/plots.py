"""Plots: results rows as bars per shape; speed-ups."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .report import PASS_TITLES, conditions_title, milliseconds, name_of
from .results import TITLES, Pair, Row, shape_of
from .usage import UsageError


def write_plot(path: Path, rows: Sequence[Row]) -> None:
    """Draw one panel per operator, pass, dtype and conditions of at least one row into a file; its suffix
    picks the format."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        parts = TITLES[row["op"]], PASS_TITLES[row["pass"]], row["dtype"], conditions_title(row)
        panels.setdefault(", ".join(filter(None, parts)), []).append(row)
    figure = _figure(len(panels))
    every = figure.subplots(len(panels), squeeze=False).flat
    for axes, (title, chosen) in zip(every, panels.items(), strict=True):
        axes.set_title(title)
        _bars(axes, chosen)
        axes.set_yscale("log")
        axes.set_ylabel("ms")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    figure.savefig(path, dpi=150)


def write_speed_ups(path: Path, found: Sequence[Pair]) -> None:
    """Draw at least one speed-up as bars from top to bottom, one group per operator and head dims, a colour
    per pass."""
    groups: dict[str, list[Pair]] = {}
    for pair in found:
        shape = shape_of(pair.shown)
        heads = f"{shape.H} heads of {shape.K}/{shape.V}"
        groups.setdefault(f"{TITLES[pair.shown['op']]}\n{heads}", []).append(pair)
    passes = list(dict.fromkeys(pair.shown["pass"] for pair in found))
    figure = _figure(1, (9, 1 + 0.35 * len(found)))
    axes = figure.subplots()
    height = 0.8 / len(passes)
    for number, which in enumerate(passes):
        for place, group in enumerate(groups.values()):
            for pair in group:
                if pair.shown["pass"] == which:
                    at = place + (number - (len(passes) - 1) / 2) * height
                    axes.barh(at, pair.speed_up, height, color=f"C{number}")
                    axes.text(pair.speed_up, at, _told(pair), va="center", fontsize="small")
        axes.barh([0], [0], color=f"C{number}", label=PASS_TITLES[which])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * max(pair.speed_up or 0.0 for pair in found))
    axes.set_xlabel("times as fast as the fastest correct baseline")
    axes.legend(loc="lower right", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _told(pair: Pair) -> str:
    """A speed-up and what it is made of."""
    assert pair.ours and pair.theirs
    theirs = pair.theirs["backend"].partition(":")[2]
    times = f"{milliseconds(pair.ours['ms'])} ms, {theirs} {milliseconds(pair.theirs['ms'])} ms"
    return f" {pair.speed_up:.1f}x ({times})"


def check_path(path: Path) -> None:
    """Raise where no plot can be written there; to be asked before what is drawn is measured."""
    formats = set(_figure(1).canvas.get_supported_filetypes())
    if path.suffix.removeprefix(".") not in formats:
        raise UsageError(f"--plot: expected a file name with one of {', '.join(sorted(formats))}, got {path}")


def _figure(panels: int, size: tuple[float, float] | None = None) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plot: matplotlib is not installed (pip install 'tfla_tk[plot]')") from error
    return Figure(figsize=size or (11, 4.5 * panels), layout="constrained")


def _bars(axes: Any, rows: Sequence[Row]) -> None:
    shapes = list(dict.fromkeys(shape_of(row) for row in rows))
    names = list(dict.fromkeys(name_of(row) for row in rows))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        found = {shape_of(row): row["ms"] for row in rows if name_of(row) == name}
        places = [at for at, shape in enumerate(shapes) if shape in found]
        offset = (number - (len(names) - 1) / 2) * width
        axes.bar([at + offset for at in places], [found[shapes[at]] for at in places], width, label=name)
    axes.set_xticks(range(len(shapes)), [str(shape) for shape in shapes], fontsize="small")
